#include "task/window.h"

#include <algorithm>
#include <vector>

#include "base/error.h"
#include "cluster/shares.h"

namespace whale {
namespace {

int64_t floor_div(int64_t a, int64_t b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// What coordinate `at` makes, reads for it, and has of the source.
struct Shares {
  Interval made, read, own;
};
Shares shares_of(const WindowRead& w, const MeshAxis& axis, int64_t at, int64_t row) {
  const Interval made = cut_of(axis, false, w.result, at, row);
  return {made, made.size() > 0 ? read_through(w, made) : Interval{}, cut_of(axis, false, w.source, at, row)};
}
// Every one that there is.
std::vector<Shares> all_shares(const WindowRead& w, const MeshAxis& axis) {
  const int64_t rows = axis.ragged() ? static_cast<int64_t>(axis.shares.size()) / axis.size : 1;
  std::vector<Shares> out;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t k = 0; k < axis.members(row); ++k) out.push_back(shares_of(w, axis, k, row));
  return out;
}

}  // namespace

Interval read_through(const WindowRead& w, const Interval& r) {
  Interval read;
  if (w.transposed) {
    // From the first row that reaches the interval (or, where the stride leaps over the window, the one before it, so
    // that nothing is padded by less than zero) to the last.
    const int64_t first = floor_div(r.begin + w.low - w.reach, w.stride) + 1;
    read = {std::min(first, floor_div(r.begin + w.low, w.stride)), floor_div(r.end - 1 + w.low, w.stride) + 1};
  } else {
    read = {r.begin * w.stride - w.low, (r.end - 1) * w.stride - w.low + w.reach};
  }
  read = {std::max<int64_t>(read.begin, 0), std::min(read.end, w.source)};
  return read.begin < read.end ? read : Interval{};
}

WindowPadding padding_of(const WindowRead& w, const Interval& r) {
  const Interval read = read_through(w, r);
  if (!w.transposed)
    return {read.begin - (r.begin * w.stride - w.low), (r.end - 1) * w.stride - w.low + w.reach - read.end, 0};
  const int64_t high = (read.end - 1) * w.stride + w.reach - r.end - w.low;
  return {r.begin + w.low - read.begin * w.stride, std::max<int64_t>(high, 0), std::max<int64_t>(-high, 0)};
}

bool window_fits(const WindowRead& window, const MeshAxis& axis) {
  const std::vector<Shares> all = all_shares(window, axis);
  return std::all_of(all.begin(), all.end(), [](const Shares& s) { return s.made.size() > 0 && s.read.size() > 0; });
}

bool reads_own(const WindowRead& window, const MeshAxis& axis) {
  const std::vector<Shares> all = all_shares(window, axis);
  return std::all_of(all.begin(), all.end(), [](const Shares& s) { return s.read == s.own; });
}

int64_t halo_of(const WindowRead& w, const MeshAxis& axis) {
  int64_t most = 0;
  for (const Shares& s : all_shares(w, axis)) {
    const int64_t both = std::min(s.read.end, s.own.end) - std::max(s.read.begin, s.own.begin);
    most = std::max(most, s.read.size() - std::max<int64_t>(both, 0));
  }
  return most;
}

void localise_window(Attrs& attrs, const Factor& factor, const Interval& share) {
  const size_t d = factor.window_dim;
  const auto entries = [&](const char* name) -> Ints* {
    const auto at = attrs.find(name);
    return at == attrs.end() ? nullptr : std::get_if<Ints>(&at->second);
  };
  const auto write = [](Ints& list, size_t at, int64_t value) {
    if (value != 0 || at < list.size()) list.at(at) = value;
  };
  const WindowPadding padding = padding_of(factor.window, share);
  if (auto* list = entries("padding")) {
    if (list->empty() && (padding.low || padding.high)) list->assign(2 * factor.window_rank, 0);
    write(*list, 2 * d, padding.low);
    write(*list, 2 * d + 1, padding.high);
  }
  if (auto* list = entries("spatial")) write(*list, d, share.size());
  if (auto* list = entries("output_padding")) {
    if (list->empty() && padding.more) list->assign(factor.window_rank, 0);
    write(*list, d, padding.more);
  }
}

AxisSharding read_sharding(const Factor& factor, const SubAxis& sub_axis, const MeshAxis& axis) {
  AxisSharding out{.placement = Placement::kShard, .sub_axis = sub_axis};
  if (!reads_own(factor.window, axis)) out.window = factor.window;
  return out;
}

}  // namespace whale
