// By which factors an op can be cut along an axis, given where its operands lie.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shard/sub_axes.h"
#include "task/axes.h"

namespace whale {

inline AxisSharding shard(const SubAxis& sub_axis, bool state = false, bool samples = false) {
  return {.placement = Placement::kShard, .sub_axis = sub_axis, .state = state, .samples = samples};
}

// An op, where its operands lie as it reads them, and its results along the axes that are settled (the ones before the
// axis in question).
struct Placed {
  const Graph& graph;
  const Axes& axes;
  const Op& op;
  const Factors& factors;
  std::vector<const Sharding*> in, out;  // null: kNone

  Placement operand(size_t i, size_t a) const { return in[i] ? in[i]->axes[a].placement : Placement::kReplicate; }
  bool time_varies(size_t i) const { return operand(i, kTime) != Placement::kReplicate; }
};

// Beside what earlier axes cut. Throws where micro-batches would cut groups of samples.
bool fits(const Placed& placed, const Factor& factor, const SubAxisPart& sub, size_t axis);
// Cuts that operands have along the axis, as factors of the op; with the operand.
std::vector<std::pair<OpCut, size_t>> cuts_of_operands(const Placed& placed, size_t axis);
OpCut largest_cut(const Placed& placed, size_t axis);  // that of the largest operand
// Of an op that nobody has chosen for: as its operands lie.
OpCut followed_cut(const Placed& placed, size_t axis, bool exact);

// Where samples are cut over micro-batches and replicas: an input with a batch, as the reader's stage is fed it.
Sharding input_sharding(const Tensor& input, const Axes& axes, const Op& reader);

// The sharding in which an op that is cut so reads its operand `i`, and has its result `o`, along the axis. (Of these
// the shardings in `placed` are not asked for.)
AxisSharding wanted_operand(const Placed& placed, size_t i, size_t axis, const OpCut& cut);
AxisSharding made_result(const Placed& placed, size_t o, size_t axis, const OpCut& cut);

// An operand that is read whole and goes round piece by piece (rewrite/stream.h) is cut so before; absent: it does
// not.
SubAxis streamed_piece(const Placed& placed, size_t i, size_t axis, const OpCut& cut);

// What cuts the sub-axis of the samples further is of samples too, whoever chose it.
void mark_samples(Sharding& sharding);

// Not cut along the axis: the operands' partial values, when the op is linear in them, so that its results are partial
// too; empty: it takes whole operands.
std::vector<int> linear_parts(const Placed& placed, size_t axis, bool exact);

// Axes of the meshes as gradients are summed along them where that is at once: splits first, so that replicas, which
// are farther from each other, sum parts.
std::vector<size_t> settling_order(const Axes& axes, const Op& op);

// Of a gradient that is about to be summed along the axis `replicas` into `want`: the sharding along `split` that it
// goes to first, so that replicas sum parts. As its parameter lives there; of one that lies whole, any part. None: it
// stays. `all`: replicas sum in fewer bits, which the split does not.
std::optional<AxisSharding> first_along_split(const Axes& axes, const Tensor& gradient, const Sharding& now,
                                              int32_t stage, size_t replicas, size_t split, const AxisSharding& lives,
                                              const AxisSharding& want, bool all);

// Something small spread over a large tensor that lies so: what is small moves.
bool is_spread(const Graph& graph, TensorId id, const Sharding& sharding, const CostModel& cost);

// An update that widens a gradient does so when all micro-batches are in it: the sum is of the gradient's own type.
inline bool ends_sum(const Op& op) { return op.code == OpCode::k_cast && op.phase == Phase::kUpdate; }

// Around the op, as the user wrote it: a pipeline's cut divides scopes.
std::string written_scope(const Graph& graph, const TaskGraphs& tasks, const Op& op);

}  // namespace whale
