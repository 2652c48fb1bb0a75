// From a position in this device's local tensor to its position in the unpadded logical tensor: what random ops, iota,
// rotary and attention masks count by, so that no cut of the batch changes a number.
#pragma once

#include <cstdint>

#include "base/error.h"
#include "plan/plan.h"

namespace whale {

class GlobalIndex {
 public:
  static constexpr int kMaxRank = 12;

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
    find_fast_path();
  }

  // Global coordinate along dimension `d` of local coordinate `at`. batch_begin: StepContext::batch_begin.
  int64_t coordinate(int d, int64_t at, int64_t batch_begin) const {
    const Axis& axis = axes_[d];
    if (d != batch_.dim) return axis.origin + at;
    if (batch_.outer == 1) return axis.origin + at + batch_begin * batch_.inner;
    const int64_t local_run = axis.local / batch_.outer;    // elements of one outer value, here
    const int64_t global_run = axis.global / batch_.outer;  // and in the logical tensor
    return axis.origin + at / local_run * global_run + at % local_run + batch_begin * batch_.inner;
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
  };

  void find_fast_path() {
    int outermost = 0;  // the first dimension that can be cut at all
    while (outermost < rank_ - 1 && axes_[outermost].global == 1) ++outermost;
    for (int d = 0; d < rank_; ++d)
      if (d != outermost && (axes_[d].origin != 0 || axes_[d].local != axes_[d].global)) contiguous_ = false;
    if (batch_.present() && (batch_.dim != outermost || batch_.outer != 1)) {
      const Axis& axis = axes_[batch_.dim];
      if (axis.local != axis.global)
        contiguous_ = false;
      else
        batch_ = Digit{};  // the whole batch is here: it begins at sample 0
    }
    if (rank_ == 0) return;
    origin_ = axes_[outermost].origin;
    outer_stride_ = axes_[outermost].stride;
  }

  int rank_;
  Axis axes_[kMaxRank];
  Digit batch_;
  bool contiguous_ = true;
  int64_t origin_ = 0, outer_stride_ = 1;
};

}  // namespace whale
