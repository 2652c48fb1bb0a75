#include "rewrite/fuse.h"

#include <algorithm>

#include "base/error.h"
#include "ops/fused.h"
#include "rewrite/rewrite.h"
#include "shard/gradients.h"

namespace whale {
namespace {

constexpr size_t kMostSteps = 24;
constexpr size_t kMostInputs = 8;

bool can_be_step(const Graph& g, const Op& op) {
  if (op.outputs.size() != 1 || op.inputs.empty() || op.inputs.size() > 3) return false;
  if (!step_of(op, g.tensor(op.outputs[0]).dtype)) return false;
  if (std::find(op.inputs.begin(), op.inputs.end(), kNone) != op.inputs.end()) return false;
  // A chain runs at one width: what leaves or enters f64 (statistics) stays an op of its own.
  const bool wide = g.tensor(op.outputs[0]).dtype == DType::kF64;
  for (const TensorId id : op.inputs)
    if ((g.tensor(id).dtype == DType::kF64) != wide) return false;
  return element_count(g.tensor(op.outputs[0]).dims) > 1;
}

// Where several steps of an update read the same numbers of 16 bits widened, each widens them as it goes: no copy in 32
// bits waits for all of them.
void widen_in_chains(ShardedGraph& lg) {
  Graph& g = lg.graph;
  const Lists readers = readers_of(g);
  std::vector<char> kept(g.tensors.size());
  for (const NamedTensor& f : lg.fetches) kept[f.tensor] = 1;
  for (const Variable& v : g.variables)
    if (v.next != kNone) kept[v.next] = 1;
  std::vector<Op> ops;
  for (size_t i = 0; i < g.ops.size(); ++i) {
    ops.push_back(std::move(g.ops[i]));
    if (ops.back().code != OpCode::k_cast || ops.back().phase != Phase::kUpdate || !can_be_step(g, ops.back()))
      continue;
    const Op cast = ops.back();
    const TensorId wide = cast.outputs[0];
    const auto& read_by = readers[wide];
    const bool widens = size_of(g.tensor(wide).dtype) > size_of(g.tensor(cast.inputs[0]).dtype);
    const bool chains = std::ranges::all_of(read_by, [&](OpId r) {
      return can_be_step(g, g.op(r)) && g.op(r).phase == cast.phase && g.op(r).region == cast.region;
    });
    if (!widens || !chains || kept[wide]) continue;
    std::vector<OpId> others;  // but the first
    for (const OpId r : read_by)
      if (r != read_by[0] && std::ranges::count(others, r) == 0) others.push_back(r);
    for (const OpId r : others) {
      Op again = cast;
      again.outputs = {add_like(lg, wide, ".again")};
      std::ranges::replace(g.op(r).inputs, wide, again.outputs[0]);
      ops.push_back(std::move(again));
    }
  }
  const bool any = ops.size() > g.ops.size();
  g.ops = std::move(ops);
  if (any) compact(g, {});
}

struct Group {
  std::vector<OpId> ops;  // in order; the last is the root
  TensorIds inputs;
};

class Fuser {
 public:
  explicit Fuser(ShardedGraph& graph)
      : lg_(graph),
        g_(graph.graph),
        readers_(readers_of(graph.graph)),
        kept_(g_.tensors.size()),
        gradients_(graph.graph, true) {
    for (const NamedTensor& f : lg_.fetches) kept_[f.tensor] = 1;
    for (const Variable& v : g_.variables)
      if (v.next != kNone) kept_[v.next] = 1;
  }

  void run() {
    groups_.resize(g_.ops.size());
    for (size_t i = 0; i < g_.ops.size(); ++i)
      if (can_be_step(g_, g_.ops[i])) grow(static_cast<OpId>(i));
    std::vector<char> removed(g_.ops.size());
    for (size_t i = 0; i < g_.ops.size(); ++i) {
      if (groups_[i].ops.size() < 2) continue;
      for (const OpId op : groups_[i].ops) removed[op] = static_cast<size_t>(op) != i;
      g_.ops[i] = fused(groups_[i]);
    }
    compact(g_, removed);
  }

 private:
  // Partial values pass through linear ops only; a chain does not say that it is linear.
  bool partial(TensorId id) const {
    const auto& axes = lg_.shardings[id].axes;
    return std::any_of(axes.begin(), axes.end(),
                       [](const AxisSharding& a) { return a.placement == Placement::kPartial; });
  }
  bool joins(const Op& producer, TensorId between, OpId reader) const {
    const Op& op = g_.op(reader);
    const TensorId result = op.outputs[0];
    const auto& readers = readers_[between];
    return !kept_[between] && std::all_of(readers.begin(), readers.end(), [&](OpId r) { return r == reader; }) &&
           producer.region == op.region && producer.phase == op.phase && producer.stage == op.stage &&
           !partial(between) && !partial(result) && !sums_uses(producer, op) &&
           g_.tensor(between).dims == g_.tensor(result).dims && lg_.shardings[between] == lg_.shardings[result];
  }

  // Of a parameter's gradient: what one use adds is added when it is there, and does not wait for the next one's.
  bool sums_uses(const Op& producer, const Op& reader) const {
    return producer.code == OpCode::k_add && reader.code == OpCode::k_add &&
           gradients_.terms.contains(producer.outputs[0]) && gradients_.terms.contains(reader.outputs[0]);
  }

  // Takes in the groups of the operands' producers while the limits allow.
  void grow(OpId root) {
    Group group{{}, {}};
    const Op& op = g_.op(root);
    std::vector<OpId> taken;
    for (const TensorId id : op.inputs) {
      const OpId p = g_.tensor(id).producer;
      if (p == kNone || groups_[p].ops.empty() || !joins(g_.op(p), id, root)) continue;
      if (std::find(taken.begin(), taken.end(), p) != taken.end()) continue;
      Group wider = group;
      const Group& more = groups_[p];
      wider.ops.insert(wider.ops.end(), more.ops.begin(), more.ops.end());
      if (wider.ops.size() + 1 > kMostSteps) continue;
      std::vector<OpId> with = taken;
      with.push_back(p);
      wider.inputs = inputs_of(wider.ops, root);
      if (wider.inputs.size() > kMostInputs) continue;
      group = std::move(wider);
      taken = std::move(with);
    }
    for (const OpId p : taken) groups_[p].ops.clear();
    std::sort(group.ops.begin(), group.ops.end());
    group.inputs = inputs_of(group.ops, root);
    group.ops.push_back(root);
    groups_[root] = std::move(group);
  }

  TensorIds inputs_of(const std::vector<OpId>& ops, OpId root) const {
    TensorIds inside, out;
    for (const OpId op : ops) inside.push_back(g_.op(op).outputs[0]);
    const auto look = [&](OpId op) {
      for (const TensorId id : g_.op(op).inputs)
        if (std::find(inside.begin(), inside.end(), id) == inside.end() &&
            std::find(out.begin(), out.end(), id) == out.end())
          out.push_back(id);
    };
    for (const OpId op : ops) look(op);
    look(root);
    // Operands of full size first: the result may take the place of one of the first two.
    const auto& full = g_.tensor(g_.op(root).outputs[0]);
    std::stable_partition(out.begin(), out.end(), [&](TensorId id) {
      const Tensor& t = g_.tensor(id);
      return t.kind == TensorKind::kValue && t.dims == full.dims && t.dtype == full.dtype;
    });
    return out;
  }

  Op fused(const Group& group) const {
    FusedBody body;
    const auto n = static_cast<int>(group.inputs.size());
    const auto operand = [&](TensorId id) {
      const auto at = std::find(group.inputs.begin(), group.inputs.end(), id);
      if (at != group.inputs.end()) return static_cast<int>(at - group.inputs.begin());
      for (size_t s = 0; s < group.ops.size(); ++s)
        if (g_.op(group.ops[s]).outputs[0] == id) return n + static_cast<int>(s);
      throw internal("fusion: operand '{}' is not in its group", g_.tensor(id).name);
    };
    for (const OpId id : group.ops) {
      const Op& op = g_.op(id);
      FusedStep step = *step_of(op, g_.tensor(op.outputs[0]).dtype);
      for (const TensorId input : op.inputs) step.operands.push_back(operand(input));
      body.steps.push_back(std::move(step));
    }
    body.results = {n + static_cast<int>(group.ops.size()) - 1};
    Op op = g_.op(group.ops.back());
    op.code = OpCode::k_fused;
    op.attrs = encode(body, n);
    op.inputs = group.inputs;
    op.key = 0;
    return op;
  }

  ShardedGraph& lg_;
  Graph& g_;
  Lists readers_;
  std::vector<char> kept_;
  const Gradients gradients_;
  std::vector<Group> groups_;
};

}  // namespace

void fuse_elementwise(ShardedGraph& graph) {
  widen_in_chains(graph);
  Fuser(graph).run();
}

}  // namespace whale
