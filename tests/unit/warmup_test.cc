// How deep 1F1B's warm-up is: legal depths, what they cost in memory and gain in time, and those that the planner
// finds.
#include "schedule/warmup.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "cluster/device_kinds.h"
#include "cluster/devices.h"
#include "compile/automatic.h"
#include "compile/compile.h"
#include "compile/deeper_warmup.h"
#include "plan/figures.h"
#include "schedule/verify.h"
#include "simulate/simulate.h"
#include "unit/caught.h"
#include "unit/golden.h"
#include "unit/property.h"

using namespace whale;
using golden::Gpt;
using golden::graph_of;

namespace {

std::string text_of(std::string_view name, const std::vector<int>& depths) {
  return fmt::format("{}[{}]", name, fmt::join(depths, ","));
}

// Every list of numbers 1 .. m, one for each stage.
void each_depths(int stages, int m, const std::function<void(const std::vector<int>&)>& visit) {
  std::vector<int> depths(static_cast<size_t>(stages), 1);
  for (bool more = true; more;) {
    visit(depths);
    more = false;
    for (int& d : depths) {
      if (d < m) {
        ++d, more = true;
        break;
      }
      d = 1;
    }
  }
}

bool falls(const std::vector<int>& depths) { return std::ranges::is_sorted(depths, std::greater{}); }

int total(const std::vector<int>& depths) { return std::accumulate(depths.begin(), depths.end(), 0); }

struct Problem {
  int m = 1;
  std::vector<StageTimes> times;
  std::vector<LinkTimes> links;
  std::vector<int> most;
};

int some(int from, int to) { return *rc::gen::inRange(from, to + 1); }

// Fast and slow links, room for few and for all.
Problem problem() {
  const int p = some(2, 4);
  Problem out{.m = some(2, p < 4 ? 8 : 7), .times = {}, .links = {}, .most = {}};
  for (int s = 0; s < p; ++s) {
    out.times.push_back({.forward = some(50, 150) / 100.0, .backward = some(100, 300) / 100.0, .weight = 0});
    out.most.push_back(some(0, 1) ? out.m : some(1, out.m));
    constexpr int kSlow[] = {0, 30, 400};
    const int slow = kSlow[some(0, 2)];
    if (s > 0) out.links.push_back({some(0, slow) / 100.0, some(0, slow) / 100.0});
  }
  return out;
}

}  // namespace

TEST_CASE("1f1b and zb_h1 with a given warm-up, as text") {
  CHECK(to_string(make_schedule("1f1b[4,2,1]", 3, 5)) ==
        "0: F0 F1 F2 F3 B0 F4 B1 B2 B3 B4\n"
        "1: F0 F1 B0 F2 B1 F3 B2 F4 B3 B4\n"
        "2: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4\n");
  CHECK(to_string(make_schedule("zb_h1[3,1]", 2, 3)) ==
        "0: F0 F1 F2 B0 W0 B1 W1 B2 W2\n"
        "1: F0 B0 F1 B1 W0 F2 B2 W1 W2\n");
  for (const char* name : {"1f1b", "zb_h1"})
    for (const int p : {1, 2, 4})
      for (const int m : {1, 3, 8})
        CHECK(to_string(make_schedule(text_of(name, usual_warmup(p, m)), p, m)) ==
              to_string(make_schedule(name, p, m)));
  // Of fewer micro-batches as many as there are.
  CHECK(to_string(make_schedule("1f1b[7,5,1]", 3, 2)) == to_string(make_schedule("1f1b[2,2,1]", 3, 2)));
}

TEST_CASE("a warm-up is as many micro-batches alive, and takes a channel's capacity where it falls by more than two") {
  for (const char* name : {"1f1b", "zb_h1"})
    for (const auto& [p, most] : {std::pair{1, 4}, {2, 6}, {3, 5}, {4, 4}})
      for (int m = 1; m <= most; ++m)
        each_depths(p, m, [&](const std::vector<int>& depths) {
          if (!falls(depths)) return;
          CAPTURE(text_of(name, depths));
          const PipelineSchedule schedule = make_schedule(text_of(name, depths), p, m);
          int fall = 0;
          for (int s = 1; s < p; ++s) fall = std::max(fall, depths[s - 1] - depths[s]);
          const int capacity = capacity_needed(schedule);
          // What the stage before has sent and not been thanked for lies in the two channels between them.
          CHECK(capacity <= std::max(1, (fall + 1) / 2));
          if (fall > 2) CHECK(capacity == (fall + 1) / 2);
          const std::vector<LivePeak> peaks = live_peaks(schedule);
          for (int s = 0; s < p; ++s) CHECK(peaks[s].activations == depths[s]);
        });
}

TEST_CASE("a warm-up that rises from stage to stage deadlocks, and no other does") {
  for (const char* name : {"1f1b", "zb_h1"})
    for (const auto& [p, most] : {std::pair{2, 5}, {3, 4}, {4, 3}})
      for (int m = 1; m <= most; ++m)
        each_depths(p, m, [&](const std::vector<int>& depths) {
          const std::vector<int64_t> wide(depths.begin(), depths.end());
          PipelineSchedule schedule = make_schedule(name, p, m);
          schedule.shape.warmup = depths;
          schedule.devices = schedule_rule(name).orders(schedule.shape);
          CHECK(!find_deadlock(schedule, kUnlimitedCapacity) == falls(depths));
          const std::string refused = message_of([&] { check_warmup({name, wide}, p); });
          CHECK(refused.empty() == falls(depths));
          if (!refused.empty()) CHECK(has(refused, "do not rise"));
        });
}

TEST_CASE("depths of a warm-up that cannot be are refused") {
  CHECK(has(message_of([] { make_schedule("1f1b[3,1]", 3, 4); }), "2 depths for 3 stages"));
  CHECK(has(message_of([] { make_schedule("gpipe[3,1]", 2, 4); }), "leave warmup out, or take 1f1b or zb_h1"));
  CHECK(has(message_of([] { make_schedule("interleaved[3,1]", 2, 4, 2); }), "'interleaved' has a warm-up of its own"));
  for (const char* text : {"1f1b[", "1f1b[]", "1f1b[2", "1f1b[2,", "1f1b[2,]", "1f1b[,2]", "1f1b[2]]", "1f1b[2]x",
                           "1f1b[0]", "1f1b[-1]", "1f1b[1.5]", "1f1b[99999999999]", "1f1b[a]", "1f1b[ 2]"})
    CHECK_MESSAGE(has(message_of([&] { read_schedule(text); }), "expected whole numbers from 1"), text);
  CHECK(has(message_of([] { read_schedule("2f2b[2]"); }), "no pipeline schedule '2f2b'"));
  CHECK(to_string(read_schedule("1f1b[3,2]")) == "1f1b[3,2]");
  CHECK(to_string(read_schedule("[3,2]")) == "[3,2]");
}

// f and b: a forward and a backward pass; L: a message. With the usual depths of 2 and 1 a pair of micro-batches is let
// in, and the next pair when the first one is back: every two take 2 (f + b + L). With one more, stage 1 always has
// work: m (f + b), and the way to it and back.
TEST_CASE("two stages and a link that takes as long as a forward pass: default and deeper warm-up as formulas") {
  for (const double f : {1.0, 2.0, 3.0})
    for (const double b : {f, 2 * f, 3 * f})
      for (int m = 3; m <= 12; ++m) {
        const double L = f;
        const std::vector<StageTimes> times(2, {f, b, 0});
        const std::vector<LinkTimes> links{{L, L}};
        const auto seconds = [&](int depth) { return seconds_of_1f1b(m, times, links, std::vector<int>{depth, 1}); };
        const double pairs = std::ceil(m / 2.0);
        CHECK(seconds(2) == doctest::Approx(pairs * 2 * (f + b + L) + (m % 2 == 0 ? f + b : 0)));
        CHECK(seconds(3) == doctest::Approx((m + 1) * (f + b) + 2 * L));
        const Warmup found = find_warmup(m, times, links, std::vector<int>{m, m});
        CHECK(found.depths == std::vector<int>{3, 1});
        CHECK(found.seconds == seconds(3));
      }
}

TEST_CASE("without slow links the warm-up stays as 1f1b has it, and its time is the clock's") {
  for (const int p : {2, 3, 5})
    for (const int m : {1, 2, 7, 12}) {
      const std::vector<StageTimes> times(static_cast<size_t>(p), {1, 2, 0});
      const std::vector<LinkTimes> links(static_cast<size_t>(p - 1));
      const Warmup found = find_warmup(m, times, links, std::vector<int>(static_cast<size_t>(p), m));
      CHECK(found.depths == usual_warmup(p, m));
      CHECK(found.seconds == run_clock(make_schedule("1f1b", p, m), times).makespan);
    }
}

TEST_CASE("property: the depths that are found take no longer than any, and are no deeper than needed") {
  CHECK(whale::test::holds("find_warmup is the best of all depths", 300, [] {
    const Problem a = problem();
    const auto p = static_cast<int>(a.times.size());
    const std::vector<int> usual = usual_warmup(p, a.m);
    const Warmup found = find_warmup(a.m, a.times, a.links, a.most);
    double best = std::numeric_limits<double>::infinity();
    int least = 0;
    each_depths(p, a.m, [&](const std::vector<int>& depths) {
      if (!falls(depths)) return;
      for (size_t s = 0; s < depths.size(); ++s)
        if (depths[s] < usual[s] || depths[s] > std::max(usual[s], a.most[s])) return;
      const double mine = seconds_of_1f1b(a.m, a.times, a.links, depths);
      RC_ASSERT(std::isfinite(mine));
      if (mine > best + 1e-9 || (mine > best - 1e-9 && total(depths) >= least)) return;
      best = std::min(best, mine), least = total(depths);
    });
    RC_CLASSIFY(found.depths != usual, "deeper");
    RC_ASSERT(found.seconds < best + 1e-6);
    RC_ASSERT(total(found.depths) == least);
    for (size_t s = 0; s < usual.size(); ++s) RC_ASSERT(found.depths[s] <= std::max(usual[s], a.most[s]));
  }));
}

namespace {

CompileOptions with(const std::string& strategy) {
  CompileOptions out;
  out.strategy = strategy;
  return out;
}

double simulated(const Plan& plan) { return times_of(plan, plan.entries[0], 10'000'000).value().seconds; }

Graph model(int64_t batch, int64_t layers) {
  Gpt s;
  s.batch = batch, s.layers = layers, s.dim = 256, s.heads = 4, s.seq = 128;
  return graph_of(s);
}

}  // namespace

TEST_CASE("a plan's warm-up is deeper where links are slow, and faster by its own instructions") {
  const Graph graph = model(32, 6);
  struct Case {
    const char *devices, *strategy;
    bool deeper;
  };
  for (const Case& c : {Case{"3xV100-16GB:1~5Gb/s@20us", "pipeline(3, micro_batches=8)", true},
                        Case{"3xV100-16GB:1~5Gb/s@20us", "pipeline(3, micro_batches=8, schedule=1f1b)", true},
                        Case{"2xV100-16GB:2~10Gb/s@20us", "replica(2) > pipeline(2, micro_batches=8)", false},
                        Case{"2xV100-16GB:2~10Gb/s@20us", "pipeline(2, micro_batches=8) > replica(2)", true},
                        Case{"3xV100-16GB:1~5Gb/s@20us", "pipeline(3, micro_batches=8, schedule=gpipe)", false},
                        Case{"3xV100-16GB:1~5Gb/s@20us", "pipeline(3, micro_batches=8, warmup=[3,2,1])", false},
                        Case{"3xV100-16GB:1~5Gb/s@20us", "pipeline(3, micro_batches=2)", false},
                        Case{"V100-16GB:2", "pipeline(2, micro_batches=32)", false},
                        Case{"null:3", "pipeline(3, micro_batches=8)", false}}) {
    CAPTURE(c.devices);
    CAPTURE(c.strategy);
    const std::vector<DeviceSpec> devices = parse_devices(c.devices, {0});
    const Plan plan = compile(graph, devices, with(c.strategy));
    const auto is_why = [](const std::string& note) { return has(note, "forward passes before their first backward"); };
    CHECK(std::ranges::any_of(plan.notes, is_why) == c.deeper);
    const bool written = has(c.strategy, "warmup");
    CHECK(has(plan.strategy, "warmup=[") == (c.deeper || written));
    if (!c.deeper) continue;
    // The same text with the usual depths is slower, and the one that was found is the plan again.
    std::string usual = c.strategy;
    usual.insert(usual.find(')'), has(usual, "(3") ? ", warmup=[3,2,1]" : ", warmup=[2,1]");
    CHECK(simulated(plan) < (1 - kWorthDeeper) * simulated(compile(graph, devices, with(usual))));
    Plan again = compile(graph, devices, with(plan.strategy));
    // Depths are in the text, cuts by the clock are not: they are found again with these depths.
    const bool cut =
        std::ranges::any_of(plan.notes, [](const std::string& n) { return has(n, "Stages are cut by how"); });
    CHECK((cut || print(again.entries[0].programs[0]) == print(plan.entries[0].programs[0])));
    CHECK(simulated(again) == doctest::Approx(simulated(plan)).epsilon(cut ? 0.05 : 1e-9));
    CHECK(again.model_hash == plan.model_hash);
    // Another batch is planned with the same depths, from a file too.
    const std::vector<uint8_t> bytes = serialize(plan);
    const Entry half = compile_entry(deserialize(bytes.data(), bytes.size()), "train", 16);
    CHECK(half.programs[0].schedule.size() == plan.entries[0].programs[0].schedule.size());
    for (size_t row = 0; row < half.programs[0].schedule.size(); ++row)
      CHECK(half.programs[0].schedule[row].micro_batch == plan.entries[0].programs[0].schedule[row].micro_batch);
  }
}

TEST_CASE("auto times pipelines with the warm-up that their plans have") {
  Gpt wide;
  wide.batch = 64, wide.layers = 12, wide.dim = 1024, wide.heads = 8, wide.seq = 256;
  const Graph graph = graph_of(wide);
  const std::vector<DeviceSpec> devices = parse_devices("4xV100-16GB:1~5Gb/s@20us", {0});
  const Found found = search(graph, devices, {});
  int deeper = 0;
  for (const Judged& j : found.list) {
    if (!j.simulated) continue;
    CAPTURE(j.candidate.strategy);
    CompileOptions options = with(j.candidate.strategy);
    static_cast<PlanOptions&>(options) = j.candidate.options;
    options.strategy = j.candidate.strategy;
    const Plan plan = compile(graph, chosen_of(devices, j.candidate.devices), options);
    CHECK(simulated(plan) == doctest::Approx(j.seconds));
    deeper += has(plan.strategy, "warmup=[");
  }
  CHECK(deeper > 0);
}

TEST_CASE("a warm-up is no deeper than memory has room for, and as deep as it has") {
  const Graph graph = model(32, 6);
  const char* strategy = "pipeline(3, micro_batches=8)";
  std::vector<DeviceSpec> devices = parse_devices("3xV100-16GB:1~5Gb/s@20us", {0});
  const Plan roomy = compile(graph, devices, with(strategy));
  const Plan usual = compile(graph, devices, with("pipeline(3, micro_batches=8, warmup=[3,2,1])"));
  const auto held = [](const Plan& plan) { return memory_of(plan, plan.entries[0], 0).device.total(); };
  REQUIRE(held(roomy) > held(usual));
  devices[0].memory_bytes = held(usual);
  const Plan tight = compile(graph, devices, with(strategy));  // by other cuts, if deeper
  CHECK(held(tight) <= held(usual));
  const Plan usual_there = compile(graph, devices, with("pipeline(3, micro_batches=8, warmup=[3,2,1])"));
  CHECK(simulated(tight) <= simulated(usual_there) * (1 + 1e-9));
  devices[0].memory_bytes = held(roomy);
  CHECK(held(compile(graph, devices, with(strategy))) == held(roomy));
  // More micro-batches alive, of as many bytes each as their buffers say.
  const auto depth = [](const Plan& plan) {
    int32_t most = 0;
    for (const Buffer& b : plan.entries[0].programs[0].buffers) most = std::max(most, b.versions);
    return most;
  };
  CHECK(depth(usual) == 3);
  CHECK(depth(roomy) > 3);
}

TEST_CASE("a pipeline that is annotated gets its warm-up in its scope; the model is the same one") {
  Graph graph = model(32, 6);
  Scope pipeline;
  pipeline.kind = ScopeKind::kPipeline, pipeline.count = 3, pipeline.micro_batches = 8;
  pipeline.parent = 0;
  graph.scopes.insert(graph.scopes.begin() + 1, pipeline);
  for (size_t s = 2; s < graph.scopes.size(); ++s) graph.scopes[s].parent = graph.scopes[s].parent + 1;
  for (Op& op : graph.ops) op.scope = op.scope + 1;
  const std::vector<DeviceSpec> devices = parse_devices("3xV100-16GB:1~5Gb/s@20us", {0});
  const Plan plan = compile(graph, devices, {});
  CHECK(has(plan.strategy, "warmup=["));
  CHECK(has(plan.source.scopes[1].schedule, "["));
  Graph fast = graph;
  CHECK(compile(fast, parse_devices("V100-16GB:3", {0}), {}).model_hash == plan.model_hash);
  // Twice the same scope is none that could be said deeper.
  graph.scopes.push_back(graph.scopes[1]);
  CHECK(!with_warmup(graph, {}, {3, 2, 1}));
}

TEST_CASE("cuts and depths are chosen together: hardly a written warm-up is faster, and its cuts are its own") {
  // Random pipelines on unlike devices, of which depths that are found after the cuts lose up to a tenth.
  struct Case {
    int64_t layers, dim, seq, batch, micro_batches;
    const char* devices;
    std::vector<const char*> warmups;
  };
  for (const Case& c :
       {Case{6,
             512,
             128,
             8,
             4,
             "RTX-3090:1~10Gb/s@100us|V100-32GB:1~5Gb/s@100us|T4:1~5Gb/s@100us",
             {"4,2,1", "3,2,1", "4,3,1", "4,4,1"}},
        Case{11, 256, 128, 8, 8, "L4:1~5Gb/s@10us|A100-40GB:1~25Gb/s@10us", {"5,2", "2,1", "3,1", "4,1"}},
        Case{6,
             256,
             128,
             12,
             12,
             "V100-32GB:1~10Gb/s@30us|V100-32GB:1~10Gb/s@30us|RTX-3090:1~25Gb/s@100us|A100-40GB:1~100Gb/s@30us",
             {"7,5,3,1", "4,3,2,1", "10,7,4,1"}}}) {
    CAPTURE(std::string(c.devices));
    Gpt s;
    s.batch = c.batch, s.layers = c.layers, s.dim = c.dim, s.heads = 4, s.seq = c.seq;
    const Graph graph = graph_of(s);
    const std::vector<DeviceSpec> devices = parse_devices(c.devices, {0});
    const std::string pipeline = fmt::format("pipeline({}, micro_batches={}", devices.size(), c.micro_batches);
    const double found = simulated(compile(graph, devices, with(pipeline + ")")));
    for (const char* warmup : c.warmups) {
      CAPTURE(std::string(warmup));
      const Plan written = compile(graph, devices, with(fmt::format("{}, warmup=[{}])", pipeline, warmup)));
      CHECK(has(written.strategy, fmt::format("warmup=[{}]", warmup)));
      CHECK(found <= 1.02 * simulated(written));
    }
  }
}

TEST_CASE("a pipeline whose stages have next to nothing to do says so") {
  const auto says = [](const char* devices, const char* strategy) {
    const Plan plan = compile(model(16, 8), parse_devices(devices, {0}), with(strategy));
    return std::ranges::any_of(plan.notes, [](const std::string& n) { return has(n, "next to nothing to do"); });
  };
  CHECK(says("2xA100-40GB:1~100Mb/s@1ms", "pipeline(2, micro_batches=8)"));
  CHECK(!says("A100-40GB:2", "pipeline(2, micro_batches=8)"));
  CHECK(!says("A100-40GB:2", "replica(2)"));
}
