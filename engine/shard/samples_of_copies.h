// Where the samples are in a program with copies of its body (rewrite/copy_replicas.h).
#pragma once

#include <vector>

#include "shard/sub_axes.h"

namespace whale {

// As follow_samples. A constant with a row for every sample has the rows of its copy, though nothing may pair it with
// samples any more: a gradient that is the same for all of them has them where the forward value has.
std::vector<OpCut> follow_samples_of_copies(const Graph& graph, OpFactors& factors);

}  // namespace whale
