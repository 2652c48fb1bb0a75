// What the devices along each axis of the meshes have between them.
#pragma once

#include <vector>

#include "cluster/mesh.h"
#include "cost/cost.h"

namespace whale {

// [mesh][axis]: the slowest link between neighbours along it, when all groups of the axis talk at once and share the
// networks of their nodes and zones. Empty where devices have no figures: the cost model's link is that of all.
std::vector<std::vector<LinkRates>> axis_links(const std::vector<Mesh>& meshes, const std::vector<DeviceSpec>& devices,
                                               const CostModel& cost);

}  // namespace whale
