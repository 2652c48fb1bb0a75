// Plans from end to end, without a device: structure, golden text, verification of broken plans, the clock.
#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "cost/cost.h"
#include "plan/figures.h"
#include "simulate/simulate.h"
#include "unit/caught.h"
#include "unit/small_models.h"

using namespace whale;

namespace {

Plan plan_of(const small::Model& m, const std::string& devices, CompileOptions options = {}) {
  options.verify_passes = true;
  return compile(m.g, parse_devices(devices, {0, 1, 2, 3}), options);
}
const Program& program_of(const Plan& plan, size_t row = 0) {
  return plan.entries[0].programs[plan.entries[0].rows[row].program];
}
CompileOptions with(const std::function<void(CompileOptions&)>& change) {
  CompileOptions options;
  change(options);
  return options;
}

// WHALE_RENEW_GOLDEN=1 in the environment writes the files instead.
void compare_golden(const std::string& name, const std::string& text) {
  const std::filesystem::path path = std::filesystem::path(__FILE__).parent_path() / ".." / "golden" / name;
  if (std::getenv("WHALE_RENEW_GOLDEN")) {
    std::ofstream(path) << text;
    return;
  }
  std::ifstream file(path);
  const std::string want{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  CHECK_MESSAGE(want == text, name, " differs; look at what changed, then renew it with tests/golden/renew.sh BUILD");
}

}  // namespace

TEST_CASE("golden text of each level of a small model") {
  std::map<std::string, std::string> levels;
  const Plan plan =
      plan_of(small::mlp(), "ref:2", with([&](CompileOptions& o) {
                o.bucket_bytes = 512;
                o.dump = [&](std::string_view pass, const std::string& text) { levels[std::string(pass)] = text; };
              }));
  compare_golden("mlp.graph.txt", levels.at("source"));
  compare_golden("mlp.train.txt", levels.at("train.assign_regions"));
  compare_golden("mlp.shardings.txt", levels.at("train.order_ops"));
  compare_golden("mlp.plan.txt", print(plan));
  compare_golden("mlp.summary.txt", summary(plan));
  CHECK(print(plan) == print(plan_of(small::mlp(), "ref:2", with([](CompileOptions& o) { o.bucket_bytes = 512; }))));
}

TEST_CASE("golden text of the choices and the reshards of a small model") {
  const Plan plan =
      plan_of(small::gpt(8), "null:4", with([](CompileOptions& o) { o.strategy = "replica(2) > split(2)"; }));
  compare_golden("gpt.choices.txt", choices_text(choices_of(plan)));
  compare_golden("gpt.reshards.txt", reshards_text(reshards_of(plan), cost_of(plan).link));
}

TEST_CASE("every model plans on every number of devices, with micro-batches, cuts and options, and verifies") {
  for (const small::Model& m : {small::mlp(7), small::gpt(7), small::gpt(5, OptimizerKind::kLamb), small::resnet(7)})
    for (const char* devices : {"ref:1", "ref:2", "null:3", "ref:5"})
      for (const int64_t micro_batches : {1, 3})
        for (const bool fusion : {true, false}) {
          if (m.g.name == "resnet" && micro_batches > 1) continue;
          CAPTURE(m.g.name);
          CAPTURE(devices);
          const Plan plan = plan_of(m, devices, with([&](CompileOptions& o) {
                                      o.accumulation = micro_batches;
                                      o.fusion = fusion;
                                      o.overlap = fusion;
                                      o.recompute = fusion ? Recompute::kNone : Recompute::kSelective;
                                      o.bucket_bytes = 2048;
                                    }));
          CHECK(plan.entries.size() == 2);
          CHECK(plan.find_entry("eval", 0) == nullptr);
          for (const Entry& e : plan.entries)
            for (const Program& p : e.programs) CHECK(p.arena_bytes <= p.peak_live_bytes * 5 / 4 + 4096);
        }
}

TEST_CASE("one device has no collectives and one segment; like devices share a program") {
  const Plan one = plan_of(small::gpt(), "ref:1");
  CHECK(step_of(program_of(one)).collectives == 0);
  for (const Group& group : one.groups) CHECK(group.parts.empty());
  REQUIRE(program_of(one).segments.size() == 1);
  CHECK(program_of(one).segments[0].name == "step");
  CHECK(plan_of(small::mlp(8), "ref:4").entries[0].programs.size() == 1);
  const Plan uneven = plan_of(small::mlp(8), "ref:3");  // 3, 3, 2
  CHECK(uneven.entries[0].programs.size() == 2);
  CHECK(uneven.entries[0].rows[2].samples[0].whole == Interval{6, 8});
}

TEST_CASE("shares by hand, also zero") {
  const Plan plan =
      plan_of(small::mlp(8), "ref:3", with([](CompileOptions& o) { o.strategy = "replica(shares=[3,0,1])"; }));
  CHECK(plan.strategy == "replica(3, shares=[3,0,1])");
  CHECK(plan.entries[0].rows[0].samples[0].whole == Interval{0, 6});
  CHECK(plan.entries[0].rows[1].samples[0].whole.size() == 0);
  // The idle device still adds its zeros and updates its copy.
  const Program& idle = program_of(plan, 1);
  int fills = 0, updates = 0, products = 0;
  for (const Instruction& i : idle.segments[0].instructions) {
    fills += i.op() == OpCode::k_fill;
    updates += i.kind() == InstructionKind::kKernel && has_flag(i.kernel()->op, kUpdateOp);
    products += i.op() == OpCode::k_matmul;
  }
  CHECK(fills >= 4);
  CHECK(updates >= 1);
  CHECK(products == 0);
}

TEST_CASE("micro-batches of two sizes make two variants of the body") {
  const Plan plan = plan_of(small::mlp(8), "ref:2", with([](CompileOptions& o) { o.accumulation = 3; }));  // runs 3 3 2
  const Program& p = program_of(plan);
  REQUIRE(p.segments.size() == 4);
  CHECK(p.segments[1].name == "body");
  CHECK(p.segments[2].name == "body/2");  // the first micro-batch that runs it
  REQUIRE(p.schedule.size() == 5);
  CHECK(p.schedule[3].segment == 2);
  CHECK(plan.entries[0].rows[0].samples[0].micro_batches == std::vector<SampleRange>{{0, 2}, {3, 5}, {6, 7}});
  CHECK(plan.entries[0].rows[1].samples[0].micro_batches == std::vector<SampleRange>{{2, 3}, {5, 6}, {7, 8}});
  CHECK(plan.entries[0].rows[1].samples[0].whole == Interval{4, 8});
}

TEST_CASE("updates are in place, reshapes cost nothing, recompute saves memory") {
  const Plan plan = plan_of(small::gpt(), "ref:1");
  const Program& p = program_of(plan);
  for (const Instruction& i : p.segments[0].instructions) {
    if (i.kind() != InstructionKind::kKernel) continue;
    CHECK(i.op() != OpCode::k_reshape);
    if (has_flag(i.kernel()->op, kUpdateOp))
      for (const BufferId b : i.out) CHECK(p.buffers[b].kind == BufferKind::kVariable);
  }
  const small::Model large = small::gpt(8, OptimizerKind::kAdamW, 2, 64, 128, 64, 2);
  const int64_t kept = program_of(plan_of(large, "ref:1")).arena_bytes;
  CHECK(program_of(plan_of(large, "ref:1", with([](CompileOptions& o) { o.recompute = Recompute::kSelective; })))
            .arena_bytes < kept * 9 / 10);
}

TEST_CASE("a fetched gradient is the one that updates read, summed once") {
  for (const OptimizerKind optimizer : {OptimizerKind::kAdam, OptimizerKind::kAdafactor, OptimizerKind::kLamb})
    for (const bool narrow : {false, true}) {
      const auto sums = [&](bool fetch) {
        const Plan plan = plan_of(small::mlp(12, optimizer), "ref:6", with([&](CompileOptions& o) {
                                    o.strategy = "replica(2) > replica(3)", o.zero = 1;
                                    if (narrow) o.gradient_dtype = DType::kF16;
                                    if (fetch) o.fetch = {"grad:w1"};
                                  }));
        int64_t bytes = 0;
        for (const Segment& s : program_of(plan).segments)
          for (const Instruction& i : s.instructions)
            if (const auto* c = i.as<work::Collective>(); c != nullptr && c->op != OpCode::k_all_gather)
              bytes += static_cast<int64_t>(i.bytes);
        return bytes;
      };
      INFO(static_cast<int>(optimizer), " ", narrow);
      CHECK(sums(true) == sums(false));
    }
}

TEST_CASE("gradients and tensors can be fetched; what is not there is named") {
  const Plan plan = plan_of(small::mlp(8), "ref:2", with([](CompileOptions& o) { o.fetch = {"grad:w1", "fc1"}; }));
  const auto& outputs = plan.entries[0].outputs;
  const auto find = [&](const char* name) {
    return std::find_if(outputs.begin(), outputs.end(), [&](const PlanOutput& o) { return o.name == name; });
  };
  REQUIRE(find("grad:w1") != outputs.end());
  CHECK(find("grad:w1")->merge == OutputMerge::kSame);
  CHECK(find("grad:w1")->dims == Dims{4, 16});
  REQUIRE(find("fc1") != outputs.end());
  CHECK(find("fc1")->merge == OutputMerge::kConcat);
  CHECK(find("loss")->merge == OutputMerge::kSame);
  CHECK(has(message_of([] { plan_of(small::mlp(), "ref:1", with([](CompileOptions& o) { o.fetch = {"nothing"}; })); }),
            "'nothing'"));
  CHECK(has(
      message_of([] { plan_of(small::mlp(), "ref:1", with([](CompileOptions& o) { o.fetch = {"grad:nothing"}; })); }),
      "grad:nothing"));
}

TEST_CASE("other batch sizes have the same variables in the same order") {
  const Plan plan = plan_of(small::gpt(6), "ref:2");
  for (const int64_t batch : {1, 3, 6, 9})
    for (const char* name : {"train", "eval"}) {
      Plan other = plan;
      other.entries = {compile_entry(plan, name, batch)};
      CHECK(other.entries[0].batch == batch);
      CHECK(other.entries[0].inputs[0].dims[0] == batch);
      CHECK_NOTHROW(verify(other));
    }
  CHECK_THROWS_AS(compile_entry(plan, "predict", 3), Error);
  CHECK_THROWS_AS(compile_entry(plan, "train", 0), Error);
  small::Model forward = small::mlp();
  forward.g.training.optimizer.kind = OptimizerKind::kNone;
  const Plan eval = plan_of(forward, "ref:1");
  CHECK(eval.entries.size() == 1);
  CHECK_THROWS_AS(compile_entry(eval, "train", 4), Error);
}

TEST_CASE("bad options") {
  CHECK_THROWS_AS(compile(small::mlp().g, {}, {}), Error);
  CHECK(has(message_of([] {
              plan_of(small::mlp(), "cpu:2", with([](CompileOptions& o) { o.precision = Precision::kFloat64; }));
            }),
            "ref"));
  CHECK(has(
      message_of([] { plan_of(small::mlp(), "ref:4", with([](CompileOptions& o) { o.strategy = "replica(2)"; })); }),
      "4 are there"));
  CHECK_THROWS_AS(plan_of(small::mlp(), "ref:1", with([](CompileOptions& o) { o.accumulation = -1; })), Error);
  small::Model m = small::mlp();
  m.enter(ScopeKind::kReplica, 0, {2, 1});
  const TensorId y = m.op(OpCode::k_relu, {m.g.outputs[0].tensor});
  m.scope = 0;
  m.enter(ScopeKind::kReplica, 0, {1, 1});
  m.g.outputs.push_back({"more", m.op(OpCode::k_relu, {y})});
  CHECK(has(message_of([&] { plan_of(m, "ref:2"); }), "different places"));
}

// ---- verify finds what is wrong -----------------------------------------------------------------------------------
TEST_CASE("a broken plan does not verify") {
  const Plan good = plan_of(small::gpt(4), "ref:2", with([](CompileOptions& o) { o.bucket_bytes = 4096; }));
  const auto broken = [&](const std::function<void(Plan&, Program&)>& damage) {
    Plan plan = good;
    damage(plan, plan.entries[0].programs[0]);
    return message_of([&] { verify(plan); });
  };
  CHECK(broken([](Plan&, Program&) {}) == "");
  CHECK(broken([](Plan&, Program& p) { p.segments[0].instructions[3].in.push_back(99999); }) != "");
  CHECK(has(broken([](Plan&, Program& p) {
              for (Instruction& i : p.segments[0].instructions) i.waits.clear();
            }),
            "without waiting"));
  CHECK(broken([](Plan&, Program& p) {
          for (Buffer& b : p.buffers)
            if (b.kind == BufferKind::kArena) b.offset = 0;
        }) != "");
  CHECK(has(broken([](Plan&, Program& p) { p.arena_bytes /= 2; }), "arena"));
  CHECK(broken([](Plan&, Program& p) {
          std::erase_if(p.segments[0].instructions,
                        [](const Instruction& i) { return i.kind() == InstructionKind::kFetch; });
        }) != "");
  CHECK(has(broken([](Plan&, Program& p) {
              Buffer& idle = p.buffers.emplace_back();
              idle.dtype = DType::kF32, idle.dims = {4}, idle.bytes = 16;
            }),
            "no place"));
  CHECK(broken([](Plan& plan, Program&) { plan.groups[0].parts[0][1] = 7; }) != "");
  CHECK(broken([](Plan& plan, Program&) { plan.entries[0].rows.pop_back(); }) != "");
  CHECK(broken([](Plan&, Program& p) { p.schedule[0].segment = 4; }) != "");
  CHECK(has(broken([](Plan& plan, Program& p) {  // one device skips a collective
              plan.entries[0].programs.push_back(p);
              plan.entries[0].rows[1].program = static_cast<int32_t>(plan.entries[0].programs.size()) - 1;
              auto& list = plan.entries[0].programs.back().segments[0].instructions;
              const auto at = std::find_if(list.begin(), list.end(), [](const Instruction& i) {
                return i.kind() == InstructionKind::kCollective;
              });
              at->name = "another";
            }),
            "different collectives"));
}

TEST_CASE("swapping the places of two live buffers is found") {
  const Plan good = plan_of(small::gpt(4), "ref:1");
  std::vector<size_t> roots;
  const Program& p = program_of(good);
  for (size_t b = 0; b < p.buffers.size(); ++b)
    if (p.buffers[b].kind == BufferKind::kArena && p.buffers[b].alias == kNone && p.buffers[b].bytes >= 1024)
      roots.push_back(b);
  REQUIRE(roots.size() > 20);
  int found = 0;
  for (size_t k = 0; k + 1 < 20; ++k) {
    Plan bad = good;
    Program& q = bad.entries[0].programs[0];
    const int64_t to = q.buffers[roots[k + 1]].offset;
    for (Buffer& b : q.buffers)
      if (&b == &q.buffers[roots[k]] || b.alias == static_cast<BufferId>(roots[k])) b.offset = to;
    found += !message_of([&] { verify(bad); }).empty();
  }
  CHECK(found >= 15);  // neighbours in the program are mostly alive together
}

// ---- time ---------------------------------------------------------------------------------------------------------
TEST_CASE("communication overlaps the backward pass, and not without it") {
  const small::Model m = small::gpt(4, OptimizerKind::kAdamW, 4);
  const auto run = [&](bool overlap) {
    const Plan plan = plan_of(m, "null:2", with([&](CompileOptions& o) {
                                o.overlap = overlap;
                                o.bucket_bytes = 8192;
                              }));
    const auto events = simulate(plan, plan.entries[0], [](const Instruction& i, int32_t) {
      return i.kind() == InstructionKind::kCollective ? 2.0 : 1.0;
    });
    for (const Event& e : events) {  // waits are honoured, queues keep their order
      const Segment& s = program_of(plan).segments[e.segment];
      for (const Wait& w : s.instructions[e.instruction].waits)
        for (const Event& other : events)
          if (other.device == e.device && other.instruction == w.index) CHECK(other.end <= e.start);
    }
    return makespan(events);
  };
  const double beside = run(true), after = run(false);
  CHECK(beside < after);
}

TEST_CASE("a collective waits for the slowest member") {
  const Plan plan = plan_of(small::mlp(8), "null:2");
  const auto events = simulate(plan, plan.entries[0], [](const Instruction& i, int32_t device) {
    return i.kind() == InstructionKind::kCollective ? 0.5 : device == 1 ? 3.0 : 1.0;
  });
  double first = -1;
  for (const Event& e : events) {
    const Instruction& i = program_of(plan).segments[e.segment].instructions[e.instruction];
    if (i.kind() != InstructionKind::kCollective) continue;
    if (e.device == 0 && first < 0) first = e.start;
    if (e.device == 1) {
      CHECK(e.start == doctest::Approx(first));
      break;
    }
  }
  CHECK(first > 0);
}

TEST_CASE("devices that wait for each other are found, not waited for") {
  Plan plan = plan_of(small::mlp(8), "null:2");
  plan.entries[0].programs.push_back(plan.entries[0].programs[0]);
  plan.entries[0].rows[1].program = static_cast<int32_t>(plan.entries[0].programs.size()) - 1;
  std::erase_if(plan.entries[0].programs.back().segments[0].instructions,
                [](const Instruction& i) { return i.kind() == InstructionKind::kCollective; });
  for (Instruction& i : plan.entries[0].programs.back().segments[0].instructions) i.waits.clear();
  CHECK_THROWS_AS(simulate(plan, plan.entries[0], [](const Instruction&, int32_t) { return 1.0; }), Error);
}

TEST_CASE("one device of each class has the times of all of them, and the picture's JSON their stretches") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 2);
  for (const char* strategy : {"replica(4) > pipeline(2, micro_batches=4)", "replica(2) > split(4)", "replica"}) {
    CAPTURE(strategy);
    const Plan plan = plan_of(m, "null:8", with([&](CompileOptions& o) { o.strategy = strategy; }));
    const Entry& e = plan.entries[0];
    const StepTimes times = *times_of(plan, e, 1 << 20);
    CHECK(*std::max_element(times.classes.begin(), times.classes.end()) < 7);
    const std::vector<Event> all = simulate(plan, e, seconds_by(cost_of(plan), plan, e));
    CHECK(makespan(all) == doctest::Approx(times.seconds));
    size_t wrong = 0;
    std::map<int32_t, std::vector<Event>> of_class, of_device;
    for (const Event& event : times.events) of_class[times.classes[event.device]].push_back(event);
    for (const Event& event : all) of_device[event.device].push_back(event);
    for (const auto& [device, events] : of_device) {
      const std::vector<Event>& want = of_class[times.classes[device]];
      REQUIRE(events.size() == want.size());
      for (size_t k = 0; k < want.size(); ++k)
        wrong += std::abs(want[k].start - events[k].start) > 1e-9 || std::abs(want[k].end - events[k].end) > 1e-9;
    }
    CHECK(wrong == 0);
    CHECK(has(to_json(plan), "\"timeline\":{\"seconds\":"));
  }
  const Plan plan = plan_of(m, "null:2");
  CHECK(!times_of(plan, plan.entries[0], 3));
}

TEST_CASE("cost formulas") {
  const LinkRates link{.bytes_per_second = 1e9, .latency_seconds = 1e-6};
  CHECK(all_reduce_seconds(1e6, 1, link) == 0);
  CHECK(all_reduce_seconds(4e6, 4, link) == doctest::Approx(6 * (1e-6 + 1e-3)));
  CHECK(all_gather_seconds(4e6, 2, link) == doctest::Approx(1e-6 + 2e-3));
  // Of 4 MB on 4 devices, each receives: gathered, exchanged, summed, summed in parts.
  CHECK(received_bytes({}, 4e6, 4) == doctest::Approx(3e6));
  CHECK(received_bytes({.cut = true}, 4e6, 4) == doctest::Approx(0.75e6));
  CHECK(received_bytes({.sum = true}, 4e6, 4) == doctest::Approx(6e6));
  CHECK(received_bytes({.sum = true, .cut = true}, 4e6, 4) == doctest::Approx(3e6));
  for (const bool sum : {false, true})
    for (const bool cut : {false, true}) {
      const double rounds = sum && !cut ? 6 : 3, bytes = received_bytes({sum, cut}, 4e6, 4);
      CHECK(reshard_seconds({sum, cut}, 4e6, 4, link) ==
            doctest::Approx(rounds * link.latency_seconds + bytes / link.bytes_per_second));
    }
  CHECK(op_seconds({1e9, 1e6}, {.flops_per_second = 1e9, .bytes_per_second = 1e9, .seconds_per_op = 0}) ==
        doctest::Approx(1));
  CHECK(op_seconds({1, 2e9}, {.flops_per_second = 1e9, .bytes_per_second = 1e9, .seconds_per_op = 0}) ==
        doctest::Approx(2));
}

TEST_CASE("the picture's JSON and the summary mention devices and buckets") {
  const Plan plan = plan_of(small::mlp(8), "ref:2");
  const std::string json = to_json(plan), text = summary(plan);
  CHECK(json.find("\"micro_batches\":1") != std::string::npos);
  CHECK(json.find("bucket.0") != std::string::npos);
  CHECK(std::count(json.begin(), json.end(), '{') == std::count(json.begin(), json.end(), '}'));
  CHECK(text.find("replica(2)") != std::string::npos);
  CHECK(text.find("optimizer state") != std::string::npos);
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find('\n', at), text.size());
    CHECK(end - at <= 140);
    at = end + 1;
  }
}

TEST_CASE("random shares and micro-batches verify") {
  CHECK(rc::check("plans of random cuts verify", [] {
    const auto devices = *rc::gen::inRange(1, 5);
    const auto batch = *rc::gen::inRange<int64_t>(1, 13);
    const auto micro_batches = *rc::gen::inRange<int64_t>(1, std::min<int64_t>(4, batch + 1));
    std::string shares;
    for (int d = 0; d < devices; ++d) shares += (d ? "," : "") + std::to_string(d == 0 ? 2 : *rc::gen::inRange(0, 4));
    CompileOptions options;
    options.strategy = "replica(shares=[" + shares + "])";
    options.accumulation = micro_batches;
    options.bucket_bytes = *rc::gen::inRange<int64_t>(1, 20000);
    const Plan plan = plan_of(small::gpt(batch, OptimizerKind::kAdamW, 1), "ref:" + std::to_string(devices), options);
    int64_t samples = 0;
    for (const DeviceRow& row : plan.entries[0].rows)
      for (const SampleRange& r : row.samples[0].micro_batches) samples += r.size();
    RC_ASSERT(samples == (batch == 1 ? devices : batch));
  }));
}
