#include <fmt/format.h>
#include <algorithm>
#include <set>

#include "base/philox.h"
#include "grad/passes.h"

namespace whale {
namespace {

// The first of each name keeps it. Sorted by hashes: nearly all names are taken once, and no set of them is made.
void tell_apart(const std::vector<std::string*>& names) {
  std::vector<std::pair<uint64_t, size_t>> order;
  order.reserve(names.size());
  for (size_t i = 0; i < names.size(); ++i) order.emplace_back(hash_name(*names[i]), i);
  std::sort(order.begin(), order.end());
  const auto is_there = [&](const std::string& name) {
    const auto at = std::lower_bound(order.begin(), order.end(), std::pair(hash_name(name), size_t{0}));
    return at != order.end() && at->first == hash_name(name);
  };
  std::set<std::string> fresh;
  for (size_t k = 1; k < order.size(); ++k) {
    if (order[k].first != order[k - 1].first) continue;
    std::string& name = *names[order[k].second];
    const std::string stem = name;
    int n = 2;
    do name = fmt::format("{}.{}", stem, n++);
    while (is_there(name) || !fresh.insert(name).second);
  }
}

}  // namespace

void name_apart(Graph& graph) {
  std::vector<std::string*> ops, values;
  for (Op& op : graph.ops) ops.push_back(&op.name);
  // What is fed and what outlives the step keeps its name; step scalars are known by theirs, whatever else has it too.
  for (Tensor& t : graph.tensors)
    if (t.kind != TensorKind::kValue && t.kind != TensorKind::kStep) values.push_back(&t.name);
  for (Tensor& t : graph.tensors)
    if (t.kind == TensorKind::kValue) values.push_back(&t.name);
  tell_apart(ops), tell_apart(values);
}

}  // namespace whale
