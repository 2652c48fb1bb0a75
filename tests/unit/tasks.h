// Task graphs, and what they are laid out to, for tests that need no plan.
#pragma once

#include "shard/insert.h"

namespace whale::small {

// On devices that nobody has measured; `nodes`: of each, its machine; empty: all in one.
inline TaskGraphs tasks_of(Graph& graph, int64_t devices, std::string_view strategy,
                           const std::vector<int32_t>& nodes = {}) {
  std::vector<DeviceSpec> specs(static_cast<size_t>(devices), {.kind = DeviceKind::kNull, .cores = {}});
  for (size_t d = 0; d < nodes.size(); ++d) specs[d].node = nodes[d];
  return form_task_graphs(graph, specs, strategy, CostModel(specs, 1, kMachineOfCores), false);
}

// Without the passes that look at the plan's options.
inline ShardedGraph lay_out(Graph graph, const TaskGraphs& tasks, const ShardOptions& options) {
  place_in_stages(graph, tasks);
  return insert_reshards(graph, tasks, options, choose_cuts(graph, tasks, options));
}

}  // namespace whale::small
