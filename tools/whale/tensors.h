// Numbers out of tensors of any dtype, and back.
#pragma once

#include <cstddef>

#include "api.h"
#include "values.h"

namespace tool {

size_t elements(const whale_tensor* tensor);
double root_of_elements(const whale_tensor* tensor);  // at least 1: a norm to what it is per element
// Elements [begin, begin + count) of a tensor of any dtype.
void load(const whale_tensor* tensor, size_t begin, size_t count, double* to);
// The other way, rounded to nearest; f64, f32, bf16 and f16.
void store(whale_tensor* tensor, size_t begin, size_t count, const double* from);
bool storable(int dtype);
double rounding_of(int dtype);              // half a unit in the last place of a float, relative
bool integers(const whale_tensor* tensor);  // also bool
bool same_bits(const whale_tensor* a, const whale_tensor* b);
// Euclidean, norm: of the finite elements of b. The same infinity, or no number, in both is no difference, in one of
// them an infinite one. Of integers how many elements differ, of how many: a double tells int64 apart up to 2^53 only.
struct Distance {
  double difference = 0, norm = 0;
};
Distance distance(const whale_tensor* a, const whale_tensor* b);
Values values_of(const whale_tensor* tensor);

}  // namespace tool
