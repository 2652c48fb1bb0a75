#include "shard/origins.h"

#include <algorithm>

namespace whale {

bool passes_on(const Op& op) {
  return op.code == OpCode::k_transfer || op.code == OpCode::k_local_slice || op.code == OpCode::k_cast ||
         has_flag(op.code, kCollective);
}

bool is_parameter(const ReshardBuilder& b, TensorId id) {
  const Graph& g = b.out.graph;
  while (b.producer(id) != kNone && g.op(b.producer(id)).code == OpCode::k_cast) id = g.op(b.producer(id)).inputs[0];
  return g.tensor(id).kind == TensorKind::kVariable;
}

bool sums_of_unlike(const ReshardBuilder& b, TensorId id) {
  const OpId producer = b.producer(id);
  if (producer == kNone || b.out.tasks.replicas.empty()) return false;
  for (size_t a = 1; a < b.out.axes(); ++a)
    if (b.out.of_unlike(a) && b.out.placement(id, a) != Placement::kShard)
      for (const TensorId x : b.out.graph.op(producer).inputs)
        if (b.out.placement(x, a) == Placement::kShard) return true;
  return false;
}

static bool is_constant(const ReshardBuilder& b, TensorId id, int depth) {
  const Graph& g = b.out.graph;
  if (g.tensor(id).kind == TensorKind::kStep) return true;
  const OpId producer = b.producer(id);
  if (producer == kNone || depth > kDeepest || has_flag(g.op(producer).code, kCollective) ||
      g.op(producer).code == OpCode::k_accumulate || sums_of_unlike(b, id))
    return false;
  // What was reduced since stands for its parts: a copy of what reduces it would read itself.
  return std::ranges::all_of(g.op(producer).inputs, [&](TensorId x) {
    return x == kNone || (b.latest(x) == x && is_constant(b, x, depth + 1));
  });
}

bool is_constant(const ReshardBuilder& b, TensorId id) { return is_constant(b, id, 0); }

bool depends_on(const ReshardBuilder& b, TensorId id, TensorKind kind) {
  bool found = false;
  each_maker(b, id, [&](TensorId t) { return !(found |= b.out.graph.tensor(t).kind == kind); });
  return found;
}

bool has_mixed_rows(const ReshardBuilder& b, TensorId id) {
  bool found = false;
  each_maker(b, id, [&](TensorId t) {
    const bool rows = b.out.placement(t, kTime) == Placement::kShard;
    found |= rows && mixes(b, t);
    return !rows && !found;
  });
  return found;
}

}  // namespace whale
