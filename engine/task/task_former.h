// How task_graph.h forms its TaskGraphs, internal to its files: the leaves of the scope tree, the stages of a pipeline,
// the devices of each, and the axes of their meshes.
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
TaskLeaf leaf_of(std::vector<Scope> nest, std::vector<ScopeId> ids, std::string path, bool annotated);
[[noreturn]] void refuse(const std::vector<Scope>& nest, std::string_view path, const std::string& what);

// `layout=average(n)` on nest[i]: what it slices has n members. Layouts that nobody knows are refused.
void check_layouts(std::vector<Scope>& nest, std::string_view path);

// Devices that nest[from, to) needs; `complete` becomes false when a count is left out (it counts as 1).
int64_t product(const std::vector<Scope>& nest, size_t from, size_t to, bool& complete);
// Fills in counts of nest[from, to) so that they multiply to `devices`: the outermost one left out takes what the
// others leave, further ones are 1.
void fill_counts(std::vector<Scope>& nest, size_t from, size_t to, int64_t devices, std::string_view path);

// Axes of a mesh, and what each leaf does along them.
struct AxisUse {
  AxisRole role = AxisRole::kFollow;
  std::string factor;
  bool by_micro_batch = false;
};
struct Axes {
  std::vector<MeshAxis> axes;
  std::vector<std::vector<AxisUse>> uses;  // [leaf][axis]
};

class TaskFormer {
 public:
  TaskFormer(Graph& graph, const std::vector<DeviceSpec>& devices, std::string_view strategy, const CostModel& cost,
             bool exact);
  TaskGraphs run();

 private:
  // task_graph.cc
  void collect();                                        // which leaf every scope in use belongs to
  const StrategyClause* clause_of(ScopeId scope) const;  // the innermost one whose name is a part of the scope's path
  void find_pipeline();
  void check_pipeline(const TaskLeaf& leaf, const Scope& pipeline) const;  // counts, before anything is sized by them
  void make_tasks();
  // Axes along which replicas take whole micro-batches: the same replicas in all meshes, and nothing else on them.
  // Where that does not hold, exact mode has all of them compute every micro-batch.
  void find_whole_micro_batches();
  TaskGraph task(size_t l, size_t mesh, int32_t stage) const;
  // task_stages.cc
  // Pipelines side by side share their devices: one pipeline, of which each is a chunk (or several).
  void find_siblings();
  void find_stages_of_siblings();
  void assign_stages();  // every op gets one; the graph gets a `stage` scope where none was written
  void find_stages();
  int64_t stages_left(const TaskLeaf& leaf) const;  // as many as there are devices for
  std::vector<int32_t> cut_ops(const std::vector<OpId>& ops, int64_t stages, const TaskLeaf& leaf) const;
  // Ops outside every written stage join the stage of what they read; those that read nothing, of who reads them.
  void join(std::vector<int32_t>& stage);
  // task_devices.cc
  void count_devices();
  void count_stage_devices();
  void fill_stage_counts();
  void make_meshes();
  void check_shares(const Mesh& mesh) const;
  // task_layout.cc
  std::vector<int32_t> device_order() const;  // as the `layout` of a scope says
  std::vector<int32_t> order_of(const TaskLeaf& leaf, size_t i) const;
  std::vector<int32_t> by_row(const TaskLeaf& leaf, size_t i) const;
  std::vector<int32_t> by_column(const TaskLeaf& leaf, size_t i) const;
  std::vector<int64_t> slices_of(const TaskLeaf& leaf, size_t i) const;  // devices of each slice
  // task_axes.cc
  void make_axes();  // those around the pipeline, then those of the stages, aligned by name

  int32_t mesh_of(ScopeId scope) const {  // -1: no op of it is in a stage
    if (!staged_) return 0;
    const int32_t s = out_.stage_of_scope[static_cast<size_t>(scope)];
    return s < 0 ? -1 : out_.mesh_of_stage[static_cast<size_t>(s)];
  }

  Graph& g_;
  int64_t devices_;
  bool exact_;
  std::vector<int32_t> nodes_;  // per device
  bool local_ = false;          // all scopes are ignored
  std::vector<StrategyClause> clauses_;
  std::vector<Scope> otherwise_;
  std::vector<TaskLeaf> leaves_;
  std::map<ScopeId, size_t> leaf_of_scope_;
  std::optional<size_t> staged_;  // a leaf inside the pipeline
  Scope pipeline_;
  std::vector<ScopeId> siblings_;  // pipelines side by side, in the order of their first ops
  std::vector<int32_t> stage_;     // per op
  int64_t virtual_stages_ = 1;
  size_t physical_ = 1;
  std::vector<int64_t> stage_devices_;  // per mesh, of one pipeline
  Axes outer_;
  std::vector<Axes> stage_axes_;
  std::vector<std::vector<size_t>> stage_leaves_;  // per mesh
  std::vector<std::vector<size_t>> place_;         // per mesh and own axis: position in common_
  std::vector<std::string> common_;
  TaskGraphs out_;
};

}  // namespace whale
