// Where a pipeline may be cut, and what crosses there.
#pragma once

#include <vector>

#include "ir/graph.h"

namespace whale {

// By tensor: what depends on a batched input (1; 2: such an input). Constants and parameters are there wherever they
// are needed.
std::vector<char> moving_tensors(const Graph& graph);

inline double whole_bytes(const Tensor& t) { return static_cast<double>(element_count(t.dims) * size_of(t.dtype)); }

// Such that ops [0, at) and [at, n) are a cut, with the bytes of activations that cross it.
struct CutPlace {
  size_t at = 0;
  double crossing = 0;
};
// Of these ops, in their order, some hundreds where least crosses, without the ends. `keep_groups`: none between a
// value and the elementwise op that alone reads it, which may be fused.
std::vector<CutPlace> cut_places(const Graph& graph, const std::vector<OpId>& ops, bool keep_groups);

}  // namespace whale
