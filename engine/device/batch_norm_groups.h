// Batch norm over groups of samples: a kernel for each group of those that a device has rows of.
#pragma once

#include <algorithm>
#include <vector>

#include "device/device.h"

namespace whale {

// Operands of x's shape, and statistics, which have a row per group.
struct GroupOperands {
  std::vector<size_t> rows_in, rows_out, stats_in, stats_out;
};
inline const GroupOperands kStatsGroups{{0}, {}, {}, {0}}, kApplyGroups{{0, 4}, {0}, {1}, {}},
    kGradStatsGroups{{0, 1, 3}, {}, {2}, {0}}, kGradGroups{{0, 1, 5}, {0, 1}, {2, 4}, {}};

// The operands of one group each: rows [begin, end) of the first dimension, and the group's row of the statistics. A
// device may have a part of a group, or nothing: then its sums are zero.
inline std::vector<KernelSpec> by_group(const KernelSpec& spec, const GroupOperands& operands) {
  const Dims& x = spec.in[operands.rows_in[0]].dims;
  const Operand& stats = operands.stats_in.empty() ? spec.out[operands.stats_out[0]] : spec.in[operands.stats_in[0]];
  const int64_t groups = stats.dims[0], rows = x[0];
  const int64_t group = groups == 1 ? rows : attr_int(*spec.attrs, "group"),
                begin = groups == 1 ? 0 : attr_int(*spec.attrs, "begin");
  std::vector<KernelSpec> out;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = std::clamp<int64_t>(g * group - begin, 0, rows),
                  last = std::clamp<int64_t>((g + 1) * group - begin, first, rows);
    KernelSpec one = spec;
    const auto cut = [](Operand& operand, int64_t from, int64_t to) {
      if (!operand.present() || operand.dims.empty()) return;
      const int64_t whole = std::max<int64_t>(operand.dims[0], 1);
      const auto bytes = static_cast<int64_t>(size_of(operand.dtype));
      operand.data = static_cast<char*>(operand.data) + element_count(operand.dims) / whole * bytes * from;
      operand.dims[0] = to - from;
    };
    for (const size_t i : operands.rows_in)
      if (i < one.in.size()) cut(one.in[i], first, last);
    for (const size_t o : operands.rows_out)
      if (o < one.out.size()) cut(one.out[o], first, last);
    for (const size_t i : operands.stats_in) cut(one.in[i], g, g + 1);
    for (const size_t o : operands.stats_out) cut(one.out[o], g, g + 1);
    out.push_back(std::move(one));
  }
  return out;
}

}  // namespace whale
