// Batches for `whale run`, `verify` and `bench`: synthetic, from a text file, or from arrays named like the inputs.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api.h"

namespace tool {

// One input of the plan, as its JSON describes it. limit > 0: integers must lie in [0, limit).
struct InputSpec {
  std::string name;
  int dtype = WHALE_F32;
  std::vector<int64_t> dims;
  int batch_dim = 0;
  int64_t limit = 0;
};

struct Array {
  std::string name;
  int dtype = WHALE_F32;
  std::vector<int64_t> dims;
  std::vector<uint8_t> bytes;
};
using Batch = std::vector<Array>;

class DataSource {
 public:
  virtual ~DataSource() = default;
  virtual Batch next() = 0;
};

size_t size_of(int dtype);
int parse_dtype(const std::string& name);  // "f32", "float32", ...
std::vector<InputSpec> inputs_of(const whale_plan* plan, const std::string& entry);
int64_t batch_of(const std::vector<InputSpec>& inputs);
// Tokens for token models, samples otherwise, and the word for it.
int64_t items_of(const std::vector<InputSpec>& inputs);
const char* item_name(const std::vector<InputSpec>& inputs);

// path empty: synthetic. `.npz` and `.safetensors`: arrays named like the inputs, in order, the last batch smaller.
// Anything else is a text file for token models: random windows of bytes; `targets` are the next bytes.
std::unique_ptr<DataSource> open_data(const std::string& path, const std::vector<InputSpec>& inputs, uint64_t seed);

std::string read_file(const std::string& path);

}  // namespace tool
