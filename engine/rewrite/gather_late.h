// Parameters that live in parts (ZeRO 3) are put together where they are read.
#pragma once

#include "shard/sharded_graph.h"

namespace whale {

// With micro-batches: gathers of parameters that are cut like their state, and what is made of them alone, move from
// the prologue into the body, one copy for the forward and one for the backward pass (and one for the work that
// zero-bubble schedules put off), so that no whole parameter lives longer than its readers of one micro-batch
// (Rajbhandari et al., 2020, section 5.3). Where replicas take micro-batches of their own they stay: the replicas would
// not meet.
void gather_late(ShardedGraph& graph);

}  // namespace whale
