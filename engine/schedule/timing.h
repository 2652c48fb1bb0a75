// How long a pipeline schedule takes: messages take no time, devices wait for what they need and for free capacity.
#pragma once

#include <span>
#include <vector>

#include "schedule/walk.h"

namespace whale {

// Seconds of one micro-batch. A backward that is not split takes backward + weight.
struct StageTimes {
  double forward = 0;
  double backward = 0;  // input gradient
  double weight = 0;    // weight gradient
};

struct Timeline {
  std::vector<std::vector<WorkTime>> devices;  // [device][position], as in the schedule
  double makespan = 0;                         // first start anywhere to last end anywhere
  double span = 0;                             // the largest over devices of own first start to own last end
  double busy = 0;                             // the largest over devices of time at work
  double bubble() const { return makespan - busy; }
  double span_bubble() const { return span - busy; }
  double bubble_share() const { return makespan > 0 ? bubble() / makespan : 0; }
};

// `times` has one entry per virtual stage, or a single one: that of every whole stage, shared evenly by its virtual
// stages. Throws invalid for another number of times, internal where the schedule deadlocks.
Timeline run_clock(const PipelineSchedule& schedule, std::span<const StageTimes> times,
                   int capacity = kUnlimitedCapacity);
Timeline run_clock(const PipelineSchedule& schedule, const StageTimes& times, int capacity = kUnlimitedCapacity);

}  // namespace whale
