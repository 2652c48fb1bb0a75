// Batches for `whale run`, `verify` and `bench`: synthetic, from a text file, or from arrays named like the inputs.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "api.h"
#include "arrays.h"
#include "file.h"

namespace tool {

// One input of the plan, as its JSON describes it. limit > 0: integers must lie in [0, limit), or be `ignored`.
struct InputSpec {
  std::string name;
  int dtype = WHALE_F32;
  std::vector<int64_t> dims;
  int batch_dim = 0;
  int64_t limit = 0;
  std::optional<int64_t> ignored;
};

using Batch = std::vector<Array>;

class DataSource {
 public:
  virtual ~DataSource() = default;
  // Of the step after so many iterations: a function of both numbers and the source alone, so that a run that goes on
  // from a checkpoint goes on in its data.
  virtual Batch batch(uint64_t seed, int64_t iteration) = 0;
  // Which part of a file of arrays that batch is, as a sentence; empty: none.
  virtual std::string place_of(int64_t /*iteration*/) const { return ""; }
};

std::vector<InputSpec> inputs_of(const whale_plan* plan, const std::string& entry);
// With the floats in the types that these inputs have: a plan in float64 takes float64.
Batch widen(const Batch& batch, const std::vector<InputSpec>& inputs);
int64_t batch_of(const std::vector<InputSpec>& inputs);
// Tokens for token models, samples otherwise, and the word for it.
int64_t items_of(const std::vector<InputSpec>& inputs);
const char* item_name(const std::vector<InputSpec>& inputs);

// path empty: synthetic. A file is what its content says: .npz and .safetensors are arrays named like the inputs, .npy
// the array of the only input; in order, the last batch smaller. Text is for token models: random windows of bytes;
// `targets` are the next bytes. Anything else is refused, with what to do.
// Synthetic numbers: floats are normal, integers below their limit. kWide reaches what those leave alone: a sixth of
// the labels that may be ignored is, and the floats of every fourth batch are larger, so that gradients are clipped.
enum class Draw : uint8_t { kTypical, kWide };
std::unique_ptr<DataSource> open_data(const std::string& path, const std::vector<InputSpec>& inputs,
                                      Draw draw = Draw::kTypical);

}  // namespace tool
