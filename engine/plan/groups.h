// Whom a device works with along an axis.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace whale {

// One group per axis of the meshes: its lines, each in the order of the coordinates, mesh after mesh. Along an axis of
// one device there is nobody to work with.
std::vector<Group> groups_of(const std::vector<Mesh>& meshes);

}  // namespace whale
