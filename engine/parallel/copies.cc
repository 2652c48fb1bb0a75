#include "parallel/copies.h"

#include <algorithm>
#include <tuple>

#include "parallel/order.h"
#include "parallel/rewrite.h"

namespace whale {

std::vector<char> weight_ops(const LayoutGraph& lg) {
  const Graph& g = lg.graph;
  std::vector<char> later(g.ops.size()), needed(g.tensors.size());
  for (size_t i = g.ops.size(); i-- > 0;) {
    const Op& op = g.ops[i];
    if (op.phase == Phase::kForward || op.region != Region::kBody) continue;
    bool now = op.code == OpCode::k_transfer;
    for (const TensorId id : op.outputs) now |= id != kNone && needed[static_cast<size_t>(id)];
    later[i] = !now;
    if (now)
      for (const TensorId id : op.inputs)
        if (id != kNone) needed[static_cast<size_t>(id)] = 1;
  }
  return later;
}

WorkKind work_of(const Op& op, bool weight) {
  if (op.phase == Phase::kForward) return WorkKind::kForward;
  return weight ? WorkKind::kWeight : WorkKind::kBackward;
}

void copy_before_sums(LayoutGraph& lg) {
  Graph& g = lg.graph;
  if (lg.micro_batches == 1) return;
  const std::vector<char> weights = weight_ops(lg);
  const bool pipelined = !lg.tasks.schedule.empty();
  // When an op's segment runs, of those of one micro-batch; a transfer's sending half stands with what it sends.
  const auto when = [&](OpId i, int32_t stage) {
    const Op& op = g.op(i);
    const bool body = pipelined && op.region == Region::kBody;
    const WorkKind kind = work_of(op, weights[static_cast<size_t>(i)]);
    return std::tuple(op.region, body ? kind : WorkKind{}, !body ? 0 : kind == WorkKind::kForward ? stage : -stage);
  };
  std::vector<std::vector<OpId>> readers(g.tensors.size());  // of a storage
  for (size_t i = 0; i < g.ops.size(); ++i)
    for (const TensorId id : g.ops[i].inputs)
      if (id != kNone && !is_view(g.ops[i].code))
        readers[static_cast<size_t>(view_root(g, id))].push_back(static_cast<OpId>(i));
  std::vector<Op> ops;
  bool changed = false;
  for (size_t i = 0; i < g.ops.size(); ++i) {
    if (has_flag(g.ops[i].code, kCollective))
      for (const Alias& alias : aliases_of(view_of(g, g.ops[i]))) {
        TensorId& x = g.ops[i].inputs[static_cast<size_t>(alias.input)];
        if (!alias.must || x == kNone) continue;
        const auto mine = when(static_cast<OpId>(i), g.ops[i].stage);
        const auto& all = readers[static_cast<size_t>(view_root(g, x))];
        if (std::none_of(all.begin(), all.end(), [&](OpId r) {
              return r != static_cast<OpId>(i) &&
                     when(r, g.op(r).code == OpCode::k_transfer ? lg.stage(x) : g.op(r).stage) > mine;
            }))
          continue;
        const TensorId made = add_like(lg, x, ".copy");
        Op copy = op_beside(g.ops[i], OpCode::k_cast, g.tensor(made).name, {x}, {made});
        copy.attrs = {{"dtype", std::string(name_of(g.tensor(made).dtype))}};
        x = made;
        ops.push_back(std::move(copy));
        changed = true;
      }
    ops.push_back(g.ops[i]);
  }
  if (!changed) return;
  g.ops = std::move(ops);
  compact(g, {});
}

}  // namespace whale
