// Task graphs for tests that need no plan.
#pragma once

#include "task/task_graph.h"

namespace whale::small {

// On devices that nobody has measured; `nodes`: of each, its machine; empty: all in one.
inline TaskGraphs tasks_of(Graph& graph, int64_t devices, std::string_view strategy,
                           const std::vector<int32_t>& nodes = {}) {
  std::vector<DeviceSpec> specs(static_cast<size_t>(devices), {.kind = DeviceKind::kNull, .cores = {}});
  for (size_t d = 0; d < nodes.size(); ++d) specs[d].node = nodes[d];
  return form_task_graphs(graph, specs, strategy, CostModel(specs), false);
}

}  // namespace whale::small
