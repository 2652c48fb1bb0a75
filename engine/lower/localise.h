// The local form of tensors and ops on one device: its intervals, dimensions, attributes that repeat dimensions, boxes.
#pragma once

#include "plan/part.h"
#include "plan/plan.h"
#include "shard/sub_axes.h"

namespace whale {

// One device of a stage's mesh, in one micro-batch.
struct Place {
  int32_t mesh = 0;
  Ints coordinates;
  int64_t micro_batch = 0;
};

class Localiser {
 public:
  explicit Localiser(const ShardedGraph& graph);

  // The place's part of so many positions along an axis (time: its micro-batch's); `state`: by the shares of state;
  // `rotate`: that of the place so many before (AxisSharding).
  Interval interval(size_t axis, bool state, int64_t extent, const Place& place, int64_t rotate = 0) const;
  // The sub-axes of the tensor that are cut, outer axes first, with this device's interval; `but`: without that axis
  // (and those inside it that cut the same sub-axis).
  std::vector<SubAxisCut> cuts(TensorId id, const Place& place, size_t but = SIZE_MAX) const;
  Dims dims(TensorId id, const Place& place) const;
  int64_t elements(TensorId id, const Place& place) const;
  bool empty(TensorId id, const Place& place) const;  // no elements
  Part part(TensorId id, const Place& place) const { return part_of(g_.graph.tensor(id).dims, cuts(id, place)); }

  // Samples of the batch: the global interval, when the axes of `mask` cut it (bit a: axis a; bit 0: time).
  Interval samples(uint64_t mask, const Place& place) const;
  uint64_t sample_mask(TensorId id) const;
  // The micro-batches that the device runs: all, or its replica's where replicas take whole ones.
  // `through`: as far as the axes up to this one say.
  Interval micro_batches(const Place& place, size_t through = SIZE_MAX) const;

  // A cut along one axis, in coordinates of the local tensor: the sub-axis there, and an interval per coordinate.
  struct AxisCut {
    SubAxis sub_axis;
    std::vector<Interval> intervals;
  };
  AxisCut axis_cut(TensorId id, size_t axis, const Place& place) const;
  // The sub-axis and its extent there; the interval of the place, of such an extent.
  std::pair<SubAxis, int64_t> local_sub_axis(TensorId id, size_t axis, const Place& place) const;
  Interval member_part(TensorId id, size_t axis, const Place& place, int64_t extent) const;
  // The place's part of what a local_slice or part_view reads, of its sub-axis.
  Interval sliced_part(const Op& op, const Place& place) const;

  // Shapes and ends as the attributes' roles say, sizes and begins as the factors say; what reshards need.
  Attrs attrs(const Op& op, const Place& place) const;
  // Where the result lies, in the dimensions of which the op asks (OpDef::placed_dims); else empty.
  Box box(const Op& op, const Place& place) const;
  // The tensor that the box describes; kNone: none.
  TensorId box_tensor(const Op& op) const;
  OpCost cost(const Op& op, const Attrs& attrs, const Place& place) const;

  // Ops whose program depends on where along the axis the device is, not only on how large its parts are.
  bool depends_on_coordinate(const Op& op, size_t axis) const;

 private:
  const ShardedGraph& g_;
  mutable OpFactors factors_;
  const MeshAxis time_;
  std::vector<char> cut_;  // per tensor: along any axis
  // Calls body(SubAxisCut) for each of cuts().
  template <class Body>
  void each_cut(TensorId id, const Place& place, size_t but, Body body) const;
  bool begins(const Factor& factor) const;
  static int64_t positions(const Factor& factor, const SubAxis& whole, const SubAxis& cut);
  int64_t first_in_time(TensorId id, const SubAxisCut& cut, const Place& place) const;
};

}  // namespace whale
