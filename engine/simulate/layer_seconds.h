// How long the instructions of a device take where a profile has times of layers alone (cost/measured_layers.h): each
// layer's time is shared among its instructions as the roofline has them.
#pragma once

#include <functional>
#include <unordered_map>

#include "cost/measured_layers.h"
#include "plan/plan.h"

namespace whale {

// Of computing instructions of forward and backward passes; updates and what moves data are not in it.
// `roofline`: seconds of an instruction by rates.
std::unordered_map<const Instruction*, double> layer_seconds(const Plan& plan, const Entry& entry, int32_t device,
                                                             const MeasuredDevice& measured,
                                                             const std::function<double(const Instruction&)>& roofline);

}  // namespace whale
