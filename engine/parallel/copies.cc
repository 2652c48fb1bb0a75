#include "parallel/copies.h"

#include <algorithm>

#include "parallel/order.h"
#include "parallel/rewrite.h"

namespace whale {
namespace {

// The segment of an op, of those of one micro-batch; a transfer's sending half stands with what it sends.
struct Place {
  Region region{};
  WorkKind kind{};
  int32_t at = 0;  // of the stages that pass on such work: its place in their order
  friend bool operator==(const Place&, const Place&) = default;
};

// Weight gradients come when there is time: after their stage's backward pass, before or after that of other stages.
bool may_follow(const Place& x, const Place& y) {
  if (x == y) return false;
  if (x.region != y.region) return x.region > y.region;
  if (x.kind == WorkKind::kForward || y.kind == WorkKind::kForward)
    return x.kind == y.kind ? x.at > y.at : x.kind > y.kind;
  return x.kind == WorkKind::kWeight || x.at > y.at;
}

}  // namespace

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
  const bool waits = pipelined && schedule_rule(lg.tasks.schedule).split_backward;
  const auto place_of = [&](OpId i, int32_t stage) {
    const Op& op = g.op(i);
    if (!pipelined || op.region != Region::kBody) return Place{op.region, {}, 0};
    const WorkKind kind = work_of(op, waits && weights[static_cast<size_t>(i)]);
    return Place{op.region, kind, kind == WorkKind::kForward ? stage : -stage};
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
        const Place mine = place_of(static_cast<OpId>(i), g.ops[i].stage);
        const auto& all = readers[static_cast<size_t>(view_root(g, x))];
        if (std::none_of(all.begin(), all.end(), [&](OpId r) {
              return r != static_cast<OpId>(i) &&
                     may_follow(place_of(r, g.op(r).code == OpCode::k_transfer ? lg.stage(x) : g.op(r).stage), mine);
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
