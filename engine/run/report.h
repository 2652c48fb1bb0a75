// What a session holds and where its last run spent its time, as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "run/device_bytes.h"
#include "run/executor.h"
#include "run/loaded.h"

namespace whale {

DeviceBytes device_bytes(Machine& machine, const Executor* last, size_t device);

// `last`: the entry of the last run; may be null.
std::string report_json(Machine& machine, const Executor* last, std::optional<double> loss_scale = {},
                        const LoadedCheckpoint* loaded = nullptr);

}  // namespace whale
