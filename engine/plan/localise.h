// One op's local form: dimensions of its part, attributes that repeat dimensions, its Box.
#pragma once

#include "parallel/layout_graph.h"
#include "plan/plan.h"

namespace whale {

// The samples of a device: for tensors that are cut along time and devices, along time only, along devices only.
struct LocalExtents {
  int64_t both = 0, run = 0, share = 0;
};

Dims local_dims(const LayoutGraph& graph, TensorId id, const LocalExtents& extents);

// Attributes by convention: `shape` and `dims` are those of the result; `limits` end where the local operand ends.
Attrs local_attrs(const Graph& graph, const Op& op, const std::vector<Dims>& in, const std::vector<Dims>& out);

// Where the result lies, for ops that ask (random, offset-aware, fused); else empty.
Box box_of(const LayoutGraph& graph, const Op& op);

// The cost of the local part.
OpCost local_cost(const Graph& graph, const Op& op, const Attrs& attrs, const std::vector<Dims>& in,
                  const std::vector<Dims>& out);

}  // namespace whale
