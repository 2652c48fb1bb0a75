// Plans of pipelines by hand: the clock of plans agrees with the clock of schedules, and what is wrong is found.
#include <doctest/doctest.h>

#include <algorithm>

#include "plan/memory.h"
#include "schedule/timing.h"
#include "simulate/simulate.h"
#include "unit/caught.h"

namespace whale {
namespace {

constexpr int64_t kWidth = 4;
const StageTimes kTimes{2, 3, 1};

// Stages of one device each; a forward and a backward are one instruction between a receive and a send.
struct Maker {
  const PipelineSchedule& schedule;
  int32_t capacity;
  Plan plan;

  int32_t link_between(int from, int to, const std::string& name) {
    Link link{name, capacity, {}};
    link.transfers.push_back({from, to, {{0, kWidth}}, {{0, kWidth}}});
    plan.entries[0].links.push_back(link);
    return static_cast<int32_t>(plan.entries[0].links.size()) - 1;
  }

  static Buffer buffer(const std::string& name, int32_t versions, Program& p) {
    Buffer b;
    b.name = name, b.dtype = DType::kF32, b.dims = {kWidth}, b.bytes = kWidth * 4, b.versions = versions;
    b.offset = p.arena_bytes;
    p.arena_bytes += versions * kAlignment;
    return b;
  }

  static Instruction move(Work work, const std::string& name, BufferId b) {
    Instruction i;
    i.work = std::move(work), i.name = name;
    (i.kind() == InstructionKind::kSend ? i.in : i.out) = {b};
    return i;
  }
  static Instruction compute(const std::string& name, BufferId in, BufferId out, Phase phase) {
    Instruction i;
    i.name = name, i.phase = phase;
    if (in == kNone) {
      i.work = work::Kernel{OpCode::k_fill, {{"shape", Dims{kWidth}}, {"value", 1.0}, {"dtype", std::string("f32")}}};
    } else {
      i.work = work::Kernel{OpCode::k_neg};
      i.in = {in};
    }
    i.out = {out};
    return i;
  }

  void make() {
    const int stages = schedule.shape.stages, micro_batches = schedule.shape.micro_batches;
    plan.model = "pipe";
    plan.micro_batches = micro_batches;
    plan.entries.emplace_back();
    Entry& e = plan.entries[0];
    e.name = "train", e.batch = micro_batches;
    std::vector<int32_t> down, up;
    for (int s = 0; s + 1 < stages; ++s) down.push_back(link_between(s, s + 1, "x"));
    for (int s = 0; s + 1 < stages; ++s) up.push_back(link_between(s + 1, s, "dx"));
    for (int s = 0; s < stages; ++s) {
      plan.devices.push_back({});
      plan.meshes.push_back({{{"replica", 1, {}, {}}}, {s}});
      Program p;
      const bool first = s == 0, last = s + 1 == stages;
      for (const char* name : {"x", "y", "dy", "dx"}) p.buffers.push_back(buffer(name, micro_batches, p));
      Segment forward{fmt::format("forward.{}", s), {}}, backward{fmt::format("backward.{}", s), {}};
      const auto at = static_cast<size_t>(s);
      if (!first) forward.instructions.push_back(move(work::Receive{down[at - 1]}, "take x", 0));
      forward.instructions.push_back(compute("F", first ? kNone : 0, 1, Phase::kForward));
      if (!last) forward.instructions.push_back(move(work::Send{down[at]}, "give x", 1));
      if (!last) backward.instructions.push_back(move(work::Receive{up[at]}, "take dx", 2));
      backward.instructions.push_back(compute("B", last ? 1 : 2, 3, Phase::kBackward));
      if (!first) backward.instructions.push_back(move(work::Send{up[at - 1]}, "give dx", 3));
      p.segments = {forward, backward};
      for (const WorkItem& item : schedule.devices[at])
        p.schedule.push_back({item.kind == WorkKind::kForward ? 0 : 1, item.micro_batch, item.micro_batch, false});
      e.programs.push_back(p);
      DeviceRow row;
      row.device = row.program = row.mesh = s;
      row.coordinates = {0};
      row.samples.resize(1);
      row.samples[0].whole = {0, micro_batches};
      for (int64_t u = 0; u < micro_batches; ++u) row.samples[0].micro_batches.push_back({u, u + 1});
      e.rows.push_back(row);
    }
    plan.scopes.resize(1);
  }
};

Plan pipeline(const PipelineSchedule& schedule, int32_t capacity) {
  Maker maker{schedule, capacity, {}};
  maker.make();
  return maker.plan;
}

double seconds(const Instruction& i, int32_t) {
  if (i.kind() != InstructionKind::kKernel) return 0;
  return i.phase == Phase::kForward ? kTimes.forward : kTimes.backward + kTimes.weight;
}

std::string error_of(const Plan& plan) {
  return message_of([&] { verify(plan); });
}

}  // namespace

TEST_CASE("the clock of a pipeline's plan is the clock of its schedule") {
  for (const char* name : {"gpipe", "1f1b"})
    for (const int stages : {1, 2, 4})
      for (const int micro_batches : {1, 3, 8})
        for (const int capacity : {1, 2, 8}) {
          CAPTURE(name);
          CAPTURE(stages);
          CAPTURE(micro_batches);
          CAPTURE(capacity);
          const PipelineSchedule schedule = make_schedule(name, stages, micro_batches);
          const Plan plan = pipeline(schedule, capacity);
          REQUIRE(error_of(plan) == "");
          const std::vector<Event> events = simulate(plan, plan.entries[0], seconds);
          const Timeline line = run_clock(schedule, kTimes, capacity);
          CHECK(makespan(events) == doctest::Approx(line.makespan));
          for (const Event& e : events) {
            const Segment& s = plan.entries[0].programs[e.device].segments[e.segment];
            if (s.instructions[e.instruction].kind() != InstructionKind::kKernel) continue;
            const WorkTime& want = line.devices[e.device][e.row];
            CHECK(e.start == doctest::Approx(want.start));
            CHECK(e.end == doctest::Approx(want.end));
          }
        }
}

TEST_CASE("a message takes the time of its send") {
  const Plan plan = pipeline(make_schedule("gpipe", 2, 1), 1);
  const auto events = simulate(plan, plan.entries[0], [](const Instruction& i, int32_t device) {
    return i.kind() == InstructionKind::kSend ? 0.5 : seconds(i, device);
  });
  CHECK(makespan(events) == doctest::Approx(2 * (kTimes.forward + kTimes.backward + kTimes.weight) + 1));
}

TEST_CASE("a pipeline's plan as text and bytes") {
  const Plan plan = pipeline(make_schedule("1f1b", 2, 3), 1);
  const std::string text = print(plan);
  CHECK(has(text, "mesh 0 [replica 1] of devices 0"));
  CHECK(has(text, "schedule F0 F1@1 B0 F2@2 B1@1 B2@2"));
  CHECK(has(text, "link 0 x, capacity 1"));
  CHECK(has(summary(plan), "stage 1: [replica 1] of devices 1"));
  const std::vector<uint8_t> bytes = serialize(plan);
  const Plan again = deserialize(bytes.data(), bytes.size());
  CHECK(print(again) == text);
  CHECK(to_json(again) == to_json(plan));
  CHECK(serialize(again) == bytes);
}

TEST_CASE("what is wrong with a pipeline's plan is found") {
  const PipelineSchedule schedule = make_schedule("1f1b", 3, 4);
  const Plan good = pipeline(schedule, 2);
  REQUIRE(error_of(good) == "");
  const auto after = [&](auto change) {
    Plan plan = good;
    change(plan, plan.entries[0]);
    return error_of(plan);
  };
  CHECK(has(after([](Plan&, Entry& e) { e.links[0].transfers[0].target[0].end = 3; }), "two sizes"));
  CHECK(has(after([](Plan&, Entry& e) {
              e.links[0].transfers[0].source[0] = {1, 5};
              e.links[0].transfers[0].target[0] = {0, 4};
            }),
            "does not lie inside"));
  CHECK(has(after([](Plan&, Entry& e) { e.links[0].capacity = 0; }), "capacity"));
  CHECK(has(after([](Plan&, Entry& e) { e.links[0].transfers[0].to = 2; }), "receives"));
  CHECK(has(after([](Plan&, Entry& e) { e.links[0].transfers[0].to = 7; }), "names device 7"));
  CHECK(has(after([](Plan&, Entry& e) { e.programs[0].schedule.pop_back(); }), "receives 3 time(s)"));
  CHECK(has(after([](Plan&, Entry& e) { e.programs[1].segments[0].instructions[0].work = work::Receive{9}; }),
            "a receive names one link"));
  // Device 0 wants the first gradient before it has sent anything.
  CHECK(has(after([](Plan&, Entry& e) {
              auto& rows = e.programs[0].schedule;
              const ScheduleRow first = rows[0];
              const auto backward =
                  std::find_if(rows.begin(), rows.end(), [](const ScheduleRow& r) { return r.segment == 1; });
              rows[0] = *backward;
              *backward = first;
            }),
            "never leaves segment 'backward.0'"));
  // The values of two micro-batches that live at once in one version.
  CHECK(has(after([](Plan&, Entry& e) {
              for (ScheduleRow& r : e.programs[0].schedule) r.version = 4;
            }),
            "works on version 4"));
  CHECK(has(after([](Plan&, Entry& e) { e.programs[2].buffers[3].offset = e.programs[2].buffers[1].offset; }),
            "share bytes"));
  CHECK(has(after([](Plan&, Entry& e) { e.programs[0].buffers[1].versions = 1000; }), "aligned inside the arena"));
  CHECK(has(after([](Plan&, Entry& e) { e.rows[1].mesh = 0; }), "place in mesh"));
  CHECK(has(after([](Plan&, Entry& e) { e.rows[1].samples.clear(); }), "no samples"));
  CHECK(has(after([](Plan& p, Entry&) { p.meshes[1].devices = {5}; }), "names device 5"));
  CHECK(has(after([](Plan& p, Entry&) { p.meshes.clear(); }), "no mesh"));
  CHECK(has(after([](Plan& p, Entry&) {
              PlanVariable v;
              v.name = "w", v.dtype = DType::kF32, v.dims = {6};
              v.storage_sharding.axes.push_back({.placement = Placement::kShard, .sub_axis = {0, 4, 1}});
              p.variables.push_back(v);
            }),
            "does not have"));
}

TEST_CASE("a value of another micro-batch in the version that is read is found") {
  Plan plan = pipeline(make_schedule("gpipe", 2, 3), 1);
  REQUIRE(error_of(plan) == "");
  Program& last = plan.entries[0].programs[1];  // its backward reads what its forward made
  for (Buffer& b : last.buffers) b.versions = 1;
  for (ScheduleRow& r : last.schedule) r.version = 0;
  CHECK(has(error_of(plan), "of micro-batch 2 in micro-batch"));
}

TEST_CASE("a pipeline's plan whose rows are in an order that nobody can follow is found") {
  const PipelineSchedule schedule = make_schedule("gpipe", 3, 4);
  for (const int capacity : {1, 2}) CHECK(error_of(pipeline(schedule, capacity)) == "");
  Plan plan = pipeline(schedule, 1);
  // The second device takes a gradient before it passes its last activation on.
  auto& rows = plan.entries[0].programs[1].schedule;
  std::swap(rows[3], rows[4]);
  CHECK(has(error_of(plan), "never leaves"));
}

}  // namespace whale
