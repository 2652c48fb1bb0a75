#include "shard/cuts.h"

#include <algorithm>

#include "base/error.h"
#include "cost/cost.h"
#include "task/factor_names.h"
#include "task/window.h"

namespace whale {

std::vector<size_t> settling_order(const Axes& axes, const Op& op) {
  std::vector<size_t> out;
  for (const bool replicas : {false, true})
    for (size_t a = 1; a < axes.axes(); ++a)
      if ((axes.role(op, a) == AxisRole::kReplica) == replicas) out.push_back(a);
  return out;
}

namespace {

bool are_beside(const Dims& dims, const AxisSharding& x, const AxisSharding& y) {
  return x.placement != Placement::kShard || y.placement != Placement::kShard ||
         (!(x.sub_axis == y.sub_axis) && compatible(dims, x.sub_axis, y.sub_axis));
}

// Whether summing parts over replicas, not the whole, saves more than it takes to put the parts together.
bool pays_in_parts(const Axes& axes, const Tensor& t, const Sharding& now, int32_t stage, size_t replicas,
                   size_t split) {
  double bytes = static_cast<double>(element_count(t.dims) * size_of(t.dtype));
  for (size_t b = 1; b < now.axes.size(); ++b)
    if (now.axes[b].placement == Placement::kShard) bytes /= static_cast<double>(axes.size(b, stage));
  if (axes.mesh_axis(split, stage).has_gaps()) return false;
  const int64_t n = axes.size(split, stage), r = axes.size(replicas, stage);
  const LinkRates &far = axes.tasks.link(stage, replicas - 1), &near = axes.tasks.link(stage, split - 1);
  return all_reduce_seconds(bytes, r, far) - all_reduce_seconds(bytes / static_cast<double>(n), r, far) >
         all_reduce_seconds(0, n, near);
}

}  // namespace

std::optional<AxisSharding> first_along_split(const Axes& axes, const Tensor& t, const Sharding& now, int32_t stage,
                                              size_t replicas, size_t split, const AxisSharding& lives,
                                              const AxisSharding& want, bool all) {
  const AxisSharding& mine = now.axes[split];
  const auto fits = [&](const AxisSharding& cut) {
    bool out = cut.placement == Placement::kShard && are_beside(t.dims, cut, want);
    for (size_t b = 1; b < now.axes.size(); ++b) out &= b == split || are_beside(t.dims, cut, now.axes[b]);
    return out;
  };
  if (mine.placement == Placement::kShard && fits(lives) && !are_beside(t.dims, mine, want)) return lives;
  if (mine.placement != Placement::kPartial || mine.combine != Combine::kSum) return std::nullopt;
  if (fits(lives)) return lives;
  if (all) return AxisSharding{};
  if (lives.placement == Placement::kShard || !pays_in_parts(axes, t, now, stage, replicas, split)) return std::nullopt;
  for (size_t d = 0; d < t.dims.size(); ++d) {
    const AxisSharding part = shard({static_cast<int>(d), 1, 1});
    if (t.dims[d] % axes.size(split, stage) == 0 && fits(part)) return part;
  }
  return std::nullopt;
}

bool is_spread(const Graph& graph, TensorId id, const Sharding& sharding, const CostModel& cost) {
  const OpId producer = graph.tensor(id).producer;
  if (producer == kNone) return false;
  const Op& op = graph.op(producer);
  if (op.outputs.size() != 1 || op.code == OpCode::k_transfer || op.code == OpCode::k_local_slice ||
      op.code == OpCode::k_accumulate || has_flag(op.code, kCollective) || has_flag(op.code, kUpdateOp) ||
      has_flag(op.code, kRandom))
    return false;
  int64_t from = 0;
  for (const TensorId x : op.inputs) {
    if (x == kNone) continue;
    from += element_count(graph.tensor(x).dims);
    // A gradient's reader is in an earlier stage: what the forward pass made here must not go back there.
    const OpId made = graph.tensor(x).producer;
    if (op.phase == Phase::kBackward && made != kNone && graph.op(made).phase == Phase::kForward &&
        !graph.op(made).inputs.empty())
      return false;
  }
  for (const AxisSharding& l : sharding.axes)
    if (l.placement != Placement::kReplicate && !l.samples) return false;
  return from > 0 && from * cost.spread <= element_count(graph.tensor(id).dims);
}

std::string written_scope(const Graph& graph, const TaskGraphs& tasks, const Op& op) {
  const auto scope = static_cast<size_t>(op.scope);
  return graph.scope_path(scope < tasks.written.size() ? tasks.written[scope] : op.scope);
}

Sharding input_sharding(const Tensor& input, const Axes& axes, const Op& reader) {
  Sharding sharding{std::vector<AxisSharding>(axes.axes())};
  const int dim = input.batch_dim;
  if (dim < 0 || input.dims[dim] <= 1) return sharding;
  for (size_t a = 0; a < axes.axes(); ++a)
    if (axes.cuts(a, reader.stage) &&
        (a == kTime || (axes.role(reader, a) == AxisRole::kReplica && !axes.by_micro_batch(a))))
      sharding.axes[a] = shard({dim, 1, 1}, false, true);
  return sharding;
}

bool fits(const Placed& p, const Factor& f, const SubAxisPart& sub, size_t a) {
  if (!can_cut(p.op, f, sub)) return false;
  if (a == kTime && f.kind == FactorKind::kLookup) return false;
  if (const int64_t n = p.axes.micro_batches; a == kTime && f.group.rows && !sub_axis_of_groups(f, sub, n).present())
    throw invalid(
        "op '{}' ({}) has {} groups of samples, which {} micro-batches would cut; give it a multiple of {} groups, or "
        "plan with a number of micro-batches that divides them",
        p.op.name, def(p.op.code).name, f.extent / f.group.rows, n, n)
        .at_op(p.op.name)
        .at_scope(written_scope(p.graph, p.axes.tasks, p.op));
  const bool window = f.kind == FactorKind::kWindow;
  if (window && (a == kTime || !window_fits(f.window, p.axes.mesh_axis(a, p.op.stage)))) return false;
  const auto clash = [&](TensorId id, const Sharding* sharding, const SubAxis& whole) {
    if (id == kNone || !whole.present()) return false;
    const SubAxis sub_axis = sub_axis_part(whole, sub);
    for (size_t b = 0; b < a; ++b) {
      const AxisSharding& taken = sharding->axes[b];
      if (taken.placement == Placement::kShard && (!compatible(p.graph.tensor(id).dims, taken.sub_axis, sub_axis) ||
                                                   (window && taken.sub_axis.dim == sub_axis.dim)))
        return true;
    }
    return false;
  };
  for (size_t i = 0; i < p.op.inputs.size() && i < f.inputs.size(); ++i)
    if (clash(p.op.inputs[i], p.in[i], f.inputs[i])) return false;
  for (size_t o = 0; o < p.op.outputs.size() && o < f.outputs.size(); ++o)
    if (clash(p.op.outputs[o], p.out[o], f.outputs[o])) return false;
  return true;
}

std::vector<std::pair<OpCut, size_t>> cuts_of_operands(const Placed& p, size_t a) {
  std::vector<std::pair<OpCut, size_t>> out;
  for (size_t i = 0; i < p.op.inputs.size(); ++i) {
    if (p.operand(i, a) != Placement::kShard) continue;
    const AxisSharding& l = p.in[i]->axes[a];
    for (size_t k = 0; k < p.factors.list.size(); ++k) {
      const Factor& f = p.factors.list[k];
      OpCut cut{static_cast<int>(k), {}, l.state, l.samples};
      if (f.kind == FactorKind::kWindow && (l.samples || l.state)) continue;
      if (cut_of_operand(f, i, l.sub_axis, extent_of(p.graph.tensor(p.op.inputs[i]).dims, l.sub_axis), cut.sub) &&
          fits(p, f, cut.sub, a)) {
        out.emplace_back(cut, i);
        break;
      }
    }
  }
  return out;
}

OpCut largest_cut(const Placed& p, size_t a) {
  OpCut best;
  int64_t most = -1;
  for (const auto& [cut, operand] : cuts_of_operands(p, a))
    if (const int64_t n = element_count(p.graph.tensor(p.op.inputs[operand]).dims); n > most) best = cut, most = n;
  return best;
}

namespace {

// Replicas that are in different micro-batches do not meet in one: what belongs to a micro-batch is each one's own.
bool apart(const Placed& p, size_t a) {
  bool varies = false;
  for (size_t i = 0; i < p.in.size(); ++i) varies |= p.time_varies(i);
  return varies && p.axes.by_micro_batch(a);
}

}  // namespace

OpCut followed_cut(const Placed& p, size_t a, bool exact) {
  if (!p.axes.by_micro_batch(a)) return largest_cut(p, a);
  if (apart(p, a)) return {};
  return exact && !keeps_bits(p.op) ? OpCut{} : largest_cut(p, a);
}

namespace {

// Along time an operand or result with a row per group is cut with the samples.
SubAxis cut_of_groups(const Placed& p, const Factor& f, const std::vector<int>& carriers, size_t k, size_t a,
                      const OpCut& cut) {
  const bool carries = std::find(carriers.begin(), carriers.end(), static_cast<int>(k)) != carriers.end();
  return a == kTime && carries ? sub_axis_of_groups(f, cut.sub, p.axes.micro_batches) : SubAxis{};
}

}  // namespace

AxisSharding wanted_operand(const Placed& p, size_t i, size_t a, const OpCut& cut) {
  const Factor& f = p.factors.list[cut.factor];
  if (const SubAxis groups = cut_of_groups(p, f, f.group.inputs, i, a, cut); groups.present())
    return shard(groups, cut.state, cut.samples);
  if (i >= f.inputs.size() || !f.inputs[i].present()) return {};
  return f.reads_through(i) ? read_sharding(f, f.inputs[i], p.axes.mesh_axis(a, p.op.stage))
                            : shard(sub_axis_part(f.inputs[i], cut.sub), cut.state, cut.samples);
}

AxisSharding made_result(const Placed& p, size_t o, size_t a, const OpCut& cut) {
  const Factor& f = p.factors.list[cut.factor];
  if (const SubAxis groups = cut_of_groups(p, f, f.group.outputs, o, a, cut); groups.present())
    return shard(groups, cut.state, cut.samples);
  if (o < f.outputs.size() && f.outputs[o].present())
    return shard(sub_axis_part(f.outputs[o], cut.sub), cut.state, cut.samples);
  if (p.axes.of_unlike(a)) return {};  // the program adds what the copies make of their samples
  return {
      .placement = Placement::kPartial, .sub_axis = {}, .state = false, .samples = false, .combine = f.combine_of(o)};
}

SubAxis streamed_piece(const Placed& p, size_t i, size_t a, const OpCut& cut) {
  const Factor& f = p.factors.list[cut.factor];
  if (a == kTime || (i < f.inputs.size() && f.inputs[i].present())) return {};
  const SubAxis piece = streamed_sub_axis(p.factors, i);
  return piece.present() && asks_for(p.axes.tasks, p.op, a, f) ? piece : SubAxis{};
}

void mark_samples(Sharding& sharding) {
  for (const AxisSharding& a : sharding.axes)
    for (AxisSharding& b : sharding.axes)
      if (a.samples && b.placement == Placement::kShard && b.sub_axis == a.sub_axis) b.samples = true;
}

std::vector<int> linear_parts(const Placed& p, size_t a, bool exact) {
  std::vector<int> partial;
  bool sum = true, narrows = false;
  for (size_t i = 0; i < p.op.inputs.size(); ++i) {
    if (p.operand(i, a) != Placement::kPartial) continue;
    partial.push_back(static_cast<int>(i));
    sum &= p.in[i]->axes[a].combine == Combine::kSum;
    for (const TensorId o : p.op.outputs)  // sums stay in the wider type
      if (o != kNone) narrows |= size_of(p.graph.tensor(o).dtype) < size_of(p.graph.tensor(p.op.inputs[i]).dtype);
  }
  // Exact mode adds each use of a parameter over time for itself: stages may lie between uses.
  const bool passes = sum && !narrows && !(exact && a == kTime) && !apart(p, a) &&
                      std::find(p.factors.linear.begin(), p.factors.linear.end(), partial) != p.factors.linear.end();
  return passes ? partial : std::vector<int>{};
}

}  // namespace whale
