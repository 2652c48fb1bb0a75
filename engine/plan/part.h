// The part of a logical tensor that one device holds (semantics.md section 4): per dimension, the intervals of it in
// ascending order. Locally they lie one after the other.
#pragma once

#include <functional>
#include <vector>

#include "cluster/shares.h"
#include "ir/sharding.h"
#include "plan/plan.h"

namespace whale {

// One sub-axis of a tensor cut down to an interval of it.
struct SubAxisCut {
  SubAxis sub_axis;
  int64_t extent = 0;  // of the sub-axis, whole
  Interval at;
  friend bool operator==(const SubAxisCut&, const SubAxisCut&) = default;
};

struct Part {
  std::vector<std::vector<Interval>> dims;
  Dims extents() const;  // local
  bool empty() const;
  friend bool operator==(const Part&, const Part&) = default;
};

Part part_of(const Dims& dims, const std::vector<SubAxisCut>& cuts);
// The cuts of the device at these coordinates, one a sub-axis.
std::vector<SubAxisCut> cuts_of(const Dims& dims, const Sharding& sharding, const std::vector<MeshAxis>& axes,
                                const Ints& coordinates);
// What the device at these coordinates holds; partial values count as whole. The axes are those of the sharding's mesh.
Part part_of(const Dims& dims, const Sharding& sharding, const std::vector<MeshAxis>& axes, const Ints& coordinates);

// A dimension after a cut of it.
void cut_down(Dims& dims, const SubAxisCut& cut);
// Local dimensions after the cuts, which are of different sub-axes: arithmetic only.
Dims local_dims(const Dims& dims, const std::vector<SubAxisCut>& cuts);

// Every maximal run of elements that is contiguous both in the logical tensor and in the part: offsets and length in
// elements, in the order of the part.
void for_each_run(const Dims& dims, const Part& part,
                  const std::function<void(int64_t logical, int64_t local, int64_t elements)>& run);

}  // namespace whale
