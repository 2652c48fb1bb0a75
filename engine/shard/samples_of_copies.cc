#include "shard/samples_of_copies.h"

#include <algorithm>

namespace whale {
namespace {

std::vector<char> constants_of(const Graph& graph) {
  std::vector<char> out(graph.tensors.size());
  for (const Op& op : graph.ops) {
    const bool constant = std::ranges::all_of(op.inputs, [&](TensorId id) { return id == kNone || out[id] != 0; });
    for (const TensorId id : op.outputs)
      if (id != kNone) out[id] = constant;
  }
  return out;
}

// The op sums over the sub-axis of its operand.
bool sums_over(const Op& op, const Factors& factors, const Dims& dims, size_t operand, const SubAxis& sub_axis) {
  return std::ranges::any_of(factors.list, [&](const Factor& f) {
    SubAxisPart part;
    return cut_of_operand(f, operand, sub_axis, extent_of(dims, sub_axis), part) && can_cut(op, f, part) &&
           std::ranges::none_of(f.outputs, [](const SubAxis& o) { return o.present(); });
  });
}

}  // namespace

std::vector<OpCut> follow_samples_of_copies(const Graph& graph, OpFactors& factors) {
  std::vector<SubAxis> seeds(graph.tensors.size());
  for (const TensorId id : graph.inputs)
    if (const int dim = graph.tensor(id).batch_dim; dim >= 0) seeds[id] = SubAxis{dim, 1, 1};
  std::vector<OpCut> cuts = follow(graph, seeds, factors);
  const std::vector<char> constant = constants_of(graph);
  bool found = false;
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const Op& op = graph.ops[i];
    if (op.phase != Phase::kBackward || op.origin == kNone || cuts[i].present()) continue;
    const OpCut& cut = cuts[op.origin];
    if (!cut.present()) continue;
    const Op& forward = graph.op(op.origin);
    const Factor& f = factors.of(forward).list[cut.factor];
    for (size_t o = 0; o < forward.outputs.size(); ++o) {
      if (forward.outputs[o] == kNone || !f.outputs[o].present()) continue;
      const Dims& dims = graph.tensor(forward.outputs[o]).dims;
      const SubAxis rows = sub_axis_part(f.outputs[o], cut.sub);
      for (size_t k = 0; k < op.inputs.size(); ++k)
        if (const TensorId id = op.inputs[k]; id != kNone && constant[id] && graph.tensor(id).dims == dims &&
                                              sums_over(op, factors.of(op), dims, k, rows))
          seeds[id] = rows, found = true;
    }
  }
  return found ? follow(graph, seeds, factors) : cuts;
}

}  // namespace whale
