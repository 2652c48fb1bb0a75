// Whether the memory that a plan takes is there.
#pragma once

#include "cluster/host_memory.h"
#include "plan/plan.h"

namespace whale {

// Throws resource_exhausted when the devices of the plan need more together than is there: variables and arenas, as if
// every page were touched. Null devices take addresses only.
void check_memory(const Plan& plan, const HostMemory& found);

}  // namespace whale
