// Which devices are alike.
#pragma once

#include <cstdint>
#include <vector>

#include "cluster/device_spec.h"

namespace whale {

// Numbers of devices from 0, in the order in which kinds come: equal for equal kind, figures and memory. Where they are
// does not count.
std::vector<int32_t> kinds_of(const std::vector<DeviceSpec>& devices);

}  // namespace whale
