// Every cut of a program, chosen before anything is moved: a pure assignment. What has to travel follows from it
// mechanically (insert.h).
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "shard/sub_axes.h"
#include "task/axes.h"

namespace whale {

struct ShardOptions {
  int64_t micro_batches = 1;                 // size of the time axis
  std::vector<std::string> fetch_gradients;  // parameters: also fetch "grad:NAME"
  int zero = 0;        // 1: optimizer state, 2: and gradients, 3: and parameters are cut over replicas
  bool exact = false;  // sums over micro-batches are trees; replicas cut only what keeps_bits
  std::optional<DType> gradient_dtype = {};    // that gradients are summed in along replica axes; none: their own
  std::optional<DType> accumulate_dtype = {};  // that gradients are summed in over micro-batches; none: their own
  bool adasum = false;                         // along replica axes gradients are combined by Adasum
  const StorageShardings* storage_shardings = nullptr;  // of another entry of the same plan; null: chosen here
};

// What a choice costs in a step, on the device with the most to do when all have equal shares; nothing overlaps.
struct Price {
  double compute_seconds = 0;
  double move_seconds = 0;
  double moved_bytes = 0;  // received
  Price& operator+=(const Price& other);
  double seconds() const { return compute_seconds + move_seconds; }
};

struct Choices {
  std::vector<std::vector<OpCut>> cuts;  // [axis][op], time first: the factor that the op is cut by
  // Per tensor, as its op leaves it; a variable's storage sharding, an input as it comes. And the stage that it is in.
  std::vector<Sharding> shardings;
  std::vector<int32_t> stages;
  // Values that go to another sharding as soon as they are made, for whoever reads them (ZeRO 2: a gradient goes
  // to its owner's part before micro-batches are summed).
  std::map<TensorId, Sharding> settled;
  std::vector<Price> prices;  // per op: its arithmetic, and what moves its operands
  int64_t batch = 0;          // samples; 0: no input has a batch dimension
  int64_t micro_batches = 1;  // a single sample cannot be cut
};

// Gives every op its stage: that of its scope; one without joins what it reads.
void place_in_stages(Graph& graph, const TaskGraphs& tasks);

// Of gradients (also those with the loss scale still in them): the parameter; kNone: none of this name is left.
std::map<TensorId, TensorId> parameters_of_gradients(const Graph& graph);

// `graph` is complete (forward, backward and update ops) and its ops have stages. Rules: semantics.md section 4. Along
// a replica axis ops follow the samples; along a split axis forward ops take what split.h chose, the others what moves
// and computes least; along time everything follows the samples.
Choices choose_cuts(const Graph& graph, const TaskGraphs& tasks, const ShardOptions& options);

// Of the devices that have most to do; other stages' work at the same time.
Price price_of_step(const Graph& graph, const TaskGraphs& tasks, const Choices& choices);

}  // namespace whale
