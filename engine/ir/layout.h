// Where a tensor is (semantics.md section 4): one entry a mesh axis, outermost first; time (micro-batches) is an axis
// like any other. This is the regular form, in which all children of a level share one sub-layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ir/shape.h"

namespace whale {

// How partial values are combined. Grows with the op set: softmax triples, top-k, ...
enum class Combine : uint8_t { kSum, kMax, kMin };

struct Interval {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

enum class Placement : uint8_t { kReplicate, kShard, kPartial };

struct AxisLayout {
  Placement placement = Placement::kReplicate;
  Digit digit;                      // kShard: which digit is cut, in coordinates of the logical tensor
  std::vector<Interval> cut;        // kShard: an interval of the digit per coordinate of the axis
  Combine combine = Combine::kSum;  // kPartial
  friend bool operator==(const AxisLayout&, const AxisLayout&) = default;
};

struct Layout {
  std::vector<AxisLayout> axes;
  friend bool operator==(const Layout&, const Layout&) = default;
};

}  // namespace whale
