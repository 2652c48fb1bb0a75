// Updates of replicated parameters in slices (CoCoNeT): all_reduce + update becomes reduce_scatter + update of the own
// slice + all_gather. Every element has the same bits.
#pragma once

#include "shard/sharded_graph.h"

namespace whale {

// `always`: wherever it is possible; else where it costs less. An update qualifies when one gradient that nobody else
// reads is summed for it along a replica axis, and when a dimension is long enough to have a slice for every replica.
void slice_updates(ShardedGraph& graph, bool always);

// Slices along the outermost dimension that only updates read are parts of the storage of what they are cut from:
// updated in place, gathered in place.
void view_slices(ShardedGraph& graph);

}  // namespace whale
