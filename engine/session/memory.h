// Whether the memory that a plan takes is there.
#pragma once

#include "cluster/host_memory.h"
#include "plan/plan.h"
#include "run/machine.h"

namespace whale {

// Throws resource_exhausted when the devices of the plan need more together than is there: variables and arenas, as if
// every page were touched. Null devices take addresses only. `ranks`: of the devices; those of another rank take none
// here. Empty: all are here.
void check_memory(const Plan& plan, const HostMemory& found, const std::vector<int32_t>& ranks = {}, int rank = 0);

// Throws resource_exhausted when the areas that one more entry takes are not there, or beyond what a device may take.
void check_memory(Machine& machine, const Plan& plan, const Entry& entry, const HostMemory& found);

}  // namespace whale
