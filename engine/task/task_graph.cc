#include "task/task_graph.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/text.h"
#include "cluster/shares.h"
#include "schedule/schedule.h"
#include "task/axis_links.h"
#include "task/strategy.h"
#include "task/task_parts.h"
#include "task/unlike.h"

namespace whale {
namespace {

bool takes_whole(const Scope& scope) { return scope.by == "micro_batch"; }

TaskGraph task_of(const TaskLeaf& leaf, const TaskAxes& axes, size_t l, size_t mesh, int32_t stage) {
  TaskGraph t{.nest = leaf.nest, .path = leaf.path, .ops = {}, .stage = stage, .roles = {}, .factors = {}};
  const size_t count = axes.outer.axes.size() + axes.common.size();
  t.roles.assign(count, AxisRole::kFollow);
  t.factors.resize(count);
  for (size_t a = 0; a < axes.outer.axes.size(); ++a)
    t.roles[a] = axes.outer.uses[0][a].role, t.factors[a] = axes.outer.uses[0][a].factor;
  const StageAxes& own = axes.stages[mesh];
  const auto at = static_cast<size_t>(std::find(own.leaves.begin(), own.leaves.end(), l) - own.leaves.begin());
  for (size_t a = 0; a < own.axes.size(); ++a)
    t.roles[own.place[a]] = own.uses[at][a].role, t.factors[own.place[a]] = own.uses[at][a].factor;
  return t;
}

// Every op in the TaskGraph of its leaf on its mesh.
void make_tasks(const Graph& graph, const TaskLeaves& leaves, const TaskAxes& axes, TaskGraphs& out) {
  std::map<std::pair<size_t, size_t>, int32_t> known;  // (leaf, mesh)
  out.task_of_scope.assign(graph.scopes.size(), -1);
  for (const auto& [scope, l] : leaves.of_scope) {
    if (mesh_of(out, scope) < 0) continue;
    const auto mesh = static_cast<size_t>(mesh_of(out, scope));
    const auto [at, fresh] = known.try_emplace({l, mesh}, static_cast<int32_t>(out.tasks.size()));
    if (fresh) out.tasks.push_back(task_of(leaves.list[l], axes, l, mesh, out.stage_of_scope[scope]));
    out.task_of_scope[scope] = at->second;
  }
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const int32_t t = out.task_of_scope[graph.ops[i].scope];
    out.tasks[t].ops.push_back(static_cast<OpId>(i));
  }
}

// What was written for the model first.
std::string strategy_text(std::vector<TaskLeaf> leaves, bool staged) {
  std::stable_sort(leaves.begin(), leaves.end(),
                   [](const TaskLeaf& a, const TaskLeaf& b) { return b.annotated < a.annotated; });
  std::vector<std::string> texts;
  for (const TaskLeaf& leaf : leaves)
    if (const std::string text = to_string(leaf.nest);
        (!staged || leaf.staged()) && std::find(texts.begin(), texts.end(), text) == texts.end())
      texts.push_back(text);
  return fmt::format("{}", fmt::join(texts, "; "));
}

// Axes along which replicas take whole micro-batches: the same replicas in all meshes, and nothing else on them.
// Where that does not hold, exact mode has all of them compute every micro-batch. `deal`: shares of work, between.
void share_micro_batches(const TaskAxes& from, bool exact, TaskGraphs& out, const std::function<void()>& deal) {
  const size_t axes = out.meshes[0].axes.size();
  out.by_micro_batch.assign(axes, 0);
  std::vector<char> split(axes), asked(axes);
  const auto look = [&](size_t a, const AxisUse& use) {
    split[a] |= use.role == AxisRole::kSplit;
    if (use.role != AxisRole::kReplica) return;
    out.by_micro_batch[a] |= exact || use.by_micro_batch;
    asked[a] |= use.by_micro_batch;
  };
  for (const auto& uses : from.outer.uses)
    for (size_t a = 0; a < uses.size(); ++a) look(a, uses[a]);
  for (const StageAxes& stage : from.stages)
    for (const auto& uses : stage.uses)
      for (size_t a = 0; a < uses.size(); ++a) look(stage.place[a], uses[a]);
  if (deal) deal();
  const auto any_mesh = [&](auto holds) { return std::any_of(out.meshes.begin(), out.meshes.end(), holds); };
  for (size_t a = 0; a < axes; ++a) {
    if (!out.by_micro_batch[a]) continue;
    const bool differs = any_mesh([&](const Mesh& mesh) {
      return mesh.axes[a].size != out.meshes[0].axes[a].size ||
             !same_ratio(mesh.axes[a].shares, out.meshes[0].axes[a].shares, mesh.axes[a].size);
    });
    const bool uneven = any_mesh([&](const Mesh& mesh) {
      bool inside = exact && mesh.axes[a].has_gaps();
      for (size_t b = 0; b < a; ++b) inside |= mesh.axes[b].size > 1 && !out.by_micro_batch[b];
      return inside && mesh.axes[a].ragged();
    });
    if (!split[a] && !differs && !uneven) continue;
    const char* why = split[a]  ? "share their devices with a split, which needs all of them for every micro-batch"
                      : differs ? "differ between the stages of a pipeline, which passes on every micro-batch"
                                : "have shares that differ between groups that need every micro-batch";
    const char* instead = split[a]  ? "put the split inside the replica"
                          : differs ? "put the replica around the pipeline"
                                    : "give all groups equal shares";
    std::string path;
    for (TaskGraph& task : out.tasks) {
      if (task.roles[a] != AxisRole::kReplica) continue;
      if (path.empty()) path = task.path;
      if (asked[a] && std::any_of(task.nest.begin(), task.nest.end(), takes_whole))
        throw invalid("scope '{}' ({}): replicas of whole micro-batches (by=micro_batch) {}; {}, or leave 'by' out",
                      to_string(task.nest), task.path, why, instead)
            .at_scope(task.path);
      task.roles[a] = AxisRole::kFollow;
    }
    // Exact mode promises bits: what cannot be shared by whole micro-batches is not shared.
    out.by_micro_batch[a] = 0;
    out.notes.push_back(fmt::format("Exact mode: replicas ({}) {}, so each computes all of them; {} to share the work.",
                                    path, why, instead));
  }
  if (!exact) return;
  for (const Mesh& mesh : out.meshes) {
    bool replicas = false;  // outside, of which each adds up the nodes of all
    for (size_t a = 0; a < axes; ++a) {
      if (replicas && mesh.axes[a].ragged() && !out.by_micro_batch[a])
        throw invalid(
            "exact mode: axis '{}' of '{}' has shares that differ between replicas; give all of them equal shares",
            mesh.axes[a].name, out.strategy);
      replicas |= out.by_micro_batch[a] && mesh.axes[a].size > 1;
    }
  }
}

}  // namespace

const TaskGraph& TaskGraphs::task(const Op& op) const {
  const auto scope = static_cast<size_t>(op.scope);
  const int32_t t = scope < task_of_scope.size() ? task_of_scope[scope] : -1;
  return tasks[t < 0 ? 0 : t];
}

TaskGraphs form_task_graphs(Graph& graph, const std::vector<DeviceSpec>& devices, std::string_view strategy,
                            const CostModel& cost, bool exact, const DealShares& deal, const StageLimits& limits) {
  const std::string_view text = strategy.empty() ? std::string_view(graph.default_strategy) : strategy;
  if (const std::optional<Scope> replicas = find_unlike(graph, text))
    return form_unlike(graph, devices, *replicas, cost, exact, deal);
  TaskGraphs out(cost);
  const auto there = std::ssize(devices);
  TaskLeaves leaves = find_leaves(graph, text, there);
  const std::optional<TaskPipeline> pipeline = find_pipeline(graph, leaves, there);
  Ints stage_devices{there};
  if (pipeline) {
    const TaskStages stages = find_stages(graph, leaves, *pipeline, devices, cost, exact, limits);
    out.stage_begins = stages.begins;
    if (stages.by_room)
      out.notes.push_back(
          "Stages are cut where each device has room; the cuts that are fastest without regard to memory do not fit.");
    out.stage_bytes = bytes_of_stages(graph, stages.of_op, stages.mesh.size());
    const std::string empty = empty_stages(graph);
    write_stages(stages, graph, leaves, out);
    stage_devices = count_devices(leaves, out, leaves.list[pipeline->leaf], stages.meshes, there, empty);
    out.schedule = pipeline->scope.schedule;
    try {
      check_warmup(read_schedule(out.schedule), static_cast<int64_t>(stages.meshes));
    } catch (const Error& e) {
      const TaskLeaf& leaf = leaves.list[pipeline->leaf];
      throw invalid("scope '{}' ({}): {}", brief(to_string(leaf.nest)), leaf.path, e.message()).at_scope(leaf.path);
    }
    out.virtual_stages = pipeline->scope.virtual_stages;
    if (out.schedule == "interleaved" && out.virtual_stages == 1)
      out.notes.push_back(
          "Schedule 'interleaved' with one virtual stage a device is 1f1b; virtual_stages=2 gives every device two "
          "stages.");
  } else {
    out.mesh_of_stage = {0};
    out.stage_of_scope.assign(graph.scopes.size(), 0);
    out.stage_bytes = bytes_of_stages(graph, std::vector<int32_t>(graph.ops.size(), 0), 1);
  }
  leaves = with_counts(std::move(leaves), out, stage_devices, there);
  const TaskAxes axes = find_axes(leaves, out, stage_devices.size());
  out.meshes = make_meshes(axes, leaves.list[pipeline ? pipeline->leaf : 0], stage_devices,
                           device_order(leaves, devices, stage_devices));
  out.links = axis_links(out.meshes, devices, cost);
  make_tasks(graph, leaves, axes, out);
  out.strategy = strategy_text(std::move(leaves.list), pipeline.has_value());
  share_micro_batches(axes, exact, out, deal ? [&] { deal(graph, devices, out); } : std::function<void()>());
  return out;
}

}  // namespace whale
