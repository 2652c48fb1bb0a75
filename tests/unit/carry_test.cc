// Rows of the schedule are not joined: compute goes ahead of what other queues still do in the row before, and waits
// where it needs their bytes.
#include <doctest/doctest.h>

#include <algorithm>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "simulate/simulate.h"
#include "small_models.h"

using namespace whale;

namespace {

// Split training of several micro-batches: the gradients that leave a layer are summed beside the next micro-batch.
Plan split_plan() {
  CompileOptions options;
  options.strategy = "split(4)", options.accumulation = 4;
  return compile(small::gpt(16, OptimizerKind::kAdamW).g, parse_devices("null:4"), options);
}

Program& with_carry(Plan& plan) {
  for (Program& p : plan.entries[0].programs)
    if (!p.carries.empty()) return p;
  FAIL("no row waits for the row before");
  return plan.entries[0].programs[0];
}

}  // namespace

TEST_CASE("compute begins a row while the communication of the row before goes on") {
  CompileOptions options;
  options.strategy = "pipeline(2, micro_batches=4)";
  const Plan plan = compile(small::gpt(16, OptimizerKind::kAdamW).g, parse_devices("null:2"), options);
  const Entry& entry = plan.entries[0];
  const CostModel cost(plan.devices, 1, options.profile);
  const std::vector<Event> events = simulate(plan, entry, seconds_by(cost, plan, entry));
  int64_t ahead = 0;
  for (const Event& sent : events) {
    if (sent.queue != Queue::kCommunication) continue;
    ahead += std::ranges::any_of(events, [&](const Event& e) {
      return e.device == sent.device && e.queue == Queue::kCompute && e.row == sent.row + 1 && e.start < sent.end;
    });
    for (const Event& e : events) {  // one row ahead and no more; the other queues not at all
      if (e.device != sent.device) continue;
      if (e.queue == Queue::kCompute && e.row >= sent.row + 2) CHECK(e.start >= sent.end);
      if (e.queue != Queue::kCompute && e.row > sent.row) CHECK(e.start >= sent.end);
    }
  }
  CHECK(ahead > 0);
}

TEST_CASE("what is needed of the row before is waited for") {
  const Plan plan = split_plan();
  Plan damaged = plan;
  Program& p = with_carry(damaged);
  SUBCASE("no wait") {
    for (ScheduleRow& row : p.schedule) row.carry = kNone;
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("of the row before may still be at"), Error);
  }
  SUBCASE("a wait that comes too late") {
    const auto row = std::ranges::find_if(p.schedule, [](const ScheduleRow& r) { return r.carry != kNone; });
    const auto& list = p.segments[static_cast<size_t>(row->segment)].instructions;
    CarryWait& first = p.carries[static_cast<size_t>(row->carry)].front();
    for (size_t k = static_cast<size_t>(first.at) + 1; k < list.size(); ++k)
      if (list[k].queue == Queue::kCompute) {
        first.at = static_cast<int32_t>(k);
        break;
      }
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("of the row before may still be at"), Error);
  }
  SUBCASE("a wait for compute") {
    p.carries[0][0].on = {Queue::kCompute, 0};
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("not of its queue"), Error);
  }
  SUBCASE("a wait of another queue") {
    const auto row = std::ranges::find_if(p.schedule, [](const ScheduleRow& r) { return r.carry == 0; });
    const auto& list = p.segments[static_cast<size_t>(row->segment)].instructions;
    p.carries[0][0].at = static_cast<int32_t>(
        std::ranges::find_if(list, [](const Instruction& i) { return i.queue != Queue::kCompute; }) - list.begin());
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("not the next one of compute"), Error);
  }
  SUBCASE("a row before the first") {
    p.schedule[0].carry = 0;
    CHECK_THROWS_WITH_AS(verify(damaged), doctest::Contains("a carry from nowhere"), Error);
  }
  SUBCASE("a plan's file keeps them") {
    const std::vector<uint8_t> bytes = serialize(plan);
    CHECK(print(deserialize(bytes.data(), bytes.size())) == print(plan));
    CHECK(print(plan).find("carry 0:") != std::string::npos);
  }
}
