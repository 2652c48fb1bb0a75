// Does a plan fit its devices, of which some say how much memory they have (DeviceSpec::memory_bytes)?
#pragma once

#include <optional>
#include <string>
#include <vector>

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

// One option changed that is not in use yet and may take less memory.
struct Remedy {
  std::string text;
  PlanOptions options;
};
std::vector<Remedy> remedies_of(const Plan& plan);

// With a remedy: bytes that are missing then, at most; none: not tried.
struct Tried {
  std::string remedy;
  std::optional<int64_t> missing = {};
};

// By how much, on which device, of what, and what makes it less; of what was tried, all that do.
Error does_not_fit(const Plan& plan, const Shortage& shortage, std::vector<Tried> tried);

}  // namespace whale
