// Does a plan fit its devices, of which some say how much memory they have (DeviceSpec::memory_bytes)? What is said
// where it does not.
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

// A change by which a plan fits, or comes nearer.
struct Remedy {
  std::string flags;    // of the command line, instead of those that were given: "--zero 3 --recompute full"
  int64_t bytes = 0;    // of the fullest device, by a plan where it fits
  int64_t missing = 0;  // of the device that lacks most; 0: it fits
  double seconds = 0;   // of a step, by the estimate; 0: not known
};

// What was found for a plan that does not fit.
struct Remedies {
  double seconds = 0;                    // of a step of the plan itself, by the estimate; 0: not known
  std::vector<Remedy> fit;               // these were planned, and fit; fastest first
  std::optional<Remedy> likely = {};     // where none is: by its estimate it fits, there was no time to plan it
  std::optional<Remedy> nearest = {};    // where none does, what comes nearest, of this strategy
  int64_t batch = 0;                     // the largest batch looked at that fits with nothing else changed; 0: none
  std::optional<Remedy> automatic = {};  // where none fits: the best other strategy of all that do
  size_t others = 0;                     // that auto looked at; of which, where none fits,
  std::optional<Remedy> nearest_other = {};
  bool out_of_time = false;  // there was more to look at
};

// By how much, on which devices, of what; the tensors that take most there; what makes it fit. `entry`: of the plan, or
// one for another batch. Some 20 lines of at most 110 characters.
Error does_not_fit(const Plan& plan, const Entry& entry, const Shortage& shortage, const Remedies& remedies);

}  // namespace whale
