// What a `split` cuts: for every forward op along one axis of the mesh, the factor that costs least together with what
// its neighbours need. Megatron's pairs (columns, then rows; Shoeybi et al., 2019, section 3) come out of this, as do
// heads, vocabulary and experts; no op is known by name.
#pragma once

#include <string>
#include <vector>

#include "shard/sub_axes.h"

namespace whale {

struct SplitProblem {
  const Graph& graph;  // the passes are done; Op::stage is filled in
  const TaskGraphs& tasks;
  OpFactors& factors;                            // of the graph
  size_t axis = 1;                               // of the shardings
  const std::vector<OpCut>& samples;             // per op (follow_samples)
  const std::vector<std::vector<OpCut>>& taken;  // [earlier axis][op]: chosen before
  const StorageShardings* storage_shardings;     // of variables that are fixed already; may be null
  int64_t micro_batches = 1;
  bool trains = true;
};

// Per op; ops of the backward pass and the updates have none: they follow. Dynamic programming over the ops in order:
// a state is where the live tensors are; of states that agree the cheapest is kept, at most a few dozen.
std::vector<OpCut> choose_split(const SplitProblem& problem);

}  // namespace whale
