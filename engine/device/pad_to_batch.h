// The rows at hand at their places among all rows of the step: the kernel of every back end whose memory is the host's.
#pragma once

#include <cstring>

#include "device/device.h"
#include "device/global_index.h"

namespace whale {

class PadToBatch {
 public:
  explicit PadToBatch(const KernelSpec& spec)
      : x_(spec.in[0]), y_(spec.out[0]), global_(spec.box, x_.dims), row_(spec.row) {
    row_bytes_ = static_cast<size_t>(x_.dims.back() * size_of(x_.dtype));
    for (size_t d = 0; d + 1 < x_.dims.size(); ++d) rows_ *= x_.dims[d], all_ *= y_.dims[d];
  }

  void operator()() const {
    auto* to = static_cast<char*>(y_.data);
    const auto* from = static_cast<const char*>(x_.data);
    if (row_bytes_ == 0) return;
    std::memset(to, 0, static_cast<size_t>(element_count(y_.dims) * size_of(y_.dtype)));
    const int64_t begin = row_ ? row_->batch_begin : 0;
    for (int64_t r = 0; r < rows_; ++r) {
      int64_t row = 0, stride = 1, rest = r;
      for (size_t d = x_.dims.size() - 1; d-- > 0; rest /= x_.dims[d], stride *= y_.dims[d])
        row += global_.coordinate(static_cast<int>(d), rest % x_.dims[d], begin) * stride;
      if (row < 0 || row >= all_) throw internal("row {} of a micro-batch is not one of the step's {}", row, all_);
      std::memcpy(to + static_cast<size_t>(row) * row_bytes_, from + static_cast<size_t>(r) * row_bytes_, row_bytes_);
    }
  }

 private:
  Operand x_, y_;
  GlobalIndex global_;
  const RowContext* row_;
  size_t row_bytes_;
  int64_t rows_ = 1, all_ = 1;
};

}  // namespace whale
