#include "compile/device_orders.h"

#include <algorithm>
#include <numeric>

#include "task/strategy.h"

namespace whale {
namespace {

// Scopes of a nest that is for the whole model and says no order of devices.
bool leaves_order_open(const Graph& graph, const std::string& strategy) {
  const bool ordered = std::ranges::find(graph.scopes, ScopeKind::kCluster, &Scope::kind) != graph.scopes.end();
  if (is_annotated(graph) || ordered || strategy.empty()) return false;
  const std::vector<StrategyClause> clauses = parse_clauses(strategy);
  return clauses.size() == 1 && clauses[0].name.empty() && std::ranges::none_of(clauses[0].nest, [](const Scope& s) {
           return s.kind == ScopeKind::kCluster || !s.device_order.empty() || !s.nests.empty();
         });
}

}  // namespace

std::vector<DeviceOrder> orders_by_memory(const Graph& graph, const CompileOptions& options, const Plan& plan) {
  const std::string& strategy = options.strategy.empty() ? graph.default_strategy : options.strategy;
  const auto memory_of = [&](int32_t d) { return plan.devices[d].memory_bytes; };
  std::vector<int32_t> listed(plan.devices.size());
  std::iota(listed.begin(), listed.end(), 0);
  const bool alike = std::ranges::all_of(listed, [&](int32_t d) { return memory_of(d) == memory_of(0); });
  if (plan.meshes.size() < 2 || alike || !leaves_order_open(graph, strategy)) return {};
  std::vector<DeviceOrder> out;
  for (const bool rising : {false, true}) {
    std::vector<int32_t> sorted = listed;
    std::ranges::stable_sort(sorted, [&](int32_t a, int32_t b) {
      return rising ? memory_of(a) < memory_of(b) : memory_of(a) > memory_of(b);
    });
    // A stage after the other, over all pipelines.
    std::vector<int32_t> order(listed.size());
    size_t next = 0;
    for (const Mesh& mesh : plan.meshes)
      for (const int32_t at : mesh.devices)
        if (at >= 0) order[at] = sorted[next++];
    if (order == listed) continue;
    out.push_back({rising ? "smallest memory first" : "largest memory first",
                   fmt::format("cluster(device_order=[{}]) > {}", fmt::join(order, ","), strategy)});
  }
  return out;
}

}  // namespace whale
