// Shares of a plan's axes where its devices are unlike and nobody has written them: semantics.md section 8.
#pragma once

#include <cstdint>
#include <vector>

#include "cluster/device_spec.h"
#include "ir/graph.h"
#include "task/task_graph.h"

namespace whale {

// What a device has to hold whatever its share is, and what with all of the work of its stage; bytes.
struct Room {
  double fixed = 0, whole = 0;
};

struct DealOptions {
  int64_t batch = 0, micro_batches = 1;  // samples of a step
  bool half = false;                     // products are of 16 bits
  std::vector<Room> rooms;               // by device; empty: memory is not looked at
};

// Whether devices have figures of their own that differ.
bool are_unlike(const std::vector<DeviceSpec>& devices);
// Or a profile has other times of them.
bool are_unlike(const std::vector<DeviceSpec>& devices, const CostModel& cost);

// Fills in `shares` of axes that have none, the innermost first: the samples of replicas, the parts of splits in the
// units of what they cut most coarsely (heads), so that the slowest device is as fast as it can be (balance.h). What
// was written stays. Says in `notes` what was decided and why. `tasks.cost` has the rates. Devices that are alike are
// given equal work.
void deal_axes(const Graph& graph, const std::vector<DeviceSpec>& devices, const DealOptions& options,
               TaskGraphs& tasks);

// Of each device: its part of all of the work of its stage, by the shares of the axes.
std::vector<double> parts_of_work(const std::vector<Mesh>& meshes, size_t devices);

}  // namespace whale
