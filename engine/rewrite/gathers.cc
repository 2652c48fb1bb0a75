#include "rewrite/gathers.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "cost/cost.h"
#include "rewrite/copies.h"
#include "rewrite/order.h"
#include "rewrite/rewrite.h"

namespace whale {

bool puts_together(const ShardedGraph& lg, const Op& op) {
  return op.code == OpCode::k_all_gather ||
         (op.code == OpCode::k_transfer && op.inputs.size() == 1 && lg.stage(op.inputs[0]) == op.stage);
}

static bool gathered_of_variables(const ShardedGraph& lg, TensorId id, int depth) {
  const Tensor& t = lg.graph.tensor(id);
  if (t.kind != TensorKind::kValue) return t.kind == TensorKind::kVariable;
  if (t.producer == kNone || depth > 8) return false;
  const Op& op = lg.graph.op(t.producer);
  const bool cast = op.code == OpCode::k_cast;  // may stand in the prologue, gathered or not
  return (cast || op.region == Region::kBody) && op.inputs.size() == 1 &&
         (cast || puts_together(lg, op) || is_view(op.code)) && gathered_of_variables(lg, op.inputs[0], depth + 1);
}

bool gathered_of_variables(const ShardedGraph& lg, TensorId id) { return gathered_of_variables(lg, id, 0); }

bool is_cheap_to_gather(const ShardedGraph& lg, const Op& op, double worth) {
  const CostModel& cost = lg.tasks.cost;
  const auto group = static_cast<size_t>(attr_int(op.attrs, "group"));
  const auto bytes = static_cast<double>(bytes_of(lg.graph.tensor(op.outputs[0])));
  return bytes >= cost.cached_bytes &&
         worth >= all_gather_seconds(bytes, lg.size(group + 1, op.stage), lg.tasks.link(op.stage, group));
}

void reshard_late(ShardedGraph& lg) {
  Graph& g = lg.graph;
  if (lg.tasks.cost.memory_price <= 1) return;
  const Lists readers = readers_of(g);
  std::vector<char> handed_out(g.tensors.size());
  for (const NamedTensor& f : lg.fetches) handed_out[f.tensor] = 1;
  for (const Variable& v : g.variables)
    if (v.next != kNone) handed_out[v.next] = 1;
  std::vector<std::pair<OpId, bool>> place(g.ops.size());  // before which op, and whether that is the op itself
  bool moved = false;
  for (size_t i = g.ops.size(); i-- > 0;) {
    Op& op = g.ops[i];
    place[i] = {static_cast<OpId>(i), true};
    const bool moves = op.code == OpCode::k_all_gather || op.code == OpCode::k_all_to_all;
    if (!moves || op.phase != Phase::kForward || op.region != Region::kBody || op.inputs.size() != 1) continue;
    const auto r = readers[op.outputs[0]];
    if (r.empty() || handed_out[op.outputs[0]] || std::ranges::any_of(r, [&](OpId k) {
          return g.op(k).phase != Phase::kBackward || g.op(k).region != Region::kBody || g.op(k).stage != op.stage;
        }))
      continue;
    op.phase = Phase::kBackward;
    place[i] = {place[r[0]].first, false};
    for (const OpId k : r) place[i].first = std::min(place[i].first, place[k].first);
    moved = true;
  }
  if (!moved) return;
  std::vector<OpId> order(g.ops.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, {}, [&](OpId i) { return place[i]; });
  take_in_order(g, order);
  for (Op& op : g.ops) op.origin = kNone;  // numbers have changed
  compact(g, {});
}

void gather_for_weights(ShardedGraph& lg) {
  Graph& g = lg.graph;
  const std::vector<char> late = put_off(lg);
  const auto is_late = [&](OpId i) { return late[i] != 0; };
  const auto of_values = [&](const Op& op) {
    if (op.code != OpCode::k_all_gather || op.phase != Phase::kBackward || op.inputs.size() != 1) return false;
    const auto n = static_cast<double>(lg.size(static_cast<size_t>(attr_int(op.attrs, "group")) + 1, op.stage));
    const auto bytes = static_cast<double>(bytes_of(g.tensor(op.outputs[0])));
    return is_cheap_to_gather(lg, op, lg.tasks.cost.held_seconds(bytes - bytes / n));
  };
  std::map<TensorId, TensorId> own;
  std::vector<Op> ops;
  const auto mine = [&](auto& self, TensorId id) -> TensorId {
    const OpId made = id == kNone ? kNone : g.tensor(id).producer;
    if (made == kNone || g.op(made).region != Region::kBody || is_late(made)) return id;
    const bool of_variables = gathered_of_variables(lg, id);
    if (!of_variables && !of_values(g.op(made))) return id;
    if (const auto known = own.find(id); known != own.end()) return known->second;
    Op copy = g.op(made);
    copy.name += ".again";
    copy.phase = Phase::kBackward;
    if (of_variables) copy.inputs[0] = self(self, copy.inputs[0]);
    copy.outputs[0] = add_like(lg, id, ".again");
    own[id] = copy.outputs[0];
    ops.push_back(copy);
    return copy.outputs[0];
  };
  for (size_t i = 0; i < late.size(); ++i) {
    TensorIds read = g.ops[i].inputs;
    if (late[i])
      for (TensorId& id : read) id = mine(mine, id);
    ops.push_back(g.ops[i]);
    ops.back().inputs = read;
  }
  if (own.empty()) return;
  g.ops = std::move(ops);
  for (Op& op : g.ops) op.origin = kNone;  // numbers have changed
  compact(g, {});
}

}  // namespace whale
