// Clusters as JSON: nodes with their devices, what these achieve and what connects them (docs/clusters.md); or what
// `whale devices --probe` wrote.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cluster/device_spec.h"

namespace whale {

bool is_cluster_json(std::string_view content);  // it begins like an object or a list
// Throws invalid for what is no such object, with the file, the place (/nodes/1/devices/0/count; where it is no JSON
// line and column), what is there and what is expected.
std::vector<DeviceSpec> devices_of_json(std::string_view content, const std::string& path = "");

// JSON, or a device list, a node a line (devices_of_file()). Errors name the file and the line.
std::vector<DeviceSpec> devices_of_cluster_file(std::string_view content, const std::string& path);

}  // namespace whale
