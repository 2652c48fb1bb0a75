#include <algorithm>

#include "base/error.h"
#include "cluster/shares.h"
#include "task/strategy.h"
#include "task/task_parts.h"

namespace whale {

namespace {

AxisRole role_of(ScopeKind kind) { return kind == ScopeKind::kSplit ? AxisRole::kSplit : AxisRole::kReplica; }

// The common refinement of the leaves' nests [from_i, to_i): scopes that share the devices cut them at the same places.
LeafAxes refine(const std::vector<const TaskLeaf*>& leaves, const std::vector<std::pair<size_t, size_t>>& ranges) {
  struct Level {
    const Scope* scope;
    int64_t left;
  };
  LeafAxes out;
  out.uses.resize(leaves.size());
  std::vector<std::vector<Level>> levels(leaves.size());
  std::vector<size_t> at(leaves.size());
  bool same = true;
  for (size_t l = 0; l < leaves.size(); ++l)
    for (size_t i = ranges[l].first; i < ranges[l].second; ++i)
      if (leaves[l]->nest[i].kind != ScopeKind::kCluster)
        levels[l].push_back({&leaves[l]->nest[i], leaves[l]->nest[i].count});
  for (size_t l = 1; l < leaves.size(); ++l) {
    same &= levels[l].size() == levels[0].size();
    for (size_t i = 0; same && i < levels[l].size(); ++i)
      same &= levels[l][i].left == levels[0][i].left && levels[l][i].scope->kind == levels[0][i].scope->kind;
  }
  if (!same)  // levels of one are no axis where the scopes differ
    for (auto& list : levels) std::erase_if(list, [](const Level& x) { return x.left == 1; });
  for (;;) {
    int64_t size = 0;
    size_t smallest = 0, shared = 0;  // the leaf whose scope is cut least, the one whose shares the axis has
    for (size_t l = 0; l < leaves.size(); ++l)
      if (at[l] < levels[l].size() && (!size || levels[l][at[l]].left < size))
        size = levels[l][at[l]].left, smallest = l;
    if (!size) break;
    MeshAxis axis{.name = {}, .size = size, .shares = {}, .state_shares = {}};
    std::vector<std::string> names;
    for (size_t l = 0; l < leaves.size(); ++l) {
      if (at[l] >= levels[l].size()) {
        out.uses[l].push_back({});
        continue;
      }
      Level& level = levels[l][at[l]];
      const bool part = level.scope->count != size;
      const bool unlike =
          !level.scope->shares.empty() && !axis.shares.empty() && !same_ratio(axis.shares, level.scope->shares, size);
      if (level.left % size || (part && !level.scope->shares.empty()) || unlike) {
        const TaskLeaf &other = *leaves[unlike ? shared : smallest], &own = *leaves[l];
        throw unimplemented(
            "scopes '{}' ({}) and '{}' ({}) share devices, but cut them at different places; give them counts of which "
            "one divides the other, and shares of one ratio",
            to_string(other.nest), other.path, to_string(own.nest), own.path)
            .at_scope(own.path);
      }
      if (!part && axis.shares.empty() && !level.scope->shares.empty()) axis.shares = level.scope->shares, shared = l;
      const std::string name = name_of(level.scope->kind);
      if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
      out.uses[l].push_back({role_of(level.scope->kind), level.scope->factor, level.scope->by == "micro_batch"});
      level.left /= size;
      if (level.left == 1 || size == 1) ++at[l];
    }
    std::sort(names.begin(), names.end());
    axis.name = fmt::format("{}", fmt::join(names, "|"));
    out.axes.push_back(std::move(axis));
  }
  return out;
}

}  // namespace

TaskAxes find_axes(const TaskLeaves& leaves, const TaskGraphs& tasks, size_t meshes) {
  TaskAxes out;
  out.stages.resize(meshes);
  const TaskLeaf* inside = nullptr;  // of the pipeline
  for (const auto& [scope, l] : leaves.of_scope) {
    const int32_t mesh = mesh_of(tasks, scope);
    if (mesh < 0) continue;
    auto& list = out.stages[mesh].leaves;
    if (std::find(list.begin(), list.end(), l) == list.end()) list.push_back(l);
  }
  for (const TaskLeaf& leaf : leaves.list)
    if (leaf.staged()) inside = &leaf;
  if (inside) out.outer = refine({inside}, {{0, inside->outer()}});
  for (StageAxes& stage : out.stages) {
    std::vector<const TaskLeaf*> list;
    std::vector<std::pair<size_t, size_t>> ranges;
    for (const size_t l : stage.leaves) {
      const TaskLeaf& leaf = leaves.list[l];
      list.push_back(&leaf);
      const bool joins = inside && !leaf.staged();  // unannotated: no say
      ranges.emplace_back(joins ? leaf.nest.size() : leaf.inner(), leaf.nest.size());
    }
    static_cast<LeafAxes&>(stage) = refine(list, ranges);
  }
  // The stages' own axes in one order: matched by name, what is new comes at the end.
  for (StageAxes& stage : out.stages) {
    size_t from = 0;
    for (const MeshAxis& axis : stage.axes) {
      size_t at = from;
      while (at < out.common.size() && out.common[at] != axis.name) ++at;
      if (at == out.common.size()) out.common.push_back(axis.name);
      stage.place.push_back(out.outer.axes.size() + at);
      from = at + 1;
    }
  }
  if (out.common.empty() && out.outer.axes.empty()) out.common.push_back("replica");
  return out;
}

}  // namespace whale
