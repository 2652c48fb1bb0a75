#include "grad/rewrite.h"

#include <numeric>

namespace whale {

Rewriter::Rewriter(Graph& g) : graph(g), old(std::move(g.ops)), now_(g.tensors.size()), moved_(old.size(), kNone) {
  std::iota(now_.begin(), now_.end(), 0);
  graph.ops.clear();
  graph.ops.reserve(old.size());
  for (Tensor& t : graph.tensors)
    if (t.kind == TensorKind::kValue) t.producer = kNone;
}

OpId Rewriter::keep(size_t i, bool again) {
  const auto id = static_cast<OpId>(graph.ops.size());
  Op op = again ? old[i] : std::move(old[i]);
  for (TensorId& input : op.inputs) input = now(input);
  if (op.origin != kNone) op.origin = moved_[op.origin];
  if (again) {
    try {
      const OpView view = view_of(graph, op);
      const auto types = infer(op.code, op.attrs, view.inputs, view.present);
      for (size_t k = 0; k < types.size(); ++k) {
        Tensor& t = graph.tensor(op.outputs[k]);
        t.dtype = types[k].dtype;
        t.dims = types[k].dims;
      }
    } catch (Error& e) {
      e.at_op(op.name).at_scope(graph.scope_path(op.scope));
      throw;
    }
  }
  for (size_t k = 0; k < op.outputs.size(); ++k) {
    Tensor& t = graph.tensor(op.outputs[k]);
    t.producer = id;
    t.output = static_cast<int>(k);
  }
  graph.ops.push_back(std::move(op));
  moved_[i] = id;
  return id;
}

TensorId Rewriter::emit(size_t i, OpCode code, TensorIds inputs, Attrs attrs) {
  const Op& place = old[i];
  std::string name = place.name.empty() ? "" : fmt::format("{}.{}", place.name, def(code).name);  // "": it was kept
  const OpId id = append_op(graph, code, std::move(inputs), std::move(attrs), place.scope, std::move(name));
  Op& op = graph.op(id);
  op.phase = place.phase;
  op.region = place.region;
  op.location = place.location;
  op.origin = place.origin == kNone ? kNone : moved_[place.origin];
  return op.outputs[0];
}

const Op* Rewriter::producer(TensorId id) const {
  if (id == kNone || graph.tensor(id).producer == kNone) return nullptr;
  return &graph.op(graph.tensor(id).producer);
}

void Rewriter::finish() {
  for (Variable& v : graph.variables) v.next = now(v.next);
  for (auto* list : {&graph.outputs, &graph.gradients})
    for (NamedTensor& t : *list) t.tensor = now(t.tensor);
  graph.training.loss = now(graph.training.loss);
  drop_unmade_tensors(graph);
}

void drop_unmade_tensors(Graph& graph) {
  std::vector<TensorId> renamed(graph.tensors.size(), kNone);
  size_t kept = 0;
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    if (graph.tensors[i].kind == TensorKind::kValue && graph.tensors[i].producer == kNone) continue;
    renamed[i] = static_cast<TensorId>(kept);
    if (kept != i) graph.tensors[kept] = std::move(graph.tensors[i]);
    ++kept;
  }
  if (kept == graph.tensors.size()) return;
  graph.tensors.resize(kept);
  const auto rename = [&](TensorId& id) {
    if (id == kNone) return;
    id = renamed[id];
    WHALE_CHECK(id != kNone, "a tensor in use has no producer");
  };
  for (Op& op : graph.ops) {
    for (TensorId& id : op.inputs) rename(id);
    for (TensorId& id : op.outputs) rename(id);
  }
  for (Variable& v : graph.variables) rename(v.tensor), rename(v.owner), rename(v.next);
  for (TensorId& id : graph.inputs) rename(id);
  for (auto* list : {&graph.outputs, &graph.gradients})
    for (NamedTensor& t : *list) rename(t.tensor);
  rename(graph.training.loss);
}

bool is_variable(const Graph& graph, TensorId id) {
  return id != kNone && graph.tensor(id).kind == TensorKind::kVariable;
}

}  // namespace whale
