// The forward pass alone.
#include "grad/passes.h"
#include "grad/rewrite.h"

namespace whale {

Graph for_inference(const Graph& graph) {
  Graph g = graph;
  g.gradients.clear();
  std::erase_if(g.variables, [](const Variable& v) { return v.role == Role::kState; });
  for (Variable& v : g.variables) v.next = kNone;
  Rewriter r(g);
  for (size_t i = 0; i < r.old.size(); ++i) {
    Op& op = r.old[i];
    if (op.code == OpCode::k_batch_norm) {
      std::vector<TensorId> inputs;
      for (const TensorId id : op.inputs) inputs.push_back(r.now(id));
      const TensorId y = r.emit(i, OpCode::k_batch_norm_inference, inputs, {{"epsilon", op.attrs.at("epsilon")}});
      g.tensor(y).name = g.tensor(op.outputs[0]).name;
      r.moved(i, g.tensor(y).producer);
      r.replace(op.outputs[0], y);
    } else if (op.code == OpCode::k_dropout || op.code == OpCode::k_stop_gradient) {
      r.replace(op.outputs[0], r.now(op.inputs[0]));
    } else {
      if (op.attrs.contains("dropout")) op.attrs["dropout"] = 0.0;  // attention
      r.keep(i);
    }
  }
  r.finish();
  // The loss stays what "loss" fetches; of training only what says how values are stored does.
  Training kept;
  kept.loss = g.training.loss;
  kept.precision = g.training.precision;
  kept.optimizer.split = g.training.optimizer.split;
  g.training = kept;
  return g;
}

}  // namespace whale
