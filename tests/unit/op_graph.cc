#include "op_graph.h"

namespace whale::test {

OpGraph graph_of(const OpCall& call) {
  OpGraph out;
  Graph& g = out.graph;
  TensorIds inputs;
  for (const Value& v : call.in) {
    inputs.push_back(v.present() ? static_cast<TensorId>(g.tensors.size()) : kNone);
    if (!v.present()) continue;
    const bool parameter = is_float(v.dtype);
    g.tensors.push_back({.name = "x" + std::to_string(g.tensors.size()),
                         .dtype = v.dtype,
                         .dims = v.dims,
                         .kind = parameter ? TensorKind::kVariable : TensorKind::kInput});
    if (parameter)
      g.variables.push_back({.tensor = inputs.back(), .init = {}, .state_name = ""});
    else
      g.inputs.push_back(inputs.back());
    out.known.push_back(v);
  }
  g.op(append_op(g, call.code, inputs, call.attrs)).key = call.key;
  return out;
}

std::vector<Value> run_graph(const OpDevice& device, const Graph& graph, std::vector<Value> known,
                             const std::function<void(const OpCall&)>& see) {
  known.resize(graph.tensors.size());
  for (const Op& op : graph.ops) {
    OpCall call{op.code, op.attrs, {}, op.key};
    for (const TensorId id : op.inputs) call.in.push_back(id == kNone ? Value{} : known[id]);
    see(call);
    std::vector<Value> made = device.run(call);
    for (size_t o = 0; o < made.size(); ++o) known[op.outputs[o]] = std::move(made[o]);
  }
  return known;
}

}  // namespace whale::test
