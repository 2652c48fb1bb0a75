// What the loops of pairwise_dot.cc work on.
#pragma once

#include <cstdint>

namespace whale::cpu {

struct PairwiseArgs {
  const void* const* x;  // `vectors` operands [samples, width]
  void* y;               // [samples, pairs]: the result; backward, its gradient, only read
  void* const* dx;       // backward: like x; forward: null
  int64_t vectors, width;
  bool low;  // bf16, else float
};

}  // namespace whale::cpu
