// A Plan on the clock: when each instruction of one step of an entry would start and end. The same Plan, waits and
// collectives as the executor; only the durations come from a function.
#pragma once

#include <optional>
#include <vector>

#include "cost/cost.h"
#include "cost/measured.h"
#include "plan/plan.h"
#include "plan/walk.h"

namespace whale {

struct Event {
  int32_t device = 0;
  int32_t row = 0;  // of the program's schedule
  int32_t segment = 0;
  int32_t instruction = 0;  // in the segment
  Queue queue{};
  double start = 0, end = 0;  // seconds
};

// Events by device, then row, then instruction. A collective starts when every member of its part of the group has
// reached it and takes the longest of their durations. The messages of a send go one after the other, each when its
// channel has free capacity; that of a receive starts when it has come whole, and frees the place when it has ended.
// Throws failed_precondition when devices wait for each other.
std::vector<Event> simulate(const Plan& plan, const Entry& entry, const Duration& duration);

double makespan(const std::vector<Event>& events);

// By what a profile knows the time of a kernel, a feed or a fetch.
OpShape measured_shape(const Instruction& instruction, const std::vector<Buffer>& buffers);

// What the cost model says of an instruction of this device.
Duration seconds_by(const CostModel& cost, const Plan& plan, const Entry& entry);

// One step by the cost model.
struct StepTimes {
  // Per device: those of one class do the same at the same time (what one sends to several of a class, it sends at
  // once).
  std::vector<int32_t> classes;
  std::vector<Event> events = {};  // of the first device of each class
  double seconds = 0;
};
// Nothing where the classes together walk more than `most` instructions; by default, more than some seconds do.
inline constexpr size_t kMostWalked = 2'000'000;
std::optional<StepTimes> times_of(const Plan& plan, const Entry& entry, size_t most = kMostWalked);
// By another measure of instructions, which gives equal times to devices that are alike.
StepTimes times_of(const Plan& plan, const Entry& entry, const Duration& duration);

}  // namespace whale
