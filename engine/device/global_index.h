// From a position in this device's local tensor to its position in the unpadded logical tensor: what random ops, iota,
// rotary and attention masks count by, so that no cut of anything changes a number.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/error.h"
#include "plan/plan.h"

namespace whale {

class GlobalIndex {
 public:
  static constexpr int kMaxRank = 12;
  static constexpr int kMaxPieces = 6;

  // `local` is the shape that the box describes. A box without global extents says that local is global.
  GlobalIndex(const Box& box, const Dims& local) : rank_(static_cast<int>(local.size())) {
    if (rank_ > kMaxRank) throw invalid("a tensor of {} dimensions, at most {} are supported", rank_, kMaxRank);
    const bool whole = box.global.empty();
    if (!whole && box.global.size() != local.size())
      throw internal("box {} does not fit the local shape {}", to_string(box.global), to_string(local));
    int64_t stride = 1;
    for (int d = rank_ - 1; d >= 0; --d) {
      const auto i = static_cast<size_t>(d);
      Axis& axis = axes_[d];
      axis.local = local[i];
      axis.global = whole ? local[i] : box.global[i];
      axis.origin = !whole && i < box.origin.size() ? box.origin[i] : 0;
      axis.stride = stride;
      stride *= axis.global;
    }
    if (!whole && box.batch.present()) batch_ = box.batch;
    if (!whole) find_pieces(box);
    find_fast_path();
  }

  // Global coordinate along dimension `d` of local coordinate `at`. batch_begin: RowContext::batch_begin.
  int64_t coordinate(int d, int64_t at, int64_t batch_begin) const {
    const Axis& axis = axes_[d];
    if (axis.pieces == 0) return axis.origin + at + (d == batch_.dim ? batch_begin * batch_.inner : 0);
    int64_t index = axis.origin;
    for (int k = axis.first; k < axis.first + axis.pieces; ++k) {
      const Piece& p = pieces_[k];
      const int64_t span = p.local_inner * p.size;
      index += at / span * (p.inner * p.extent);
      at %= span;
      index += (at / p.local_inner + (p.is_batch ? batch_begin : p.begin)) * p.inner;
      at %= p.local_inner;
    }
    return index + at;
  }

  // Global linear index of local linear index `at`.
  int64_t operator()(int64_t at, int64_t batch_begin) const {
    if (contiguous_) return at + offset(batch_begin);
    int64_t index = 0;
    for (int d = rank_ - 1; d >= 0; --d) {
      index += coordinate(d, at % axes_[d].local, batch_begin) * axes_[d].stride;
      at /= axes_[d].local;
    }
    return index;
  }

  // True when only the outermost dimension is cut: the local elements are one run that starts at offset().
  bool contiguous() const { return contiguous_; }
  int64_t offset(int64_t batch_begin) const {
    return (origin_ + (batch_.present() ? batch_begin * batch_.inner : 0)) * outer_stride_;
  }

  int64_t global(int d) const { return axes_[d].global; }

 private:
  struct Axis {
    int64_t local = 1, global = 1, origin = 0, stride = 1;
    int first = 0, pieces = 0;  // in pieces_
  };
  // One sub-axis of a dimension that is cut, the outermost of a dimension first.
  struct Piece {
    int dim = 0;
    int64_t inner = 1, extent = 1;      // of the sub-axis, in the logical tensor
    int64_t local_inner = 1, size = 1;  // and here
    int64_t begin = 0;
    bool is_batch = false;
  };

  // Dimensions whose cuts leave several intervals: their coordinates are taken apart sub-axis by sub-axis.
  void find_pieces(const Box& box) {
    int count = 0;
    const auto add = [&](const SubAxis& sub_axis, int64_t extent, int64_t begin, int64_t size, bool is_batch) {
      if (count == kMaxPieces) throw invalid("a tensor cut along more than {} sub-axes is not supported", kMaxPieces);
      pieces_[count++] = {sub_axis.dim, sub_axis.inner, extent, 1, std::max<int64_t>(size, 1), begin, is_batch};
    };
    for (const BoxCut& c : box.cuts) {
      if (c.sub_axis.dim < 0 || c.sub_axis.dim >= rank_)
        throw internal("a cut of dimension {} in a box of {}", c.sub_axis.dim, rank_);
      add(c.sub_axis, c.extent, c.begin, c.size, false);
    }
    if (batch_.present()) {
      const Axis& axis = axes_[batch_.dim];
      int64_t others = batch_.outer * batch_.inner;  // local elements of one sample
      bool shared = batch_.outer != 1;
      for (const BoxCut& c : box.cuts)
        if (c.sub_axis.dim == batch_.dim && c.extent != 0) others = others / c.extent * c.size, shared = true;
      if (shared && axis.local != axis.global)
        add(batch_, axis.global / (batch_.outer * batch_.inner), 0, others == 0 ? 0 : axis.local / others, true);
    }
    std::sort(pieces_, pieces_ + count,
              [](const Piece& a, const Piece& b) { return a.dim != b.dim ? a.dim < b.dim : a.inner > b.inner; });
    for (int k = count; k-- > 0;) {
      Piece& p = pieces_[k];
      const bool innermost = k + 1 == count || pieces_[k + 1].dim != p.dim;
      // Between this sub-axis and the next one inwards everything is here.
      p.local_inner = innermost ? p.inner
                                : std::max<int64_t>(1, p.inner / (pieces_[k + 1].inner * pieces_[k + 1].extent) *
                                                           pieces_[k + 1].size * pieces_[k + 1].local_inner);
      axes_[p.dim].first = k;
      ++axes_[p.dim].pieces;
    }
  }

  void find_fast_path() {
    int outermost = 0;  // the first dimension that can be cut at all
    while (outermost < rank_ - 1 && axes_[outermost].global == 1) ++outermost;
    for (int d = 0; d < rank_; ++d)
      if (d != outermost && (axes_[d].origin != 0 || axes_[d].local != axes_[d].global)) contiguous_ = false;
    for (int d = 0; d < rank_; ++d)
      if (axes_[d].pieces != 0) contiguous_ = false;
    if (batch_.present() && (batch_.dim != outermost || batch_.outer != 1)) {
      const Axis& axis = axes_[batch_.dim];
      if (axis.local != axis.global)
        contiguous_ = false;
      else
        batch_ = SubAxis{};  // the whole batch is here: it begins at sample 0
    }
    if (rank_ == 0) return;
    origin_ = axes_[outermost].origin;
    outer_stride_ = axes_[outermost].stride;
  }

  int rank_;
  Axis axes_[kMaxRank];
  Piece pieces_[kMaxPieces];
  SubAxis batch_;
  bool contiguous_ = true;
  int64_t origin_ = 0, outer_stride_ = 1;
};

}  // namespace whale
