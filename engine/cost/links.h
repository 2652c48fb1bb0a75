// Links that are used together.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cluster/device_spec.h"
#include "cost/cost.h"

namespace whale {

inline LinkRates slower(const LinkRates& a, const LinkRates& b) {
  return {std::min(a.bytes_per_second, b.bytes_per_second), std::max(a.latency_seconds, b.latency_seconds)};
}

// Of each part: the slowest link of a ring through its devices as they are listed, when all parts talk at once and
// share the networks of the nodes and zones that they leave. That of the cost model where a device is alone.
std::vector<LinkRates> links_of_parts(const std::vector<std::vector<int32_t>>& parts,
                                      const std::vector<DeviceSpec>& devices, const CostModel& cost);

}  // namespace whale
