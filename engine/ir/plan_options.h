// How a plan is made of a model, besides its strategy, batch and devices: kept in the plan, so that other batch sizes
// and evaluation are planned alike. each_option() is the only list of them: files, JSON, ranges and the fields of the C
// ABI follow it. A new one is touched here, in whale.h, in tools/whale/plan_arguments.cc and in
// sdk/python/whale/job.py.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ir/graph.h"

namespace whale {

// Activations that are computed again for the backward pass instead of kept.
enum class Recompute : uint8_t { kNone, kSelective, kFull };

// How replicas update what all of them hold. The results have the same bits.
enum class UpdateForm : uint8_t {
  kByCost,
  kWhole,   // all_reduce, then everybody updates everything
  kSliced,  // reduce_scatter, an update of the own slice, all_gather
};

// What waits in the host's memory.
enum OffloadClass : uint32_t {
  kOffloadState = 1,
  kOffloadGradients = 2,
  kOffloadParameters = 4,
  kOffloadActivations = 8,
};
inline constexpr uint32_t kOffloadAll = 15;

// "state,activations" <-> bits; an unknown name throws and lists the known ones.
uint32_t parse_offload(std::string_view names);
std::string offload_text(uint32_t classes);

struct PlanOptions {
  int64_t bucket_bytes = 0;               // of gradients; 0: 4 MiB
  bool overlap = true;                    // false: communication on the compute queue, for comparison
  bool fusion = true;                     // false: every op by itself, for comparison
  int zero = 0;                           // ZeRO level: 1 cuts optimizer state over replicas, 2 gradients, 3 parameters
  std::vector<double> state_shares = {};  // of what ZeRO cuts, a weight per replica; empty: equal
  Recompute recompute = Recompute::kNone;
  std::vector<Recompute> stage_recompute = {};  // of each stage in the model's order; empty: `recompute` for all
  std::optional<DType> gradient_dtype = {};     // that gradients are summed in between devices; none: as they are
  std::optional<DType> accumulate_dtype = {};   // that gradients are summed in over micro-batches; none: as they are
  bool adasum = false;                          // gradients of replicas are combined by Adasum
  bool exact = false;                           // bitwise equal results for all plans of whole micro-batches
  uint32_t offload = 0;                         // OffloadClass bits
  UpdateForm update = UpdateForm::kByCost;
  int64_t matmul_chunks = 0;  // of a product beside a collective, which then overlap; 0: by cost, 1: none
  int64_t prefetch = 0;       // gathers of parameters (ZeRO 3) ahead of the one that is read; 0: by the cost model
};

// visit(name, value, last): of a number, an enum or bits, what is legal is 0 to `last`.
template <class Options, class Visit>
void each_option(Options&& o, Visit&& visit) {
  visit("bucket_bytes", o.bucket_bytes, INT64_MAX);
  visit("overlap", o.overlap, 1);
  visit("fusion", o.fusion, 1);
  visit("zero", o.zero, 3);
  visit("state_shares", o.state_shares, 0);
  visit("recompute", o.recompute, int64_t{static_cast<uint8_t>(Recompute::kFull)});
  visit("stage_recompute", o.stage_recompute, int64_t{static_cast<uint8_t>(Recompute::kFull)});
  visit("gradient_dtype", o.gradient_dtype, 0);
  visit("accumulate_dtype", o.accumulate_dtype, 0);
  visit("adasum", o.adasum, 1);
  visit("exact", o.exact, 1);
  visit("offload", o.offload, kOffloadAll);
  visit("update", o.update, int64_t{static_cast<uint8_t>(UpdateForm::kSliced)});
  visit("matmul_chunks", o.matmul_chunks, INT32_MAX);
  visit("prefetch", o.prefetch, INT32_MAX);
}

// Those that differ from the default, by name. options_of() throws where an option is unknown or out of range.
Attrs attrs_of(const PlanOptions& options);
PlanOptions options_of(const Attrs& attrs);

}  // namespace whale
