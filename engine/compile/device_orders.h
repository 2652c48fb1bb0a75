// Along a pipeline whose devices nobody has put into an order: others than the one that they are listed in.
#pragma once

#include <string>
#include <vector>

#include "compile/compile.h"

namespace whale {

struct DeviceOrder {
  std::string what;      // "largest memory first"
  std::string strategy;  // the plan's as it was asked for, on the devices in this order
};
// For a plan that does not fit: the largest memories along its stages first, and last (1f1b keeps more activations
// alive in early stages, heads are large in the last one). None where devices have like memories or the order is
// written.
std::vector<DeviceOrder> orders_by_memory(const Graph& graph, const CompileOptions& options, const Plan& plan);

}  // namespace whale
