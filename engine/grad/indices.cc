// Which ops check their indices, and which indices are checked before a step.
#include <algorithm>

#include "grad/passes.h"

namespace whale {
namespace {

// What the tensor has its elements from: an input, or an op's result that is indices (OpDef::makes_index); kNone: they
// are computed.
TensorId source_of(const Graph& graph, TensorId id) {
  while (graph.tensor(id).kind == TensorKind::kValue) {
    const Op& op = graph.op(graph.tensor(id).producer);
    if (def(op.code).makes_index.output == graph.tensor(id).output) return id;
    const bool widens = op.code == OpCode::k_cast && graph.tensor(op.inputs[0]).dtype == DType::kI32 &&
                        graph.tensor(id).dtype == DType::kI64;
    if (!widens && !has_flag(op.code, kRearranges)) return kNone;
    id = op.inputs[0];
  }
  return graph.tensor(id).kind == TensorKind::kInput ? id : kNone;
}

bool is_input(const Graph& graph, TensorId source) {
  return source != kNone && graph.tensor(source).kind == TensorKind::kInput;
}

TensorId operand_of(const Op& op) {
  const int input = def(op.code).index.input;
  return input < 0 ? kNone : op.inputs[input];
}

// The index that is checked for the op; kNone: none is. A gradient takes that of the op that it comes from, checked
// there.
TensorId index_of(const Graph& graph, const Op& op) {
  const TensorId index = operand_of(op);
  return op.origin != kNone && operand_of(graph.op(op.origin)) == index ? kNone : index;
}

// Whether the index comes from an op that makes indices for just this; throws when they are for something else.
bool is_made(const Graph& graph, const Op& op, TensorId source) {
  const IndexOperand& index = def(op.code).index;
  if (source == kNone || is_input(graph, source) || !index.or_none) return false;
  const Op& maker = graph.op(graph.tensor(source).producer);
  const Dims made = def(maker.code).makes_index.of(view_of(graph, maker)), wanted = index.of(view_of(graph, op));
  if (made == wanted) return true;
  throw invalid(
      "{}: operand '{}' has indices {} (places of {}) of op '{}' ({}), expected {} (places of {}); give both the same "
      "sizes",
      def(op.code).name, def(op.code).inputs[index.input].name, to_string(IndexRange{element_count(made), -1}),
      to_string(made), maker.name, def(maker.code).name, to_string(IndexRange{element_count(wanted), -1}),
      to_string(wanted))
      .at_op(op.name)
      .at_scope(graph.scope_path(op.scope));
}

}  // namespace

void check_indices(Graph& graph) {
  for (Op& op : graph.ops) {
    const TensorId index = index_of(graph, op);
    if (index == kNone) continue;
    const TensorId source = source_of(graph, index);
    const bool known = is_input(graph, source) || is_made(graph, op, source);
    op.attrs[kIndexLimit] = known ? 0 : index_range(view_of(graph, op)).limit;
  }
}

std::vector<std::vector<IndexRange>> indices_of_inputs(const Graph& graph) {
  std::vector<std::vector<IndexRange>> all(graph.inputs.size());
  for (const Op& op : graph.ops) {
    const TensorId index = index_of(graph, op);
    const TensorId source = index == kNone ? kNone : source_of(graph, index);
    if (!is_input(graph, source)) continue;
    auto& ranges = all[std::find(graph.inputs.begin(), graph.inputs.end(), source) - graph.inputs.begin()];
    const IndexRange range = index_range(view_of(graph, op));
    if (std::find(ranges.begin(), ranges.end(), range) == ranges.end()) ranges.push_back(range);
  }
  return all;
}

}  // namespace whale
