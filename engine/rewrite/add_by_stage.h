// Gradients of parameters that several stages use: what a stage has of one is added there first.
#pragma once

#include "ir/graph.h"

namespace whale {

// After place_in_stages. Sums of a gradient's terms in the order in which these arrive become sums of each stage's
// terms, which are then added in the order of their first ones. So each stage adds up one sum over its micro-batches
// and sends that; a term added to what another stage sends at the end of the step would wait for it as a sum of its
// own.
void add_by_stage(Graph& graph);

}  // namespace whale
