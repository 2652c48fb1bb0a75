// Links that are used together.
#pragma once

#include <algorithm>

#include "cluster/figures.h"

namespace whale {

inline LinkRates slower(const LinkRates& a, const LinkRates& b) {
  return {std::min(a.bytes_per_second, b.bytes_per_second), std::max(a.latency_seconds, b.latency_seconds)};
}

}  // namespace whale
