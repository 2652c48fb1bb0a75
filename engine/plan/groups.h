// Whom a device works with along an axis.
#pragma once

#include <string_view>
#include <vector>

#include "plan/plan.h"

namespace whale {

// One group per axis of the meshes: its lines, each in the order of the coordinates, mesh after mesh. Along an axis of
// one device there is nobody to work with.
std::vector<Group> groups_of(const std::vector<Mesh>& meshes);

// Some scope's replicas lie along this axis of a mesh or of a group. The name is where a plan file says it, and this is
// the one place that reads it from there.
bool has_replicas(std::string_view axis);
// Of the collectives of a group along this axis, or along several: one queue for all of them.
inline Queue queue_of(std::string_view axis) { return has_replicas(axis) ? Queue::kReplica : Queue::kSplit; }
int64_t most_replicas(const std::vector<Mesh>& meshes);  // of a stage

}  // namespace whale
