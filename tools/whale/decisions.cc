#include "decisions.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <nlohmann/json.hpp>

namespace tool {

std::vector<Decision> decisions_of(const std::string& graph_json) {
  const auto graph = nlohmann::json::parse(graph_json);
  std::vector<Decision> out;
  for (const auto& op : graph.at("ops")) {
    const std::string name = op.at("op");
    if (name != "moe_gate" && name != "top_k" && name != "argmax") continue;
    const auto& attributes = op.at("attributes");
    const std::string scores = graph.at("tensors").at(op.at("inputs").at(0).get<size_t>()).at("name");
    if (std::any_of(out.begin(), out.end(), [&](const Decision& d) { return d.scores == scores; })) continue;
    out.push_back({name, scores, attributes.value("k", int64_t{1}), attributes.value("axis", int64_t{-1})});
  }
  return out;
}

void compare_decisions(const Decision& decision, const Values& plan, const Values& single, Decided& decided) {
  const auto rank = static_cast<int64_t>(single.dims.size());
  if (rank == 0 || plan.data.size() != single.data.size()) return;
  const auto axis = static_cast<size_t>(decision.axis < 0 ? decision.axis + rank : decision.axis);
  const auto n = static_cast<size_t>(single.dims[axis]);
  size_t inner = 1;
  for (size_t d = axis + 1; d < single.dims.size(); ++d) inner *= static_cast<size_t>(single.dims[d]);
  if (n == 0 || inner == 0) return;
  double largest = 0;
  for (const double x : single.data) largest = std::max(largest, std::abs(x));
  for (size_t i = 0; i < single.data.size(); ++i) {
    const double gap = std::abs(plan.data[i] - single.data[i]);
    decided.scores = std::max(decided.scores, largest > 0 ? gap / largest : gap);
  }
  const size_t k = std::min(static_cast<size_t>(std::max<int64_t>(decision.k, 1)), n);
  std::vector<size_t> a(n), b(n);
  for (size_t row = 0; row < single.data.size() / n; ++row) {
    const size_t begin = row / inner * n * inner + row % inner;
    const auto order = [&](std::vector<size_t>& of, const std::vector<double>& x) {
      std::iota(of.begin(), of.end(), size_t{0});
      std::partial_sort(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(k), of.end(), [&](size_t i, size_t j) {
        const double xi = x[begin + i * inner], xj = x[begin + j * inner];
        return xi != xj ? xi > xj : i < j;
      });
    };
    order(a, plan.data), order(b, single.data);
    for (size_t c = 0; c < k; ++c) {
      ++decided.made;
      if (a[c] == b[c]) continue;
      ++decided.differ;
      const double gap = std::abs(single.data[begin + a[c] * inner] - single.data[begin + b[c] * inner]);
      const double margin = largest > 0 ? gap / largest : gap;
      if (!(margin <= decided.margin) || decided.worst.empty())
        decided.margin = margin, decided.worst = decision.scores;
    }
  }
}

}  // namespace tool
