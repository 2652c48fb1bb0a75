// Windows over the spatial dimensions of channels-last images: what convolution and pooling share.
#pragma once

#include <iterator>
#include <limits>
#include <string_view>

#include "ops/rules.h"

namespace whale {

// One entry per spatial dimension.
struct Window {
  Dims strides, low, high, dilation;
};

inline AttrSpec ints_attr(const char* name, const char* doc, bool required = false) {
  return {.name = name, .type = AttrType::kInts, .fallback = Ints{}, .required = required, .doc = doc};
}

inline Dims spatial_of(const Dims& dims) { return Dims(dims.begin() + 1, dims.end() - 1); }
inline Dims with_spatial(int64_t first, const Dims& spatial, int64_t last) {
  Dims dims{first};
  dims.insert(dims.end(), spatial.begin(), spatial.end());
  dims.push_back(last);
  return dims;
}

// Of strides, padding, dilation and windows: their sums and products stay below 2^63.
inline constexpr int64_t kMostExtent = std::numeric_limits<int32_t>::max();

inline void need_extent(int64_t extent, std::string_view of) {
  if (extent > kMostExtent) throw invalid("{} has a spatial dimension of {}, expected <= {}", of, extent, kMostExtent);
}

// Reads strides (default as given), padding and dilation, checked against the number of spatial dimensions.
inline Window read_window(const Attrs& attrs, size_t rank, const Dims& default_strides) {
  const auto read = [&](const char* name, size_t count, const Dims& otherwise, int64_t least) {
    const Dims& given = attr_ints(attrs, name);
    if (given.empty()) return otherwise;
    if (given.size() != count)
      throw invalid("attribute '{}' has {} entries, expected {} (for {} spatial dimensions)", name, given.size(), count,
                    rank);
    for (const int64_t x : given) {
      if (x < least) throw invalid("attribute '{}' is {}, expected entries >= {}", name, to_string(given), least);
      if (x > kMostExtent)
        throw invalid("attribute '{}' is {}, expected entries <= {}", name, to_string(given), kMostExtent);
    }
    return given;
  };
  Window w{read("strides", rank, default_strides, 1), Dims(rank), Dims(rank), read("dilation", rank, Dims(rank, 1), 1)};
  const Dims padding = read("padding", 2 * rank, Dims(2 * rank, 0), 0);
  for (size_t i = 0; i < rank; ++i) w.low[i] = padding[2 * i], w.high[i] = padding[2 * i + 1];
  return w;
}

inline Dims window_output(const Dims& x, const Dims& kernel, const Window& w) {
  Dims y(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    if (kernel[i] < 1) throw invalid("the window {} has an empty dimension", to_string(kernel));
    need_extent(kernel[i], "the window");
    const int64_t room = x[i] + w.low[i] + w.high[i] - w.dilation[i] * (kernel[i] - 1) - 1;
    if (room < 0)
      throw invalid("a window of {} (dilation {}) does not fit into spatial dimension {} of {} with padding ({}, {})",
                    kernel[i], w.dilation[i], i, x[i], w.low[i], w.high[i]);
    y[i] = room / w.strides[i] + 1;
  }
  return y;
}

// Spatial dimensions as factors. The dimension whose cut is a device's share has `result` elements in the operands that
// `carried` and `results` list; those of `through` have `source` and are read through the window.
struct WindowFactors {
  Dims result, source, kernel;
  Window window;
  bool transposed = false;
  std::vector<int> through, carried, results;
  std::vector<int> partial = {};
};
inline void add_windows(Factors& f, const OpView& v, const WindowFactors& w) {
  static constexpr const char* kNames[] = {"depth", "height", "width"};
  const size_t rank = w.result.size();
  if (rank > std::size(kNames)) return;
  for (size_t d = 0; d < rank; ++d) {
    const SubAxis at = sub_axis(static_cast<int>(d) + 1);
    const WindowRead read{.result = w.result[d],
                          .source = w.source[d],
                          .stride = w.window.strides[d],
                          .reach = w.window.dilation[d] * (w.kernel[d] - 1) + 1,
                          .low = w.window.low[d],
                          .transposed = w.transposed};
    const bool plain = read.reach == 1 && read.stride == 1 && read.low == 0 && read.result == read.source;
    std::vector<SubAxis> inputs(v.inputs.size()), outputs(v.outputs.size());
    for (const int i : w.through) inputs[i] = at;
    for (const int i : w.carried) inputs[i] = at;
    for (const int o : w.results)
      if (static_cast<size_t>(o) < outputs.size()) outputs[o] = at;
    add_factor(f, v, kNames[std::size(kNames) - rank + d], FactorKind::kWindow, read.result, std::move(inputs),
               std::move(outputs));
    Factor& factor = f.list.back();
    for (const int o : w.partial)
      if (static_cast<size_t>(o) < factor.partial.size()) factor.partial[o] = true;
    factor.window = read;
    factor.window_dim = d;
    factor.window_rank = rank;
    factor.through.assign(v.inputs.size(), false);
    for (const int i : w.through) factor.through[i] = !plain;
  }
}

// The attribute `spatial`: the spatial dimensions of the forward op's x.
inline Dims spatial_attr(const OpView& v, size_t rank) {
  const Dims& s = attr_ints(*v.attrs, "spatial");
  if (s.size() != rank) throw invalid("attribute 'spatial' has {} entries, expected {}", s.size(), rank);
  return s;
}

}  // namespace whale
