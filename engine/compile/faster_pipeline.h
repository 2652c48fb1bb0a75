// What makes a pipeline faster than the one that a strategy's text says at first: deeper warm-ups, other stage cuts.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "compile/compile.h"
#include "compile/deeper_warmup.h"

namespace whale {

// What makes a plan that is faster by the simulator than one with the usual warm-up and stages of even work: a deeper
// warm-up that has room, or stages cut by the pipeline's clock (task/refine_cuts.h), or both, each found for the other.
struct Faster {
  WithWarmup made_of;
  Plan plan;  // as it was walked, which fits
  double seconds = 0;
  std::string why;  // for a note
};
// `step` makes plans such as are walked only (plan_of_step). `plan`: by the options as they are.
using MakePlan = std::function<Plan(const Graph&, const CompileOptions&)>;
std::optional<Faster> faster_pipeline(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                      const CompileOptions& options, const Plan& plan, const MakePlan& step);

// Whether the clock of a pipeline would cut it elsewhere than at `usual`.
bool is_cut_otherwise(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                      double memory_price, const Ints& usual);

}  // namespace whale
