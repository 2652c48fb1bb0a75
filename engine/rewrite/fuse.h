// Fusion groups: chains of elementwise ops become one `fused` op (ops/fused.h).
#pragma once

#include "shard/sharded_graph.h"

namespace whale {

// Groups are trees: every intermediate has one reader, the same dimensions, sharding, region and phase as the root;
// operands may broadcast. Dropout joins; reductions do not. Formed on whole graphs, so that no cut of the batch changes
// them.
void fuse_elementwise(ShardedGraph& graph);

}  // namespace whale
