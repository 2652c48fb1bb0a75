#include "schedule/verify.h"

#include <algorithm>

#include "base/error.h"

namespace whale {

namespace {

struct Live {
  int activations = 0;
  int weights = 0;
};

// What is alive on one device after each of its items. A backward frees its activations when it ends, so that the peaks
// are always after a forward or after a split backward.
template <class Visit>
void each_live(const PipelineSchedule& schedule, int device, Visit visit) {
  Live live;
  for (const WorkItem& item : schedule.devices[device]) {
    switch (item.kind) {
      case WorkKind::kForward: ++live.activations; break;
      case WorkKind::kBackward:
        --live.activations;
        if (schedule.split_backward) ++live.weights;
        break;
      case WorkKind::kWeight: --live.weights; break;
    }
    visit(live);
  }
}

}  // namespace

Deadlock find_deadlock(const PipelineSchedule& schedule, int capacity) {
  return {walk_orders(schedule, capacity, [](const WorkSite&) { return 0.0; }).stuck};
}

std::string to_string(const PipelineSchedule& schedule, const Deadlock& deadlock) {
  std::string text;
  for (const Stuck& stuck : deadlock.cycle) {
    const std::string at = to_string(schedule, stuck.at.item), wanted = to_string(schedule, stuck.wanted.item);
    text += stuck.sending ? fmt::format("device {} cannot send {}: device {} has not taken {}\n", stuck.at.device, at,
                                        stuck.wanted.device, wanted)
                          : fmt::format("device {} cannot start {}: device {} has not run {}\n", stuck.at.device, at,
                                        stuck.wanted.device, wanted);
  }
  return text;
}

void verify_schedule(const PipelineSchedule& schedule, int capacity) {
  const Deadlock deadlock = find_deadlock(schedule, capacity);
  if (!deadlock) return;
  throw internal(
      "schedule '{}' of {} stages, {} micro-batches and {} virtual stages per device deadlocks with channels of "
      "capacity {}:\n{}",
      schedule.name, schedule.shape.stages, schedule.shape.micro_batches, schedule.shape.virtual_stages, capacity,
      to_string(schedule, deadlock));
}

int capacity_needed(const PipelineSchedule& schedule) {
  if (const Deadlock deadlock = find_deadlock(schedule, kUnlimitedCapacity))
    throw internal("schedule '{}' deadlocks with any capacity:\n{}", schedule.name, to_string(schedule, deadlock));
  int capacity = 0;
  while (find_deadlock(schedule, capacity)) ++capacity;
  return capacity;
}

std::vector<LivePeak> live_peaks(const PipelineSchedule& schedule) {
  std::vector<LivePeak> peaks(schedule.devices.size());
  for (size_t d = 0; d < peaks.size(); ++d) {
    each_live(schedule, static_cast<int>(d), [&](const Live& live) {
      peaks[d].activations = std::max(peaks[d].activations, live.activations);
      peaks[d].weights = std::max(peaks[d].weights, live.weights);
    });
  }
  return peaks;
}

std::vector<double> peak_bytes(const PipelineSchedule& schedule, double activation_bytes, double weight_bytes) {
  std::vector<double> peaks(schedule.devices.size());
  for (size_t d = 0; d < peaks.size(); ++d) {
    each_live(schedule, static_cast<int>(d), [&](const Live& live) {
      const double bytes =
          (live.activations * activation_bytes + live.weights * weight_bytes) / schedule.shape.virtual_stages;
      peaks[d] = std::max(peaks[d], bytes);
    });
  }
  return peaks;
}

}  // namespace whale
