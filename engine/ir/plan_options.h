// How a plan is made of a model, besides its strategy, batch and devices: kept in the plan, so that other batch sizes
// and evaluation are planned alike. each_option() is the only list of them: files, JSON, what is legal and the fields
// of the C ABI follow it. A new one is touched here, in capi/abi.toml, in tools/whale/plan_arguments.cc and in
// sdk/python/whale/job.py, and read where it acts.
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

// Of a number, an enum or bits, what is legal is 0 to `last`. What is `of_training` has no meaning without a loss.
struct OptionRule {
  int64_t last = 0;
  bool of_training = false;
};

template <class Options, class Visit>
void each_option(Options&& o, Visit&& visit) {
  constexpr int64_t kPolicies = static_cast<uint8_t>(Recompute::kFull),
                    kForms = static_cast<uint8_t>(UpdateForm::kSliced);
  visit("bucket_bytes", o.bucket_bytes, OptionRule{INT64_MAX, true});
  visit("overlap", o.overlap, OptionRule{1});
  visit("fusion", o.fusion, OptionRule{1});
  visit("zero", o.zero, OptionRule{3, true});
  visit("state_shares", o.state_shares, OptionRule{0, true});
  visit("recompute", o.recompute, OptionRule{kPolicies, true});
  visit("stage_recompute", o.stage_recompute, OptionRule{kPolicies, true});
  visit("gradient_dtype", o.gradient_dtype, OptionRule{0, true});
  visit("accumulate_dtype", o.accumulate_dtype, OptionRule{0, true});
  visit("adasum", o.adasum, OptionRule{1, true});
  visit("exact", o.exact, OptionRule{1});
  visit("offload", o.offload, OptionRule{kOffloadAll});  // parameters also without training
  visit("update", o.update, OptionRule{kForms, true});
  visit("matmul_chunks", o.matmul_chunks, OptionRule{INT32_MAX});
  visit("prefetch", o.prefetch, OptionRule{INT32_MAX});
}

// Those that differ from the default, by name. options_of() throws where an option is unknown or out of range.
Attrs attrs_of(const PlanOptions& options);
PlanOptions options_of(const Attrs& attrs);

}  // namespace whale
