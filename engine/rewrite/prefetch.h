// When gathers of what was there for long (parameters that live in parts) start, by the cost model.
#pragma once

#include <vector>

#include "rewrite/rewrite.h"
#include "shard/sharded_graph.h"

namespace whale {

// On one device; parts are taken as equal.
double local_bytes(const ShardedGraph& graph, TensorId id);

struct Gather {
  OpId reader;  // the first
  OpId op;
  friend auto operator<=>(const Gather&, const Gather&) = default;
};

struct Start {
  OpId gather;
  OpId before;
};

// Of the gathers of one stage, which share a queue. `ahead`: when the one so many before is read. 0: as late as no
// reader waits longer than if all of its pass (forward, backward) had started with the pass; but not where the stage
// would need more memory for that.
// `readers`: of each storage; `overwrites`: per op, what it makes in the place of something else.
std::vector<Start> start_gathers(const ShardedGraph& graph, const Lists& readers, const Lists& overwrites,
                                 std::vector<Gather> gathers, int64_t ahead);

}  // namespace whale
