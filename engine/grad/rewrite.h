// Rewriting a graph in one walk: the ops are taken out and put back one by one, unchanged or replaced.
#pragma once

#include <vector>

#include "ops/op.h"

namespace whale {

class Rewriter {
 public:
  explicit Rewriter(Graph& graph);

  Graph& graph;
  std::vector<Op> old;  // the ops as they were; graph.ops holds those put back so far

  // What a tensor of the old graph is now; kNone stays kNone.
  TensorId now(TensorId id) const { return id == kNone || static_cast<size_t>(id) >= now_.size() ? id : now_[id]; }
  // Uses of `id` become uses of `by`.
  void replace(TensorId id, TensorId by) { now_[id] = by; }

  // Puts old op i back, reading what its operands are now; old[i] is empty then. `again`: infers its results' types
  // once more, and old[i] stays.
  OpId keep(size_t i, bool again = false);
  // Appends a new op in the place (scope, phase, origin, region, location) of old op i; returns its first result.
  TensorId emit(size_t i, OpCode code, TensorIds inputs, Attrs attrs = {});
  // Old op i is represented by op `by` of the new list (for Op::origin).
  void moved(size_t i, OpId by) { moved_[i] = by; }
  // The op that makes a tensor in the new list, or null.
  const Op* producer(TensorId id) const;

  // Redirects variables, outputs, gradients and the loss, and drops tensors that nothing makes.
  void finish();

 private:
  std::vector<TensorId> now_;
  std::vector<OpId> moved_;
};

// Removes value tensors without a producer and renumbers the rest.
void drop_unmade_tensors(Graph& graph);

inline TensorId first_output(const Graph& graph, OpId op) { return graph.op(op).outputs[0]; }
bool is_variable(const Graph& graph, TensorId id);

}  // namespace whale
