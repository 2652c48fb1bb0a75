#include "shard/gradients.h"

#include "shard/choose.h"

namespace whale {

Gradients::Gradients(const Graph& g, bool with_terms) : parameter_of(parameters_of_gradients(g)) {
  if (!with_terms) return;
  std::vector<TensorId> todo;
  for (const auto& [gradient, parameter] : parameter_of)
    if (parameter != kNone) todo.push_back(gradient);
  while (!todo.empty()) {
    const TensorId id = todo.back();
    todo.pop_back();
    const OpId made = g.tensor(id).producer;
    if (!terms.insert(id).second || made == kNone) continue;
    const Op& op = g.op(made);
    if (op.phase != Phase::kBackward || op.code != OpCode::k_add) continue;
    for (const TensorId x : op.inputs)
      if (g.tensor(x).dims == g.tensor(id).dims) todo.push_back(x);
  }
}

}  // namespace whale
