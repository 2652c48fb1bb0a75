// The forward pass alone.
#include "grad/passes.h"
#include "grad/rewrite.h"

namespace whale {

Graph for_inference(Graph g) {
  g.gradients.clear();
  std::erase_if(g.variables, [](const Variable& v) { return v.role == Role::kState; });
  for (Variable& v : g.variables) v.next = kNone;
  Rewriter r(g);
  for (size_t i = 0; i < r.old.size(); ++i) {
    Op& op = r.old[i];
    const OpDef& d = def(op.code);
    if (d.inference) {
      TensorIds inputs;
      for (const TensorId id : op.inputs) inputs.push_back(r.now(id));
      Attrs attrs;
      for (const AttrSpec& spec : def(*d.inference).attrs) attrs[spec.name] = op.attrs.at(spec.name);
      const TensorId y = r.emit(i, *d.inference, inputs, std::move(attrs));
      g.tensor(y).name = g.tensor(op.outputs[0]).name;
      r.moved(i, g.tensor(y).producer);
      r.replace(op.outputs[0], y);
    } else if (d.flags & kTrainingOnly) {
      r.replace(op.outputs[0], r.now(op.inputs[0]));
    } else {
      for (auto& [name, value] : op.attrs)
        if (role_of(d, name) == AttrRole::kTraining) value = 0.0;
      r.keep(i);
    }
  }
  r.finish();
  // The loss stays what "loss" fetches; of training only what says how values are stored does.
  Training kept;
  kept.loss = g.training.loss;
  kept.precision = g.training.precision;
  kept.optimizer.split_master_weights = g.training.optimizer.split_master_weights;
  g.training = kept;
  return g;
}

}  // namespace whale
