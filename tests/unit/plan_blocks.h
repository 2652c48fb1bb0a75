// Blocks that small models are made of: each maps the activations [batch, ..., features] to others and never mixes
// samples (batch_norm and moe with a group over the batch excepted). Blocks are stable: kept cases name them.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "property.h"

namespace whale::test {

class BlockGraph : public GraphMaker {
 public:
  explicit BlockGraph(int64_t batch) : batch(batch) {}

  const int64_t batch;
  Dice dice{0};
  std::string name;         // of the block that is being made
  TensorId h = kNone;       // the activations
  TensorId table = kNone;   // of token embeddings
  TensorId scalar = kNone;  // a parameter
  TensorId loss = kNone;
  std::vector<TensorId> extra;  // terms of the loss

  void add(std::string_view block, uint32_t word, const std::string& prefix);
  Graph finish();

  // For the blocks:
  TensorId parameter(const char* what, Dims dims, Initializer init = {InitKind::kNormal, 0, 0.5, "", ""});
  TensorId ones(const char* what, Dims dims) {
    return parameter(what, std::move(dims), {InitKind::kOnes, 0, 1, "", ""});
  }
  TensorId reshape(TensorId x, Dims shape) { return op(OpCode::k_reshape, {x}, {{"shape", std::move(shape)}}); }
  TensorId linear(const char* what, TensorId x, int64_t features);  // the last dimension
  TensorId activation(TensorId x);
  int64_t features(TensorId x) const { return dims(x).back(); }
  void rank(size_t low, size_t high);  // reshapes h: middle dimensions are merged or made
};

struct BlockRow {
  const char* name;
  void (*make)(BlockGraph&);
};
std::span<const BlockRow> written_middle_blocks();  // plan_blocks_written.cc
std::span<const BlockRow> written_last_blocks();

std::vector<std::string> first_blocks();  // make h from inputs
std::vector<std::string> middle_blocks();
std::vector<std::string> last_blocks();  // make the loss

}  // namespace whale::test
