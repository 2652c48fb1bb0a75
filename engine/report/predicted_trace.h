// A step as the simulator has it, as a file for trace viewers.
#pragma once

#include <string>

#include "plan/plan.h"

namespace whale {

inline constexpr size_t kMostSimulated = size_t{1} << 20;  // instructions, of a step that is drawn

// The plan's first entry, in the format of measured timelines (plan/trace.h): one device for all that do the same at
// the same time. Throws unimplemented where a step is too long.
std::string predicted_trace(const Plan& plan);
std::string predicted_trace(const Plan& plan, const Entry& entry);

// Of null devices alone, which compute nothing: their clock is the simulator's, and a run of them has no other times.
bool is_of_null_devices(const Plan& plan);

}  // namespace whale
