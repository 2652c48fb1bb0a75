// Cheap ops made twice, so that their results need not live from the forward to the backward pass.
#include <algorithm>
#include <map>

#include "cost/recompute.h"
#include "ops/cost.h"
#include "rewrite/gathers.h"
#include "rewrite/order.h"
#include "rewrite/rewrite.h"

namespace whale {
namespace {

struct Recomputer {
  ShardedGraph& lg;
  Graph& g;
  const std::vector<TensorId> root;
  const Lists readers;  // of a storage
  const Lists direct;   // of a tensor
  const Recomputed& asked;
  std::vector<char> again;       // tensors that the backward pass makes anew
  std::vector<char> activation;  // tensors that are made of an input, not of parameters alone
  Recomputer(ShardedGraph& graph, const Recomputed& what)
      : lg(graph),
        g(graph.graph),
        root(roots_of(g)),
        readers(storage_readers(g, root)),
        direct(readers_of(g)),
        asked(what),
        again(g.tensors.size()),
        activation(g.tensors.size()) {
    for (const TensorId id : g.inputs) activation[id] = 1;
    for (size_t i = 0; i < g.ops.size(); ++i) {
      bool of_input = false;
      for (const TensorId id : g.ops[i].inputs) of_input |= id != kNone && activation[id] != 0;
      for (const TensorId id : g.ops[i].outputs)
        if (id != kNone) activation[id] = of_input;
    }
  }

  bool read_backward(TensorId id) const {
    const auto& r = readers[id];
    return std::any_of(r.begin(), r.end(), [&](OpId i) { return g.op(i).phase == Phase::kBackward; });
  }
  // There in the backward pass anyway.
  bool stays(TensorId id) const {
    const TensorId root = view_root(g, id);
    return g.tensor(root).kind != TensorKind::kValue || (read_backward(root) && !again[root]);
  }
  // An activation that members of a group hold parts of, put together for a product.
  bool gathers(const Op& op) const {
    if (op.code != OpCode::k_all_gather || op.phase != Phase::kForward || op.region != Region::kBody ||
        op.inputs.size() != 1 || again[view_root(g, op.inputs[0])] || !activation[op.inputs[0]])
      return false;
    const auto n = static_cast<double>(lg.size(static_cast<size_t>(attr_int(op.attrs, "group")) + 1, op.stage));
    const auto bytes = static_cast<double>(bytes_of(g.tensor(op.outputs[0])));
    const double freed = bytes - (stays(op.inputs[0]) ? 0 : bytes / n);
    return asked.gathers[op.stage]
               ? is_cheap_to_gather(lg, op, spared_seconds(lg.tasks.cost, freed, kGatheredPasses))
               : asked.short_of_memory && is_cheap_to_gather(lg, op, lg.tasks.cost.held_seconds(freed));
  }
  bool cheap(const Op& op) const {
    const bool casts_only = !asked.ops[op.stage];
    if (op.phase != Phase::kForward || op.region != Region::kBody || is_view(op.code) ||
        has_flag(op.code, kCollective) || op.code == OpCode::k_transfer || op.inputs.empty())
      return false;  // what others take part in is not made anew for one
    const bool cast_of_variable = op.code == OpCode::k_cast && g.tensor(op.inputs[0]).kind == TensorKind::kVariable;
    if (casts_only && !cast_of_variable) return false;
    for (const TensorId id : op.outputs)
      for (const AxisSharding& a : lg.shardings[id].axes)
        if (a.placement == Placement::kPartial) return false;
    const CostModel& cost = lg.tasks.cost;
    const int64_t freed = bytes_of(g.tensor(op.outputs[0]));
    const auto bytes = static_cast<double>(freed);
    return freed >= cost.cached_bytes &&
           (casts_only ? cost.held_seconds(bytes) : spared_seconds(cost, bytes, kRemadePasses)) >=
               op_seconds(cost_of(g, op), cost.device);
  }
};

}  // namespace

void recompute_cheap(ShardedGraph& lg, const Recomputed& asked) {
  Graph& g = lg.graph;
  Recomputer r(lg, asked);
  std::map<OpId, std::vector<Op>> before;  // copies that stand before an op
  const size_t n = g.ops.size();
  for (size_t i = 0; i < n; ++i) {
    const Op& op = g.ops[i];
    const bool gather = r.gathers(op);
    if (!gather && !r.cheap(op)) continue;
    const TensorId y = op.outputs[0];
    std::vector<OpId> backward;  // direct readers only: a view of it keeps it
    bool forward = false, viewed = false;
    for (const OpId k : r.direct[y]) {
      const Op& reader = g.op(k);
      viewed |= is_view(reader.code) || reader.stage != op.stage;  // another stage goes back at another time
      forward |= reader.phase == Phase::kForward;
      if (reader.phase == Phase::kBackward && (backward.empty() || backward.back() != k)) backward.push_back(k);
    }
    const bool there = gather || std::all_of(op.inputs.begin(), op.inputs.end(),
                                             [&](TensorId id) { return id == kNone || r.stays(id); });
    if (!forward || viewed || backward.empty() || !there) continue;
    Op copy = op;
    without_index_check(copy);
    copy.name += ".again";
    copy.phase = Phase::kBackward;
    for (TensorId& out : copy.outputs) out = add_like(lg, out, ".again");
    for (const OpId reader : backward)
      for (TensorId& id : g.op(reader).inputs)
        if (id == y) id = copy.outputs[0];
    r.again[y] = 1;
    before[backward.front()].push_back(std::move(copy));
  }
  if (before.empty()) return;
  std::vector<Op> ops;
  for (size_t i = 0; i < n; ++i) {
    if (const auto copies = before.find(static_cast<OpId>(i)); copies != before.end())
      for (Op& copy : copies->second) ops.push_back(std::move(copy));
    ops.push_back(std::move(g.ops[i]));
  }
  g.ops = std::move(ops);
  compact(g, {});
}

}  // namespace whale
