// That a plan from a file says of its model what its source gives.
#pragma once

#include "plan/plan.h"

namespace whale {

// Throws DATA_LOSS where what a plan says of its model (ports, indices, variables, training) is not what Plan::source
// gives: for plans from files, of which deserialize() has checked the rest. Thread-safe.
void verify_source(const Plan& plan);
// The same of one entry; `whole`: its graph before it is laid out.
void check_source(const Plan& plan, const Entry& entry, const Graph& whole);

}  // namespace whale
