#include "search/share_out.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace whale {
namespace {

constexpr double kSmall = 1e-9;

}  // namespace

// The simplex method on a dense table: rows of slacks are a feasible start, since no row has less than nothing.
double share_bound(std::span<const ShareKind> kinds, const ShareRow& have, size_t rows,
                   std::array<double, kShareRows>* price, std::vector<double>* counts) {
  const size_t n = kinds.size(), width = n + rows + 1;
  static thread_local std::vector<double> table;
  table.assign((rows + 1) * width, 0);
  const auto at = [&](size_t r, size_t c) -> double& { return table[r * width + c]; };
  std::array<size_t, kShareRows> basis{};
  for (size_t r = 0; r < rows; ++r) {
    for (size_t k = 0; k < n; ++k) at(r, k) = kinds[k].use[r];
    at(r, n + r) = 1;
    at(r, width - 1) = have[r];
    basis[r] = n + r;
  }
  for (size_t k = 0; k < n; ++k) at(rows, k) = -kinds[k].samples;
  for (int turn = 0; turn < 500; ++turn) {
    // The steepest column; after many turns the first one, which cannot cycle.
    size_t in = width;
    double most = -kSmall;
    for (size_t c = 0; c + 1 < width; ++c)
      if (at(rows, c) < most) {
        most = at(rows, c);
        in = c;
        if (turn > 200) break;
      }
    if (in == width) break;
    size_t out = rows;
    double least = 0;
    for (size_t r = 0; r < rows; ++r) {
      if (at(r, in) <= kSmall) continue;
      const double ratio = at(r, width - 1) / at(r, in);
      if (out == rows || ratio < least - kSmall || (ratio < least + kSmall && basis[r] < basis[out])) {
        least = ratio;
        out = r;
      }
    }
    if (out == rows) break;  // a kind that uses nothing: not bounded, and no kind of ours
    const double pivot = at(out, in);
    for (size_t c = 0; c < width; ++c) at(out, c) /= pivot;
    for (size_t r = 0; r <= rows; ++r) {
      const double factor = at(r, in);
      if (r == out || factor == 0) continue;
      for (size_t c = 0; c < width; ++c) at(r, c) -= factor * at(out, c);
    }
    basis[out] = in;
  }
  if (price != nullptr)
    for (size_t r = 0; r < rows; ++r) (*price)[r] = std::max(0.0, at(rows, n + r));
  if (counts != nullptr) {
    counts->assign(n, 0);
    for (size_t r = 0; r < rows; ++r)
      if (basis[r] < n) (*counts)[basis[r]] = at(r, width - 1);
  }
  return at(rows, width - 1);
}

namespace {

struct Search {
  std::span<const ShareKind> kinds;
  size_t rows;
  double want;
  int steps;
  std::array<double, kShareRows> price{};
  std::vector<size_t> order;
  std::vector<double> aim;  // of the fractions, where the search begins
  std::vector<int64_t> counts;

  double worth(const ShareRow& left) const {
    double sum = 0;
    for (size_t r = 0; r < rows; ++r) sum += price[r] * left[r];
    return sum;
  }

  bool from(size_t depth, const ShareRow& left, double samples) {
    if (samples >= want - kSmall) return true;
    if (depth == order.size() || --steps < 0 || samples + worth(left) < want - 1e-6) return false;
    const size_t k = order[depth];
    int64_t most = INT32_MAX;
    for (size_t r = 0; r < rows; ++r)
      if (kinds[k].use[r] > 0) most = std::min<int64_t>(most, left[r] / kinds[k].use[r]);
    const auto with = [&](int64_t count) {
      ShareRow rest = left;
      for (size_t r = 0; r < rows; ++r) rest[r] -= static_cast<int32_t>(count * kinds[k].use[r]);
      counts[k] = count;
      if (from(depth + 1, rest, samples + static_cast<double>(count) * kinds[k].samples)) return true;
      counts[k] = 0;
      return false;
    };
    if (depth + 1 == order.size()) return with(most);
    // From the fraction outward.
    int64_t down = std::min<int64_t>(most, static_cast<int64_t>(std::floor(aim[k] + kSmall))), up = down + 1;
    while (down >= 0 || up <= most) {
      if (down >= 0 && with(down--)) return true;
      if (up <= most && with(up++)) return true;
      if (steps < 0) break;
    }
    return false;
  }
};

}  // namespace

std::optional<std::vector<int64_t>> share_out(std::span<const ShareKind> kinds, const ShareRow& have, size_t rows,
                                              double want, int most_steps) {
  Search search{.kinds = kinds, .rows = rows, .want = want, .steps = most_steps, .order = {}, .aim = {}, .counts = {}};
  const double bound = share_bound(kinds, have, rows, &search.price, &search.aim);
  if (bound < want - 1e-6) return std::nullopt;
  // What one replica of a kind costs above its samples; a kind that costs more than there is to spare is not used.
  std::vector<double> loss(kinds.size());
  for (size_t k = 0; k < kinds.size(); ++k) loss[k] = search.worth(kinds[k].use) - kinds[k].samples;
  for (size_t k = 0; k < kinds.size(); ++k)
    if (loss[k] <= bound - want + 1e-6 && kinds[k].samples > 0) search.order.push_back(k);
  std::ranges::sort(search.order, [&](size_t a, size_t b) {
    const bool x = search.aim[a] > kSmall, y = search.aim[b] > kSmall;
    if (x != y) return x;
    return loss[a] != loss[b] ? loss[a] < loss[b] : a < b;
  });
  search.counts.assign(kinds.size(), 0);
  if (!search.from(0, have, 0)) return std::nullopt;
  return search.counts;
}

}  // namespace whale
