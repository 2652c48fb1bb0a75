// Which ops put parts together, and copies of them for work that is put off.
#pragma once

#include "shard/sharded_graph.h"

namespace whale {

// Parts that the devices of a stage hold; where groups are unlike, by transfers between them.
bool puts_together(const ShardedGraph& graph, const Op& op);

// Made of variables by casts, views and ops that put parts together, in the body: again by whoever needs it.
bool gathered_of_variables(const ShardedGraph& graph, TensorId id);

// A value that a group holds parts of, and that is gathered a second time in no more than the seconds that it is
// `worth` not to keep it.
bool is_cheap_to_gather(const ShardedGraph& graph, const Op& gather, double worth);

// Where memory is dear (at a price above 1), what the forward pass left is gathered or exchanged for the backward pass
// alone in the backward pass: a pipeline would hold it for every micro-batch on its way, and a block that is computed
// again has what it is made of.
void reshard_late(ShardedGraph& graph);

// Zero-bubble schedules put weights' gradients off, to a later row than the backward pass whose gathers they would
// read: what is gathered there is gathered again for them, and its parts alone are kept for every micro-batch between.
void gather_for_weights(ShardedGraph& graph);

}  // namespace whale
