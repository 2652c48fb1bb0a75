#include "cluster/shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <unordered_map>

#include "base/error.h"

namespace whale {

Ints round_shares(int64_t total, const std::vector<double>& weights) {
  double sum = 0;
  for (const double w : weights) {
    if (!(w >= 0) || !std::isfinite(w)) throw invalid("shares: {} is not a weight, expected numbers >= 0", w);
    sum += w;
  }
  if (!std::isfinite(sum))
    throw invalid(
        "shares [{}] add up to {}, expected a finite sum: they are weights, give smaller ones of the same ratio",
        fmt::join(weights, ", "), sum);
  if (!(sum > 0))
    throw invalid("shares [{}] add up to {}, expected more than 0: give at least one of them a weight",
                  fmt::join(weights, ", "), sum);
  const size_t n = weights.size();
  Ints out(n);
  std::vector<double> rest(n);
  int64_t given = 0;
  for (size_t i = 0; i < n; ++i) {
    const double exact = static_cast<double>(total) * (weights[i] / sum);
    // Weights such as 0.1 + 0.2 make 2.9999999; what is whole up to rounding counts as whole.
    const double whole = std::floor(exact + 1e-9 * std::max(1.0, exact));
    out[i] = static_cast<int64_t>(whole);
    rest[i] = weights[i] > 0 ? std::max(0.0, exact - whole) : -1;
    given += out[i];
  }
  std::vector<size_t> order(n);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return rest[a] > rest[b] + 1e-9; });
  for (size_t k = 0; given < total; k = (k + 1) % n)
    if (weights[order[k]] > 0) ++out[order[k]], ++given;
  for (size_t k = n; given > total; --k)
    if (const size_t i = order[(k - 1) % n]; out[i] > 0) --out[i], --given;
  return out;
}

bool same_ratio(const std::vector<double>& a, const std::vector<double>& b, int64_t columns) {
  if (a.size() != b.size()) return false;
  const auto row = static_cast<size_t>(columns);
  const auto sum_of = [&](const std::vector<double>& weights, size_t from) {
    double sum = 0;
    for (size_t i = from; i < std::min(from + row, weights.size()); ++i) sum += std::max(0.0, weights[i]);
    return sum;
  };
  for (size_t i = 0; i < a.size(); ++i) {
    const size_t from = i - i % row;
    const double x = a[i] / sum_of(a, from), y = b[i] / sum_of(b, from);
    if ((a[i] < 0) != (b[i] < 0) || (a[i] >= 0 && std::abs(x - y) > 1e-12)) return false;
  }
  return true;
}

std::vector<Interval> cut_by_shares(int64_t total, const std::vector<double>& weights) {
  std::vector<Interval> out;
  int64_t at = 0;
  for (const int64_t size : round_shares(total, weights)) out.push_back({at, at + size}), at += size;
  return out;
}

namespace {

// cut_by_shares of what was asked for before: planning asks for each tensor and device, of few extents and weights.
const std::vector<Interval>& known_cut(int64_t total, const std::vector<double>& weights) {
  struct Known {
    std::vector<double> weights;
    std::vector<Interval> parts;
  };
  constexpr size_t kExtents = 256, kWeights = 64;  // at most, of each
  thread_local std::unordered_map<int64_t, std::vector<Known>> known;
  if (known.size() > kExtents) known.clear();
  std::vector<Known>& of = known[total];
  for (const Known& k : of)
    if (k.weights == weights) return k.parts;
  if (of.size() > kWeights) of.clear();
  return of.emplace_back(Known{weights, cut_by_shares(total, weights)}).parts;
}

}  // namespace

Interval cut_of(const MeshAxis& axis, bool state, int64_t extent, int64_t at, int64_t row) {
  const std::vector<double>& shares = state ? axis.state_shares : axis.shares;
  if (axis.only >= 0) return known_cut(extent, axis.shares).at(static_cast<size_t>(axis.only));
  if (axis.ragged() && (!state || axis.has_gaps())) {
    std::vector<double> weights;
    for (int64_t k = 0; k < axis.size; ++k) {
      const double share = axis.shares[row * axis.size + k];
      weights.push_back(share < 0 ? 0 : state ? 1 : share);
    }
    return known_cut(extent, weights).at(static_cast<size_t>(at));
  }
  if (!shares.empty()) return known_cut(extent, shares).at(static_cast<size_t>(at));
  // Largest remainder of equal weights: the first ones get one more.
  const int64_t size = extent / axis.size, more = extent % axis.size;
  const int64_t begin = at * size + std::min(at, more);
  return {begin, begin + size + (at < more ? 1 : 0)};
}

Interval cut_of(const std::vector<MeshAxis>& axes, size_t a, bool state, int64_t extent, const Ints& coordinates) {
  return cut_of(axes[a], state, extent, coordinates[a], axes[a].ragged() ? row_of(axes, a, coordinates) : 0);
}

}  // namespace whale
