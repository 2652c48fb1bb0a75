// The passes that form_task_graphs is made of, internal to its files: each is a function of what the passes before it
// returned.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "task/strategy.h"
#include "task/task_graph.h"

namespace whale {

// A scope's chain of placements, outer first, and where `pipeline` and `stage` stand in it.
struct TaskLeaf {
  std::vector<Scope> nest;
  std::vector<ScopeId> ids;  // of the scopes; kNone: from the strategy's text
  std::string path;
  bool annotated = false;
  size_t pipeline = SIZE_MAX, stage = SIZE_MAX;  // positions in `nest`
  size_t outer() const { return std::min({pipeline, stage, nest.size()}); }
  size_t inner() const { return stage != SIZE_MAX ? stage + 1 : pipeline != SIZE_MAX ? pipeline + 1 : 0; }
  bool staged() const { return pipeline != SIZE_MAX || stage != SIZE_MAX; }
};
// Of every scope in use the number of its leaf.
class LeafOfScope {
 public:
  void add(ScopeId scope, size_t leaf) { list_.emplace_back(scope, leaf); }  // scopes ascend
  size_t at(ScopeId scope) const {
    return std::ranges::lower_bound(list_, scope, {}, &std::pair<ScopeId, size_t>::first)->second;
  }
  auto begin() const { return list_.begin(); }
  auto end() const { return list_.end(); }
  auto begin() { return list_.begin(); }
  auto end() { return list_.end(); }

 private:
  std::vector<std::pair<ScopeId, size_t>> list_;
};

struct TaskLeaves {
  std::vector<TaskLeaf> list;
  LeafOfScope of_scope;
  const TaskLeaf& of(const Op& op) const { return list[of_scope.at(op.scope)]; }
};
[[noreturn]] void refuse(const TaskLeaf& leaf, const std::string& what);

// task_leaves.cc
// The strategy 'local' ignores all scopes.
TaskLeaves find_leaves(const Graph& graph, std::string_view strategy, int64_t devices);
// Devices that nest[from, to) needs; `complete` becomes false when a count is left out (it counts as 1).
int64_t product(const std::vector<Scope>& nest, size_t from, size_t to, bool& complete);
// Fills in counts of the scopes [from, to) so that they multiply to `devices`: the outermost one left out takes what
// the others leave, further ones are 1.
void fill_counts(TaskLeaf& leaf, size_t from, size_t to, int64_t devices);

// task_pipeline.cc
// Pipelines side by side share their devices: one pipeline, of which each is a virtual stage (or several).
struct TaskPipeline {
  size_t leaf = 0;                // one inside it
  Scope scope;                    // its count: 0 where the stages say
  std::vector<ScopeId> siblings;  // in the order of their first ops; empty: stages alone are written
};
std::optional<TaskPipeline> find_pipeline(const Graph& graph, const TaskLeaves& leaves, int64_t devices);

// task_stages.cc
struct TaskStages {
  std::vector<int32_t> of_op, mesh;  // per stage: its mesh
  size_t meshes = 1;
  Ints begins;           // TaskGraphs::stage_begins
  bool by_room = false;  // where memory was not looked at, they would be others
};
// `devices`: as stages take them, one after the other; the slowest of a stage says how fast it is.
TaskStages find_stages(const Graph& graph, const TaskLeaves& leaves, const TaskPipeline& pipeline,
                       const std::vector<DeviceSpec>& devices, const CostModel& cost, bool exact,
                       const StageLimits& limits);
// For messages about the number of stages: those written that no op is in; none: "".
std::string empty_stages(const Graph& graph);
// Writes them into the ops and gives the graph a `stage` scope where none was written; fills in what `tasks` says of
// scopes.
void write_stages(const TaskStages& stages, Graph& graph, TaskLeaves& leaves, TaskGraphs& tasks);

inline int32_t mesh_of(const TaskGraphs& tasks, ScopeId scope) {  // -1: no op of it is in a stage
  const int32_t s = tasks.stage_of_scope[scope];
  return s < 0 ? -1 : tasks.mesh_of_stage[s];
}

// task_devices.cc
// Devices of each mesh, for one pipeline; `any`: a leaf inside it; `empty`: empty_stages() of what was written.
Ints count_devices(const TaskLeaves& leaves, const TaskGraphs& tasks, const TaskLeaf& any, size_t meshes,
                   int64_t devices, const std::string& empty);
// Counts filled in; stages of different sizes that share a nest get leaves of their own.
TaskLeaves with_counts(TaskLeaves leaves, const TaskGraphs& tasks, const Ints& stage_devices, int64_t devices);

// task_axes.cc: axes of a mesh, and what each leaf does along them.
struct AxisUse {
  AxisRole role = AxisRole::kFollow;
  std::string factor;
  bool by_micro_batch = false;
};
struct LeafAxes {
  std::vector<MeshAxis> axes;
  std::vector<std::vector<AxisUse>> uses;  // [leaf][axis]
};
struct StageAxes : LeafAxes {  // inside those around the pipeline
  std::vector<size_t> leaves;
  std::vector<size_t> place;  // per axis: among all of the mesh
};
struct TaskAxes {
  LeafAxes outer;                   // around the pipeline
  std::vector<StageAxes> stages;    // per mesh
  std::vector<std::string> common;  // names of the stages' own axes, in one order
};
TaskAxes find_axes(const TaskLeaves& leaves, const TaskGraphs& tasks, size_t meshes);
std::vector<Mesh> make_meshes(const TaskAxes& axes, const TaskLeaf& leaf, const Ints& stage_devices,
                              const std::vector<int32_t>& order);

// task_device_order.cc
// `device_order=average(n)` on nest[i]: what it slices has n members. Device orders that nobody knows are refused.
void check_device_orders(TaskLeaf& leaf);
// Of the leaf alone, before counts are known; what is wrong with it is not said.
std::vector<int32_t> likely_order(const TaskLeaf& leaf, const std::vector<DeviceSpec>& devices);
// As the `device_order` of a scope says.
std::vector<int32_t> device_order(const TaskLeaves& leaves, const std::vector<DeviceSpec>& devices,
                                  const Ints& stage_devices);

}  // namespace whale
