// Dimensions of a dense row-major tensor, and the sub-axes they are products of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/small_vector.h"

namespace whale {

using Dims = Ints;
inline constexpr int kMaxRank = 8;  // so that kernels may use fixed arrays

int64_t element_count(const Dims& dims);   // 1 for rank 0; throws on overflow of int64
std::string to_string(const Dims& dims);   // "[16, 128]"
Dims row_major_strides(const Dims& dims);  // in elements
// numpy's rule; throws with both shapes when they do not broadcast.
Dims broadcast_dims(const Dims& a, const Dims& b);

// One sub-axis of one dimension: dims[dim] == outer * extent * inner, row-major, and the sub-axis is the middle one.
// A whole dimension is the sub-axis {dim, 1, 1} of its full extent. Cutting the sub-axis to [a, b) leaves a local
// dimension of outer * (b - a) * inner elements: several intervals of the dimension when outer > 1.
struct SubAxis {
  int dim = -1;  // -1: the operand does not have this sub-axis
  int64_t outer = 1;
  int64_t inner = 1;
  bool present() const { return dim >= 0; }
  friend bool operator==(const SubAxis&, const SubAxis&) = default;
};

// Common refinement of a reshape: the sub-axes that both sides share, outermost first, with their extents (extent-1
// sub-axes are left out). Row-major order is the same on both sides, so these are exactly the sub-axes that a cut may
// use without moving data.
struct SharedSubAxis {
  int64_t extent;
  SubAxis from, to;
};
std::vector<SharedSubAxis> refine_reshape(const Dims& from, const Dims& to);

}  // namespace whale
