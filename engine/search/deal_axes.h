// Shares of a plan's axes where its devices are unlike and nobody has written them: semantics.md section 8.
#pragma once

#include <cstdint>
#include <vector>

#include "cluster/device_kinds.h"
#include "ir/graph.h"
#include "task/task_graph.h"

namespace whale {

// What a device holds, as it was seen of a plan: bytes for each byte of its stages (TaskGraphs::stage_bytes), which
// grow with its part of the work as a line does.
struct Room {
  struct Line {
    double fixed = 0, whole = 0;  // whatever its part is; in addition with all of the work
    double at(double part) const { return fixed + whole * part; }
  };
  Line parameters;  // of its parts of splits: what lives from step to step, and gradients
  Line values;      // of its part of the work: activations
};

struct DealOptions {
  int64_t batch = 0, micro_batches = 1;  // samples of a step
  bool half = false;                     // products are of 16 bits
  std::vector<Room> rooms;               // by device; empty: memory is not looked at
};

// Whether devices have figures of their own that differ (cluster/device_kinds.h), or a profile has other times of them.
bool are_unlike(const std::vector<DeviceSpec>& devices, const CostModel& cost);

// Fills in `shares` of axes that have none, the innermost first: the samples of replicas, the parts of splits in the
// units of what they cut most coarsely (heads), so that the slowest device is as fast as it can be (balance.h). What
// was written stays. Says in `notes` what was decided and why. `tasks.cost` has the rates. Devices that are alike are
// given equal work.
void deal_axes(const Graph& graph, const std::vector<DeviceSpec>& devices, const DealOptions& options,
               TaskGraphs& tasks);

// Of each device: its part of all of the work of its stage, by the shares of the axes; or of the axes of splits alone.
std::vector<double> parts_of_work(const std::vector<Mesh>& meshes, size_t devices, bool splits_alone = false);
// Bytes of its stages.
std::vector<StageBytes> stage_bytes_of_devices(const TaskGraphs& tasks, size_t devices);

}  // namespace whale
