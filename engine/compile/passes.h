// THE LIST of passes, with their levels: Graph -> ShardedGraph -> Entry. The level's verifier runs after its last row
// (after each, when asked), and the level's text goes to `dump`. The last row of a level always runs.
#pragma once

#include <string>
#include <vector>

#include "compile/compile.h"
#include "lower/lower.h"
#include "shard/insert.h"
#include "task/task_graph.h"

namespace whale {

// Of one plan: its options, who works on what, and which gradients are fetched (names after "grad:").
struct Passes {
  const CompileOptions& options;
  TaskGraphs tasks;
  std::vector<std::string> gradients;
  bool checks = true;  // what is left of each level, also where options.verify_passes does not ask for it

  template <class Level>
  void after(const std::string& pass, const Level& level, bool last) const;
  Graph on_graph(Graph graph, const std::string& entry) const;
  ShardOptions shard_options(const Graph& graph, const std::string& entry, int64_t micro_batches,
                             const StorageShardings* storage_shardings) const;
  // `storage_shardings`: where variables lie already; null: chosen here.
  ShardedGraph on_shardings(Graph graph, const std::string& entry, int64_t micro_batches,
                            const StorageShardings* storage_shardings) const;
  // `indices`: of each input, the ranges its values must be in.
  Entry make_entry(const ShardedGraph& graph, const std::vector<std::vector<IndexRange>>& indices,
                   const std::string& name, const std::vector<PlanVariable>& variables, std::vector<std::string>* notes,
                   Detail detail = Detail::kWhole) const;
};

// How many bytes of gradients go into one collective.
int64_t bucket_bytes(const CostModel& cost, const CompileOptions& options);

}  // namespace whale
