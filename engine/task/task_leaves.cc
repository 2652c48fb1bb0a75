#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "cluster/shares.h"
#include "task/strategy.h"
#include "task/task_parts.h"

namespace whale {

[[noreturn]] void refuse(const TaskLeaf& leaf, const std::string& what) {
  throw invalid("scope '{}' ({}) {}", brief(to_string(leaf.nest)), leaf.path, what).at_scope(leaf.path);
}

namespace {

bool is_bare(const std::vector<Scope>& nest) { return nest.size() == 1 && to_string(nest[0]) == "replica"; }

void check_shares(Scope& scope, const std::string& path) {
  const auto weights = static_cast<int64_t>(scope.shares.size());
  if (!weights) return;
  if (scope.count && weights % scope.count)
    throw invalid("scope '{}' ({}): shares has {} entries, expected {}, one for each {}; change the list or the count",
                  to_string(scope), path, weights, scope.count, scope.kind == ScopeKind::kSplit ? "way" : "replica")
        .at_scope(path);
  if (!scope.count) scope.count = weights;
  try {
    for (auto row = scope.shares.begin(); row != scope.shares.end(); row += scope.count)
      round_shares(1, {row, std::find(row, row + scope.count, kNoDevice)});
  } catch (const Error& e) {
    throw invalid("scope '{}' ({}): {}", brief(to_string(scope)), path, e.message()).at_scope(path);
  }
}

TaskLeaf leaf_of(std::vector<Scope> nest, std::vector<ScopeId> ids, std::string path, bool annotated) {
  TaskLeaf leaf{.nest = std::move(nest), .ids = std::move(ids), .path = std::move(path), .annotated = annotated};
  for (size_t i = 0; i < leaf.nest.size(); ++i) {
    Scope& scope = leaf.nest[i];
    if (scope.kind == ScopeKind::kCluster && !scope.devices.empty())
      throw unimplemented(
          "scope '{}' ({}): devices of a cluster is not implemented yet; a device list for the whole plan is",
          brief(to_string(scope)), leaf.path)
          .at_scope(leaf.path);
    if (!scope.nests.empty())
      throw unimplemented(
          "scope '{}' ({}): unlike replicas are around the whole model and nothing is around them or beside them; put "
          "what is inside a replica into its place in the list",
          brief(to_string(scope)), leaf.path)
          .at_scope(leaf.path);
    check_shares(scope, leaf.path);
    if (scope.kind == ScopeKind::kPipeline) {
      if (leaf.pipeline != SIZE_MAX) refuse(leaf, "has a pipeline inside a pipeline; one is enough");
      leaf.pipeline = i;
    }
    if (scope.kind == ScopeKind::kStage) {
      if (leaf.stage != SIZE_MAX) refuse(leaf, "has a stage inside a stage; stages follow one another");
      leaf.stage = i;
    }
  }
  if (leaf.pipeline != SIZE_MAX && leaf.stage != SIZE_MAX && leaf.stage < leaf.pipeline)
    refuse(leaf, "has a pipeline inside a stage; a pipeline is outside of its stages: pipeline > stage");
  if (leaf.pipeline != SIZE_MAX && leaf.stage != SIZE_MAX && leaf.stage != leaf.pipeline + 1)
    refuse(leaf, "has scopes between pipeline and stage; put them around the pipeline or into the stage");
  check_device_orders(leaf);
  return leaf;
}

// The innermost one whose name is a part of the scope's path.
const StrategyClause* clause_of(const Graph& graph, const std::vector<StrategyClause>& clauses, ScopeId scope) {
  if (std::ranges::all_of(clauses, &std::string::empty, &StrategyClause::name)) return nullptr;
  std::vector<std::string> names;
  for (ScopeId id = scope; id > 0; id = graph.scopes[id].parent)
    if (const std::string& name = graph.scopes[id].name; !name.empty()) names.insert(names.begin(), name);
  for (size_t n = names.size(); n > 0; --n) {
    const std::string path =
        fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(n), "/"));
    for (const StrategyClause& clause : clauses)
      if (!clause.name.empty() && (clause.name == names[n - 1] || clause.name == path)) return &clause;
  }
  return nullptr;
}

// What a clause of the text says, inside of the pipeline that the text has for all other ops: where the clause names
// none, all ops are between the same borders of stages, whose devices it divides in its own way.
std::vector<Scope> in_pipeline(const StrategyClause& clause, const std::vector<Scope>& otherwise) {
  const auto staged = [](const Scope& s) { return s.kind == ScopeKind::kPipeline || s.kind == ScopeKind::kStage; };
  if (std::ranges::any_of(clause.nest, staged)) return clause.nest;
  const auto at = std::ranges::find(otherwise, ScopeKind::kPipeline, &Scope::kind);
  if (at == otherwise.end() || std::ranges::any_of(at + 1, otherwise.end(), staged)) return clause.nest;
  std::vector<Scope> out(otherwise.begin(), at + 1);
  out.insert(out.end(), clause.nest.begin(), clause.nest.end());
  return out;
}

// Rows of shares: one, or one for each position of the scopes around it.
int64_t rows_of(const Scope& scope) {
  return scope.count ? static_cast<int64_t>(scope.shares.size()) / scope.count : 0;
}

}  // namespace

TaskLeaves find_leaves(const Graph& graph, std::string_view strategy, int64_t devices) {
  const bool local = strategy == "local";
  if (local && devices != 1)
    throw invalid(
        "strategy 'local' ignores all scopes and runs on one device, {} are there; give one device, such as cpu:1",
        devices);
  const std::vector<StrategyClause> clauses = parse_clauses(strategy.empty() || local ? "replica" : strategy);
  std::vector<Scope> otherwise = parse_strategy("replica");
  for (const StrategyClause& clause : clauses)
    if (clause.name.empty()) otherwise = clause.nest;
  std::map<ScopeId, std::pair<std::vector<Scope>, std::vector<ScopeId>>> nests;
  std::vector<Scope> explicit_nest = otherwise;
  std::string explicit_path = "default strategy";
  for (const Op& op : graph.ops) {
    const auto [at, fresh] = nests.try_emplace(op.scope);
    if (!fresh) continue;
    for (ScopeId id = local ? 0 : op.scope; id > 0; id = graph.scopes[id].parent) {
      const Scope& scope = graph.scopes[id];
      if (scope.kind == ScopeKind::kName || scope.kind == ScopeKind::kRoot) continue;
      at->second.first.insert(at->second.first.begin(), scope);
      at->second.second.insert(at->second.second.begin(), id);
    }
    const std::vector<Scope>& found = at->second.first;
    if (is_bare(explicit_nest) && !found.empty() &&
        std::all_of(found.begin(), found.end(), [](const Scope& s) { return s.kind == ScopeKind::kReplica; })) {
      explicit_nest = found;
      explicit_path = graph.scope_path(op.scope) + ", and ops without a scope";
    }
  }
  if (nests.empty()) nests.try_emplace(0);
  if (!local) check_clauses(graph, clauses);
  TaskLeaves leaves;
  std::map<std::string, size_t> known;
  std::optional<size_t> plain;  // of scopes that nobody annotated
  for (auto& [scope, found] : nests) {
    auto& [nest, ids] = found;
    std::string path = nest.empty() ? "default strategy" : graph.scope_path(scope);
    if (nest.empty())
      if (const StrategyClause* clause = clause_of(graph, clauses, scope)) {
        nest = in_pipeline(*clause, otherwise);
        path = clause->name;
        // A pipeline written in several clauses is one; each clause is a stage of its own.
        for (const Scope& s : nest)
          ids.push_back(s.kind == ScopeKind::kStage ? -10 - static_cast<ScopeId>(clause - clauses.data()) : kNone);
      }
    const bool annotated = !nest.empty();
    if (!annotated && plain) {
      leaves.of_scope.add(scope, *plain);
      continue;
    }
    if (nest.empty()) nest = otherwise, ids.assign(nest.size(), kNone);
    if (is_bare(nest)) {
      nest = explicit_nest, ids.assign(nest.size(), kNone);
      if (!annotated) path = explicit_path;
    }
    std::string key = to_string(nest);
    for (size_t i = 0; i < nest.size(); ++i)
      if (nest[i].kind == ScopeKind::kStage || nest[i].kind == ScopeKind::kPipeline) key += fmt::format("#{}", ids[i]);
    const auto [at, fresh] = known.try_emplace(key, leaves.list.size());
    if (fresh) leaves.list.push_back(leaf_of(nest, ids, std::move(path), annotated));
    leaves.of_scope.add(scope, at->second);
    if (!annotated) plain = at->second;
  }
  return leaves;
}

int64_t product(const std::vector<Scope>& nest, size_t from, size_t to, bool& complete) {
  int64_t n = 1;
  for (size_t i = from; i < to; ++i) {
    if (nest[i].kind == ScopeKind::kCluster) continue;
    if (!nest[i].count) complete = false;
    // With a row for each group, groups may be of different sizes.
    if (const int64_t gaps = std::count(nest[i].shares.begin(), nest[i].shares.end(), kNoDevice);
        gaps && rows_of(nest[i]) == n) {
      n = n * nest[i].count - gaps;
      continue;
    }
    n = std::min<int64_t>(n * std::max<int64_t>(nest[i].count, 1), int64_t{1} << 40);
  }
  return n;
}

void fill_counts(TaskLeaf& leaf, size_t from, size_t to, int64_t devices) {
  std::vector<Scope>& nest = leaf.nest;
  // As many groups as there are rows for them.
  for (size_t i = from, open = to; i < to; ++i) {
    bool given = true;
    const int64_t rows = rows_of(nest[i]), others = product(nest, from, i, given);
    if (rows > 1 && !given && open < to && rows % others == 0) nest[open].count = rows / others;
    if (!nest[i].count && nest[i].kind != ScopeKind::kCluster) open = i;
  }
  bool complete = true;
  int64_t needed = product(nest, from, to, complete);
  for (size_t i = from; i < to; ++i) {
    Scope& scope = nest[i];
    if (scope.count || scope.kind == ScopeKind::kCluster) continue;
    scope.count = needed > devices ? 1 : devices / needed;
    needed *= scope.count;
  }
  if (needed == devices) return;
  const char* hint = needed > devices
                         ? "give more devices or a smaller count"
                         : "devices left idle are not allowed: leave the count out, give a matching count, "
                           "or nest scopes";
  refuse(leaf, fmt::format("wants {} device(s), {} are there; {}", needed, devices, hint));
}

}  // namespace whale
