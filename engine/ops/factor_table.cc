#include "ops/factor_table.h"

#include <functional>

namespace whale {

Factors factors_of(const Graph& graph, const Op& op) {
  const OpDef& d = def(op.code);
  return d.factors ? d.factors(view_of(graph, op)) : Factors{};
}

namespace {

void mix(size_t& hash, size_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15 ^ hash >> 32; }

void mix(size_t& hash, const Attr& attr) {
  const auto list = [&](const auto& values) {
    for (const auto& v : values) mix(hash, std::hash<std::decay_t<decltype(v)>>{}(v));
  };
  if (const auto* ints = std::get_if<Ints>(&attr)) return list(*ints);
  if (const auto* floats = std::get_if<std::vector<double>>(&attr)) return list(*floats);
  if (const auto* text = std::get_if<std::string>(&attr)) return mix(hash, std::hash<std::string>{}(*text));
  if (const auto* real = std::get_if<double>(&attr)) return mix(hash, std::hash<double>{}(*real));
  if (const auto* flag = std::get_if<bool>(&attr)) return mix(hash, size_t{*flag});
  mix(hash, static_cast<size_t>(std::get<int64_t>(attr)));
}

size_t hash_of(const Graph& graph, const Op& op) {
  size_t hash = static_cast<size_t>(op.code);
  for (const auto* ids : {&op.inputs, &op.outputs})
    for (const TensorId id : *ids) {
      mix(hash, id == kNone ? 0 : 1 + static_cast<size_t>(graph.tensor(id).dtype));
      if (id == kNone) continue;
      for (const int64_t n : graph.tensor(id).dims) mix(hash, static_cast<size_t>(n));
    }
  for (const auto& [name, value] : op.attrs) mix(hash, value);
  return hash;
}

bool is_type(const TensorType& type, const Tensor& tensor) {
  return type.dtype == tensor.dtype && type.dims == tensor.dims;
}

}  // namespace

bool FactorTable::is_of(const Form& form, const Graph& graph, const Op& op) {
  if (form.code != op.code || form.inputs.size() != op.inputs.size() || form.outputs.size() != op.outputs.size())
    return false;
  for (size_t i = 0; i < op.inputs.size(); ++i)
    if (form.present[i] != (op.inputs[i] != kNone) ||
        (form.present[i] && !is_type(form.inputs[i], graph.tensor(op.inputs[i]))))
      return false;
  for (size_t o = 0; o < op.outputs.size(); ++o)
    if (!is_type(form.outputs[o], graph.tensor(op.outputs[o]))) return false;
  return form.attrs == op.attrs;
}

const Factors& FactorTable::of(const Graph& graph, const Op& op) {
  static const Factors kNothing;
  const OpDef& d = def(op.code);
  if (!d.factors) return kNothing;
  const size_t hash = hash_of(graph, op);
  const auto [first, last] = forms_.equal_range(hash);
  for (auto at = first; at != last; ++at)
    if (is_of(at->second, graph, op)) return at->second.factors;
  OpView view = view_of(graph, op);
  Factors factors = d.factors(view);
  return forms_
      .emplace(hash, Form{op.code, op.attrs, std::move(view.present), std::move(view.inputs), std::move(view.outputs),
                          std::move(factors)})
      ->second.factors;
}

}  // namespace whale
