#include "rewrite/copies.h"

#include <algorithm>
#include <set>

#include "rewrite/order.h"
#include "rewrite/rewrite.h"

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

std::vector<char> weight_ops(const ShardedGraph& lg) {
  const Graph& g = lg.graph;
  std::vector<char> later(g.ops.size()), needed(g.tensors.size());
  for (size_t i = g.ops.size(); i-- > 0;) {
    const Op& op = g.ops[i];
    if (op.phase == Phase::kForward || op.region != Region::kBody) continue;
    bool now = op.code == OpCode::k_transfer;
    for (const TensorId id : op.outputs) now |= id != kNone && needed[id];
    later[i] = !now;
    if (now)
      for (const TensorId id : op.inputs)
        if (id != kNone) needed[id] = 1;
  }
  return later;
}

std::vector<char> put_off(const ShardedGraph& lg) {
  const bool splits = !lg.tasks.schedule.empty() && schedule_rule(lg.tasks.schedule).split_backward;
  return splits ? weight_ops(lg) : std::vector<char>(lg.graph.ops.size());
}

WorkKind work_of(const Op& op, bool weight) {
  if (op.phase == Phase::kForward) return WorkKind::kForward;
  return weight ? WorkKind::kWeight : WorkKind::kBackward;
}

namespace {

struct Copier {
  ShardedGraph& lg;
  Graph& g;
  const bool pipelined;
  const std::vector<char> weights;
  const std::vector<TensorId> root;
  const Lists readers, next;  // of a storage; by data

  explicit Copier(ShardedGraph& graph)
      : lg(graph),
        g(graph.graph),
        pipelined(!lg.tasks.schedule.empty()),
        weights(put_off(lg)),
        root(roots_of(g)),
        readers(storage_readers(g, root)),
        next(followers_of(g)) {}

  Place place_of(OpId i, int32_t stage) const {
    const Op& op = g.op(i);
    if (!pipelined || op.region != Region::kBody) return Place{op.region, {}, 0};
    const WorkKind kind = work_of(op, weights[i]);
    return Place{op.region, kind, kind == WorkKind::kForward ? stage : -stage};
  }

  // Not by what it reads in place, which is all of one storage.
  bool needs(OpId later, OpId earlier) const {
    std::vector<OpId> todo{earlier};
    std::set<OpId> seen{earlier};
    while (!todo.empty()) {
      const OpId i = todo.back();
      todo.pop_back();
      if (i == later) return true;
      for (const OpId j : next[i])
        if (j <= later && seen.insert(j).second) todo.push_back(j);
    }
    return false;
  }

  bool sums_in_place(OpId i, TensorId storage) const {
    const Op& op = g.op(i);
    if (!has_flag(op.code, kCollective)) return false;
    for (const Alias& alias : aliases_of(g, op))
      if (const TensorId x = op.inputs[alias.input]; alias.must && x != kNone && root[x] == storage) return true;
    return false;
  }

  // Someone must still read the part that op `i` would sum where it lies: in a later segment, after what follows from
  // the sum, or to sum it another time (as another view).
  bool is_read_later(OpId i, TensorId x) const {
    const TensorId storage = root[x];
    const Place mine = place_of(i, g.op(i).stage);
    for (const OpId r : readers[storage]) {
      if (r == i) continue;
      const Place other = place_of(r, g.op(r).code == OpCode::k_transfer ? lg.stage(g.op(r).inputs[0]) : g.op(r).stage);
      if (lg.micro_batches > 1 && may_follow(other, mine)) return true;
      if (r > i && (sums_in_place(r, storage) || needs(r, i))) return true;
    }
    return false;
  }
};

}  // namespace

void copy_before_sums(ShardedGraph& lg) {
  Graph& g = lg.graph;
  const Copier copier(lg);
  std::vector<std::pair<OpId, size_t>> copied;  // sums, and their operands that are read later
  for (size_t i = 0; i < g.ops.size(); ++i) {
    const Op& op = g.ops[i];
    if (!has_flag(op.code, kCollective)) continue;
    for (const Alias& alias : aliases_of(g, op))
      if (const auto k = static_cast<size_t>(alias.input);
          alias.must && op.inputs[k] != kNone && copier.is_read_later(static_cast<OpId>(i), op.inputs[k]))
        copied.emplace_back(static_cast<OpId>(i), k);
  }
  if (copied.empty()) return;
  std::vector<Op> ops;
  auto next = copied.begin();
  for (size_t i = 0; i < g.ops.size(); ++i) {
    Op& op = g.ops[i];
    for (; next != copied.end() && next->first == static_cast<OpId>(i); ++next) {
      TensorId& x = op.inputs[next->second];
      const TensorId made = add_like(lg, x, ".copy");
      Op copy = op_beside(op, OpCode::k_cast, g.tensor(made).name, {x}, {made});
      copy.attrs = {{"dtype", std::string(name_of(g.tensor(made).dtype))}};
      x = made;
      ops.push_back(std::move(copy));
    }
    ops.push_back(std::move(op));
  }
  g.ops = std::move(ops);
  compact(g, {});
}

}  // namespace whale
