// Calls as graphs, and graphs computed call by call.
#pragma once

#include <functional>

#include "op_call.h"

namespace whale::test {

// A graph of one op. Its floating point operands are parameters, the others inputs.
struct OpGraph {
  Graph graph;
  std::vector<Value> known;  // by tensor: the operands'
  const Op& op() const { return graph.ops[0]; }
};
OpGraph graph_of(const OpCall& call);

// The values of all tensors, from those that no op makes. `see` is shown each call before it is computed.
std::vector<Value> run_graph(
    const OpDevice& device, const Graph& graph, std::vector<Value> known,
    const std::function<void(const OpCall&)>& see = [](const OpCall&) {});

}  // namespace whale::test
