#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "base/error.h"
#include "task/strategy.h"
#include "task/task_former.h"
#include "schedule/schedule.h"

namespace whale {

void TaskFormer::count_devices() {
  if (!staged_) {
    for (TaskLeaf& leaf : leaves_) fill_counts(leaf.nest, 0, leaf.nest.size(), devices_, leaf.path);
    stage_devices_ = {devices_};
    return;
  }
  physical_ = static_cast<size_t>(pipeline_.count);
  const PipelineSchedule shape{.name = {},
                               .shape = {static_cast<int>(physical_), 1, static_cast<int>(pipeline_.chunks)},
                               .placement = schedule_rule(pipeline_.schedule).placement,
                               .split_backward = false,
                               .devices = {}};
  for (int v = 0; v < static_cast<int>(virtual_stages_); ++v)
    out_.mesh_of_stage.push_back(site_at(shape, WorkKind::kForward, v, 0).device);
  count_stage_devices();
  fill_stage_counts();
}

// What each stage needs: written on it, or the product of its scopes; stages that do not say share what is left.
void TaskFormer::count_stage_devices() {
  stage_devices_.assign(physical_, 1);
  std::vector<char> open(physical_, 1);
  for (const auto& [scope, l] : leaf_of_scope_) {
    const TaskLeaf& leaf = leaves_[l];
    if (mesh_of(scope) < 0 || !leaf.staged()) continue;
    const auto mesh = static_cast<size_t>(mesh_of(scope));
    bool complete = true;
    const int64_t inner = product(leaf.nest, leaf.inner(), leaf.nest.size(), complete);
    const int64_t given = leaf.stage != SIZE_MAX ? leaf.nest[leaf.stage].count : 0;
    if (given || complete) open[mesh] = 0;
    stage_devices_[mesh] = std::max(stage_devices_[mesh], given ? given : inner);
  }
  TaskLeaf& any = leaves_[*staged_];
  bool complete = true;
  const int64_t outer = product(any.nest, 0, any.outer(), complete);
  const int64_t opened = std::count(open.begin(), open.end(), 1);
  const auto total = [&] { return std::accumulate(stage_devices_.begin(), stage_devices_.end(), int64_t{0}); };
  if (complete && opened) {
    int64_t left = devices_ / outer;
    for (size_t s = 0; s < physical_; ++s) left -= open[s] ? 0 : stage_devices_[s];
    for (size_t s = 0, k = 0; s < physical_; ++s)
      if (open[s])
        stage_devices_[s] = std::max<int64_t>(1, left / opened + (static_cast<int64_t>(k++) < left % opened));
  }
  const int64_t sum = total(), groups = devices_ / sum;
  if (groups * sum != devices_ || (complete && groups != outer))
    refuse(
        any.nest, any.path,
        fmt::format("wants {} device(s) ({} around a pipeline whose {} stage(s) have [{}]), {} are there; change the "
                    "number of devices, or leave a count out",
                    sum * outer, outer, physical_, fmt::join(stage_devices_, ", "), devices_));
  for (TaskLeaf& leaf : leaves_)
    if (leaf.staged()) fill_counts(leaf.nest, 0, leaf.outer(), groups, leaf.path);
}

// Stages of different sizes that share a nest get counts of their own.
void TaskFormer::fill_stage_counts() {
  const std::vector<TaskLeaf> open_leaves = leaves_;
  std::map<std::pair<size_t, int64_t>, size_t> filled;  // (leaf, devices of the stage)
  std::set<size_t> taken;
  for (auto& [scope, l] : leaf_of_scope_) {
    if (mesh_of(scope) < 0 || !leaves_[l].staged()) continue;
    const int64_t there = stage_devices_[static_cast<size_t>(mesh_of(scope))];
    const auto [at, fresh] = filled.try_emplace({l, there}, l);
    if (fresh) {
      if (!taken.insert(l).second) {
        at->second = leaves_.size();
        leaves_.push_back(open_leaves[l]);
      }
      TaskLeaf& leaf = leaves_[at->second];
      if (leaf.inner() < leaf.nest.size()) fill_counts(leaf.nest, leaf.inner(), leaf.nest.size(), there, leaf.path);
      if (leaf.stage != SIZE_MAX) leaf.nest[leaf.stage].count = there;
    }
    l = at->second;
  }
  for (TaskLeaf& leaf : leaves_)
    if (leaf.pipeline != SIZE_MAX) leaf.nest[leaf.pipeline].count = pipeline_.count;
}

// One row, or one for each position along the axes outside.
void TaskFormer::check_shares(const Mesh& mesh) const {
  int64_t positions = 1;
  for (const MeshAxis& axis : mesh.axes) {
    const auto n = static_cast<int64_t>(axis.shares.size());
    if (n > axis.size && n != axis.size * positions)
      throw invalid(
          "strategy '{}': shares of axis '{}' has {} rows of {}, expected {}",
          to_string(leaves_[staged_.value_or(0)].nest), axis.name, n / axis.size, axis.size,
          positions == 1 ? "one" : fmt::format("one, or {}: one for each position of the scopes around it", positions));
    positions *= axis.size;
  }
}

void TaskFormer::make_meshes() {
  const std::vector<int32_t> order = device_order();
  const int64_t sum = std::accumulate(stage_devices_.begin(), stage_devices_.end(), int64_t{0});
  int64_t offset = 0;
  for (size_t s = 0; s < physical_; ++s) {
    Mesh mesh;
    mesh.axes = outer_.axes;
    for (const std::string& name : common_) mesh.axes.push_back({name, 1, {}, {}});
    for (size_t a = 0; a < stage_axes_[s].axes.size(); ++a)
      mesh.axes[outer_.axes.size() + place_[s][a]] = stage_axes_[s].axes[a];
    check_shares(mesh);
    int64_t size = 1, pipelines = 1;
    for (const MeshAxis& axis : mesh.axes) size *= axis.size;
    for (const MeshAxis& axis : outer_.axes) pipelines *= axis.size;
    // Position by position; where groups are of different sizes, nobody is at some of them.
    bool fits = true;
    int64_t group = 0, wanted = 0;  // by the scopes inside
    for (int64_t p = 0, k = 0; p < pipelines && fits; ++p) {
      int64_t next = 0;
      wanted = 0;
      for (int64_t at = k; at < k + size / pipelines; ++at) wanted += mesh.has_position(at);
      for (const int64_t end = k + size / pipelines; k < end && fits; ++k) {
        const bool there = mesh.has_position(k);
        fits = !there || (next < stage_devices_[s] && group < devices_ / sum);
        mesh.devices.push_back(there && fits ? order[static_cast<size_t>(group * sum + offset + next)] : kNone);
        next += there;
      }
      fits &= next == 0 || next == stage_devices_[s];
      group += next > 0;
    }
    if (!fits || group * sum != devices_)
      refuse(
          leaves_[staged_.value_or(0)].nest, leaves_[staged_.value_or(0)].path,
          fmt::format("gives stage {} {} device(s), the scopes inside use {}; put replica or split into the stage, or "
                      "change the number of devices ({})",
                      s, stage_devices_[s], wanted, devices_));
    offset += stage_devices_[s];
    out_.meshes.push_back(std::move(mesh));
  }
  if (!staged_) out_.mesh_of_stage = {0};
}

}  // namespace whale
