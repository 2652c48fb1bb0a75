// The text of a graph: stable, one op a line, attributes only where they differ from their defaults.
#include "ops/print.h"

#include "ops/op.h"

namespace whale {

std::string init_text(const Initializer& init) {
  switch (init.kind) {
    case InitKind::kZeros: return "zeros";
    case InitKind::kOnes: return "ones";
    case InitKind::kConstant: return fmt::format("constant({})", init.a);
    case InitKind::kNormal: return fmt::format("normal({}, {})", init.a, init.b);
    case InitKind::kUniform: return fmt::format("uniform({}, {})", init.a, init.b);
    case InitKind::kTruncatedNormal: return fmt::format("truncated_normal({}, {})", init.a, init.b);
    case InitKind::kData: return fmt::format("data({})", name_of(init.data_type));
    case InitKind::kFile: return fmt::format("file({}, {})", init.file, init.key);
  }
  return "?";
}

namespace {

std::string operand(TensorId id) { return id == kNone ? "_" : fmt::format("%{}", id); }

std::string type_text(const Tensor& t) { return to_string(TensorType{t.dtype, t.dims}); }

std::string variable_text(const Graph& graph, const Variable& v) {
  std::string text =
      fmt::format("%{} = variable {} : {} ", v.tensor, graph.tensor(v.tensor).name, type_text(graph.tensor(v.tensor)));
  if (v.role == Role::kState)
    text += fmt::format("state {} of %{} ", v.state_name, v.owner);
  else if (v.role == Role::kBuffer)
    text += "buffer ";
  else if (!v.trainable)
    text += "frozen ";
  text += init_text(v.init);
  if (v.learning_rate != 1) text += fmt::format(" learning_rate *{}", v.learning_rate);
  if (v.weight_decay) text += fmt::format(" weight_decay {}", *v.weight_decay);
  if (v.next != kNone) text += fmt::format(" -> %{}", v.next);
  return text;
}

std::string attrs_text(const Op& op) {
  std::string text;
  for (const auto& [name, value] : op.attrs) {
    bool implied = false;
    for (const AttrSpec& spec : def(op.code).attrs)
      implied = implied || (name == spec.name && !spec.required && value == spec.fallback);
    if (!implied) text += fmt::format("{}{}={}", text.empty() ? "" : ", ", name, to_string(value));
  }
  return text.empty() ? text : " {" + text + "}";
}

std::string op_text(const Graph& graph, const Op& op) {
  std::vector<std::string> results, operands, types;
  for (const TensorId id : op.outputs) {
    results.push_back(operand(id));
    types.push_back(type_text(graph.tensor(id)));
  }
  for (const TensorId id : op.inputs) operands.push_back(operand(id));
  while (!operands.empty() && operands.back() == "_") operands.pop_back();
  const std::string path = graph.scope_path(op.scope);
  return fmt::format("{} = {}{}{}{} : {}  # {}{}{}", fmt::join(results, ", "), def(op.code).name,
                     operands.empty() ? "" : " ", fmt::join(operands, ", "), attrs_text(op), fmt::join(types, ", "),
                     op.name, path.empty() ? "" : " ", path);
}

}  // namespace

std::string print(const Graph& graph) {
  std::string text = fmt::format("graph {}\n", graph.name);
  for (const TensorId id : graph.inputs) {
    const Tensor& t = graph.tensor(id);
    text += fmt::format("  %{} = input {} : {}", id, t.name, type_text(t));
    text += t.batch_dim < 0 ? " whole\n" : fmt::format(" batch {}\n", t.batch_dim);
  }
  for (size_t i = 0; i < graph.tensors.size(); ++i)
    if (graph.tensors[i].kind == TensorKind::kStep)
      text += fmt::format("  %{} = step {} : {}\n", i, graph.tensors[i].name, type_text(graph.tensors[i]));
  for (const Variable& v : graph.variables) text += "  " + variable_text(graph, v) + "\n";
  for (const Op& op : graph.ops) text += "  " + op_text(graph, op) + "\n";
  for (const NamedTensor& g : graph.gradients) text += fmt::format("  gradient {} = %{}\n", g.name, g.tensor);
  for (const NamedTensor& output : graph.outputs)
    text += fmt::format("  output {} = %{}\n", output.name, output.tensor);
  if (graph.training.loss != kNone) text += fmt::format("  loss = %{}\n", graph.training.loss);
  return text;
}

}  // namespace whale
