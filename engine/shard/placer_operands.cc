// One operand from the sharding that it has to the one that its reader needs: made again already cut, or by a reshard.
#include "shard/placer.h"

#include <algorithm>

#include "base/error.h"
#include "cost/cost.h"
#include "ops/cost.h"
#include "task/window.h"

namespace whale {

static bool same_shares(const ShardedGraph& graph, size_t a, const Op& op, const AxisSharding& x,
                        const AxisSharding& y) {
  if (a == kTime || x.state == y.state) return true;
  const MeshAxis& axis = graph.mesh_axis(a, op.stage);
  return axis.shares == axis.state_shares;
}

TensorId Placer::to_sharding(const Op& op, TensorId id, size_t a, const AxisSharding& want) {
  id = b_.latest(id);
  const AxisSharding now = b_.out.at(id, a);
  const bool cut = want.placement == Placement::kShard;
  if (want.window.present()) {
    // Cut once, beside nothing else in this dimension; then the neighbours' rows are added.
    AxisSharding plain = want;
    plain.window = {};
    for (size_t b = axes(); b-- > a + 1;)
      if (placement(id, b) == Placement::kShard && b_.out.at(id, b).sub_axis.dim == want.sub_axis.dim)
        id = b_.gather(id, b);
    if (now.placement == Placement::kReplicate) return sliced(op, id, a, want);
    return b_.halo(to_sharding(op, id, a, plain), a, want);
  }
  if (now.placement == want.placement &&
      (!cut || (now.sub_axis == want.sub_axis && same_shares(b_.out, a, op, now, want))))
    return id;
  if (a == kTime) {
    const TensorId whole = whole_in_time(op, id);
    return cut ? sliced(op, whole, a, want) : whole;
  }
  if (!options_.exact && !options_.adasum && is_summed_over_replicas(id, a))
    if (const TensorId first = summed_over_splits(op, id, a, want); first != id) return to_sharding(op, first, a, want);
  // An inner cut of the same sub-axis, or of one that overlaps, is taken back first; its own axis comes later.
  for (size_t b = axes(); b-- > a + 1;) {
    if (placement(id, b) != Placement::kShard) continue;
    const SubAxis& inner = b_.out.at(id, b).sub_axis;
    const Dims& dims = g().tensor(id).dims;
    if ((now.placement == Placement::kShard && (inner == now.sub_axis || !compatible(dims, inner, now.sub_axis))) ||
        (cut && (inner == want.sub_axis || !compatible(dims, inner, want.sub_axis))))
      id = b_.gather(id, b);
  }
  switch (now.placement) {
    case Placement::kReplicate: return sliced(op, id, a, want);
    case Placement::kPartial:
      if (const TensorId made = combine_gradient(op, id, a, want); made != kNone) return made;
      return cut && now.combine == Combine::kSum ? b_.reduce_to(id, a, want)
             : cut                               ? sliced(op, b_.reduce(id, a), a, want)
                                                 : b_.reduce(id, a);
    case Placement::kShard:
      if (cut && now.sub_axis.dim != want.sub_axis.dim && !now.state && !want.state) return b_.exchange(id, a, want);
      if (cut && g().tensor(id).kind != TensorKind::kVariable && !b_.out.time_varies(id)) {  // to other parts of it
        Sharding to = b_.out.shardings[id];
        to.axes[a] = want;
        return b_.rearrange(id, to);
      }
      // Parameters that live in parts are gathered once for each pass, so that no copy lives between the passes.
      const int use = is_parameter(b_, id) && op.phase != Phase::kForward ? 1 : 0;
      const TensorId whole = b_.gather(id, a, use);
      return cut ? sliced(op, whole, a, want) : whole;
  }
  return id;
}

bool Placer::is_summed_over_replicas(TensorId id, size_t a) {
  return placement(id, a) == Placement::kPartial && b_.out.at(id, a).combine == Combine::kSum &&
         gradients_.in(b_, id) != kNone && b_.out.role(g().op(b_.producer(id)), a) == AxisRole::kReplica;
}

TensorId Placer::combine_gradient(const Op& reader, TensorId id, size_t a, const AxisSharding& want) {
  const DType exact = g().tensor(id).dtype;
  const bool narrow = options_.gradient_dtype && *options_.gradient_dtype != exact;
  if (!(narrow || options_.adasum) || !is_summed_over_replicas(id, a)) return kNone;
  const bool cut = want.placement == Placement::kShard;
  if (options_.adasum) {
    // A replica's gradient is whole first: over its micro-batches, and over the replicas inside of it.
    if (placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
    for (size_t b = axes(); b-- > a + 1;)
      if (placement(id, b) == Placement::kPartial) id = to_sharding(reader, id, b, {});
    const TensorId made = b_.adasum(id, a);
    return cut ? sliced(reader, made, a, want) : made;
  }
  // Of a sum that waits for a bucket the cast waits too.
  const Op& source = g().op(b_.producer(id));
  const Phase phase = has_flag(source.code, kCollective) ? Phase::kUpdate : source.phase;
  const TensorId low = b_.cast(id, *options_.gradient_dtype, phase);
  const TensorId made = b_.cast(cut ? b_.reduce_to(low, a, want) : b_.reduce(low, a), exact, Phase::kUpdate);
  if (!cut) b_.replace(id, made);
  return made;
}

TensorId Placer::summed_over_splits(const Op& reader, TensorId id, size_t a, const AxisSharding& want) {
  const TensorId parameter = gradients_.parameter_of.at(gradients_.in(b_, id));
  for (size_t b = axes(); b-- > 1;) {
    if (b_.out.role(g().op(b_.producer(id)), b) == AxisRole::kReplica) continue;
    const AxisSharding lives = parameter == kNone ? AxisSharding{} : storage_sharding(parameter).axes[b];
    const auto first = first_along_split(b_.out, g().tensor(id), b_.out.shardings[id], reader.stage, a, b, lives, want,
                                         options_.gradient_dtype.has_value());
    if (!first) continue;
    const TensorId part = id;
    id = to_sharding(reader, part, b, *first);
    b_.replace(part, id);  // everyone who reads the gradient reads this sum of it
  }
  return id;
}

TensorId Placer::sliced(const Op& op, TensorId id, size_t a, const AxisSharding& want) {
  const auto key =
      std::make_tuple(id, a, want.sub_axis.dim, want.sub_axis.outer, want.sub_axis.inner, want.state, want.window);
  if (const auto known = slices_.find(key); known != slices_.end()) return b_.latest(known->second);
  TensorId out = kNone;
  const OpId producer = b_.producer(id);
  // Made again it must be cut as it was along the axes before, which have been settled.
  const auto kept = [&] {
    for (size_t b = 0; b < a; ++b)
      if (placement(id, b) == Placement::kShard &&
          compatible(g().tensor(id).dims, b_.out.at(id, b).sub_axis, want.sub_axis) &&
          !cut_of_result(g().op(producer), b_.out.at(id, b).sub_axis, b).present())
        return false;
    return true;
  };
  if (!want.window.present() && is_free(id, want.sub_axis, 0, a) && kept()) {
    out = produce_cut(id, a, want);
  } else if (a == kTime && producer != kNone && g().op(producer).code == OpCode::k_transfer) {
    // Cut where it is made, and sent piece by piece.
    out = at_stage(sliced(op, g().op(producer).inputs[0], a, want), op);
  } else if (a != kTime) {
    out = b_.slice(id, a, want);
  } else {
    const TensorKind kind = g().tensor(id).kind;
    throw unimplemented(
        "op '{}' ({}): operand '{}' ({}) has a row for every sample, and {} micro-batches would need a part of it "
        "each; "
        "{}, or plan with one micro-batch (accumulation 1)",
        op.name, def(op.code).name, g().tensor(id).name,
        kind == TensorKind::kVariable ? "a variable"
        : kind == TensorKind::kInput  ? "an input without a batch dimension"
                                      : def(g().op(producer).code).name,
        micro_batches(),
        kind == TensorKind::kVariable ? "give it one row for all samples (broadcast_to spreads it), or look rows up by "
                                        "an input of indices"
        : kind == TensorKind::kInput  ? "declare the input with its batch dimension (batch_dim)"
                                      : "compute it from inputs with a batch dimension, or from constants op by op")
        .at_op(op.name)
        .at_scope(written_scope(op));
  }
  return slices_[key] = out;
}

OpCut Placer::cut_of_result(const Op& op, const SubAxis& sub_axis, size_t a) {
  if (has_flag(op.code, kCollective) || has_flag(op.code, kUpdateOp) || op.outputs.size() != 1 ||
      op.code == OpCode::k_transfer || op.code == OpCode::k_local_slice || op.code == OpCode::k_accumulate ||
      (options_.exact && b_.out.by_micro_batch(a) && !keeps_bits(op)))
    return {};
  const Factors& factors = factors_.of(g(), op);
  const Placed here = placed(op, factors);
  for (size_t k = 0; k < factors.list.size(); ++k) {
    OpCut cut{static_cast<int>(k), {}, false};
    const Factor& f = factors.list[k];
    if (f.kind == FactorKind::kMap &&
        find_sub_axis_part(f.outputs[0], f.extent, sub_axis, extent_of(g().tensor(op.outputs[0]).dims, sub_axis),
                           cut.sub) &&
        fits(here, f, cut.sub, a))
      return cut;
  }
  return {};
}

bool Placer::is_free(TensorId id, const SubAxis& sub_axis, int depth, size_t a) {
  const OpId producer = b_.producer(id);
  if (producer == kNone || depth > kDeepest) return false;
  const Op op = g().op(producer);
  const OpCut cut = cut_of_result(op, sub_axis, a);
  if (!cut.present()) return false;
  for (size_t b = 0; b < axes(); ++b)
    if (placement(id, b) == Placement::kPartial) return false;
  const int64_t n = element_count(g().tensor(id).dims);
  // Along time there is no other way.
  if (a != kTime && cost_of(g(), op).flops > static_cast<double>(tasks().cost.remade_flops * n)) return false;
  const Factor& f = factors_.of(g(), op).list[cut.factor];
  // Where nothing carries the sub-axis, something small is spread (or made from nothing); along time there is no other
  // way.
  const bool carried = std::any_of(f.inputs.begin(), f.inputs.end(), [](const SubAxis& d) { return d.present(); });
  for (const TensorId x : op.inputs)
    if (a != kTime && !carried && x != kNone && element_count(g().tensor(x).dims) * tasks().cost.spread > n)
      return false;
  for (size_t i = 0; i < op.inputs.size(); ++i)
    if (op.inputs[i] != kNone && f.inputs[i].present() &&
        !is_free(op.inputs[i], sub_axis_part(f.inputs[i], cut.sub), depth + 1, a))
      return false;
  return true;
}

TensorId Placer::produce_cut(TensorId id, size_t a, const AxisSharding& want) {
  Op op = g().op(b_.producer(id));
  OpCut cut = cut_of_result(op, want.sub_axis, a);
  cut.state = want.state, cut.samples = want.samples;
  op.name += ".cut";
  op.outputs = {b_.like(id, ".cut")};
  // Along the other axes the sharding stays what it was.
  Forced forced{{a, cut}};
  for (size_t other = 0; other < axes(); ++other) {
    if (other == a) continue;
    OpCut kept;
    // A cut that overlaps with the new one without lying in it is given up.
    if (placement(id, other) == Placement::kShard &&
        compatible(g().tensor(id).dims, b_.out.at(id, other).sub_axis, want.sub_axis)) {
      kept = cut_of_result(op, b_.out.at(id, other).sub_axis, other);
      kept.state = b_.out.at(id, other).state, kept.samples = b_.out.at(id, other).samples;
    }
    forced.emplace_back(other, kept);
  }
  const TensorId out = op.outputs[0];
  place(std::move(op), kNone, forced);
  return out;
}

}  // namespace whale
