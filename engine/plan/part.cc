#include "plan/part.h"

#include <algorithm>

#include "base/error.h"

namespace whale {
namespace {

using Intervals = std::vector<Interval>;

Intervals merged(const Intervals& list) {
  Intervals out;
  for (const Interval& i : list) {
    if (i.size() <= 0) continue;
    if (!out.empty() && out.back().end == i.begin)
      out.back().end = i.end;
    else
      out.push_back(i);
  }
  return out;
}

Intervals intersection(const Intervals& a, const Intervals& b) {
  Intervals out;
  for (size_t i = 0, k = 0; i < a.size() && k < b.size();) {
    const Interval both{std::max(a[i].begin, b[k].begin), std::min(a[i].end, b[k].end)};
    if (both.size() > 0) out.push_back(both);
    (a[i].end < b[k].end ? i : k) += 1;
  }
  return out;
}

}  // namespace

Dims Part::extents() const {
  Dims out;
  for (const Intervals& list : dims) {
    out.push_back(0);
    for (const Interval& i : list) out.back() += i.size();
  }
  return out;
}

bool Part::empty() const {
  return std::any_of(dims.begin(), dims.end(), [](const Intervals& list) { return list.empty(); });
}

Part part_of(const Dims& dims, const std::vector<SubAxisCut>& cuts) {
  Part part;
  for (const int64_t n : dims) part.dims.push_back(merged({{0, n}}));
  for (const SubAxisCut& c : cuts) {
    auto& list = part.dims.at(static_cast<size_t>(c.sub_axis.dim));
    const int64_t block = c.extent * c.sub_axis.inner;
    WHALE_CHECK(c.sub_axis.outer * block == dims[c.sub_axis.dim], "a cut's sub-axis fits its dimension");
    Intervals kept;
    for (int64_t o = 0; o < c.sub_axis.outer; ++o)
      kept.push_back({o * block + c.at.begin * c.sub_axis.inner, o * block + c.at.end * c.sub_axis.inner});
    list = intersection(list, merged(kept));
  }
  return part;
}

std::vector<SubAxisCut> cuts_of(const Dims& dims, const Sharding& sharding, const std::vector<MeshAxis>& axes,
                                const Ints& coordinates) {
  WHALE_CHECK(sharding.axes.size() == axes.size() && coordinates.size() == axes.size(),
              "a sharding has its mesh's axes");
  std::vector<SubAxisCut> cuts;
  for (size_t a = 0; a < axes.size(); ++a) {
    const AxisSharding& l = sharding.axes[a];
    if (l.placement != Placement::kShard) continue;
    const auto known =
        std::find_if(cuts.begin(), cuts.end(), [&](const SubAxisCut& c) { return c.sub_axis == l.sub_axis; });
    if (known != cuts.end()) {
      const Interval inner = cut_of(axes, a, l.state, known->at.size(), coordinates);
      known->at = {known->at.begin + inner.begin, known->at.begin + inner.end};
      continue;
    }
    const int64_t extent = dims.at(static_cast<size_t>(l.sub_axis.dim)) / (l.sub_axis.outer * l.sub_axis.inner);
    cuts.push_back({l.sub_axis, extent, cut_of(axes, a, l.state, extent, coordinates)});
  }
  return cuts;
}

Part part_of(const Dims& dims, const Sharding& sharding, const std::vector<MeshAxis>& axes, const Ints& coordinates) {
  return part_of(dims, cuts_of(dims, sharding, axes, coordinates));
}

void cut_down(Dims& dims, const SubAxisCut& c) {
  int64_t& n = dims[c.sub_axis.dim];
  n = c.extent ? n / c.extent * c.at.size() : 0;
}

Dims local_dims(const Dims& dims, const std::vector<SubAxisCut>& cuts) {
  Dims out = dims;
  for (const SubAxisCut& c : cuts) cut_down(out, c);
  return out;
}

void for_each_run(const Dims& dims, const Part& part,
                  const std::function<void(int64_t logical, int64_t local, int64_t elements)>& run) {
  if (part.empty()) return;
  if (dims.empty()) return run(0, 0, 1);
  // Dimensions behind the last one that is cut are copied whole.
  size_t last = 0;
  for (size_t d = 0; d < dims.size(); ++d)
    if (!(part.dims[d].size() == 1 && part.dims[d][0] == Interval{0, dims[d]})) last = d;
  int64_t tail = 1;
  for (size_t d = last + 1; d < dims.size(); ++d) tail *= dims[d];
  const Dims strides = row_major_strides(dims);
  int64_t local = 0;
  const std::function<void(size_t, int64_t)> walk = [&](size_t d, int64_t base) {
    for (const Interval& i : part.dims[d]) {
      if (d == last) {
        run(base + i.begin * strides[d], local, i.size() * tail);
        local += i.size() * tail;
        continue;
      }
      for (int64_t k = i.begin; k < i.end; ++k) walk(d + 1, base + k * strides[d]);
    }
  };
  walk(0, 0);
}

}  // namespace whale
