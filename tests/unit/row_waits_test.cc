// Rows of the schedule are not joined: every queue goes ahead of what others still do in the row before, and waits
// where it needs their bytes.
#include <doctest/doctest.h>

#include <algorithm>
#include <set>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "plan/groups.h"
#include "simulate/simulate.h"
#include "small_models.h"

using namespace whale;

namespace {

Plan pipelined() {
  CompileOptions options;
  options.strategy = "pipeline(2, micro_batches=4) > split(2)";
  return compile(small::gpt(16, OptimizerKind::kAdamW).g, parse_devices("null:4"), options);
}

Program& with_row_waits(Plan& plan) {
  for (Program& p : plan.entries[0].programs)
    if (!p.row_waits.empty()) return p;
  FAIL("no row waits for the row before");
  return plan.entries[0].programs[0];
}

}  // namespace

TEST_CASE("a queue begins a row while others are at the row before, and never two rows ahead") {
  const Plan plan = pipelined();
  const Entry& entry = plan.entries[0];
  const CostModel cost(plan.devices, 1, CompileOptions{}.profile);
  const std::vector<Event> events = simulate(plan, entry, seconds_by(cost, plan, entry));
  std::set<std::pair<Queue, Queue>> ahead;  // who was, of whom
  for (const Event& e : events)
    for (const Event& other : events) {
      if (e.device != other.device || e.queue == other.queue) continue;
      if (e.row == other.row + 1 && e.start < other.end) ahead.emplace(e.queue, other.queue);
      if (e.row >= other.row + 2) CHECK(e.start >= other.end);
    }
  CHECK(ahead.contains({Queue::kCompute, Queue::kSend}));
  CHECK(ahead.contains({Queue::kReceive, Queue::kCompute}));
}

TEST_CASE("collectives of replicas and of splits are on queues of their own, which run beside each other") {
  CompileOptions options;
  options.strategy = "replica(2) > split(2)", options.zero = 2, options.accumulation = 4, options.bucket_bytes = 4096;
  const Plan plan = compile(small::gpt(16, OptimizerKind::kAdamW).g, parse_devices("null:4"), options);
  const Entry& entry = plan.entries[0];
  int64_t seen[2] = {};
  for (const Program& p : entry.programs)
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions)
        if (const auto* c = i.as<work::Collective>()) {
          const bool replicas = has_replicas(plan.groups[c->group].axis);
          CHECK(i.queue == (replicas ? Queue::kReplica : Queue::kSplit));
          ++seen[replicas];
        }
  CHECK(seen[0] > 0);
  CHECK(seen[1] > 0);
  const CostModel cost(plan.devices, 1, options.profile);
  const std::vector<Event> events = simulate(plan, entry, seconds_by(cost, plan, entry));
  CHECK(std::ranges::any_of(events, [&](const Event& a) {
    return a.queue == Queue::kReplica && std::ranges::any_of(events, [&](const Event& b) {
             return b.device == a.device && b.queue == Queue::kSplit && a.start < b.end && b.start < a.end;
           });
  }));
}

TEST_CASE("what is needed of the row before is waited for") {
  const Plan plan = pipelined();
  Plan damaged = plan;
  Program& p = with_row_waits(damaged);
  const auto row = std::ranges::find_if(p.schedule, [](const ScheduleRow& r) { return r.waits != kNone; });
  REQUIRE(row != p.schedule.end());
  const auto& now = p.segments[row->segment].instructions;
  RowWaits& waits = p.row_waits[row->waits];
  RowWait& first = waits.front();
  const auto queue_of = [&](int32_t k) { return now[k].queue; };
  SUBCASE("no wait") {
    for (ScheduleRow& r : p.schedule) r.waits = kNone;
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains(", of the row before, which "), Error);
  }
  SUBCASE("a wait that comes too late") {
    waits.erase(waits.begin() + 1, waits.end());
    const Queue queue = queue_of(first.at);
    for (int32_t k = first.at + 1; k < static_cast<int32_t>(now.size()); ++k)
      if (queue_of(k) == queue) {
        first.at = k;
        break;
      }
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains(", of the row before, which "), Error);
  }
  SUBCASE("a wait for its own queue") {
    const auto& before = p.segments[std::prev(row)->segment].instructions;
    const auto own = std::ranges::find_if(before, [&](const Instruction& i) { return i.queue == queue_of(first.at); });
    REQUIRE(own != before.end());
    first.on = {own->queue, static_cast<int32_t>(own - before.begin())};
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("which is on its own queue"), Error);
  }
  SUBCASE("a wait on another queue than the instruction's") {
    first.on.queue = Queue::kCopyOut;
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("on another queue than its own"), Error);
  }
  SUBCASE("waits out of order") {
    const Wait on = first.on;
    int32_t last = static_cast<int32_t>(now.size()) - 1;
    while (queue_of(last) == on.queue) --last;
    waits = {{last, on}, {0, on}};
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("is not the next one that does"), Error);
  }
  SUBCASE("a row before the first") {
    p.schedule[0].waits = 0;
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains(" of the row before, and this row is the schedule's first"),
                         Error);
  }
  SUBCASE("waits that are none of the program's") {
    row->waits = 1000;
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("a schedule row has the waits number 1000, of "), Error);
  }
  SUBCASE("a plan's file keeps them") {
    const std::vector<uint8_t> bytes = serialize(plan);
    CHECK(print(deserialize(bytes.data(), bytes.size())) == print(plan));
    CHECK(print(plan).find("for the row before: ") != std::string::npos);
  }
}
