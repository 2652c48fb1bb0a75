#include <fmt/format.h>
#include <unordered_set>

#include "grad/passes.h"

namespace whale {
namespace {

using Names = std::unordered_set<std::string>;

void take(Names& taken, std::string& name) {
  const std::string stem = name;
  for (int n = 2; !taken.insert(name).second; ++n) name = fmt::format("{}.{}", stem, n);
}

}  // namespace

void name_apart(Graph& graph) {
  Names ops, values;
  for (const Tensor& t : graph.tensors)
    if (t.kind != TensorKind::kValue) values.insert(t.name);
  for (Op& op : graph.ops) take(ops, op.name);
  for (Tensor& t : graph.tensors)
    if (t.kind == TensorKind::kValue) take(values, t.name);
}

}  // namespace whale
