// What the body needs of the whole batch is computed in the prologue, from the whole inputs.
#include "shard/inserter.h"

#include <algorithm>

#include "base/error.h"

namespace whale {

void Inserter::hoist_operands(Op& op, OpId number) {
  if (micro_batches() == 1) return;
  if (has_flag(op.code, kUpdateOp))  // ids of looked-up rows
    for (TensorId& id : op.inputs)
      if (id != kNone && placement(id, kTime) == Placement::kShard) id = whole_in_time(op, id);
  const auto any = [&](Placement p) {
    return std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return placement(id, kTime) == p; });
  };
  const bool own_rows = number != kNone && choices_.cuts[kTime][static_cast<size_t>(number)].present();
  if (!any(Placement::kShard) && !own_rows) {
    // A partial value beside a finished sum goes on in the epilogue.
    const bool late = ends_sum(op) || std::any_of(op.inputs.begin(), op.inputs.end(),
                                                  [&](TensorId id) { return b_.region(id) == Region::kEpilogue; });
    for (TensorId& id : op.inputs)
      if (late && placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
    return;
  }
  for (TensorId& id : op.inputs) {
    if (id == kNone || placement(id, kTime) == Placement::kShard) continue;
    if (placement(id, kTime) == Placement::kPartial || b_.region(id) == Region::kEpilogue) id = whole(op, id, 0);
  }
}

TensorId Inserter::whole(const Op& user, TensorId id, int depth) {
  if (!b_.out.time_varies(id) && b_.region(id) != Region::kEpilogue) return id;
  const bool input = g().tensor(id).kind == TensorKind::kInput;
  const auto known = wholes_.find(id);
  TensorId out = known != wholes_.end() ? known->second
                 : input                ? b_.input_form(id, b_.out.stage(id), true)
                                        : make_whole(user, id, depth);
  // The user wants the value itself, not this device's part of a sum.
  if (!input && depth == 0)
    for (size_t a = 1; a < axes(); ++a)
      if (placement(out, a) == Placement::kPartial) out = b_.reduce(out, a);
  return wholes_[id] = out;
}

// What makes it, again, from whole operands; a reshard along a mesh as that reshard, one over time not at all.
TensorId Inserter::make_whole(const Op& user, TensorId id, int depth) {
  const OpId producer = b_.producer(id);
  const Op source = producer == kNone ? Op{} : g().op(producer);
  if (producer == kNone || (depth == 0 && has_mixed_rows(id)) || depth > 4 * kDeepest ||
      has_flag(source.code, kUpdateOp))
    refuse_mixed(user, id);
  if (const auto [parts, along] = b_.summed(id); parts != kNone) {
    const TensorId x = whole(user, parts, depth + 1);
    return placement(x, along) == Placement::kPartial ? b_.reduce(x, along) : x;
  }
  if (source.code == OpCode::k_accumulate) return whole(user, source.inputs[1], depth + 1);
  if (source.code == OpCode::k_transfer) {
    Op reader = user;
    reader.stage = source.stage;
    return at_stage(whole(user, source.inputs[0], depth + 1), reader);
  }
  if (source.code == OpCode::k_local_slice || has_flag(source.code, kCollective)) {
    const size_t along = static_cast<size_t>(attr_int(source.attrs, "group")) + 1;
    const TensorId x = whole(user, source.inputs[0], depth + 1);
    if (source.code != OpCode::k_all_reduce) return to_sharding(source, x, along, b_.out.at(id, along));
    return placement(x, along) == Placement::kPartial ? b_.reduce(x, along) : x;
  }
  Op op = source;
  for (TensorId& x : op.inputs)
    if (x != kNone) x = whole(user, x, depth + 1);
  op.name += ".whole";
  for (TensorId& o : op.outputs)
    if (o != kNone) o = b_.like(o, ".whole");
  const TensorIds fresh = op.outputs;
  Forced own;  // of an unlike replica all its samples, which nothing may bring but the op (constants)
  for (size_t a = 1; a < axes(); ++a)
    if (b_.out.of_unlike(a) && placement(id, a) == Placement::kShard)
      if (OpCut kept = cut_of_result(op, b_.out.at(id, a).sub_axis, a); kept.present())
        kept.samples = b_.out.at(id, a).samples, own.emplace_back(a, kept);
  place(std::move(op), kNone, own);
  TensorId out = kNone;
  for (size_t i = 0; i < fresh.size(); ++i) {
    if (source.outputs[i] == kNone) continue;
    wholes_[source.outputs[i]] = fresh[i];
    if (source.outputs[i] == id) out = fresh[i];
  }
  return out;
}

template <class Deeper>
void Inserter::each_maker(TensorId id, Deeper deeper) const {
  TensorIds found{id};
  std::set<TensorId> seen{id};
  for (size_t k = 0; k < found.size(); ++k) {
    if (!deeper(found[k]) || b_.producer(found[k]) == kNone) continue;
    for (const TensorId input : g().op(b_.producer(found[k])).inputs)
      if (input != kNone && seen.insert(input).second) found.push_back(input);
  }
}

bool Inserter::depends_on(TensorId id, TensorKind kind) const {
  bool found = false;
  each_maker(id, [&](TensorId t) { return !(found |= g().tensor(t).kind == kind); });
  return found;
}

bool Inserter::has_mixed_rows(TensorId id) const {
  bool found = false;
  each_maker(id, [&](TensorId t) {
    const bool rows = placement(t, kTime) == Placement::kShard;
    found |= rows && mixes(t);
    return !rows && !found;
  });
  return found;
}

OpId Inserter::nonlinear_behind(TensorId gradient) const {
  const auto of_backward = [&](TensorId x) {
    return x != kNone && source_.producer(x) != kNone && source_.op(source_.producer(x)).phase == Phase::kBackward;
  };
  // Of a product the gradient is the other factor: the forward op that reads both is to blame, not who is handed it.
  const auto blamed = [&](const Op& backward, TensorId x) {
    const auto has = [x](const TensorIds& ids) { return std::ranges::count(ids, x) > 0; };
    const Op& forward = source_.op(backward.origin);
    if (has(forward.inputs) || (has(forward.outputs) && std::ranges::any_of(backward.inputs, of_backward)))
      return backward.origin;
    const auto product = std::ranges::find_if(source_.ops, [&](const Op& op) {
      return op.phase == Phase::kForward && has(op.inputs) &&
             std::ranges::count_if(op.inputs, [&](TensorId t) { return t != kNone && mixes(t); }) > 1;
    });
    return product == source_.ops.end() ? backward.origin : static_cast<OpId>(product - source_.ops.begin());
  };
  OpId found = kNone;
  each_maker(gradient, [&](TensorId t) {
    if (found != kNone || source_.producer(t) == kNone) return found == kNone;
    const Op& op = source_.op(source_.producer(t));
    if (op.phase != Phase::kBackward || op.origin == kNone) return true;
    for (const TensorId x : op.inputs) {
      if (x == kNone || source_.producer(x) == kNone || of_backward(x)) continue;
      const bool rows = choices_.shardings[static_cast<size_t>(x)].axes[kTime].placement == Placement::kShard;
      if (!rows && mixes(x)) found = blamed(op, x);
    }
    return found == kNone;
  });
  return found;
}

void Inserter::refuse_mixed(const Op& user, TensorId id) const {
  const OpId behind = user.phase == Phase::kBackward ? nonlinear_behind(id) : kNone;
  const Op& op = behind == kNone ? user : source_.op(behind);
  const std::string where = op.location.empty() ? "" : op.location + ": ";
  if (behind != kNone)
    throw invalid(
        "{}op '{}' ({}) stands behind a sum or mean over all samples of the batch and is not linear in it: the "
        "gradient of every sample needs the whole sum, and with {} micro-batches no more than a part of it is there. "
        "Apply it to each sample's own loss, before the mean, where that is meant; otherwise plan with one micro-batch "
        "(accumulation 1; micro_batches=1 of a pipeline)",
        where, op.name, def(op.code).name, micro_batches())
        .at_op(op.name)
        .at_scope(written_scope(user));
  const char* advice = def(user.code).micro_batch_advice;
  throw invalid(
      "{}op '{}' ({}) uses '{}', which mixes all samples of the batch, before the loss; with {} micro-batches no more "
      "than a part of them is there. Plan with one micro-batch (accumulation 1; micro_batches=1 of a pipeline){}",
      where, op.name, def(op.code).name, g().tensor(id).name, micro_batches(),
      advice ? ", or " + fmt::format(fmt::runtime(advice), micro_batches()) : "")
      .at_op(op.name)
      .at_scope(written_scope(user));
}

}  // namespace whale
