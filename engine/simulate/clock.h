// A virtual clock: walks every device's streams through one step of an entry and says when each instruction would start
// and end. The same Plan, waits and collectives as the executor; only the durations come from a function.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace whale {

struct Event {
  int32_t device = 0;
  int32_t row = 0;  // of the program's schedule
  int32_t segment = 0;
  int32_t instruction = 0;  // in the segment
  Stream stream{};
  double start = 0, end = 0;  // seconds
};

using Duration = std::function<double(const Instruction& instruction, int32_t device)>;

// Events by device, then in schedule order. A collective starts when every member of its part of the group has reached
// it and takes the longest of their durations. A send starts when its channels have a free slot and holds its stream
// for its duration; the receive starts when it has ended, and frees the slot when it has ended itself. Throws
// failed_precondition when devices wait for each other.
std::vector<Event> simulate(const Plan& plan, const Entry& entry, const Duration& duration);

double makespan(const std::vector<Event>& events);

}  // namespace whale
