// Which cores each CPU device of a session gets.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace whale {

// The specs with `cores` decided. A plan made here names them; where it names none, or cores that this process may not
// use (it was made elsewhere), the CPU devices share `usable` ones contiguously, and more devices than cores share
// cores. threads > 0: that many cores for each CPU device, from its first one on, shared if need be.
std::vector<DeviceSpec> assign_cores(std::vector<DeviceSpec> specs, const std::vector<int>& usable, int threads);

}  // namespace whale
