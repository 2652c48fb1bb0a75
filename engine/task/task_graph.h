// From the scope tree to TaskGraphs (semantics.md section 3): each leaf of the tree with its ops, the stage that it is
// in, and what it does along every axis of that stage's mesh.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/mesh.h"
#include "cost/cost.h"
#include "ir/graph.h"
#include "task/stages.h"

namespace whale {

enum class AxisRole : uint8_t {
  kFollow,   // no scope says: as the operands lie
  kReplica,  // samples are cut
  kSplit,    // the ops are cut within themselves
};

struct TaskGraph {
  std::vector<Scope> nest;           // scopes with a placement, outer first; counts filled in
  std::string path;                  // for messages: "replica/block.1"; "default strategy"
  std::vector<OpId> ops;             // of the source graph
  int32_t stage = 0;                 // the first one of its ops; a nest without `stage` spans several
  std::vector<AxisRole> roles;       // per axis of the meshes
  std::vector<std::string> factors;  // per axis: what a split is to cut; empty: chosen
};

// What a layer counts for in what is chosen, where few stand for all.
struct LayerShare {
  int32_t layer = -1;  // -1: of no layer that repeats
  double layers = 1;   // of the model, like this one
  double steps = 1;    // from one layer to the next inside of a stage,
  double entries = 1;  // and from one stage to the next, like those to this one
};

// One of several replicas that have stages, splits and devices of their own (semantics.md section 3).
struct UnlikeReplica {
  std::vector<ScopeId> scope;     // per scope of the graph before it is copied: that of the copy; kNone: no op is in it
  int32_t stage = 0, stages = 1;  // the first of its stages, and how many
};

struct TaskGraphs {
  std::vector<TaskGraph> tasks;
  std::vector<int32_t> task_of_scope;   // per scope of the graph; -1: no op is in it
  std::vector<int32_t> stage_of_scope;  // per scope of the graph; -1: it does not say
  std::vector<ScopeId> written;         // per scope of the graph: itself, or which scope a pipeline's cut has divided
  std::vector<Mesh> meshes;
  std::vector<int32_t> mesh_of_stage;  // in the order of the model; one without a pipeline
  // Per axis: replicas take whole micro-batches (by=micro_batch); no tensor of the body is cut along it.
  std::vector<char> by_micro_batch;
  std::string schedule;        // of the pipeline; empty: none
  int64_t virtual_stages = 1;  // stages of one mesh
  std::vector<StageBytes> stage_bytes;
  Ints stage_begins;     // ops at which stages begin that nobody has written, the first of a pipeline left out
  std::string strategy;  // as text, counts filled in
  std::vector<std::string> notes;  // what was decided and why, one sentence each
  // Unlike replicas: each has a copy of the body (rewrite/copy_replicas.h), on stages and meshes of its own. Empty: the
  // usual case. Of their axis, the first, each mesh has one place (MeshAxis::only).
  std::vector<UnlikeReplica> replicas;
  std::vector<LayerShare> shares;  // per scope of a condensed graph (task/condense.h); empty: each layer is itself
  CostModel cost;                  // of the devices: what every pass after this one asks
  std::vector<std::vector<LinkRates>> links;  // task/axis_links.h

  explicit TaskGraphs(const CostModel& model) : cost(model) {}
  bool of_unlike(size_t mesh_axis) const { return mesh_axis == 0 && !replicas.empty(); }
  size_t stages() const { return mesh_of_stage.size(); }
  const TaskGraph& task(const Op& op) const;
  LayerShare share(const Op& op) const {
    const auto scope = static_cast<size_t>(op.scope);
    return scope < shares.size() ? shares[scope] : LayerShare{};
  }
  // Between the devices of a stage along an axis of its mesh.
  const LinkRates& link(int32_t stage, size_t mesh_axis) const {
    return links.empty() ? cost.link : links[mesh_of_stage[stage]][mesh_axis];
  }
  const Mesh& mesh(int32_t stage) const { return meshes[mesh_of_stage[stage]]; }
};

// `strategy`: for the ops without a scope of their own; empty: the graph's, or else replica. A bare `replica` takes
// count and shares from the strategy, or else from the first scope that gives them, so that one model has one mesh.
// A pipeline whose stages are not written is cut here: the graph gets `stage` scopes. Throws naming the scope, the
// devices wanted and the devices there.
// `devices`: their machines ascend. `exact`: all replicas are by=micro_batch. `deal` may fill in shares of axes that
// have none. `limits`: of the stages that are cut here, without unlike replicas.
using DealShares = std::function<void(const Graph& graph, const std::vector<DeviceSpec>& devices, TaskGraphs& tasks)>;
TaskGraphs form_task_graphs(Graph& graph, const std::vector<DeviceSpec>& devices, std::string_view strategy,
                            const CostModel& cost, bool exact, const DealShares& deal = {},
                            const StageLimits& limits = {});
}  // namespace whale
