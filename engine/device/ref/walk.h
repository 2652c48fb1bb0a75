// Walks the multi-indices of a shape in row-major order, keeping the offsets that several operands have there.
#pragma once

#include <array>
#include <cstdint>

#include "base/error.h"
#include "ir/shape.h"

namespace whale::ref {

// Strides, in elements, per dimension of the walked shape; 0 where an operand is broadcast.
using Strides = Dims;

// numpy's rule: `operand` aligned to the right of `dims`, extent 1 is repeated.
inline Strides broadcast_strides(const Dims& operand, const Dims& dims) {
  Strides strides(dims.size(), 0);
  int64_t stride = 1;
  for (size_t k = 1; k <= operand.size() && k <= dims.size(); ++k) {
    const int64_t extent = operand[operand.size() - k];
    if (extent != 1) strides[dims.size() - k] = stride;
    stride *= extent;
  }
  return strides;
}

template <size_t N>
class Walk {
 public:
  static constexpr size_t kMaxRank = 12;

  Walk(const Dims& dims, const std::array<Strides, N>& strides) : rank_(dims.size()), count_(element_count(dims)) {
    if (rank_ > kMaxRank) throw invalid("a tensor of {} dimensions, at most {} are supported", rank_, kMaxRank);
    for (size_t d = 0; d < rank_; ++d) {
      dims_[d] = dims[d];
      for (size_t n = 0; n < N; ++n) strides_[n][d] = strides[n][d];
    }
  }

  // visit(i, offsets): i is the linear index in the shape, offsets[n] the element of operand n.
  template <class Visit>
  void each(Visit visit) const {
    std::array<int64_t, kMaxRank> at{};
    std::array<int64_t, N> offsets{};
    for (int64_t i = 0; i < count_; ++i) {
      visit(i, offsets);
      for (size_t d = rank_; d-- > 0;) {
        for (size_t n = 0; n < N; ++n) offsets[n] += strides_[n][d];
        if (++at[d] < dims_[d]) break;
        for (size_t n = 0; n < N; ++n) offsets[n] -= strides_[n][d] * dims_[d];
        at[d] = 0;
      }
    }
  }

 private:
  size_t rank_;
  int64_t count_;
  std::array<int64_t, kMaxRank> dims_{};
  std::array<std::array<int64_t, kMaxRank>, N> strides_{};
};

}  // namespace whale::ref
