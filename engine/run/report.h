// What a session holds and where its last run spent its time, as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "run/device_bytes.h"
#include "run/executor.h"

namespace whale {

struct LoadedCheckpoint {
  std::string directory, id;
  int64_t format = 0;
  bool checksums = false;                  // format 1 has none
  uint64_t seed = 0;                       // which the session goes on with
  std::vector<std::string> left_out = {};  // optimizer state that the plan has no place for
  std::string optimizer = {};              // that it was trained with; empty: the checkpoint does not say
};

DeviceBytes device_bytes(Machine& machine, const Executor* last, size_t device);

// `last`: the entry of the last run; may be null.
std::string report_json(Machine& machine, const Executor* last, std::optional<double> loss_scale = {},
                        const LoadedCheckpoint* loaded = nullptr);

}  // namespace whale
