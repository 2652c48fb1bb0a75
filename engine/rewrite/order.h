// In which order one device runs the ops: gradient buckets, grouped updates, and an order that overlaps communication
// with the backward pass and keeps few tensors alive.
#pragma once

#include "rewrite/rewrite.h"
#include "shard/sharded_graph.h"

namespace whale {

// Results that share the storage of their operand, so that no instruction is needed: reshape, stop_gradient, part_view.
bool is_view(OpCode code);
// The tensor whose storage `id` shows, through views.
TensorId view_root(const Graph& graph, TensorId id);
std::vector<TensorId> roots_of(const Graph& graph);  // of all tensors
// Who reads each storage, views left out; `roots` are the tensors'.
Lists storage_readers(const Graph& graph, const std::vector<TensorId>& roots);
int64_t bytes_of(const Tensor& tensor);

// Results that the backward pass makes anew from what is there anyway, when that costs little: casts of parameters
// always; in the stages of `ops` also activations, norms and the like: what frees many bytes for a second of computing
// them again (a few percent of time for a fifth of the memory; cost/recompute.h); in those of `gathers`, and in all
// where memory is short, what an all_gather along a split put together, of which the part stays (Korthikanti et al.,
// 2022, section 4.2.2).
struct Recomputed {
  std::vector<char> ops, gathers;  // a flag a stage: asked for
  bool short_of_memory = false;
};
void recompute_cheap(ShardedGraph& graph, const Recomputed& asked);

// Blocks (name scopes with siblings, such as block0, block1; without them about sqrt(n) runs of a stage's n ops) keep
// what other blocks and reshards hand them, and are computed again just before their backward ops. Of `stages` (a flag
// each) alone.
void recompute_blocks(ShardedGraph& graph, const std::vector<char>& stages);

// Swaps neighbours (and no more) where the other order has fewer bytes alive: a weight's gradient before that of the
// activation, for example.
void shorten_lives(ShardedGraph& graph);

// One collective per bucket, until `bucket_bytes` are reached: all_reduce or reduce_scatter of gradients of one type in
// the order in which they become ready; all_gather of updated parameters in that order, and of parameters that live in
// parts in the order in which they are read. sums_leave: gradients over micro-batches wait in the host's memory.
void form_buckets(ShardedGraph& graph, int64_t bucket_bytes, bool sums_leave = false);

// Updates of one kind and one bucket (without collectives: of `bucket_bytes` of gradients) become one op.
void group_updates(ShardedGraph& graph, int64_t bucket_bytes);

// The final order. Constants just before their first use; an all_reduce as soon as its operands are there; updates as
// soon as their gradients are (behind the next bucket's all_reduce, so that waiting for one overlaps the other) and
// never before the last reader of the old value. Parameters that live in parts are gathered when the one `prefetch`
// gathers before is read (0: by the cost model, rewrite/prefetch.h).
void order_ops(ShardedGraph& graph, int64_t prefetch = 0);

}  // namespace whale
