// Replicas of replicas are replicas: neighbouring axes that all use alike become one. Gradients are then summed at
// once, over near and far links as their groups allow, and not along a far link first, whole.
#pragma once

#include <vector>

#include "task/task_graph.h"

namespace whale {

// Axes that have no shares, of the same sizes in all meshes; no device gets other samples, where they divide evenly.
// The strategy's text and the nests stay as written.
void join_replicas(TaskGraphs& tasks, const std::vector<DeviceSpec>& devices);

}  // namespace whale
