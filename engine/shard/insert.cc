#include "shard/insert.h"

#include "base/error.h"
#include "shard/ends.h"

namespace whale {

ShardedGraph insert_reshards(Graph graph, const TaskGraphs& tasks, const ShardOptions& options,
                             const Choices& choices) {
  Placer placer(std::move(graph), tasks, options, choices);
  placer.place_all();
  finish_step(placer);
  ShardedGraph& out = placer.builder().out;
  for (Tensor& t : out.graph.tensors) t.producer = kNone;  // of a cast that nobody reads, which is left out, no more
  for (size_t i = 0; i < out.graph.ops.size(); ++i)
    for (const TensorId id : out.graph.ops[i].outputs)
      if (id != kNone) out.graph.tensor(id).producer = static_cast<OpId>(i);
  return std::move(out);
}

void verify(const Graph& graph, const Choices& choices, const ShardedGraph& inserted) {
  for (const Op& op : inserted.graph.ops)
    for (const TensorId id : op.outputs) {
      if (id == kNone || static_cast<size_t>(id) >= graph.tensors.size()) continue;
      const auto t = static_cast<size_t>(id);
      if (!(inserted.shardings[t] == choices.shardings[t]) || inserted.stages[t] != choices.stages[t])
        throw internal("'{}' lies as {} in stage {}, chosen was {} in stage {}", graph.tensors[t].name,
                       to_string(inserted.shardings[t]), inserted.stages[t], to_string(choices.shardings[t]),
                       choices.stages[t])
            .at_op(op.name);
    }
}

}  // namespace whale
