// One element of any type from and to a number: for initial values and for files of another precision.
#pragma once

#include <cstddef>

#include "ir/dtype.h"

namespace whale {

bool convertible(DType from, DType to);  // equal, or both floating point
// `count` elements; throws invalid when not convertible. f64 -> f32 -> bf16 round to nearest even.
void convert(DType from_dtype, const void* from, DType to_dtype, void* to, size_t count);
void fill(DType dtype, void* to, size_t count, double value);
double element(DType dtype, const void* at);  // integers and bool as they are

}  // namespace whale
