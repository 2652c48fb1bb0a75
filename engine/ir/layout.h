// Where a tensor is (semantics.md section 4): one entry a mesh axis, outermost first; time (micro-batches) is an axis
// like any other. This is the regular form, in which all children of a level share one sub-layout.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "ir/shape.h"

namespace whale {

// How partial values are combined. Grows with the op set: softmax triples, top-k, ...
enum class Combine : uint8_t { kSum, kMax, kMin, kLogSumExp };

struct Interval {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

enum class Placement : uint8_t { kReplicate, kShard, kPartial };

// Where a cut falls follows from the digit's extent and the axis' shares, so it is not stored: largest remainder
// rounding (parallel/shares.h). Two axes that cut the same digit cut one inside the other, the outer axis first.
struct AxisLayout {
  Placement placement = Placement::kReplicate;
  Digit digit;                      // kShard: which digit is cut, in coordinates of the logical tensor
  bool state = false;               // kShard: by the axis' shares of state (ZeRO), not by those of its work
  bool samples = false;             // kShard: the digit holds the batch
  Combine combine = Combine::kSum;  // kPartial
  friend bool operator==(const AxisLayout&, const AxisLayout&) = default;
};

struct Layout {
  std::vector<AxisLayout> axes;
  friend bool operator==(const Layout&, const Layout&) = default;
};

}  // namespace whale
