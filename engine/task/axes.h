// The axes that shardings have, as one list: time (micro-batches) first, then those of the meshes.
#pragma once

#include <string>

#include "task/task_graph.h"

namespace whale {

inline constexpr size_t kTime = 0;

struct Axes {
  TaskGraphs tasks;
  int64_t micro_batches = 1;

  size_t axes() const { return 1 + tasks.meshes[0].axes.size(); }
  std::string axis_name(size_t axis) const { return axis == kTime ? "time" : tasks.meshes[0].axes[axis - 1].name; }
  const MeshAxis& mesh_axis(size_t axis, int32_t stage) const { return tasks.mesh(stage).axes[axis - 1]; }
  int64_t size(size_t axis, int32_t stage) const { return axis == kTime ? micro_batches : mesh_axis(axis, stage).size; }
  AxisRole role(const Op& op, size_t axis) const { return tasks.task(op).roles[axis - 1]; }
  // Each mesh has one place along it and a part of the samples; sums over samples are added in the program itself.
  bool of_unlike(size_t axis) const { return axis != kTime && tasks.of_unlike(axis - 1); }
  bool cuts(size_t axis, int32_t stage) const { return size(axis, stage) > 1 || of_unlike(axis); }
  // Replicas along the axis take whole micro-batches: what differs from micro-batch to micro-batch is not cut along it,
  // a sum over micro-batches is.
  bool by_micro_batch(size_t axis) const {
    return axis != kTime && axis <= tasks.by_micro_batch.size() && tasks.by_micro_batch[axis - 1];
  }
  bool same_devices(int32_t a, int32_t b) const { return tasks.mesh_of_stage[a] == tasks.mesh_of_stage[b]; }
};

}  // namespace whale
