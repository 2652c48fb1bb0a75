// What a laid-out program takes, without lowering it: bytes by class and seconds, of the first device of each mesh.
#pragma once

#include <vector>

#include "plan/figures.h"
#include "shard/layout_graph.h"

namespace whale {

struct Estimate {
  struct Mesh {
    MemoryClasses memory;
    double seconds = 0;  // of its own work in a step
  };
  std::vector<Mesh> meshes;  // as in LayoutGraph::tasks
  double seconds = 0;        // of a step, with the bubble of its schedule
};

// Memory: the lives that lowering will find, from the order of the ops; variables are exact, the arena is its fullest
// moment. Not seen: gaps between buffers, feeds and fetches, chunks of products, micro-batches of several sizes, sums
// in trees, the host's memory. Seconds: by the cost model, nothing beside anything. `overlap`: collectives go beside
// the computation.
Estimate estimate_of(const LayoutGraph& graph, bool overlap);

}  // namespace whale
