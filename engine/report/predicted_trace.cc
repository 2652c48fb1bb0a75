#include "report/predicted_trace.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "base/error.h"
#include "plan/figures.h"
#include "plan/trace.h"
#include "report/device_classes.h"
#include "simulate/simulate.h"

namespace whale {

std::string predicted_trace(const Plan& plan) {
  if (plan.entries.empty())
    throw error(Code::kFailedPrecondition, "plan '{}' has no entries: there is nothing to show", plan.model);
  return predicted_trace(plan, plan.entries[0]);
}

bool is_of_null_devices(const Plan& plan) {
  return std::ranges::all_of(plan.devices, [](const DeviceSpec& d) { return d.kind == DeviceKind::kNull; });
}

std::string predicted_trace(const Plan& plan, const Entry& entry) {
  const std::optional<StepTimes> times = times_of(plan, entry, kMostSimulated);
  if (!times)
    throw unimplemented(
        "a step of this plan is longer than {} instructions of devices that differ: no timeline of it is "
        "written; plan fewer micro-batches to see one",
        kMostSimulated);
  std::vector<std::string> names(plan.devices.size());
  std::vector<std::vector<int32_t>> of_class;
  std::vector<int32_t> firsts;
  for (size_t d = 0; d < times->classes.size(); ++d) {
    const auto c = static_cast<size_t>(times->classes[d]);
    if (c >= of_class.size()) of_class.resize(c + 1);
    of_class[c].push_back(static_cast<int32_t>(d));
  }
  for (const std::vector<int32_t>& devices : of_class) {
    const auto d = static_cast<size_t>(devices[0]);
    names[d] = fmt::format("{} {}", kind_text(plan.devices[d]), d);
    if (devices.size() > 1) names[d] += fmt::format(" (of {}: {})", devices.size(), devices_text(devices, 6));
  }
  const auto nanoseconds = [](double seconds) { return static_cast<int64_t>(std::llround(seconds * 1e9)); };
  std::map<std::pair<int32_t, Queue>, std::vector<TraceSpan>> spans;
  for (const Event& e : times->events) {
    const Program& p = entry.programs[entry.rows[e.device].program];
    spans[{e.device, e.queue}].push_back({&p.segments[e.segment].instructions[e.instruction],
                                          p.schedule[e.row].micro_batch, nanoseconds(e.start), nanoseconds(e.end)});
  }
  std::vector<TraceTrack> tracks;
  for (auto& [at, list] : spans) {
    std::stable_sort(list.begin(), list.end(),
                     [](const TraceSpan& a, const TraceSpan& b) { return a.begin < b.begin; });
    tracks.push_back({at.first, at.second, std::move(list)});
  }
  return trace_text(plan, {TraceClock::kPredicted, entry.name, entry.batch}, tracks, names);
}

}  // namespace whale
