// Plans proven equal to their program without being run, and damaged ones refuted.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "base/error.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "own_programs.h"
#include "plan_case.h"
#include "prove/prove.h"
#include "prove/region.h"
#include "prove/terms.h"
#include "unit/caught.h"
#include "unit/small_models.h"

using namespace whale;

namespace {

Plan plan_of(
    const Graph& graph, const std::string& devices, const std::string& strategy,
    const std::function<void(CompileOptions&)>& more = [](CompileOptions&) {}) {
  CompileOptions options;
  options.strategy = strategy;
  more(options);
  return compile(graph, parse_devices(devices), options);
}

// Of replicas that each have a program of their own.
Proof after(Plan plan, const std::function<void(Plan&, Program&)>& damage) {
  for (Entry& e : plan.entries) give_own_programs(e);
  damage(plan, plan.entries[0].programs[0]);
  return prove(plan);
}
std::vector<Instruction*> all_of(Program& p, const std::function<bool(const Instruction&)>& wanted) {
  std::vector<Instruction*> out;
  for (Segment& s : p.segments)
    for (Instruction& i : s.instructions)
      if (wanted(i)) out.push_back(&i);
  return out;
}
bool is_op(const Instruction& i, const char* name) { return i.verb() == name; }

}  // namespace

TEST_CASE("regions: a reshape changes nothing of them, a cut takes a part") {
  using proof::hull, proof::same;
  const proof::Region all = proof::Region::whole({4, 6});
  const proof::Region columns = *all.cut({4, 6}, SubAxis{1, 1, 1}, {0, 3});
  CHECK(columns.size() == 12);
  CHECK(same(columns, *columns.in({4, 2, 3})));
  CHECK(same(*columns.in({4, 2, 3})->in({4, 6}), columns));
  CHECK(!columns.in({3, 8}));
  const proof::Region rows = *all.cut({4, 6}, SubAxis{0, 1, 1}, {1, 3});
  CHECK(same(*all.run(6, 12), rows));
  CHECK(same(*rows.in({24}), *all.in({24})->run(6, 12)));
  CHECK(!same(rows, columns));
  const auto whole = hull({*all.cut({4, 6}, SubAxis{1, 1, 1}, {3, 6}), columns}, 4, 24);
  REQUIRE(whole);
  CHECK(whole->is_whole());
  // A box of 9 alone: of 3 x 3 it has a row and a part of another.
  const proof::Region nine = proof::Region::whole({9});
  const auto run = hull({*nine.run(2, 1), *proof::Region::whole({3, 3}).cut({3, 3}, SubAxis{0, 1, 1}, {1, 3})}, 1, 7);
  REQUIRE(run);
  CHECK(same(*run, *nine.run(2, 7)));
}

TEST_CASE("terms: each once, none missing") {
  using proof::Set, proof::Terms;
  const auto terms = [](Interval samples) {
    Terms t;
    t.add_summand(7, {{{1, 0}, 8, Set(samples)}});
    return t;
  };
  Terms half = terms({0, 4});
  CHECK(half.join(terms({4, 6})) == kNone);
  CHECK(!half.whole());
  CHECK(half.join(terms({5, 7})) == 7);
  Terms other = terms({0, 6});
  CHECK(other.join(terms({6, 8})) == kNone);
  CHECK(other.whole());
  // Alike terms are counted.
  const auto some = [](int64_t n) {
    Terms t;
    t.add_summand(7, {{{1, 0}, 3, Set::first(n), true}});
    return t;
  };
  Terms two = some(2);
  CHECK(two.join(some(2)) == 7);
  two = some(2);
  CHECK(two.join(some(1)) == kNone);
  CHECK(two.whole());
}

TEST_CASE("proof: plans of small models") {
  const Graph mlp = small::mlp(8, OptimizerKind::kAdam).g, gpt = small::gpt(4).g;
  for (const Graph* g : {&mlp, &gpt})
    for (const char* strategy : {"replica", "replica(2, shares=[3,1])", "split(2)", "pipeline(2, micro_batches=2)"})
      for (const int zero : {0, 3}) {
        CAPTURE(strategy);
        CAPTURE(zero);
        const Proof proof = prove(plan_of(*g, "null:2", strategy, [&](CompileOptions& o) {
          o.zero = zero, o.recompute = zero ? Recompute::kFull : Recompute::kNone;
        }));
        CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, text(proof));
      }
  const Proof nested = prove(plan_of(gpt, "null:8", "replica(2) > pipeline(2, micro_batches=2) > split(2)"));
  CHECK_MESSAGE(nested.verdict == ProofVerdict::kProven, text(nested));
  const Proof narrow = prove(plan_of(gpt, "null:4", "replica(2) > split(2)", [](CompileOptions& o) {
    o.precision = Precision::kBFloat16, o.accumulation = 2;
  }));
  CHECK_MESSAGE(narrow.verdict == ProofVerdict::kProven, text(narrow));
  const Proof exact =
      prove(plan_of(mlp, "null:2", "replica", [](CompileOptions& o) { o.exact = true, o.accumulation = 4; }));
  CHECK_MESSAGE(exact.verdict == ProofVerdict::kProven, text(exact));
  CHECK(has(text(exact), "not part of the proof"));
}

TEST_CASE("proof: damage is refuted, and said where") {
  const Graph mlp = small::mlp(8).g;
  const Plan plan = plan_of(mlp, "null:2", "replica", [](CompileOptions& o) { o.accumulation = 2, o.fusion = false; });
  CHECK(after(plan, [](Plan&, Program&) {}).verdict == ProofVerdict::kProven);
  const auto refuted = [&](const char* what, const std::function<void(Plan&, Program&)>& damage) {
    const Proof proof = after(plan, damage);
    CAPTURE(what);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kRefuted, text(proof));
    return text(proof);
  };
  const auto sum = [](const Instruction& i) { return is_op(i, "accumulate") && has(i.name, "weight_grad"); };
  refuted("a missing term", [&](Plan&, Program& p) {
    // The sum begins anew with each micro-batch.
    Instruction& i = *all_of(p, sum).at(0);
    i.as<work::Kernel>()->op = OpCode::k_cast;
    i.as<work::Kernel>()->attrs = {{"dtype", std::string("f32")}};
    i.in = {i.in[1]};
  });
  refuted("a term twice", [&](Plan&, Program& p) {
    Instruction& i = *all_of(p, sum).at(0);
    i.in[1] = i.in[0];
  });
  refuted("a scale", [](Plan&, Program& p) {
    for (Instruction* i : all_of(p, [](const Instruction& x) { return is_op(x, "fill"); })) {
      Attr& value = i->as<work::Kernel>()->attrs.at("value");
      if (std::get<double>(value) != 0) value = std::get<double>(value) * 2;
    }
  });
  refuted("another operand", [](Plan&, Program& p) {
    for (Instruction* i : all_of(p, [](const Instruction& x) { return is_op(x, "relu_grad"); }))
      std::swap(i->in[0], i->in[1]);
  });
  refuted("another decay", [](Plan&, Program& p) {
    for (Instruction* i : all_of(p, [](const Instruction& x) { return is_op(x, "sgd"); }))
      i->as<work::Kernel>()->attrs.at("weight_decay") = 0.5;
  });
  refuted("no update on one copy", [](Plan&, Program& p) {
    for (Segment& s : p.segments)
      for (Instruction& i : s.instructions)
        if (is_op(i, "sgd")) i.as<work::Kernel>()->op = OpCode::k_adagrad;
  });
  refuted("samples of another micro-batch", [](Plan& p, Program&) {
    for (SampleCut& c : p.entries[0].rows[0].samples)
      if (c.micro_batches.size() > 1) std::swap(c.micro_batches[0], c.micro_batches[1]);
  });
}

TEST_CASE("proof: the message names the gradient, the op and who made what it reads") {
  const Plan plan = plan_of(small::mlp(8).g, "null:2", "replica");
  const Proof proof = after(plan, [](Plan&, Program& p) {
    Instruction& i = *all_of(p, [](const Instruction& x) { return is_op(x, "sgd"); }).at(0);
    i.as<work::Kernel>()->attrs["weight_decay"] = 0.5;
  });
  CHECK(proof.verdict == ProofVerdict::kRefuted);
  REQUIRE(!proof.entries.empty());
  const EntryProof& train = proof.entries[0];
  CHECK(train.device >= 0);
  CHECK(train.verb == "sgd");
  CHECK(has(train.what, "weight_decay is 0.5"));
  CHECK(has(text(proof), "the gradient of w1"));
  CHECK(has(to_json(proof), "\"verdict\":\"refuted\""));
}

TEST_CASE("proof: what there is no rule for is not covered, never proven") {
  // Adasum is no sum.
  const Proof proof = prove(plan_of(small::mlp(8).g, "null:2", "replica", [](CompileOptions& o) { o.adasum = true; }));
  CHECK(proof.verdict == ProofVerdict::kNotCovered);
  CHECK(has(text(proof), "adasum"));
}

// No false alarm, and few of them not covered.
TEST_CASE("property: random plans are proven") {
  using namespace whale::test;
  Dice dice(5);
  int proven = 0, open = 0, none = 0;
  for (int n = 0; n < 250; ++n) {
    const PlanCase c = random_plan_case(dice);
    CAPTURE(to_string(c));
    std::optional<Plan> plan;
    try {
      const Graph g = graph_of(c);
      plan = compile(g, parse_devices(fmt::format("ref:{}", c.devices)), options_of(c, g));
    } catch (const Error&) {
      ++none;
      continue;
    }
    const Proof proof = prove(*plan);
    CHECK_MESSAGE(proof.verdict != ProofVerdict::kRefuted, text(proof));
    ++(proof.verdict == ProofVerdict::kProven ? proven : open);
  }
  MESSAGE(proven << " proven, " << open << " not covered, " << none << " models without a plan");
  CHECK(open * 20 <= proven);
}
