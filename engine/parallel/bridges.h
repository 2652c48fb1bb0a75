// The layout graph under construction: appending ops with their regions, and the bridges (semantics.md section 4), each
// made once.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "parallel/layout_graph.h"

namespace whale {

class BridgeBuilder {
 public:
  // Takes the graph's tensors and variables; inputs with a batch dimension are cut along both axes (unless the batch is
  // 1).
  BridgeBuilder(const Graph& graph, int64_t micro_batches, int64_t devices);

  LayoutGraph out;

  OpId append(Op op);                // its results' layouts are set already; finds its region
  OpId producer(TensorId id) const;  // kNone: not made by an op
  Region region(TensorId id) const;  // of the op that makes it; inputs and variables are there from the prologue on
  TensorId like(TensorId id, const char* suffix);  // a new tensor of the same type, replicated
  TensorId latest(TensorId id) const;              // after a partial value was reduced, everyone uses the reduced one

  TensorId reduce(TensorId id, size_t axis);  // partial -> replicate: accumulate over time, all_reduce over devices
  TensorId gather(TensorId id, size_t axis);  // shard -> replicate over devices: all_gather
  TensorId slice(TensorId id, size_t axis, const Digit& digit);  // replicate -> shard over devices: local_slice
  TensorId whole_input(TensorId id);                             // the input, not cut along time

  void finish();  // drops what nobody reads; moves what only the epilogue reads there

 private:
  TensorId bridge(OpCode code, std::vector<TensorId> inputs, TensorId id, const char* suffix, Attrs attrs, size_t axis,
                  AxisLayout to);
  std::map<TensorId, TensorId> reduced_, wholes_;
  std::map<std::pair<TensorId, size_t>, TensorId> gathered_;
  std::vector<OpId> producer_;
};

}  // namespace whale
