// One operand from the layout that it has to the one that its reader needs: made again already cut, or by a bridge.
#include "shard/inserter.h"

#include <algorithm>

#include "base/error.h"
#include "cost/cost.h"
#include "task/window.h"

namespace whale {

TensorId Inserter::bring(const Op& op, TensorId id, size_t a, const AxisLayout& want) {
  id = b_.latest(id);
  const AxisLayout now = b_.out.at(id, a);
  const bool cut = want.placement == Placement::kShard;
  if (want.window.present()) {
    // Cut once, beside nothing else in this dimension; then the neighbours' rows are added.
    AxisLayout plain = want;
    plain.window = {};
    for (size_t b = axes(); b-- > a + 1;)
      if (placement(id, b) == Placement::kShard && b_.out.at(id, b).digit.dim == want.digit.dim) id = b_.gather(id, b);
    if (now.placement == Placement::kReplicate) return sliced(op, id, a, want);
    return b_.halo(bring(op, id, a, plain), a, want);
  }
  if (now.placement == want.placement && (!cut || (now.digit == want.digit && same_shares(a, op, now, want))))
    return id;
  if (a == kTime) {
    const TensorId whole = whole_in_time(op, id);
    return cut ? sliced(op, whole, a, want) : whole;
  }
  // An inner cut of the same digit, or of one that overlaps, is taken back first; its own axis comes later.
  for (size_t b = axes(); b-- > a + 1;) {
    if (placement(id, b) != Placement::kShard) continue;
    const Digit& inner = b_.out.at(id, b).digit;
    const Dims& dims = g().tensor(id).dims;
    if ((now.placement == Placement::kShard && (inner == now.digit || !compatible(dims, inner, now.digit))) ||
        (cut && (inner == want.digit || !compatible(dims, inner, want.digit))))
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
      if (cut && now.digit.dim != want.digit.dim && !now.state && !want.state) return b_.exchange(id, a, want);
      if (cut && g().tensor(id).kind != TensorKind::kVariable && !b_.out.time_varies(id)) {  // to other parts of it
        Layout to = b_.out.layouts[static_cast<size_t>(id)];
        to.axes[a] = want;
        return b_.rearrange(id, to);
      }
      // Parameters that live in parts are gathered once for each pass, so that no copy lives between the passes.
      const int use = is_parameter(id) && op.phase != Phase::kForward ? 1 : 0;
      const TensorId whole = b_.gather(id, a, use);
      return cut ? sliced(op, whole, a, want) : whole;
  }
  return id;
}

bool Inserter::is_parameter(TensorId id) const {
  while (b_.producer(id) != kNone && g().op(b_.producer(id)).code == OpCode::k_cast)
    id = g().op(b_.producer(id)).inputs[0];
  return g().tensor(id).kind == TensorKind::kVariable;
}

template <class Found>
TensorId Inserter::on_its_way(TensorId id, Found found) const {
  while (id != kNone && !found(id)) {
    const OpId made = b_.producer(id);
    if (made == kNone) return kNone;
    const Op& op = g().op(made);
    if (op.code == OpCode::k_accumulate)
      id = op.inputs[1];
    else if (has_flag(op.code, kCollective) || op.code == OpCode::k_transfer || op.code == OpCode::k_local_slice ||
             op.code == OpCode::k_cast)
      id = op.inputs[0];
    else
      return kNone;
  }
  return id;
}

TensorId Inserter::gradient_in(TensorId id) const {
  return on_its_way(id, [this](TensorId x) { return parameter_of_.contains(x); });
}

bool Inserter::term_in(TensorId id) const {
  return on_its_way(id, [this](TensorId x) { return terms_.contains(x); }) != kNone;
}

TensorId Inserter::combine_gradient(const Op& reader, TensorId id, size_t a, const AxisLayout& want) {
  const DType exact = g().tensor(id).dtype;
  const bool narrow = options_.gradient_dtype && *options_.gradient_dtype != exact;
  if (!(narrow || options_.adasum) || b_.out.at(id, a).combine != Combine::kSum || gradient_in(id) == kNone ||
      role(g().op(b_.producer(id)), a) != AxisRole::kReplica)
    return kNone;
  const bool cut = want.placement == Placement::kShard;
  if (options_.adasum) {
    // A replica's gradient is whole first: over its micro-batches, and over the replicas inside of it.
    if (placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
    for (size_t b = axes(); b-- > a + 1;)
      if (placement(id, b) == Placement::kPartial) id = bring(reader, id, b, {});
    const TensorId made = b_.adasum(id, a);
    return cut ? sliced(reader, made, a, want) : made;
  }
  id = summed_over_splits(reader, id, want);
  if (placement(id, a) != Placement::kPartial) return bring(reader, id, a, want);  // groups of unlike sizes came first
  // Of a sum that waits for a bucket the cast waits too.
  const Op& source = g().op(b_.producer(id));
  const Phase phase = has_flag(source.code, kCollective) ? Phase::kUpdate : source.phase;
  const TensorId low = b_.cast(id, *options_.gradient_dtype, phase);
  const TensorId made = b_.cast(cut ? b_.reduce_to(low, a, want) : b_.reduce(low, a), exact, Phase::kUpdate);
  if (!cut) b_.replace(id, made);
  return made;
}

TensorId Inserter::summed_over_splits(const Op& reader, TensorId id, const AxisLayout& want) {
  const TensorId parameter = parameter_of_.at(gradient_in(id));
  const Dims dims = g().tensor(id).dims;
  for (size_t a = axes(); a-- > 1;) {
    if (placement(id, a) != Placement::kPartial || role(g().op(b_.producer(id)), a) == AxisRole::kReplica) continue;
    AxisLayout lives = parameter == kNone ? AxisLayout{} : home(parameter).axes[a];
    const auto beside = [&](const AxisLayout& other) {
      return other.placement != Placement::kShard ||
             (!(other.digit == lives.digit) && compatible(dims, other.digit, lives.digit));
    };
    for (size_t b = 1; b < axes() && lives.placement == Placement::kShard; ++b)
      if (!beside(want) || !beside(b_.out.at(id, b))) lives = {};
    const TensorId part = id;
    id = bring(reader, part, a, lives);
    b_.replace(part, id);  // everyone who reads the gradient reads this sum of it
  }
  return id;
}

bool Inserter::passes_on(const Op& op) {
  return op.code == OpCode::k_transfer || op.code == OpCode::k_local_slice || op.code == OpCode::k_cast ||
         has_flag(op.code, kCollective);
}

OpId Inserter::summed_replicas(TensorId id) const {
  while (id != kNone && b_.producer(id) != kNone) {
    const Op& op = g().op(b_.producer(id));
    const TensorId from = op.inputs.empty() ? kNone : op.inputs[0];
    for (size_t a = 1; a < axes(); ++a)
      if (has_flag(op.code, kCollective) && op.code != OpCode::k_adasum && op.phase == Phase::kBackward &&
          size(a, op) > 1 && role(op, a) == AxisRole::kReplica && placement(from, a) == Placement::kPartial &&
          placement(id, a) != Placement::kPartial)
        return b_.producer(id);
    if (!passes_on(op)) return kNone;
    id = from;
  }
  return kNone;
}

void Inserter::check_adasum() const {
  if (!options_.adasum) return;
  for (const auto& [gradient, parameter] : parameter_of_) {
    const OpId last = parameter == kNone ? kNone : b_.producer(gradient);
    if (last == kNone) continue;
    bool whole = false;  // along an axis of replicas: Adasum has nothing to combine there
    for (size_t a = 1; a < axes(); ++a)
      whole |= size(a, g().op(last)) > 1 && role(g().op(last), a) == AxisRole::kReplica &&
               placement(gradient, a) != Placement::kPartial;
    if (!whole) continue;
    TensorIds look{gradient};
    std::set<TensorId> seen;
    while (!look.empty()) {
      const TensorId id = look.back();
      look.pop_back();
      const OpId made = b_.producer(id);
      if (made == kNone || !seen.insert(id).second) continue;
      const Op& op = g().op(made);
      if (op.phase != Phase::kBackward || op.code == OpCode::k_adasum) continue;
      for (const TensorId x : op.inputs)
        if (x != kNone) look.push_back(x);
      for (const std::vector<int>& summands : factors_of(g(), op).linear)
        for (const int i : summands) {
          const OpId sum = summed_replicas(op.inputs[static_cast<size_t>(i)]);
          if (sum == kNone || std::all_of(summands.begin(), summands.end(), [&](int other) {
                return summed_replicas(op.inputs[static_cast<size_t>(other)]) != kNone;
              }))
            continue;
          for (const int other : summands) check_came_alike(op, op.inputs[static_cast<size_t>(other)]);
          throw unimplemented(
              "Adasum of the gradient of '{}', of which a part is the same on all replicas (a penalty on the "
              "parameter): '{}' joins it to what the replicas' own parts add up to; use the optimizer's weight decay, "
              "or leave adasum out",
              g().tensor(parameter).name, op.name)
              .at_op(op.name)
              .at_scope(written_scope(op));
        }
    }
  }
}

bool Inserter::same_shares(size_t a, const Op& op, const AxisLayout& x, const AxisLayout& y) const {
  if (a == kTime || x.state == y.state) return true;
  const MeshAxis& axis = b_.out.mesh_axis(a, op.stage);
  return axis.shares == axis.state_shares;
}

TensorId Inserter::whole_in_time(const Op& op, TensorId id) {
  if (placement(id, kTime) == Placement::kReplicate) return id;
  if (placement(id, kTime) == Placement::kPartial) return b_.reduce(id, kTime);
  if (!depends_on(id, TensorKind::kInput) || (op.phase == Phase::kUpdate && !depends_on(id, TensorKind::kVariable)))
    return whole(op, id, 0);
  throw invalid(
      "op '{}' ({}) needs all samples of '{}' at once, which {} micro-batches do not have; plan with one micro-batch "
      "(accumulation 1), or keep samples apart in this op",
      op.name, def(op.code).name, g().tensor(id).name, micro_batches())
      .at_op(op.name)
      .at_scope(written_scope(op));
}

TensorId Inserter::sliced(const Op& op, TensorId id, size_t a, const AxisLayout& want) {
  const auto key = std::make_tuple(id, a, want.digit.dim, want.digit.outer, want.digit.inner, want.state, want.window);
  if (const auto known = slices_.find(key); known != slices_.end()) return b_.latest(known->second);
  TensorId out = kNone;
  const OpId producer = b_.producer(id);
  // Made again it must be cut as it was along the axes before, which have been settled.
  const auto kept = [&] {
    for (size_t b = 0; b < a; ++b)
      if (placement(id, b) == Placement::kShard &&
          compatible(g().tensor(id).dims, b_.out.at(id, b).digit, want.digit) &&
          !cut_of_result(g().op(producer), b_.out.at(id, b).digit, b).present())
        return false;
    return true;
  };
  if (!want.window.present() && is_free(id, want.digit, 0, a) && kept()) {
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

OpCut Inserter::cut_of_result(const Op& op, const Digit& digit, size_t a) {
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
        find_sub_digit(f.outputs[0], f.extent, digit, extent_of(g().tensor(op.outputs[0]).dims, digit), cut.sub) &&
        fits(here, f, cut.sub, a))
      return cut;
  }
  return {};
}

bool Inserter::is_free(TensorId id, const Digit& digit, int depth, size_t a) {
  const OpId producer = b_.producer(id);
  if (producer == kNone || depth > kDeepest) return false;
  const Op op = g().op(producer);
  const OpCut cut = cut_of_result(op, digit, a);
  if (!cut.present()) return false;
  for (size_t b = 0; b < axes(); ++b)
    if (placement(id, b) == Placement::kPartial) return false;
  const int64_t n = element_count(g().tensor(id).dims);
  // Along time there is no other way.
  if (a != kTime && cost_of(view_of(g(), op)).flops > static_cast<double>(tasks().cost.remade_flops * n)) return false;
  const Factor& f = factors_.of(g(), op).list[static_cast<size_t>(cut.factor)];
  // Where nothing carries the digit, something small is spread (or made from nothing); along time there is no other
  // way.
  const bool carried = std::any_of(f.inputs.begin(), f.inputs.end(), [](const Digit& d) { return d.present(); });
  for (const TensorId x : op.inputs)
    if (a != kTime && !carried && x != kNone && element_count(g().tensor(x).dims) * tasks().cost.spread > n)
      return false;
  for (size_t i = 0; i < op.inputs.size(); ++i)
    if (op.inputs[i] != kNone && f.inputs[i].present() &&
        !is_free(op.inputs[i], sub_digit(f.inputs[i], cut.sub), depth + 1, a))
      return false;
  return true;
}

TensorId Inserter::produce_cut(TensorId id, size_t a, const AxisLayout& want) {
  Op op = g().op(b_.producer(id));
  OpCut cut = cut_of_result(op, want.digit, a);
  cut.state = want.state, cut.samples = want.samples;
  op.name += ".cut";
  op.outputs = {b_.like(id, ".cut")};
  // Along the other axes the layout stays what it was.
  Forced forced{{a, cut}};
  for (size_t other = 0; other < axes(); ++other) {
    if (other == a) continue;
    OpCut kept;
    // A cut that overlaps with the new one without lying in it is given up.
    if (placement(id, other) == Placement::kShard &&
        compatible(g().tensor(id).dims, b_.out.at(id, other).digit, want.digit)) {
      kept = cut_of_result(op, b_.out.at(id, other).digit, other);
      kept.state = b_.out.at(id, other).state, kept.samples = b_.out.at(id, other).samples;
    }
    forced.emplace_back(other, kept);
  }
  const TensorId out = op.outputs[0];
  place(std::move(op), kNone, forced);
  return out;
}

}  // namespace whale
