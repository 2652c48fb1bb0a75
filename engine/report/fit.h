// Does a plan fit its devices, of which some say how much memory they have (DeviceSpec::memory_bytes)?
#pragma once

#include "base/error.h"
#include "plan/figures.h"
#include "plan/plan.h"

namespace whale {

// Of the device that lacks most. A plan that has no entries yet is judged by its variables.
struct Shortage {
  int64_t bytes = 0;  // that are missing; 0: none
  int32_t device = 0;
  MemoryClasses needed;
  std::string entry;
  int64_t batch = 0;  // that this entry is for, where the plan's own fits; 0: the plan's own
};
Shortage shortage_of(const Plan& plan);
Shortage shortage_of(const Plan& plan, const Entry& entry);  // that the plan may have, for another batch

// By how much, on which device, of what, and what would make it less.
Error does_not_fit(const Plan& plan, const Shortage& shortage);

}  // namespace whale
