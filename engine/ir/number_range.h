// The numbers that a type of integers, or bool, has.
#pragma once

#include <cmath>

#include "ir/dtype.h"

namespace whale {

inline bool has_negatives(DType dtype) {
  return is_float(dtype) || dtype == DType::kI8 || dtype == DType::kI32 || dtype == DType::kI64;
}
// The first number above those of the type.
inline double end_of(DType dtype) {
  const int bits = dtype == DType::kBool ? 1 : 8 * static_cast<int>(size_of(dtype)) - (has_negatives(dtype) ? 1 : 0);
  return std::ldexp(1.0, bits);
}
// Floating point types have any number, rounded.
inline bool has_number(DType dtype, double value) {
  if (is_float(dtype)) return true;
  const double end = end_of(dtype);
  return value >= (has_negatives(dtype) ? -end : 0) && value < end && value == std::floor(value);
}

}  // namespace whale
