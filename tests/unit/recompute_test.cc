// Recompute frees memory and changes no bit.
#include <doctest/doctest.h>

#include "trained.h"

namespace whale {
namespace {

CompileOptions options_of(Recompute recompute, const std::string& strategy = "", int64_t accumulation = 0,
                          int zero = 0) {
  CompileOptions options;
  options.recompute = recompute;
  options.strategy = strategy;
  options.accumulation = accumulation;
  options.zero = zero;
  return options;
}

// The model's blocks, by the parameters that they read: ops between are the blocks' as well.
small::Model named(small::Model m) {
  ScopeId block = 0;
  for (Op& op : m.g.ops) {
    for (const TensorId id : op.inputs) {
      if (id == kNone || m.g.tensor(id).kind != TensorKind::kVariable) continue;
      const std::string& name = m.g.tensor(id).name;
      if (!name.starts_with("h") || name.find('.') == name.npos) {
        block = 0;
        continue;
      }
      const std::string of = "block" + name.substr(1, name.find('.') - 1);
      if (block && m.g.scopes[block].name == of) continue;
      m.scope = 0;
      block = m.enter(ScopeKind::kName);
      m.g.scopes[block].name = of;
    }
    op.scope = block;
  }
  return m;
}

int64_t arena(const small::Model& m, Recompute recompute) {
  const Plan plan = compile(m.g, parse_devices("ref:1", {0}), options_of(recompute));
  return plan.entries[0].programs[0].arena_bytes;
}

int copies(const Plan& plan) {
  int n = 0;
  for (const Program& p : plan.entries[0].programs)
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions) n += i.name.ends_with(".again");
  return n;
}

TEST_CASE("recompute full: blocks keep their inputs alone") {
  const small::Model m = small::gpt(4, OptimizerKind::kAdamW, 6, 64, 64, 64, 2);
  const int64_t none = arena(m, Recompute::kNone), runs = arena(m, Recompute::kFull),
                blocks = arena(named(m), Recompute::kFull), selective = arena(m, Recompute::kSelective);
  MESSAGE("arena: none ", none, ", selective ", selective, ", runs ", runs, ", blocks ", blocks);
  CHECK(blocks * 2 < none);
  CHECK(runs * 2 < none);
  CHECK(selective <= none);
}

TEST_CASE("recompute changes no bit, on one device and on several") {
  // Groups of unlike shares put their parameters together by transfers.
  const char* kUnlike = "pipeline(2, micro_batches=3) > replica(2) > split(2, shares=[[2,1],[1,1]])";
  const small::Model gpt = small::gpt(6, OptimizerKind::kAdamW, 3), blocks = named(gpt), resnet = small::resnet(6);
  struct Case {
    const small::Model& m;
    const char* devices;
    const char* strategy;
    int64_t accumulation;
    int zero;
  };
  for (const Case& c : std::vector<Case>{{gpt, "ref:1", "", 1, 0},
                                         {blocks, "ref:1", "", 1, 0},
                                         {resnet, "ref:1", "", 1, 0},
                                         {blocks, "ref:1", "", 3, 0},
                                         {blocks, "ref:2", "", 1, 0},
                                         {resnet, "ref:2", "", 1, 0},
                                         {blocks, "ref:2", "", 2, 2},
                                         {blocks, "ref:2", "", 1, 3},
                                         {blocks, "ref:2", "split(2)", 1, 0},
                                         {blocks, "ref:4", "replica(2) > split(2)", 1, 1},
                                         {blocks, "ref:2", "pipeline(2, micro_batches=3)", 1, 0},
                                         {blocks, "ref:2", "pipeline(2, micro_batches=3, schedule=zb_h1)", 1, 0},
                                         {gpt, "ref:4", "pipeline(2, micro_batches=3) > split(2)", 1, 0},
                                         {blocks, "ref:4", "replica(2) > pipeline(2, micro_batches=3)", 1, 0},
                                         {blocks, "ref:8", kUnlike, 1, 3},
                                         {blocks, "ref:4", "replica(2) > split(2, shares=[[2,1],[1,1]])", 3, 3}}) {
    CAPTURE(c.devices);
    CAPTURE(c.strategy);
    CAPTURE(c.zero);
    const int64_t vocab = &c.m == &resnet ? 5 : 32;
    const auto plan_of = [&](Recompute r) {
      return compile(c.m.g, parse_devices(c.devices, {0, 1, 2, 3}), options_of(r, c.strategy, c.accumulation, c.zero));
    };
    const Plan full = plan_of(Recompute::kFull);
    CHECK(copies(full) > 0);
    const small::Trained none = small::train(plan_of(Recompute::kNone), 2, vocab);
    CHECK(none == small::train(full, 2, vocab));
    CHECK(none == small::train(plan_of(Recompute::kSelective), 2, vocab));
  }
}

// What another stage sent is no cheap op: the sender would have to send once more, when it is at something else.
TEST_CASE("recompute selective: what was sent to a stage is kept there") {
  using enum OpCode;
  small::Model m;
  const TensorId x = m.input("x", {16, 8192}),
                 context = m.op(k_tanh, {m.op(k_mul, {x, m.variable("w", {8192})})}, {}, "context");
  TensorId h = context;
  for (int layer = 0; layer < 8; ++layer) {  // each reads the context, as a decoder does
    h = m.op(k_mul, {h, m.variable(fmt::format("w{}", layer), {8192})});
    h = m.op(k_tanh, {m.op(k_mul, {h, context})});
  }
  m.minimize(m.op(k_reduce_mean, {h}), OptimizerKind::kSgd);
  for (const std::string strategy :
       {"pipeline(2, micro_batches=4, virtual_stages=2) > replica(2)", "pipeline(4, micro_batches=4)",
        "replica(2) > pipeline(2, micro_batches=4, virtual_stages=2)"}) {
    CAPTURE(strategy);
    const Plan plan = compile(m.g, parse_devices("null:4"), options_of(Recompute::kSelective, strategy));
    for (const Program& p : plan.entries[0].programs)
      for (const Segment& s : p.segments)
        for (const Instruction& i : s.instructions)
          CHECK((i.kind() == InstructionKind::kReceive && i.name.ends_with(".again")) == false);
  }
}

TEST_CASE("recompute of each stage: its own policy, no bit changed") {
  const small::Model m = named(small::gpt(6, OptimizerKind::kAdamW, 4));
  const auto copies_of = [](const Plan& plan, size_t device) {
    int n = 0;
    for (const Segment& s : plan.entries[0].programs[device].segments)
      for (const Instruction& i : s.instructions) n += i.name.ends_with(".again");
    return n;
  };
  struct Case {
    const char* schedule;
    std::vector<Recompute> policies;
  };
  for (const Case& c : std::vector<Case>{{"1f1b", {Recompute::kFull, Recompute::kNone}},
                                         {"gpipe", {Recompute::kNone, Recompute::kFull}},
                                         {"zb_h1", {Recompute::kFull, Recompute::kSelective}}}) {
    CAPTURE(c.schedule);
    CompileOptions options;
    options.strategy = fmt::format("pipeline(2, micro_batches=3, schedule={})", c.schedule);
    const auto devices = parse_devices("ref:2", {0, 1});
    const small::Trained plain = small::train(compile(m.g, devices, options), 2, 32);
    options.stage_recompute = c.policies;
    const Plan plan = compile(m.g, devices, options);
    for (size_t s = 0; s < 2; ++s) CHECK((copies_of(plan, s) > 0) == (c.policies[s] == Recompute::kFull));
    const std::vector<uint8_t> file = serialize(plan);
    const Plan again = deserialize(file.data(), file.size());
    CHECK(again.options.stage_recompute == plan.options.stage_recompute);
    CHECK(small::train(again, 2, 32) == plain);
    options.stage_recompute.push_back(Recompute::kNone);
    CHECK_THROWS_WITH_AS(compile(m.g, devices, options), doctest::Contains("3 recompute policies for 2 stage(s)"),
                         Error);
  }
}

}  // namespace
}  // namespace whale
