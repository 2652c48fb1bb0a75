// Sliding windows of convolution and pooling over one, two or three spatial dimensions, always treated as three.
#pragma once

#include "device/ref/table.h"

namespace whale::ref {

struct Window {
  static constexpr size_t kSpatial = 3;
  int64_t input[kSpatial], output[kSpatial], kernel[kSpatial], stride[kSpatial], low[kSpatial], dilation[kSpatial];

  // x [n, s..., c], y [n, s'..., c']; kernel extents and attributes have one entry per spatial dimension. Strides left
  // out are the window itself in pooling, 1 in convolution (which has a dilation).
  Window(const Attrs& attrs, const Dims& x, const Dims& y, const Dims& extents) {
    const size_t rank = x.size() - 2;
    if (rank > kSpatial) throw unimplemented("a window over {} spatial dimensions, the ref device has at most 3", rank);
    const Ints& strides = attr_ints(attrs, "strides");
    const Ints& padding = attr_ints(attrs, "padding");
    const Ints& dilations = attr_ints(attrs, "dilation");
    for (size_t d = 0; d < kSpatial; ++d) {
      input[d] = output[d] = kernel[d] = stride[d] = dilation[d] = 1;
      low[d] = 0;
      if (d + rank < kSpatial) continue;
      const size_t s = d + rank - kSpatial;
      input[d] = x[1 + s];
      output[d] = y[1 + s];
      kernel[d] = extents[s];
      stride[d] = s < strides.size() ? strides[s] : attrs.contains("window") ? extents[s] : 1;
      if (2 * s < padding.size()) low[d] = padding[2 * s];
      if (s < dilations.size()) dilation[d] = dilations[s];
    }
  }

  int64_t inputs() const { return input[0] * input[1] * input[2]; }
  int64_t outputs() const { return output[0] * output[1] * output[2]; }
  int64_t taps() const { return kernel[0] * kernel[1] * kernel[2]; }

  // Position in the input (linear over the spatial dimensions) that tap `tap` of output `at` reads; -1 in the padding.
  int64_t source(int64_t at, int64_t tap) const {
    const int64_t o[] = {at / (output[1] * output[2]), at / output[2] % output[1], at % output[2]};
    const int64_t k[] = {tap / (kernel[1] * kernel[2]), tap / kernel[2] % kernel[1], tap % kernel[2]};
    int64_t position = 0;
    for (size_t d = 0; d < kSpatial; ++d) {
      const int64_t i = o[d] * stride[d] - low[d] + k[d] * dilation[d];
      if (i < 0 || i >= input[d]) return -1;
      position = position * input[d] + i;
    }
    return position;
  }
};

}  // namespace whale::ref
