// Where every tensor is: layouts spread from the inputs' batch digit and the splits' choices through the factors of the
// ops; where operands do not lie as an op needs them, bridges are inserted.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "parallel/digits.h"

namespace whale {

struct PropagateOptions {
  int64_t micro_batches = 1;                 // size of the time axis
  std::vector<std::string> fetch_gradients;  // parameters: also fetch "grad:NAME"
  int zero = 0;        // 1: optimizer state, 2: and gradients, 3: and parameters are cut over replicas
  bool exact = false;  // sums over micro-batches are trees; replicas cut only what keeps_bits
  std::optional<DType> gradient_dtype = {};  // that gradients are summed in along replica axes; none: their own
  bool adasum = false;                       // along replica axes gradients are combined by Adasum
  const Homes* homes = nullptr;              // of another entry of the same plan; null: chosen here
};

// `graph` is complete: forward, backward and update ops. Rules, an axis at a time (semantics.md sections 2, 4, 5):
//   map: cut operands give a cut result; reduce: a partial one; `linear` lets partial values pass; an operand that
//   carries a factor whole beside cut ones is produced again already cut where that is free, else sliced; everything
//   else is a bridge: all_reduce, reduce_scatter, all_gather, local_slice, all_to_all, between stages a transfer. Along
//   time: accumulate in the body and go on in the epilogue; a value of the whole batch that the body needs is hoisted
//   to the prologue when it depends on no parameter, else it is an error that names the op.
// Along a replica axis ops follow the samples; along a split axis forward ops take what split.h chose, and the rest
// what moves least. Variables' next values are brought home, fetched values to a legal layout at the end.
LayoutGraph propagate(const Graph& graph, const TaskGraphs& tasks, const PropagateOptions& options);

}  // namespace whale
