// Elementwise sum, maximum, minimum of two arrays: the arithmetic of reductions between devices.
#pragma once

#include <cstddef>

#include "ops/op.h"

namespace whale::cpu {

// to[i] = combine(a[i], b[i]); `to` may be `a` or `b`, no other overlap. bf16 is added in f32 and rounded once.
void combine_arrays(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t elements);

}  // namespace whale::cpu
