// What a plan would take, at one price of memory; of models that repeat, from a few of their layers.
#pragma once

#include <vector>

#include "compile/compile.h"
#include "report/fit.h"

namespace whale {

// Memory becomes dearer from attempt to attempt, until what is planned fits the devices that say how much they have.
constexpr int kPrices = 4;
double price_of(const CompileOptions& options, int attempt);

Estimate estimate_at(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                     double memory_price);

// Where devices are unlike, and one has no room for its share by speed: the room of each (CompileOptions::rooms).
CompileOptions with_rooms(const Graph& graph, const std::vector<DeviceSpec>& devices, CompileOptions options);

// What remedies would be missing at the plan's price of memory, as many as are estimated in `seconds`.
std::vector<Tried> tried_remedies(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                  const CompileOptions& options, const Plan& plan, double seconds);

}  // namespace whale
