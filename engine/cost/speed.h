// How fast a device is, in one number: for shares that are dealt before the work is known.
#pragma once

#include "cluster/figures.h"

namespace whale {

inline double speed_of(const DeviceRates& rates) { return rates.flops_per_second; }

}  // namespace whale
