// Where variables live: parameters as the first op that reads them is split, state as its parameter and, by ZeRO, cut
// over replicas.
#pragma once

#include <vector>

#include "shard/forms.h"

namespace whale {

using SplitCuts = std::vector<std::vector<OpCut>>;  // [axis][op]: what split.h chose for forward ops

// Into their forms, per tensor; in the plan's other entries as the first has them (ShardOptions).
void place_variables(const CutProblem& problem, const SplitCuts& splits, std::vector<Form>& forms);

// The sub-axis along which state of a variable that lies so is cut over replicas into `ways`: the outermost dimension
// that is long enough and free; absent: there is none.
SubAxis state_sub_axis(const CutProblem& problem, TensorId variable, const Sharding& lies, size_t axis, int64_t ways);

}  // namespace whale
