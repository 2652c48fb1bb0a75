#include "parallel/task_graph.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "parallel/shares.h"
#include "parallel/strategy.h"

namespace whale {
namespace {

// What is not built yet says so by name; the mechanism below does not depend on it.
void check_supported(const Scope& scope, std::string_view path) {
  if (scope.kind != ScopeKind::kReplica)
    throw unimplemented("scope '{}' ({}) is not implemented yet; replica is", to_string(scope), path)
        .at_scope(std::string(path));
  if (scope.by == "micro_batch")
    throw unimplemented("scope '{}' ({}): by=micro_batch is not implemented yet; by=sample is", to_string(scope), path)
        .at_scope(std::string(path));
  if (!scope.layout.empty() && scope.layout != "all")
    throw unimplemented("scope '{}' ({}): layout={} is not implemented yet; layout=all is", to_string(scope), path,
                        scope.layout)
        .at_scope(std::string(path));
}

std::vector<Scope> nest_of(const Graph& graph, ScopeId id) {
  std::vector<Scope> nest;
  for (; id > 0; id = graph.scopes[static_cast<size_t>(id)].parent) {
    const Scope& scope = graph.scopes[static_cast<size_t>(id)];
    if (scope.kind != ScopeKind::kName && scope.kind != ScopeKind::kRoot) nest.push_back(scope);
  }
  std::reverse(nest.begin(), nest.end());
  return nest;
}

// `replica` with everything left out: takes the parameters written elsewhere in the model or its strategy.
bool is_bare(const std::vector<Scope>& nest) { return nest.size() == 1 && to_string(nest[0]) == "replica"; }

}  // namespace

int64_t Mesh::size() const {
  int64_t n = 1;
  for (const Axis& axis : axes) n *= axis.size;
  return n;
}

std::vector<int64_t> Mesh::coordinates(int64_t device) const {
  std::vector<int64_t> out(axes.size());
  for (size_t a = axes.size(); a-- > 0; device /= axes[a].size) out[a] = device % axes[a].size;
  return out;
}

std::vector<double> Mesh::device_shares() const {
  std::vector<double> out(static_cast<size_t>(size()), 1.0);
  for (size_t d = 0; d < out.size(); ++d) {
    const std::vector<int64_t> at = coordinates(static_cast<int64_t>(d));
    for (size_t a = 0; a < axes.size(); ++a)
      if (!axes[a].shares.empty()) out[d] *= axes[a].shares[static_cast<size_t>(at[a])];
  }
  return out;
}

Mesh resolve_mesh(std::vector<Scope>& nest, int64_t devices, std::string_view path) {
  int64_t needed = 1;
  for (Scope& scope : nest) {
    check_supported(scope, path);
    const auto weights = static_cast<int64_t>(scope.shares.size());
    if (weights && scope.count && weights != scope.count)
      throw invalid("scope '{}' ({}): shares has {} entries, expected {}, one for each replica", to_string(scope), path,
                    weights, scope.count)
          .at_scope(std::string(path));
    if (weights) {
      scope.count = weights;
      try {
        round_shares(1, scope.shares);
      } catch (const Error& e) {
        throw invalid("scope '{}' ({}): {}", to_string(scope), path, e.message()).at_scope(std::string(path));
      }
    }
    if (scope.count > devices)
      needed = scope.count;  // and the product does not overflow
    else if (scope.count)
      needed *= scope.count;
    if (needed > devices) break;
  }
  // The outermost scope without a count takes what the others leave; further ones need one device.
  for (Scope& scope : nest) {
    if (scope.count || needed > devices) continue;
    scope.count = devices / needed;
    needed *= scope.count;
  }
  if (needed != devices) {
    const char* hint =
        needed > devices
            ? "give more devices or a smaller count"
            : "devices left idle are not allowed: leave the count out, give a matching count, or nest scopes";
    throw invalid("scope '{}' ({}) wants {} device(s), {} are there; {}", to_string(nest), path, needed, devices, hint)
        .at_scope(std::string(path));
  }
  Mesh mesh;
  for (const Scope& scope : nest)
    mesh.axes.push_back({.name = name_of(scope.kind), .size = scope.count, .shares = scope.shares});
  return mesh;
}

std::vector<TaskGraph> form_task_graphs(const Graph& graph, int64_t devices, std::string_view strategy) {
  if (strategy.empty()) strategy = graph.default_strategy;
  const std::vector<Scope> otherwise = parse_strategy(strategy.empty() ? "replica" : strategy);
  std::map<ScopeId, std::vector<Scope>> nests;
  std::vector<Scope> explicit_nest = otherwise;  // what a bare `replica` means here
  for (const Op& op : graph.ops) {
    const auto [at, fresh] = nests.try_emplace(op.scope);
    if (!fresh) continue;
    at->second = nest_of(graph, op.scope);
    if (is_bare(explicit_nest) && !at->second.empty()) explicit_nest = at->second;
  }
  std::map<std::string, size_t> leaf_of;  // like nests are one TaskGraph
  std::vector<TaskGraph> out;
  const auto leaf = [&](ScopeId scope, std::vector<Scope> nest) {
    TaskGraph task{.nest = std::move(nest), .path = graph.scope_path(scope), .ops = {}, .mesh = {}};
    if (task.nest.empty()) task.nest = otherwise, task.path = "default strategy";
    if (is_bare(task.nest)) task.nest = explicit_nest;
    task.mesh = resolve_mesh(task.nest, devices, task.path);
    const auto [known, fresh] = leaf_of.try_emplace(to_string(task.nest), out.size());
    if (fresh) out.push_back(std::move(task));
    return known->second;
  };
  std::map<ScopeId, size_t> index;
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const ScopeId scope = graph.ops[i].scope;
    auto found = index.find(scope);
    if (found == index.end()) found = index.emplace(scope, leaf(scope, nests[scope])).first;
    out[found->second].ops.push_back(static_cast<OpId>(i));
  }
  if (out.empty()) leaf(0, {});
  return out;
}

}  // namespace whale
