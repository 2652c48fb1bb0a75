#include "run/timeline.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/format.h"
#include "ops/op.h"
#include "run/place.h"

namespace whale {
std::string to_chrome_trace(const std::vector<DeviceTimeline>& devices, const Plan& plan) {
  int64_t origin = INT64_MAX;
  for (const DeviceTimeline& device : devices)
    for (const QueueTimeline& queue : device)
      for (const TimelineRecord& record : queue.records) origin = std::min(origin, record.begin);
  nlohmann::json events = nlohmann::json::array();
  for (size_t d = 0; d < devices.size(); ++d) {
    const std::string name = fmt::format("{} {}", name_of(plan.devices[d].kind), d);
    events.push_back({{"ph", "M"}, {"pid", d}, {"name", "process_name"}, {"args", {{"name", name}}}});
    for (size_t s = 0; s < kQueues; ++s) {
      if (devices[d][s].records.empty()) continue;
      events.push_back(
          {{"ph", "M"}, {"pid", d}, {"tid", s}, {"name", "thread_name"}, {"args", {{"name", kQueueDefs[s].name}}}});
      for (const TimelineRecord& record : devices[d][s].records)
        events.push_back({{"ph", "X"},
                          {"pid", d},
                          {"tid", s},
                          {"name", record.instruction->name},
                          {"cat", phase_text(record.instruction->phase)},
                          {"ts", static_cast<double>(record.begin - origin) * 1e-3},
                          {"dur", static_cast<double>(record.end - record.begin) * 1e-3},
                          {"args",
                           {{"op", record.instruction->verb()},
                            {"micro_batch", record.micro_batch},
                            {"flops", record.instruction->flops}}}});
    }
  }
  return nlohmann::json{{"traceEvents", events}, {"displayTimeUnit", "ms"}}.dump(
      -1, ' ', false, nlohmann::json::error_handler_t::replace);
}

}  // namespace whale
