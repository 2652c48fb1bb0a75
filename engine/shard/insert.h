// From the choice of every cut to a program with reshards in it: mechanical.
#pragma once

#include "shard/choose.h"
#include "shard/sharded_graph.h"

namespace whale {

// Brings every operand to where its op, cut as chosen, reads it, and every result to where it is wanted. Rules, an axis
// at a time (semantics.md sections 2, 4, 5):
//   map: cut operands give a cut result; reduce: a partial one; `linear` lets partial values pass; an operand that
//   carries a factor whole beside cut ones is produced again already cut where that is free, else sliced; everything
//   else is a reshard: all_reduce, reduce_scatter, all_gather, local_slice, all_to_all, between stages a transfer.
//   Along time: accumulate in the body and go on in the epilogue; a value of the whole batch that the body needs is
//   hoisted to the prologue when it depends on no parameter, else it is an error that names the op.
// Variables' next values go to their storage sharding, fetched values to a legal sharding, at the end.
ShardedGraph insert_reshards(Graph graph, const TaskGraphs& tasks, const ShardOptions& options, const Choices& choices);

// The results of the graph's own ops lie as they were chosen to.
void verify(const Graph& graph, const Choices& choices, const ShardedGraph& inserted);

}  // namespace whale
