// From what the user gives to what the passes take, and to a plan without entries.
#pragma once

#include <string>
#include <vector>

#include "compile/compile.h"
#include "shard/insert.h"
#include "task/task_graph.h"

namespace whale {

// The scopes as written, and with the stages that a pipeline was cut into. Stages are cut by the profile's rate of
// memory for time; every pass behind that trades by what the model makes memory worth.
struct Scoped {
  Graph graph;
  TaskGraphs tasks;
};
Scoped scope_out(Graph source, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                 double memory_price);

// Throws where the graph, with what the options change in it, does not hold.
void check_graph(const Graph& graph, const CompileOptions& options);

// The graph with the options in it: what Plan::source keeps, when it has its micro-batches too.
Graph source_of(const Graph& graph, const CompileOptions& options);

// The source, checked (quickly: known to hold, check_graph), scoped out, and with its micro-batches: those of the
// pipeline, or its own (training.accumulation).
Scoped prepare(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
               double memory_price, Care care = Care::kChecked);

// The names after "grad:" that are fetched.
std::vector<std::string> gradients_of(const CompileOptions& options);
// A plan without entries and variables. `scoped`: what was prepared, or a few of its layers.
Plan outline(const Scoped& scoped, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
             double memory_price);
std::vector<PlanVariable> variables_of(const ShardedGraph& graph);
StorageShardings storage_shardings_of(const std::vector<PlanVariable>& variables);

}  // namespace whale
