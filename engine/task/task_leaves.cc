#include <algorithm>

#include "base/error.h"
#include "task/shares.h"
#include "task/strategy.h"
#include "task/task_former.h"

namespace whale {

[[noreturn]] void refuse(const std::vector<Scope>& nest, std::string_view path, const std::string& what) {
  throw invalid("scope '{}' ({}) {}", to_string(nest), path, what).at_scope(std::string(path));
}

namespace {

void check_scope(const Scope& scope, std::string_view path) {
  const auto later = [&](const std::string& what, const char* instead) {
    throw unimplemented("scope '{}' ({}): {} is not implemented yet; {} is", to_string(scope), path, what, instead)
        .at_scope(std::string(path));
  };
  if (scope.kind == ScopeKind::kCluster && !scope.devices.empty())
    later("devices of a cluster", "a device list for the whole plan");
}

}  // namespace

TaskLeaf leaf_of(std::vector<Scope> nest, std::vector<ScopeId> ids, std::string path, bool annotated) {
  TaskLeaf leaf{.nest = {}, .ids = {}, .path = std::move(path), .annotated = annotated};
  for (size_t i = 0; i < nest.size(); ++i) {
    Scope& scope = nest[i];
    check_scope(scope, leaf.path);
    const auto weights = static_cast<int64_t>(scope.shares.size());
    if (weights && scope.count && weights % scope.count)
      throw invalid(
          "scope '{}' ({}): shares has {} entries, expected {}, one for each {}; change the list or the count",
          to_string(scope), leaf.path, weights, scope.count, scope.kind == ScopeKind::kSplit ? "way" : "replica")
          .at_scope(leaf.path);
    if (weights) {
      if (!scope.count) scope.count = weights;
      try {
        for (auto row = scope.shares.begin(); row != scope.shares.end(); row += scope.count)
          round_shares(1, {row, std::find(row, row + scope.count, kNoDevice)});
      } catch (const Error& e) {
        throw invalid("scope '{}' ({}): {}", to_string(scope), leaf.path, e.message()).at_scope(leaf.path);
      }
    }
    if (scope.kind == ScopeKind::kPipeline) {
      if (leaf.pipeline != SIZE_MAX) refuse(nest, leaf.path, "has a pipeline inside a pipeline; one is enough");
      leaf.pipeline = leaf.nest.size();
    }
    if (scope.kind == ScopeKind::kStage) {
      if (leaf.stage != SIZE_MAX) refuse(nest, leaf.path, "has a stage inside a stage; stages follow one another");
      leaf.stage = leaf.nest.size();
    }
    leaf.nest.push_back(scope);
    leaf.ids.push_back(ids[i]);
  }
  if (leaf.pipeline != SIZE_MAX && leaf.stage != SIZE_MAX && leaf.stage < leaf.pipeline)
    refuse(leaf.nest, leaf.path,
           "has a pipeline inside a stage; a pipeline is outside of its stages: pipeline > stage");
  if (leaf.pipeline != SIZE_MAX && leaf.stage != SIZE_MAX && leaf.stage != leaf.pipeline + 1)
    refuse(leaf.nest, leaf.path,
           "has scopes between pipeline and stage; put them around the pipeline or into the stage");
  check_layouts(leaf.nest, leaf.path);
  return leaf;
}

// Rows of shares: one, or one for each position of the scopes around it.
static int64_t rows_of(const Scope& scope) {
  return scope.count ? static_cast<int64_t>(scope.shares.size()) / scope.count : 0;
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

void fill_counts(std::vector<Scope>& nest, size_t from, size_t to, int64_t devices, std::string_view path) {
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
  refuse(nest, path, fmt::format("wants {} device(s), {} are there; {}", needed, devices, hint));
}

}  // namespace whale
