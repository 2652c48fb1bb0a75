// Where every tensor is: layouts spread from the inputs' batch digit through the factors of the ops; where operands do
// not lie as an op needs them, bridges are inserted.
#pragma once

#include <string>
#include <vector>

#include "parallel/layout_graph.h"

namespace whale {

struct PropagateOptions {
  int64_t micro_batches = 1;                 // size of the time axis
  int64_t devices = 1;                       // size of the replica axis
  std::vector<std::string> fetch_gradients;  // parameters: also fetch "grad:NAME"
};

// `graph` is complete: forward, backward and update ops. Rules, an axis at a time (semantics.md sections 2, 4, 5):
//   map: cut operands give a cut result; reduce: a partial one; `linear` lets partial values pass; an operand that
//   carries a factor whole beside cut ones is produced again already cut where that is free, else sliced; everything
//   else is a bridge. Along the replica axis: all_reduce, local_slice, all_gather. Along time: accumulate in the body
//   and go on in the epilogue; a value of the whole batch that the body needs is hoisted to the prologue when it
//   depends on no parameter, else it is an error that names the op.
// What every device holds (variables' next values) and what is fetched is brought to a legal layout at the end.
LayoutGraph propagate(const Graph& graph, const PropagateOptions& options);

}  // namespace whale
