// What an engine lets files of strangers ask for (whale_engine_options). Graphs and plans are checked once they have
// been read: reading itself takes memory in proportion to the file, which max_file_bytes bounds.
#pragma once

#include <cstdint>
#include <string>

#include "cluster/device_spec.h"
#include "ir/graph.h"
#include "plan/plan.h"
#include "session/init_files.h"
#include "whale/whale.h"

namespace whale::capi {

struct Limits {
  int64_t file_bytes = INT32_MAX;  // where the offsets of FlatBuffers end
  int64_t ops = 1'000'000;
  int64_t tensors = 4'000'000;
  int64_t elements = int64_t{1} << 52;
  int64_t devices = 65536;
  int64_t plan_bytes = int64_t{64} << 30;
  std::string init_dir;
};

Limits read_limits(const whale_engine_options& options);

// Each throws RESOURCE_EXHAUSTED, naming the option, its value and what was found.
void check_file_bytes(const Limits& limits, int64_t bytes, const std::string& what);
void check_devices(const Limits& limits, size_t devices);
void check_limits(const Limits& limits, const Graph& graph);
void check_limits(const Limits& limits, const Plan& plan);

// Where a graph or plan that was loaded from `path` (empty: from bytes) may read initial values; `what`: "model" or
// "plan".
InitFiles init_files_of(const Limits& limits, const std::string& path, const char* what);

}  // namespace whale::capi
