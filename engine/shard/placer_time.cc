// What the body needs of the whole batch is computed in the prologue, from the whole inputs.
#include "shard/placer.h"

#include <algorithm>

#include "base/error.h"

namespace whale {

void Placer::hoist_operands(Op& op, OpId number) {
  if (micro_batches() == 1) return;
  if (has_flag(op.code, kUpdateOp))  // ids of looked-up rows
    for (TensorId& id : op.inputs)
      if (id != kNone && placement(id, kTime) == Placement::kShard) id = whole_in_time(op, id);
  const auto any = [&](Placement p) {
    return std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return placement(id, kTime) == p; });
  };
  const bool own_rows = number != kNone && choices_.cuts[kTime][number].present();
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

TensorId Placer::whole_in_time(const Op& op, TensorId id) {
  if (placement(id, kTime) == Placement::kReplicate) return id;
  if (placement(id, kTime) == Placement::kPartial) return b_.reduce(id, kTime);
  if (!depends_on(b_, id, TensorKind::kInput) ||
      (op.phase == Phase::kUpdate && !depends_on(b_, id, TensorKind::kVariable)))
    return whole(op, id, 0);
  throw invalid(
      "op '{}' ({}) needs all samples of '{}' at once, which {} micro-batches do not have; plan with one micro-batch "
      "(accumulation 1), or keep samples apart in this op",
      op.name, def(op.code).name, g().tensor(id).name, micro_batches())
      .at_op(op.name)
      .at_scope(written_scope(op));
}

TensorId Placer::whole(const Op& user, TensorId id, int depth) {
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
TensorId Placer::make_whole(const Op& user, TensorId id, int depth) {
  const OpId producer = b_.producer(id);
  const Op source = producer == kNone ? Op{} : g().op(producer);
  if (producer == kNone || (depth == 0 && has_mixed_rows(b_, id)) || depth > 4 * kDeepest ||
      has_flag(source.code, kUpdateOp))
    refuse_mixed(b_, source_, choices_, user, id);
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

}  // namespace whale
