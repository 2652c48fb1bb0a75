// Copies between strided arrays of any element size: what transpose, slice, pad, concat and broadcast_to are.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "ir/shape.h"

namespace whale::cpu {

// to[sum i_d to_stride_d] = from[sum i_d from_stride_d] over all indices below extent. Strides in elements.
class StridedCopy {
 public:
  StridedCopy(int64_t element_bytes, const Dims& extent, const Dims& from_strides, const Dims& to_strides);
  void run(int threads, const void* from, void* to) const;

 private:
  static constexpr int kMaxRank = 12;
  struct Axis {
    int64_t extent = 1, from = 0, to = 0;
  };
  void range(const char* from, char* to, int64_t begin, int64_t end) const;

  int64_t bytes_ = 1;  // of one element
  int64_t total_ = 0;  // elements
  int rank_ = 0;       // outer axes
  std::array<Axis, kMaxRank> axes_{};
  Axis row_{}, column_{};  // the inner plane: `column_` runs along the target's memory, `row_` along the source's
};

}  // namespace whale::cpu
