// One step, predicted or measured, as a picture shows it: on each queue of a device, what it does when.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "report/activity.h"
#include "simulate/simulate.h"

namespace whale {

struct SpanLabel {
  std::string name;   // of the op in the graph; of several: the first one's, "..." and the last one's
  std::string op;     // "matmul"; of several: "matmul, add"
  std::string scope;  // "replica/block.3"
  Activity activity{};
  int64_t count = 1;  // of instructions that it stands for
  double flops = 0;   // of all of them
  auto operator<=>(const SpanLabel&) const = default;
};

struct LabelledSpan {
  int32_t label = 0;
  int32_t micro_batch = 0;
  double start = 0, end = 0;  // seconds from the step's begin
};
struct QueueTrack {
  int32_t device = 0;
  Queue queue{};
  std::vector<LabelledSpan> spans;  // by start
};

struct StepTimeline {
  double seconds = 0;
  std::vector<SpanLabel> labels;
  std::vector<QueueTrack> tracks;  // by device, then queue; none is empty

  int32_t label_of(SpanLabel label);  // the same number for equal ones

 private:
  std::map<SpanLabel, int32_t> numbers_;
};

// The first device of each class walks for all.
StepTimeline timeline_of(const Plan& plan, const Entry& entry, const StepTimes& times);

// Of the same step with as few labels and spans as a page of about `bytes` may hold: neighbours that do the same are
// one, then those that lie too close to be told apart. Shares of time that are asked of it before are not changed.
StepTimeline folded(const StepTimeline& timeline, size_t bytes);

// Seconds in which the queue was at work, by activity.
std::array<double, kActivities> busy_of(const StepTimeline& timeline, const QueueTrack& track);

}  // namespace whale
