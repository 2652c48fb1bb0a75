// Helpers of passes that replace ops.
#pragma once

#include <vector>

#include "ir/graph.h"

namespace whale {

// Removes the ops marked in `removed` (may be empty: none) and brings the rest into an order in which they can run,
// changing as little as possible; renumbers producers and origins.
void compact(Graph& graph, const std::vector<char>& removed);

// For an op that is run again on the same index.
void without_index_check(Op& op);

// Who reads each tensor, as op numbers in order; an op that reads it twice stands there twice.
std::vector<std::vector<OpId>> readers_of(const Graph& graph);

}  // namespace whale
