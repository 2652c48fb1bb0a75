// What choices cost, by the cost model: arithmetic, and what moves operands. Each is charged to the op that it is for.
#pragma once

#include "shard/cut_problem.h"

namespace whale {

// Of a tensor of that sharding on a device of the stage, were it not cut along `axis`.
double bytes_beside(const CutProblem& problem, TensorId id, const Sharding& sharding, int32_t stage, size_t axis);

// `cuts`: [axis], of the op.
Price price_of_op(const CutProblem& problem, const Op& op, const std::vector<OpCut>& cuts);
// From the sharding to another one along `axis`, for a reader in that stage.
Price price_of_move(const CutProblem& problem, TensorId id, const Sharding& from, int32_t stage, size_t axis,
                    const AxisSharding& to);
// To that stage, from another one.
Price price_of_transfer(const CutProblem& problem, TensorId id, const Sharding& sharding, int32_t stage);

}  // namespace whale
