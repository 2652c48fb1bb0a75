// A deep model by what is distinct in it: of layers that repeat and of stages that are alike a few stay, and one layer
// of each stage stands for those that went. What is estimated of the small graph is that of the model, when what
// belongs to a layer counts as often as the layer stands for one (report/estimate.h).
#pragma once

#include <optional>
#include <vector>

#include "task/task_graph.h"

namespace whale {

struct Condensed {
  Graph graph;
  // Of the stages that stay. Each has a mesh of its own, with devices numbered anew, and a schedule of one virtual
  // stage.
  TaskGraphs tasks;
  std::vector<int32_t> stage_like;  // per stage of the model: the one here that is like it
  std::vector<std::vector<int64_t>>
      layers;                         // [stage of the model][run]: as many stand behind the layer, itself included
  std::vector<int32_t> run_of_scope;  // per scope of `graph`: the run of whose standing layer it is; -1: of none
};

// Of a model with its stages. None where too little would go, or where stages or replicas are not alike enough:
// pipelines of which a device passes values from one virtual stage to another, whole micro-batches for each replica.
// `least_bytes`: of a layer's parameters on a device; smaller ones do more with each other than with their neighbours
// (buckets). `more`: so many layers of each stage stay beyond those that must. `kinds`: of each device, equal for those
// that are alike; empty: all are.
std::optional<Condensed> condense(const Graph& graph, const TaskGraphs& tasks, double least_bytes, size_t more = 0,
                                  const std::vector<int32_t>& kinds = {});

// `few` as the condensed form of the model that `more` is by itself, which has a layer more of each run.
Condensed one_layer_less(Condensed few, const Condensed& more);

}  // namespace whale
