// How samples are dealt out: largest remainder rounding.
#pragma once

#include <cstdint>
#include <vector>

#include "cluster/mesh.h"
#include "ir/sharding.h"

namespace whale {

// Whole numbers in proportion to `weights`, adding up to `total`: rounded by largest remainder, ties to the lower
// index. Zero weights get zero. The sum of the weights must be positive.
Ints round_shares(int64_t total, const std::vector<double>& weights);
std::vector<Interval> cut_by_shares(int64_t total, const std::vector<double>& weights);  // consecutive runs from 0

// Weights of one ratio, row by row of `columns` of them, with the same gaps (kNoDevice).
bool same_ratio(const std::vector<double>& a, const std::vector<double>& b, int64_t columns);

// The interval of [0, extent) that coordinate `at` of the axis gets, by the axis' shares of work or of state; `row`: of
// a ragged axis. Where nobody is, nothing is.
Interval cut_of(const MeshAxis& axis, bool state, int64_t extent, int64_t at, int64_t row = 0);
// The same along axes[a], at coordinates in all axes of the mesh.
Interval cut_of(const std::vector<MeshAxis>& axes, size_t a, bool state, int64_t extent, const Ints& coordinates);

}  // namespace whale
