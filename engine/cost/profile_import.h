// Profiles that others' tools wrote, as ours (docs/profiles.md): Sailor's and Metis's times of layers, and tables of
// ops.
#pragma once

#include <memory>
#include <string>

#include "cost/measured.h"

namespace whale {

// `path`: Sailor's profile.json, a file of Metis's (DeviceType.A100_tp1_bs4.json) or a folder of them, or a table with
// the columns op, gpu, B, M, N, K, H, ms. `device`: the device type (cluster/device_types.h) that it is of; empty: as
// the file, or its folder, is named. Throws invalid for what is none of these, and for times that cannot be right.
std::shared_ptr<const MeasuredProfile> import_profile(const std::string& path, const std::string& device);

}  // namespace whale
