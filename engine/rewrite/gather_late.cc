#include "rewrite/gather_late.h"

#include <algorithm>
#include <map>

#include "rewrite/copies.h"
#include "rewrite/rewrite.h"

namespace whale {
namespace {

// Puts a parameter together along an axis where replicas hold parts of it, and walk the same micro-batches.
bool gathers_parameter(const ShardedGraph& lg, const Op& op) {
  const bool gathers = op.code == OpCode::k_all_gather || op.code == OpCode::k_transfer;
  if (!gathers || op.inputs.size() != 1 || lg.stage(op.inputs[0]) != op.stage) return false;
  const TensorId variable = variable_behind(lg.graph, op.inputs[0]);
  if (variable == kNone) return false;
  bool state = false;
  for (size_t a = 1; a < lg.axes(); ++a) {
    if (lg.size(a, op.stage) == 1) continue;
    if (lg.by_micro_batch(a)) return false;
    state |= lg.at(op.inputs[0], a).placement == Placement::kShard && lg.at(variable, a).state;
  }
  return state;
}

}  // namespace

void gather_late(ShardedGraph& lg) {
  Graph& g = lg.graph;
  if (lg.micro_batches == 1) return;
  const auto readers = readers_of(g);
  std::vector<char> late(g.ops.size());
  const auto made_late = [&](TensorId id) {
    return id == kNone || g.tensor(id).kind == TensorKind::kStep ||
           (g.tensor(id).producer != kNone && late[g.tensor(id).producer]);
  };
  for (size_t i = 0; i < g.ops.size(); ++i) {
    const Op& op = g.ops[i];
    if (op.region != Region::kPrologue) continue;
    late[i] =
        gathers_parameter(lg, op) || (!op.inputs.empty() && std::all_of(op.inputs.begin(), op.inputs.end(), made_late));
  }
  std::vector<char> kept(g.tensors.size());  // to the end of the step
  for (const NamedTensor& f : lg.fetches) kept[f.tensor] = 1;
  for (const Variable& v : g.variables)
    if (v.next != kNone) kept[v.next] = 1;
  const std::vector<char> weights = put_off(lg);
  // Readers are moved before what they read: the work for which a copy is wanted is known then.
  std::vector<std::vector<WorkKind>> kinds(g.ops.size());
  for (size_t i = g.ops.size(); i-- > 0;) {
    if (!late[i]) continue;
    for (const TensorId id : g.ops[i].outputs) {
      if (id == kNone) continue;
      late[i] &= !kept[id];
      for (const OpId r : readers[id]) {
        const Op& reader = g.op(r);
        late[i] &= (late[r] || reader.region == Region::kBody) && reader.stage == g.ops[i].stage;
        const WorkKind kind = work_of(reader, weights[r]);
        for (const WorkKind k : late[r] ? kinds[r] : std::vector{kind})
          if (std::find(kinds[i].begin(), kinds[i].end(), k) == kinds[i].end()) kinds[i].push_back(k);
      }
    }
  }
  // Where one reader stays, so does what it reads; and what is made of what stays.
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < g.ops.size(); ++i) {
      const Op& op = g.ops[i];
      if (late[i] && !gathers_parameter(lg, op) && !std::all_of(op.inputs.begin(), op.inputs.end(), made_late))
        late[i] = 0, changed = true;
      for (const TensorId id : op.inputs)
        if (!late[i] && op.region == Region::kPrologue && id != kNone && g.tensor(id).producer != kNone)
          if (char& made = late[g.tensor(id).producer]; made) made = 0, changed = true;
    }
  }
  std::map<std::pair<TensorId, WorkKind>, TensorId> copies;
  std::vector<Op> ops;
  for (size_t i = 0; i < g.ops.size(); ++i) {
    Op& op = g.ops[i];
    if (!late[i]) {
      for (TensorId& id : op.inputs)
        if (const auto copy = copies.find({id, work_of(op, weights[i])}); copy != copies.end()) id = copy->second;
      ops.push_back(std::move(op));
      continue;
    }
    for (size_t k = 0; k < kinds[i].size(); ++k) {
      const WorkKind kind = kinds[i][k];
      Op one = op;
      one.region = Region::kBody;
      one.phase = kind == WorkKind::kForward ? Phase::kForward : Phase::kBackward;
      if (k > 0) one.name += ".again";
      for (TensorId& id : one.inputs)
        if (const auto copy = copies.find({id, kind}); copy != copies.end()) id = copy->second;
      for (TensorId& id : one.outputs) {
        if (id == kNone || k == 0) continue;
        const TensorId again = add_like(lg, id, ".again");
        copies[{id, kind}] = again;
        id = again;
      }
      ops.push_back(std::move(one));
    }
  }
  g.ops = std::move(ops);
  for (Op& op : g.ops) op.origin = kNone;  // numbers have changed
  compact(g, {});
}

}  // namespace whale
