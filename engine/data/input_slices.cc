#include "data/input_slices.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace whale {
namespace {

constexpr size_t kMostNamed = 4;  // ranges of samples in a message

void join(std::vector<Interval>& rows) {
  std::ranges::sort(rows, {}, &Interval::begin);
  std::vector<Interval> joined;
  for (const Interval& r : rows)
    if (!joined.empty() && r.begin <= joined.back().end)
      joined.back().end = std::max(joined.back().end, r.end);
    else
      joined.push_back(r);
  rows = std::move(joined);
}

}  // namespace

InputSlices::InputSlices(const PlanInput& port) : whole_(port.dims), dims_(port.dims), batch_dim_(port.batch_dim) {
  for (const int64_t n : whole_) hull_.push_back({0, n});
}

void InputSlices::add(SampleRange range, const std::vector<Interval>& box) {
  if (batch_dim_ >= 0 && range.size() == 0) return;
  if (batch_dim_ >= 0) rows_.push_back(range);
  for (size_t d = 0; d < hull_.size(); ++d) {
    if (static_cast<int>(d) == batch_dim_) continue;
    hull_[d] = read_ ? Interval{std::min(hull_[d].begin, box[d].begin), std::max(hull_[d].end, box[d].end)} : box[d];
  }
  read_ = true;
}

void InputSlices::finish() {
  join(rows_);
  for (size_t d = 0; d < dims_.size(); ++d) dims_[d] = hull_[d].size();
  if (batch_dim_ < 0) return;
  int64_t& samples = dims_[batch_dim_] = 0;
  for (const Interval& r : rows_) samples += r.size();
}

std::vector<Interval> InputSlices::box(size_t index) const {
  std::vector<Interval> box = hull_;
  if (batch_dim_ >= 0) box[batch_dim_] = rows_.at(index);
  return box;
}

std::vector<FedRun> InputSlices::runs(SampleRange range, const Dims& local, int64_t element_bytes) const {
  std::vector<FedRun> runs;
  if (batch_dim_ >= 0 && range.size() == 0) return runs;
  Dims extents = dims_, from(dims_.size(), 0), to(dims_.size(), 0);
  for (size_t d = 0; d < to.size(); ++d) to[d] = hull_[d].begin;
  if (batch_dim_ >= 0) {
    const auto at = static_cast<size_t>(batch_dim_);
    int64_t before = 0;
    const auto row = std::ranges::find_if(rows_, [&](const Interval& r) {
      if (r.begin <= range.begin && range.end <= r.end) return true;
      before += r.size();
      return false;
    });
    if (row == rows_.end()) throw internal("samples [{}, {}) are in no slice", range.begin, range.end);
    extents[at] = range.size(), from[at] = before + range.begin - row->begin, to[at] = 0;
  }
  // Dimensions behind the last one that either side has more of are moved as one.
  size_t last = extents.size();
  int64_t run = element_bytes;
  while (last > 0) {
    run *= extents[last - 1];
    --last;
    if (extents[last] != dims_[last] || extents[last] != local[last]) break;
  }
  const Dims host = row_major_strides(dims_), device = row_major_strides(local);
  const int64_t count = element_count({extents.begin(), extents.begin() + static_cast<ptrdiff_t>(last)});
  for (int64_t i = 0; i < count && run > 0; ++i) {
    int64_t h = 0, l = 0, rest = i;
    for (size_t d = extents.size(); d-- > 0;) {
      const int64_t at = d < last ? rest % extents[d] : 0;
      if (d < last) rest /= extents[d];
      h += (from[d] + at) * host[d], l += (to[d] + at) * device[d];
    }
    runs.push_back(
        {static_cast<size_t>(h * element_bytes), static_cast<size_t>(l * element_bytes), static_cast<size_t>(run)});
  }
  return runs;
}

std::string InputSlices::text() const {
  std::string text;
  for (size_t r = 0; r < std::min(rows_.size(), kMostNamed); ++r)
    text += fmt::format("{}[{}, {})", r == 0 ? "samples " : " and ", rows_[r].begin, rows_[r].end);
  if (rows_.size() > kMostNamed) text += fmt::format(" and {} more ranges", rows_.size() - kMostNamed);
  if (batch_dim_ >= 0 && rows_.empty()) text = "no samples";
  std::string cut;
  bool all = true;
  for (size_t d = 0; d < hull_.size(); ++d) {
    const bool whole = hull_[d] == Interval{0, whole_[d]};
    all = all && whole;
    cut += fmt::format("{}{}", d == 0 ? "" : ", ", whole ? ":" : fmt::format("{}:{}", hull_[d].begin, hull_[d].end));
  }
  if (!all) text += fmt::format("{}[{}]", text.empty() ? "" : ", of each ", cut);
  return text.empty() ? "all of it" : text;
}

}  // namespace whale
