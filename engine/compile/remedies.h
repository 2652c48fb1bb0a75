// For a plan that does not fit: the changes by which it would, and what they cost.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "compile/compile.h"
#include "report/fit.h"

namespace whale {

// How long is looked, in seconds of this thread's own time; 0: not at all.
struct RemedyEffort {
  double estimates = 2;  // of changes
  double plans = 2;      // of those that are printed
  double search = 1;     // for another strategy, where no change fits
};

// Recompute, ZeRO, offload and micro-batches, each alone and together with others, by estimates; what fits by them is
// planned as it will be printed, and left out where it does not fit then. `asked`: what the user gave, without cuts and
// shares by room. `plan`: the one of it that comes nearest, `shortage` and `entry` of that plan or of another batch of
// it. `options_too`: the options of `asked` are printed too, since the user gave others.
Remedies remedies_for(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& asked,
                      const Plan& plan, const Shortage& shortage, const RemedyEffort& effort = {},
                      bool options_too = false);

// compile()'s own way to a plan, without other batches and reasons: none where nothing fits. `warmups`: deeper ones
// too, where they are worth it.
std::optional<Plan> plan_that_fits(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                   const CompileOptions& options, bool warmups = false);
// compile_entry(), whether it fits or not.
Entry entry_for(const Plan& plan, std::string_view name, int64_t batch);
// An evaluation has a price of memory of its own where it does not fit at the plan's: the lowest at which it does.
std::optional<Entry> evaluation_that_fits(const Plan& plan, int64_t batch);

}  // namespace whale
