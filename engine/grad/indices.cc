// Which ops check their indices, and which indices are checked before a step.
#include <algorithm>

#include "grad/passes.h"

namespace whale {
namespace {

// The input that the tensor has its elements from; kNone: they are computed.
TensorId source_of(const Graph& graph, TensorId id) {
  while (graph.tensor(id).kind == TensorKind::kValue) {
    const Op& op = graph.op(graph.tensor(id).producer);
    const bool widens = op.code == OpCode::k_cast && graph.tensor(op.inputs[0]).dtype == DType::kI32 &&
                        graph.tensor(id).dtype == DType::kI64;
    if (!widens && !has_flag(op.code, kRearranges)) return kNone;
    id = op.inputs[0];
  }
  return graph.tensor(id).kind == TensorKind::kInput ? id : kNone;
}

TensorId index_of(const Op& op) {
  const int input = def(op.code).index.input;
  return input < 0 ? kNone : op.inputs[static_cast<size_t>(input)];
}

}  // namespace

void check_indices(Graph& graph) {
  for (Op& op : graph.ops)
    if (const TensorId index = index_of(op); index != kNone)
      op.attrs[kIndexLimit] = source_of(graph, index) != kNone ? 0 : index_range(view_of(graph, op)).limit;
}

std::vector<std::vector<IndexRange>> indices_of_inputs(const Graph& graph) {
  std::vector<std::vector<IndexRange>> all(graph.inputs.size());
  for (const Op& op : graph.ops) {
    const TensorId index = index_of(op);
    const TensorId source = index == kNone ? kNone : source_of(graph, index);
    if (source == kNone) continue;
    auto& ranges =
        all[static_cast<size_t>(std::find(graph.inputs.begin(), graph.inputs.end(), source) - graph.inputs.begin())];
    const IndexRange range = index_range(view_of(graph, op));
    if (std::find(ranges.begin(), ranges.end(), range) == ranges.end()) ranges.push_back(range);
  }
  return all;
}

}  // namespace whale
