// Attention in blocks of queries and keys, with a running softmax: memory linear in the sequence.
#pragma once

#include <cstdint>

#include "base/philox.h"
#include "device/global_index.h"
#include "ir/dtype.h"

namespace whale::cpu {

// One head-carrying operand, [batch, time, heads, width] somewhere inside a tensor; strides in elements. Head h is at h
// * width.
struct HeadsView {
  char* data = nullptr;  // of head 0
  int64_t batch = 0, time = 0, width = 0;
  DType dtype{};
  char* at(int64_t b, int64_t t, int64_t h) const { return data + (b * batch + t * time + h * width) * size_of(dtype); }
};

struct AttentionArgs {
  HeadsView q, k, v, out;      // out: the result, or an operand of the gradient
  HeadsView dout, dq, dk, dv;  // gradient only
  float* lse = nullptr;        // [b, h, tq]
  const char* bias = nullptr;
  DType bias_dtype{};
  int64_t bias_batch = 0, bias_head = 0;  // strides; 0: broadcast
  float* dbias = nullptr;                 // gradient only; same strides
  int64_t batches = 0, heads = 0, kv_heads = 0, tq = 0, tk = 0, d = 0, dv_width = 0;
  int64_t all_keys = 0, key_begin = 0;  // k and v may be a piece of all keys
  bool causal = false;
  int64_t shift = 0;  // causal: query i sees keys up to i + shift
  float scale = 1;
  double rate = 0;  // dropout
  RandomStream stream{0, 0, 0};
  GlobalIndex box{Box{}, Dims{}};
  int64_t all_heads = 0, all_queries = 0, batch_begin = 0;

  static constexpr int64_t kQueries = 64, kKeys = 64;  // of a block
  int64_t query_blocks() const { return (tq + kQueries - 1) / kQueries; }
  // Global number of the first key's dropout word of a query.
  uint64_t random_row(int64_t b, int64_t h, int64_t i) const {
    const int64_t head = box.coordinate(0, b, batch_begin) * all_heads + box.coordinate(2, h, batch_begin);
    return static_cast<uint64_t>((head * all_queries + box.coordinate(1, i, batch_begin)) * all_keys + key_begin);
  }
};

size_t attention_scratch(const AttentionArgs& args);  // floats, one thread
size_t attention_grad_scratch(const AttentionArgs& args);

// Forward: one (batch, head, block of queries). Backward: one (batch, key head).
void run_attention(const AttentionArgs& args, int64_t b, int64_t h, int64_t block, float* scratch);
void run_attention_grad(const AttentionArgs& args, int64_t b, int64_t kv_head, float* scratch);

}  // namespace whale::cpu
