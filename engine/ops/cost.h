// What an op of a graph costs, by its definition and the shapes there.
#pragma once

#include "ops/op.h"

namespace whale {

OpCost cost_of(const Graph& graph, const Op& op);  // as of its view, without making one anew

}  // namespace whale
