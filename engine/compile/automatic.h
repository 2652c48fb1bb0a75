// Strategies that nobody wrote: candidates for a model and a cluster, judged by the cost model and the simulator
// (semantics.md section 8).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "compile/compile.h"

namespace whale {

struct Candidate {
  std::string strategy;
  PlanOptions options;
  int64_t accumulation = 0;      // micro-batches without a pipeline; 0: the graph's
  std::vector<int32_t> devices;  // of the cluster, ascending; others stay idle
  std::string of;                // which they are, where they are not all: "V100-32GB alone"
};

struct Judged {
  Candidate candidate;
  double seconds = 0;      // of a step; 0: it was not planned that far
  bool simulated = false;  // seconds are the simulator's, not the estimate's
  int64_t bytes = 0;       // of the fullest device
  bool at_least = false;   // bytes and missing: nobody planned that far
  int64_t missing = 0;     // bytes, on the device that lacks most; 0: it fits
  double price = 0;        // of a step, where devices have prices; 0: they have none
  std::string lost;        // why it is not the winner; empty: it is
};

struct Found {
  std::vector<Judged> list;  // the winner first, then what fits by rank, then what does not
  int64_t batch = 0;
  size_t not_tried = 0;  // candidates for which there was no time
  const Judged& winner() const { return list.front(); }
  bool fits() const { return !list.empty() && list.front().lost.empty(); }
};

// Counts of replicas, stages and ways of splits for all devices, and where they are unlike for those of each type
// alone; micro-batches; a part of the model split by itself (model_parts.h); then, where memory is short, ZeRO,
// recompute and offload in the order of what they cost; of the best pipeline other schedules. What the model has
// written stays.
// `options.strategy` is not looked at; what it asks for besides (zero, recompute, offload, exact...) stays.
Found search(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options);

// compile() by the winner; its notes say what it was chosen over. RESOURCE_EXHAUSTED where nothing fits, with what
// comes nearest.
Plan compile_automatic(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options);

std::string found_text(const Found& found, const std::vector<DeviceSpec>& devices);
Json found_json(const Found& found, const std::vector<DeviceSpec>& devices);
// Of those that fit: no other is as fast and as cheap. By rising price.
std::vector<Judged> pareto_front(const Found& found);

// The best strategy for the first so many devices and for each batch: what a scheduler of many jobs asks. JSON rows
// with devices, batch, strategy, seconds, samples_per_second, bytes, or `error`.
Json predict(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
             const std::vector<int64_t>& counts, const std::vector<int64_t>& batches);

}  // namespace whale
