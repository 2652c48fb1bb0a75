#include "run/timeline.h"

#include "plan/trace.h"

namespace whale {

std::string to_chrome_trace(const std::vector<DeviceTimeline>& devices, const Plan& plan, const Entry& entry) {
  std::vector<TraceTrack> tracks;
  for (size_t d = 0; d < devices.size(); ++d)
    for (size_t q = 0; q < kQueues; ++q) {
      if (devices[d][q].records.empty()) continue;
      TraceTrack track{static_cast<int32_t>(d), static_cast<Queue>(q), {}};
      for (const TimelineRecord& r : devices[d][q].records)
        track.spans.push_back({r.instruction, r.micro_batch, r.begin, r.end});
      tracks.push_back(std::move(track));
    }
  return trace_text(plan, {TraceClock::kMeasured, entry.name, entry.batch}, tracks);
}

}  // namespace whale
