// Where a tensor is (semantics.md section 4): one entry a mesh axis, outermost first; time (micro-batches) is an axis
// like any other. This is the regular form, in which all children of a level share one sub-sharding.
#pragma once

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "ir/shape.h"

namespace whale {

// How partial values are combined. Grows with the op set: softmax triples, top-k, ...
enum class Combine : uint8_t { kSum, kMax, kMin, kLogSumExp };
inline constexpr const char* kCombines[] = {"sum", "max", "min", "logsumexp"};
inline const char* name_of(Combine combine) { return kCombines[static_cast<size_t>(combine)]; }

struct Interval {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

enum class Placement : uint8_t { kReplicate, kShard, kPartial };

// What an op reads of a dimension through a window (convolution, pooling). The dimension of its result that is cut has
// `result` elements, the one that is read `source`. Result r reads [r * stride - low, r * stride - low + reach); when
// transposed, it reads every s with 0 <= r + low - s * stride < reach.
struct WindowRead {
  int64_t result = 0, source = 0;
  int64_t stride = 1, reach = 1, low = 0;  // reach: dilation * (kernel - 1) + 1
  bool transposed = false;
  bool present() const { return result > 0; }
  friend auto operator<=>(const WindowRead&, const WindowRead&) = default;  // NOLINT(modernize-use-nullptr)
};

// Where a cut falls follows from the sub-axis's extent and the axis' shares, so it is not stored: largest remainder
// rounding (cluster/shares.h). Two axes that cut the same sub-axis cut one inside the other, the outer axis first.
struct AxisSharding {
  Placement placement = Placement::kReplicate;
  SubAxis sub_axis;                 // kShard: which sub-axis is cut, in coordinates of the logical tensor
  bool state = false;               // kShard: by the axis' shares of state (ZeRO), not by those of its work
  bool samples = false;             // kShard: the sub-axis holds the batch
  Combine combine = Combine::kSum;  // kPartial
  // kShard, of a use, never of a storage sharding: not the device's own share of the sub-axis but what it reads for its
  // share of the window's result. Parts overlap.
  WindowRead window = {};
  // kShard, of a use: the share of the device `rotate` places before on the axis, which goes round (rewrite/stream.h).
  int64_t rotate = 0;
  friend bool operator==(const AxisSharding&, const AxisSharding&) = default;
};

struct Sharding {
  std::vector<AxisSharding> axes;
  friend bool operator==(const Sharding&, const Sharding&) = default;
};

}  // namespace whale
