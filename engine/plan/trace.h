// Timelines of a plan as files that trace viewers open (ui.perfetto.dev): Chrome's trace format. Measured and predicted
// ones are written alike: a process a device, a thread a queue.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"

namespace whale {

struct TraceSpan {
  const Instruction* instruction = nullptr;
  int32_t micro_batch = 0;
  int64_t begin = 0, end = 0;  // nanoseconds
};

struct TraceTrack {
  int32_t device = 0;
  Queue queue{};
  std::vector<TraceSpan> spans;  // one after the other
};

enum class TraceClock : uint8_t { kMeasured, kPredicted };
inline constexpr const char* kTraceClocks[] = {"measured", "predicted"};

// What readers look for under "otherData".
struct TraceOf {
  TraceClock clock{};
  std::string entry;
  int64_t batch = 0;
};

// Microseconds from the first span. names: of the processes, by device; empty: "cpu 3".
std::string trace_text(const Plan& plan, const TraceOf& of, const std::vector<TraceTrack>& tracks,
                       const std::vector<std::string>& names = {});

}  // namespace whale
