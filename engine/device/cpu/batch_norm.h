// Batch norm over channels-last data, as passes over a flat array: channel i % c of element i repeats with a period
// that is a multiple of the vector length, and coefficients are stored for one period. Every pass starts at a multiple
// of it.
#pragma once

#include <cstdint>

#include "ir/dtype.h"

namespace whale::cpu {

inline constexpr int64_t kVector = 16;  // floats in the widest vector

// A multiple of c and of kVector, at least four vectors.
int64_t channel_period(int64_t c);

// One pass. Arrays of f32 or bf16 (`dtype`) start at a multiple of `period`; null pointers: absent.
struct ChannelPass {
  DType dtype = DType::kF32;
  int64_t period = 0;
  const void* x = nullptr;
  const void* dy = nullptr;
  const void* y = nullptr;  // a mask: dy counts but where y <= 0
  const void* residual = nullptr;
  void* out = nullptr;
  void* second = nullptr;  // dresidual
  bool relu = false;
  const float *mean = nullptr, *scale = nullptr, *shift = nullptr, *slope = nullptr;  // [period]
};

// Each works on elements [begin, end); begin is a multiple of the period.
// out = (x - mean) scale + shift (+ residual), at least 0 when relu.
void normalize(const ChannelPass& pass, int64_t begin, int64_t end);
// out = scale dy' + slope (x - mean) + shift; second = dy'.
void normalize_grad(const ChannelPass& pass, int64_t begin, int64_t end);
// sums[0, period): sum of x; sums[period, 2 period): of x squared. In f64.
void sum_squares(const ChannelPass& pass, int64_t begin, int64_t end, double* sums);
// Of dy', and of dy' (x - mean).
void sum_grad(const ChannelPass& pass, int64_t begin, int64_t end, double* sums);

}  // namespace whale::cpu
