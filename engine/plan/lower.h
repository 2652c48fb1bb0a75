// From layouts to instructions: local dimensions, buffers, segments, streams and waits, offsets. One program per class
// of devices with the same local shapes.
#pragma once

#include <map>
#include <string>

#include "parallel/layout_graph.h"
#include "parallel/shares.h"
#include "parallel/task_graph.h"
#include "plan/plan.h"

namespace whale {

struct LowerOptions {
  std::string entry;                                      // "train", "eval"
  std::map<std::string, int32_t, std::less<>> variables;  // name -> number in Plan::variables
  int64_t variable_bytes = 0;                             // of all variables of the plan on one device
  bool overlap = true;                                    // collectives on the communication stream
};

Entry lower(const LayoutGraph& graph, const Mesh& mesh, const BatchCut& cut, const LowerOptions& options);

}  // namespace whale
