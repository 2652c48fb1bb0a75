// What an op of a graph costs, by its definition and the shapes there; without a view made anew for each.
#pragma once

#include "ops/op.h"

namespace whale {

OpCost cost_of(const Graph& graph, const Op& op);
void put_view(const Graph& graph, const Op& op, OpView& view);  // view_of, in the memory of the view before

}  // namespace whale
