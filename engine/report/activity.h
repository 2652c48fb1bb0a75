// What the time of an instruction is spent on, as pictures show it.
#pragma once

#include <array>
#include <vector>

#include "plan/plan.h"

namespace whale {

enum class Activity : uint8_t { kForward, kBackward, kWeightGradient, kUpdate, kCommunication, kData, kHostCopy };
inline constexpr size_t kActivities = 7;
inline constexpr std::array<const char*, kActivities> kActivityNames = {
    "forward", "backward", "weight gradient", "update", "communication", "data", "host copy"};
inline const char* name_of(Activity activity) { return kActivityNames[static_cast<size_t>(activity)]; }

// By segment and position. A weight gradient is what makes or sums what the update reads, and nothing else.
std::vector<std::vector<Activity>> activities_of(const Program& program, const std::vector<Group>& groups);

}  // namespace whale
