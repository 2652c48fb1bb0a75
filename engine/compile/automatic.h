// Strategies that nobody wrote: candidates for a model and a cluster, judged by the cost model and the simulator
// (semantics.md section 8).
#pragma once

#include <cstdint>
#include <vector>

#include "base/json.h"
#include "compile/found.h"

namespace whale {

// Counts of replicas, stages and ways of splits for all devices, and where they are unlike for those of each type
// alone; micro-batches; a part of the model split by itself (model_parts.h); then, where memory is short, ZeRO,
// recompute and offload in the order of what they cost; of the best pipeline other schedules. What the model has
// written stays.
// `options.strategy` is not looked at; what it asks for besides (zero, recompute, offload, exact...) stays.
Found search(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options);

// compile() by the winner; its notes say what it was chosen over. RESOURCE_EXHAUSTED where nothing fits, with what
// comes nearest.
Plan compile_automatic(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options);

// The best strategy for the first so many devices and for each batch: what a scheduler of many jobs asks. JSON rows
// with devices, batch, strategy, seconds, samples_per_second, bytes, or `error`.
Json predict(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
             const std::vector<int64_t>& counts, const std::vector<int64_t>& batches);

}  // namespace whale
