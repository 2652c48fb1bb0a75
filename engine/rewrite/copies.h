// What a pipeline's order means for storage: which backward work can wait, and values that need a second copy.
#pragma once

#include <vector>

#include "schedule/schedule.h"
#include "shard/sharded_graph.h"

namespace whale {

// Per op: of the backward pass, and nothing sent to another stage waits for it: it may run later (zero-bubble's W).
std::vector<char> weight_ops(const ShardedGraph& graph);
// The same where the schedule has such work of its own; elsewhere none.
std::vector<char> put_off(const ShardedGraph& graph);
WorkKind work_of(const Op& op, bool weight);  // in a pipeline

// A collective works in place. Where what was there before is still read later (by the backward pass or another stage
// of these devices; by what follows from the collective itself; by another collective, of another view), it gets a
// copy.
void copy_before_sums(ShardedGraph& graph);

}  // namespace whale
