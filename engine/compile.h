// From a graph and a list of devices to a Plan. compile.cc is the list of passes.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "plan/bridge_report.h"
#include "plan/plan.h"

namespace whale {

// Activations that are computed again for the backward pass instead of kept.
enum class Recompute : uint8_t { kNone, kSelective, kFull };

// How replicas update what all of them hold. The results have the same bits.
enum class UpdateForm : uint8_t {
  kByCost,
  kWhole,   // all_reduce, then everybody updates everything
  kSliced,  // reduce_scatter, an update of the own slice, all_gather
};

struct CompileOptions {
  std::string strategy;                     // of unannotated ops; empty: the graph's
  std::vector<std::string> fetch = {};      // besides the graph's outputs: tensor names, "grad:PARAMETER"
  int64_t bucket_bytes = 0;                 // of gradients; 0: 4 MiB
  int64_t accumulation = 0;                 // micro-batches; 0: the graph's
  std::optional<Precision> precision = {};  // none: the graph's
  bool overlap = true;                      // false: communication on the compute stream, for comparison
  bool fusion = true;                       // false: every op by itself, for comparison
  int zero = 0;                           // ZeRO level: 1 cuts optimizer state over replicas, 2 gradients, 3 parameters
  std::vector<double> state_shares = {};  // of what ZeRO cuts, a weight per replica; empty: equal
  Recompute recompute = Recompute::kNone;
  std::vector<Recompute> stage_recompute = {};  // of each stage in the model's order; empty: `recompute` for all
  std::optional<DType> gradient_dtype = {};     // that gradients are summed in between devices; none: as they are
  bool adasum = false;                          // gradients of replicas are combined by Adasum
  uint32_t offload = 0;                         // OffloadClass bits (parallel/offload.h)
  UpdateForm update = UpdateForm::kByCost;
  int64_t matmul_chunks = 0;  // of a product beside a collective, which then overlap; 0: by cost, 1: none
  bool exact = false;         // bitwise equal results for all plans of whole micro-batches
  int64_t max_bytes = 0;      // estimated memory that planning may take; 0: any
  bool verify = true;         // each level after each pass
  std::function<void(std::string_view pass, const std::string& text)> dump = {};  // text of the level after each pass
};

// A plan with the entry "train" (when there is a loss and an optimizer) and the entry "eval". Plans only: needs no
// device.
Plan compile(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options = {});

// One more entry of the same plan, for another batch size (a last, smaller batch; evaluation), from Plan::source: same
// variables in the same order, same devices, shares and micro-batches. RESOURCE_EXHAUSTED where it needs more memory
// than a device says it has. Thread-safe.
Entry compile_entry(const Plan& plan, std::string_view name, int64_t batch);

// The bridges of a training step (without a loss: of an evaluation), with what they cost and what else was legal; found
// by planning Plan::source once more. Thread-safe.
std::vector<BridgeRow> bridges_of(const Plan& plan);

}  // namespace whale
