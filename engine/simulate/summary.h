// One step of an entry on the clock, in figures: how long, who works and who waits.
#pragma once

#include <string>

#include "base/json.h"
#include "plan/plan.h"

namespace whale {

// `seconds` of the step; `instructions` that were walked (of the first device of each class) and `walk_seconds` that it
// took; `classes`: of each `devices`, `compute_seconds` (forward, backward, weight gradients, updates), by `phases`,
// `communication_seconds`, `hidden_seconds` of it (beside computation), `idle_seconds` (neither). Throws
// RESOURCE_EXHAUSTED where a step has more than 2^26 instructions of unlike devices.
Json simulation_json(const Plan& plan, const Entry& entry);
std::string simulation_text(const Json& simulation);  // the same for a terminal

}  // namespace whale
