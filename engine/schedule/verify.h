// Verification of a pipeline schedule: no deadlock under blocking sends, and what is alive at most.
#pragma once

#include <string>
#include <vector>

#include "schedule/walk.h"

namespace whale {

// A cycle of devices each of which waits for the next one, the last for the first. Empty: the schedule ends.
struct Deadlock {
  std::vector<Stuck> cycle;
  explicit operator bool() const { return !cycle.empty(); }
};

// Runs the schedule with channels of this capacity (walk.h). Throws invalid where the schedule is not complete.
Deadlock find_deadlock(const PipelineSchedule& schedule, int capacity);
// One line per member of the cycle: what it is at and what it waits for.
std::string to_string(const PipelineSchedule& schedule, const Deadlock& deadlock);
// Throws internal with the cycle where there is one.
void verify_schedule(const PipelineSchedule& schedule, int capacity);
// The least capacity (0, 1, 2, ...) with which the schedule ends.
int capacity_needed(const PipelineSchedule& schedule);

struct LivePeak {
  int activations = 0;  // in units of M_B / v: from an item's forward to the end of its backward
  int weights = 0;      // in units of M_W / v: kept for the weight gradient, from the backward's end to its own
};

// Per device; each count has its own peak.
std::vector<LivePeak> live_peaks(const PipelineSchedule& schedule);
// Per device: the peak of both together, where one micro-batch on one stage keeps these many bytes.
std::vector<double> peak_bytes(const PipelineSchedule& schedule, double activation_bytes, double weight_bytes);

}  // namespace whale
