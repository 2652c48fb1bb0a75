// What the rules and the kernels of a mixture of experts share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "ir/graph.h"

namespace whale {

// Places per expert and routing group: the attribute `capacity`, or capacity_factor * k * tokens / experts rounded up,
// at least 1 and at most the tokens of the group.
inline int64_t moe_capacity(const Attrs& attrs, int64_t tokens, int64_t experts) {
  if (const int64_t given = attr_int(attrs, "capacity"); given > 0) return given;
  const double even = static_cast<double>(attr_int(attrs, "k", 1)) * static_cast<double>(tokens) /
                      static_cast<double>(std::max<int64_t>(experts, 1));
  const double wanted = std::ceil(attr_float(attrs, "capacity_factor", 1) * even);
  return static_cast<int64_t>(std::clamp(wanted, 1.0, std::max(1.0, static_cast<double>(tokens))));
}

}  // namespace whale
