#include "schedule/timing.h"

#include <algorithm>
#include <limits>

#include "base/error.h"
#include "schedule/verify.h"

namespace whale {

Timeline run_clock(const PipelineSchedule& schedule, std::span<const StageTimes> times, int capacity) {
  const int virtual_stages = schedule.shape.total_stages();
  const bool even = times.size() == 1;
  if (!even && static_cast<int>(times.size()) != virtual_stages)
    throw invalid("the clock has times of {} stages, expected {} (stages x virtual stages) or 1", times.size(),
                  virtual_stages);
  const double shares = even ? schedule.shape.virtual_stages : 1;
  const auto seconds = [&](const WorkSite& site) {
    const StageTimes& t = times[even ? 0 : model_stage(schedule, site.device, site.item.virtual_stage)];
    const double whole = t.backward + (schedule.split_backward ? 0 : t.weight);
    const double by_kind[] = {t.forward, whole, t.weight};
    return by_kind[static_cast<int>(site.item.kind)] / shares;
  };
  OrderWalk result = walk_orders(schedule, capacity, seconds);
  if (!result.stuck.empty()) verify_schedule(schedule, capacity);  // throws, and names the cycle

  Timeline line;
  double first = std::numeric_limits<double>::infinity(), last = 0;
  for (const auto& device : result.times) {
    double busy = 0;
    for (const WorkTime& t : device) busy += t.end - t.start;
    line.busy = std::max(line.busy, busy);
    line.span = std::max(line.span, device.back().end - device.front().start);
    first = std::min(first, device.front().start);
    last = std::max(last, device.back().end);
  }
  line.makespan = last - first;
  line.devices = std::move(result.times);
  return line;
}

Timeline run_clock(const PipelineSchedule& schedule, const StageTimes& times, int capacity) {
  return run_clock(schedule, std::span(&times, 1), capacity);
}

}  // namespace whale
