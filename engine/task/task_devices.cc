#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "task/strategy.h"
#include "task/task_parts.h"

namespace whale {

// What each stage needs: written on it, or the product of its scopes; stages that do not say share what is left.
Ints count_devices(const TaskLeaves& leaves, const TaskGraphs& tasks, const TaskLeaf& any, size_t meshes,
                   int64_t devices, const std::string& empty) {
  Ints out(meshes, 1);
  std::vector<char> open(meshes, 1);
  for (const auto& [scope, l] : leaves.of_scope) {
    const TaskLeaf& leaf = leaves.list[l];
    if (mesh_of(tasks, scope) < 0 || !leaf.staged()) continue;
    const auto mesh = static_cast<size_t>(mesh_of(tasks, scope));
    bool complete = true;
    const int64_t inner = product(leaf.nest, leaf.inner(), leaf.nest.size(), complete);
    const int64_t given = leaf.stage != SIZE_MAX ? leaf.nest[leaf.stage].count : 0;
    if (given || complete) open[mesh] = 0;
    out[mesh] = std::max(out[mesh], given ? given : inner);
  }
  bool complete = true;
  const int64_t outer = product(any.nest, 0, any.outer(), complete);
  const int64_t opened = std::count(open.begin(), open.end(), 1);
  if (complete && opened) {
    int64_t left = devices / outer;
    for (size_t s = 0; s < meshes; ++s) left -= open[s] ? 0 : out[s];
    for (size_t s = 0, k = 0; s < meshes; ++s)
      if (open[s]) out[s] = std::max<int64_t>(1, left / opened + (static_cast<int64_t>(k++) < left % opened));
  }
  const int64_t sum = std::accumulate(out.begin(), out.end(), int64_t{0}), groups = devices / sum;
  if (groups * sum != devices || (complete && groups != outer))
    refuse(any, fmt::format(
                    "wants {} device(s) ({} around a pipeline whose {} stage(s) have [{}]), {} are there; change the "
                    "number of devices, or leave a count out{}",
                    sum * outer, outer, meshes, fmt::join(out, ", "), devices, empty));
  return out;
}

TaskLeaves with_counts(TaskLeaves leaves, const TaskGraphs& tasks, const Ints& stage_devices, int64_t devices) {
  const std::vector<TaskLeaf>& list = leaves.list;
  if (std::none_of(list.begin(), list.end(), [](const TaskLeaf& leaf) { return leaf.staged(); })) {
    for (TaskLeaf& leaf : leaves.list) fill_counts(leaf, 0, leaf.nest.size(), devices);
    return leaves;
  }
  const int64_t groups = devices / std::accumulate(stage_devices.begin(), stage_devices.end(), int64_t{0});
  for (TaskLeaf& leaf : leaves.list)
    if (leaf.staged()) fill_counts(leaf, 0, leaf.outer(), groups);
  const std::vector<TaskLeaf> open = leaves.list;
  std::map<std::pair<size_t, int64_t>, size_t> filled;  // (leaf, devices of the stage)
  std::set<size_t> taken;
  for (auto& [scope, l] : leaves.of_scope) {
    if (mesh_of(tasks, scope) < 0 || !list[l].staged()) continue;
    const int64_t there = stage_devices[mesh_of(tasks, scope)];
    const auto [at, fresh] = filled.try_emplace({l, there}, l);
    if (fresh) {
      if (!taken.insert(l).second) {
        at->second = list.size();
        leaves.list.push_back(open[l]);
      }
      TaskLeaf& leaf = leaves.list[at->second];
      if (leaf.inner() < leaf.nest.size()) fill_counts(leaf, leaf.inner(), leaf.nest.size(), there);
      if (leaf.stage != SIZE_MAX) leaf.nest[leaf.stage].count = there;
    }
    l = at->second;
  }
  for (TaskLeaf& leaf : leaves.list)
    if (leaf.pipeline != SIZE_MAX) leaf.nest[leaf.pipeline].count = std::ssize(stage_devices);
  return leaves;
}

// One row, or one for each position along the axes outside.
static void check_shares(const Mesh& mesh, const TaskLeaf& leaf) {
  int64_t positions = 1;
  for (const MeshAxis& axis : mesh.axes) {
    const auto n = static_cast<int64_t>(axis.shares.size());
    if (n > axis.size && n != axis.size * positions)
      throw invalid(
          "strategy '{}': shares of axis '{}' has {} rows of {}, expected {}", brief(to_string(leaf.nest)), axis.name,
          n / axis.size, axis.size,
          positions == 1 ? "one" : fmt::format("one, or {}: one for each position of the scopes around it", positions));
    positions *= axis.size;
  }
}

std::vector<Mesh> make_meshes(const TaskAxes& axes, const TaskLeaf& leaf, const Ints& stage_devices,
                              const std::vector<int32_t>& order) {
  const auto devices = std::ssize(order);
  const int64_t sum = std::accumulate(stage_devices.begin(), stage_devices.end(), int64_t{0});
  int64_t offset = 0;
  std::vector<Mesh> out;
  for (size_t s = 0; s < axes.stages.size(); ++s) {
    const StageAxes& stage = axes.stages[s];
    Mesh mesh;
    mesh.axes = axes.outer.axes;
    for (const std::string& name : axes.common) mesh.axes.push_back({name, 1, {}, {}});
    for (size_t a = 0; a < stage.axes.size(); ++a) mesh.axes[stage.place[a]] = stage.axes[a];
    check_shares(mesh, leaf);
    int64_t size = 1, pipelines = 1;
    for (const MeshAxis& axis : mesh.axes) size *= axis.size;
    for (const MeshAxis& axis : axes.outer.axes) pipelines *= axis.size;
    // Position by position; where groups are of different sizes, nobody is at some of them.
    bool fits = true;
    int64_t group = 0, wanted = 0;  // by the scopes inside
    for (int64_t p = 0, k = 0; p < pipelines && fits; ++p) {
      int64_t next = 0;
      wanted = 0;
      for (int64_t at = k; at < k + size / pipelines; ++at) wanted += mesh.has_position(at);
      for (const int64_t end = k + size / pipelines; k < end && fits; ++k) {
        const bool there = mesh.has_position(k);
        fits = !there || (next < stage_devices[s] && group < devices / sum);
        mesh.devices.push_back(there && fits ? order[group * sum + offset + next] : kNone);
        next += there;
      }
      fits &= next == 0 || next == stage_devices[s];
      group += next > 0;
    }
    if (!fits || group * sum != devices)
      refuse(leaf, fmt::format(
                       "gives stage {} {} device(s), the scopes inside use {}; put replica or split into the stage, or "
                       "change the number of devices ({})",
                       s, stage_devices[s], wanted, devices));
    offset += stage_devices[s];
    out.push_back(std::move(mesh));
  }
  return out;
}

}  // namespace whale
