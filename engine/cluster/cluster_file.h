// Clusters as JSON: nodes with their devices, what these achieve and what connects them (docs/clusters.md); or what
// `whale devices --probe` wrote.
#pragma once

#include <string_view>
#include <vector>

#include "cluster/device_spec.h"

namespace whale {

bool is_cluster_json(std::string_view content);  // it begins like an object
// Throws invalid for what is no such object, with the place (nodes[1].devices[0].count), what is there and what is
// expected.
std::vector<DeviceSpec> devices_of_json(std::string_view content);

}  // namespace whale
