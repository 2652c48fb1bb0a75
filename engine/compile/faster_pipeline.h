// What makes a pipeline faster than the one that a strategy's text says at first: deeper warm-ups, other stage cuts.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "compile/compile.h"
#include "compile/deeper_warmup.h"

namespace whale {

// A plan that is faster by the simulator than one with the usual warm-up and stages of even work: with a deeper warm-up
// that has room, or stages cut by the pipeline's clock (task/refine_cuts.h), or both. `make` makes plans as `plan` was
// made, `step` such as are walked only (plan_of_step).
struct Faster {
  Plan plan;
  std::string why;  // for a note
  WithWarmup made_of;
};
using MakePlan = std::function<Plan(const Graph&, const CompileOptions&)>;
std::optional<Faster> faster_pipeline(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                      const CompileOptions& options, const Plan& plan, const MakePlan& make,
                                      const MakePlan& step);
// Where stages begin by the clock, as far as that is elsewhere than at `usual`: with the usual warm-up, and a deeper
// one.
std::vector<Ints> begins_by_clock(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                  const CompileOptions& options, double memory_price, const Ints& usual);

}  // namespace whale
