// Streamed reshards (semantics.md section 4): an op that reads a gathered operand, and can take it piece by piece
// (FactorKind::kStream), goes round a ring instead of gathering. Attention becomes ring attention (Liu et al., 2023).
#pragma once

#include "shard/sharded_graph.h"

namespace whale {

// `all_gather -> op` becomes n rounds, one for each device of the axis. In round r a device works on the piece of the
// device r places before it, while the next piece comes from its neighbour by a `shift`; results are merged or added
// in the order of the rounds. Results that lie as the pieces do (gradients of keys and values) travel with them and are
// where they began after n shifts, in the place of a `reduce_scatter`. Done where a split asks for the factor by name,
// or where time and memory say so.
void stream_gathers(ShardedGraph& graph);

}  // namespace whale
