// Axes as attributes write them: negative ones count from the end. Shape rules and kernels share these.
#pragma once

#include <vector>

#include "base/error.h"
#include "ir/graph.h"

namespace whale {

inline int normalize_axis(int64_t axis, size_t rank) {
  const auto n = static_cast<int64_t>(rank);
  if (axis < -n || axis >= n) throw invalid("axis {} is out of range for a tensor of rank {}", axis, rank);
  return static_cast<int>(axis < 0 ? axis + n : axis);
}

// Which dimensions the attribute `axes` names; all of them when it is empty.
inline std::vector<bool> reduced_axes(const Attrs& attrs, size_t rank) {
  const Ints& axes = attr_ints(attrs, "axes");
  std::vector<bool> reduced(rank, axes.empty());
  for (const int64_t axis : axes) {
    const auto i = static_cast<size_t>(normalize_axis(axis, rank));
    if (reduced[i]) throw invalid("axes {} name dimension {} twice", to_string(Attr(axes)), i);
    reduced[i] = true;
  }
  return reduced;
}

}  // namespace whale
