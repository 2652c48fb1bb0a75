#include "comm/all_to_all_shape.h"

#include "base/error.h"
#include "comm/member.h"

namespace whale {

AllToAllShape::AllToAllShape(const CollectiveSpec& spec, size_t members, size_t rank)
    : cuts_(spec.cuts.at(0).cuts), to_cuts_(spec.to.cuts) {
  const Operand &x = spec.in.at(0), &y = spec.out.at(0);
  if (cuts_.empty() || to_cuts_.empty()) throw internal("an all-to-all without cuts");
  extent_ = cuts_.back().end;
  to_extent_ = to_cuts_.back().end;
  inproc::check_cuts(cuts_, members, extent_);
  inproc::check_cuts(to_cuts_, members, to_extent_);
  look_around(x, spec.cuts[0].sub_axis, cuts_[rank].size(), spec.to.sub_axis);
  const int64_t units = rows_ * middle_ * unit_, bytes = size_of(x.dtype);
  if (element_count(x.dims) * bytes != units * cuts_[rank].size() * to_extent_ ||
      element_count(y.dims) * bytes != units * extent_ * to_cuts_[rank].size())
    throw internal("an all-to-all from {} to {} has the cuts [{}, {}) and [{}, {}) of other numbers of elements",
                   to_string(x.dims), to_string(y.dims), cuts_[rank].begin, cuts_[rank].end, to_cuts_[rank].begin,
                   to_cuts_[rank].end);
}

// x has the sub-axis `from` cut to `size` and the sub-axis `to` whole.
void AllToAllShape::look_around(const Operand& x, const SubAxis& from, int64_t size, const SubAxis& to) {
  const inproc::Rows a = inproc::rows_of(x, from), b = inproc::rows_of(x, to);
  if (from.dim != to.dim) {
    from_first_ = from.dim < to.dim;
    const SubAxis &first = from_first_ ? from : to, &second = from_first_ ? to : from;
    rows_ = from_first_ ? a.rows : b.rows;
    unit_ = from_first_ ? b.unit : a.unit;
    middle_ = first.inner * second.outer;
    for (int d = first.dim + 1; d < second.dim; ++d) middle_ *= x.dims[d];
    return;
  }
  // Both in one dimension: x has outer * first * middle * second * inner elements there.
  from_first_ = from.inner >= to_extent_ * to.inner && from.inner % (to_extent_ * to.inner) == 0;
  if (from_first_) {
    rows_ = a.rows;
    middle_ = from.inner / (to_extent_ * to.inner);
    unit_ = b.unit;
  } else {
    if (from.outer % (to.outer * to_extent_) != 0)
      throw internal("an all-to-all between sub-axes of dimension {} that lie across each other", from.dim);
    rows_ = a.rows / from.outer * to.outer;
    middle_ = from.outer / (to.outer * to_extent_);
    unit_ = a.unit;
  }
  if (rows_ * size * middle_ * to_extent_ * unit_ != element_count(x.dims) * size_of(x.dtype))
    throw internal("an all-to-all's part {} does not have its sub-axes", to_string(x.dims));
}

int64_t AllToAllShape::elements(DType dtype) const {
  return rows_ * middle_ * unit_ / size_of(dtype) * extent_ * to_extent_;
}

std::vector<Strided> AllToAllShape::source(char* x, size_t from, size_t to) const {
  const Interval &f = cuts_[from], &t = to_cuts_[to];
  return runs(x, from_first_ ? Side{f.size(), to_extent_, 0, t.begin} : Side{to_extent_, f.size(), t.begin, 0}, f, t);
}

std::vector<Strided> AllToAllShape::target(char* y, size_t from, size_t to) const {
  const Interval &f = cuts_[from], &t = to_cuts_[to];
  return runs(y, from_first_ ? Side{extent_, t.size(), f.begin, 0} : Side{t.size(), extent_, 0, f.begin}, f, t);
}

std::vector<Strided> AllToAllShape::runs(char* data, const Side& side, const Interval& from, const Interval& to) const {
  if (from.size() == 0 || to.size() == 0) return {};
  const int64_t firsts = from_first_ ? from.size() : to.size(), seconds = from_first_ ? to.size() : from.size();
  std::vector<Strided> list;
  for (int64_t row = 0; row < rows_ && middle_ * unit_ > 0; ++row)
    list.push_back({data,
                    static_cast<size_t>(
                        ((row * side.first + side.first_begin) * middle_ * side.second + side.second_begin) * unit_),
                    static_cast<size_t>(seconds * unit_), static_cast<size_t>(side.second * unit_),
                    static_cast<size_t>(firsts * middle_)});
  return list;
}

}  // namespace whale
