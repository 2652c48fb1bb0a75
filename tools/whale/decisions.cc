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
    // top_k: the values, then their places.
    const size_t result = op.at("outputs").at(name == "top_k" ? 1 : 0);
    const Decision made{name, scores, graph.at("tensors").at(result).at("name"), attributes.value("k", int64_t{1}),
                        attributes.value("axis", int64_t{-1})};
    const auto same = std::find_if(out.begin(), out.end(),
                                   [&](const Decision& d) { return d.scores == scores && d.axis == made.axis; });
    if (same == out.end())
      out.push_back(made);
    else if (same->k < made.k)
      *same = made;
  }
  return out;
}

std::vector<std::string> names_of(const std::vector<Decision>& decisions) {
  std::vector<std::string> out;
  for (const Decision& d : decisions) out.push_back(d.scores);
  for (const Decision& d : decisions)
    if (!d.made.empty()) out.push_back(d.made);
  return out;
}

Seen seen(const std::vector<Decision>& decisions, size_t d, const std::vector<Values>& values, size_t first) {
  Seen out{&values[first + d], nullptr};
  size_t at = first + decisions.size();
  for (size_t before = 0; before < d; ++before) at += !decisions[before].made.empty();
  if (!decisions[d].made.empty()) out.made = &values[at];
  return out;
}

void compare_decisions(const Decision& decision, const Seen& of_plan, const Seen& of_one, bool rounded,
                       Decided& decided) {
  const Values &plan = *of_plan.scores, &single = *of_one.scores;
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
  const size_t ordered = std::min(k + 1, n);
  std::vector<size_t> a(n), b(n);
  for (size_t row = 0; row < single.data.size() / n; ++row) {
    const size_t begin = row / inner * n * inner + row % inner;
    const auto order = [&](std::vector<size_t>& of, const std::vector<double>& x) {
      std::iota(of.begin(), of.end(), size_t{0});
      std::partial_sort(of.begin(), of.begin() + static_cast<std::ptrdiff_t>(ordered), of.end(),
                        [&](size_t i, size_t j) {
                          const double xi = x[begin + i * inner], xj = x[begin + j * inner];
                          return xi != xj ? xi > xj : i < j;
                        });
    };
    order(a, plan.data), order(b, single.data);
    const auto tied = [&](const std::vector<size_t>& of, const std::vector<double>& x, size_t c) {
      const auto at = [&](size_t i) { return x[begin + of[i] * inner]; };
      return (c > 0 && at(c) == at(c - 1)) || (c + 1 < ordered && at(c) == at(c + 1));
    };
    const auto made_alike = [&](size_t c) {
      const Values *x = of_plan.made, *y = of_one.made;
      const size_t at = row * k + c;
      return x && y && at < std::min(x->data.size(), y->data.size()) && x->data[at] == y->data[at];
    };
    for (size_t c = 0; c < k; ++c) {
      ++decided.made;
      if (a[c] == b[c] && (!rounded || made_alike(c) || !(tied(a, plan.data, c) || tied(b, single.data, c)))) continue;
      ++decided.differ;
      const double gap = std::abs(single.data[begin + a[c] * inner] - single.data[begin + b[c] * inner]);
      const double margin = largest > 0 ? gap / largest : gap;
      if (!(margin <= decided.margin) || decided.worst.empty())
        decided.margin = margin, decided.worst = decision.scores;
    }
  }
}

}  // namespace tool
