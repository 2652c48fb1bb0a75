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
    const bool late = std::any_of(op.inputs.begin(), op.inputs.end(),
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

namespace {

[[noreturn]] void refuse_mixed(const Graph& g, const Op& user, const std::string& scope, TensorId id,
                               int64_t micro_batches) {
  const char* advice = def(user.code).micro_batch_advice;
  throw invalid(
      "op '{}' ({}) uses '{}', which mixes all samples of the batch, before the loss; with {} micro-batches no more "
      "than a part of them is there. Plan with one micro-batch (accumulation 1){}",
      user.name, def(user.code).name, g.tensor(id).name, micro_batches,
      advice ? ", or " + fmt::format(fmt::runtime(advice), micro_batches) : "")
      .at_op(user.name)
      .at_scope(scope);
}

}  // namespace

TensorId Inserter::whole(const Op& user, TensorId id, int depth) {
  if (const auto known = wholes_.find(id); known != wholes_.end()) return known->second;
  if (!b_.out.time_varies(id) && b_.region(id) != Region::kEpilogue) return id;
  const bool input = g().tensor(id).kind == TensorKind::kInput;
  TensorId out = input ? b_.input_form(id, b_.out.stage(id), true) : make_whole(user, id, depth);
  // The user wants the value itself, not this device's part of a sum.
  if (!input && depth == 0)
    for (size_t a = 1; a < axes(); ++a)
      if (placement(out, a) == Placement::kPartial) out = b_.reduce(out, a);
  return wholes_[id] = out;
}

// What makes it, again, from whole operands; a bridge along a mesh as that bridge, one over time not at all.
TensorId Inserter::make_whole(const Op& user, TensorId id, int depth) {
  const OpId producer = b_.producer(id);
  const Op source = producer == kNone ? Op{} : g().op(producer);
  const bool twice = depends_on(id, TensorKind::kVariable) && depends_on(id, TensorKind::kInput);
  if (producer == kNone || twice || depth > 4 * kDeepest || has_flag(source.code, kUpdateOp))
    refuse_mixed(g(), user, written_scope(user), id, micro_batches());
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
    if (source.code != OpCode::k_all_reduce) return bring(source, x, along, b_.out.at(id, along));
    return placement(x, along) == Placement::kPartial ? b_.reduce(x, along) : x;
  }
  Op op = source;
  for (TensorId& x : op.inputs)
    if (x != kNone) x = whole(user, x, depth + 1);
  op.name += ".whole";
  for (TensorId& o : op.outputs)
    if (o != kNone) o = b_.like(o, ".whole");
  const std::vector<TensorId> fresh = op.outputs;
  place(std::move(op), kNone, {});
  TensorId out = kNone;
  for (size_t i = 0; i < fresh.size(); ++i) {
    if (source.outputs[i] == kNone) continue;
    wholes_[source.outputs[i]] = fresh[i];
    if (source.outputs[i] == id) out = fresh[i];
  }
  return out;
}

bool Inserter::depends_on(TensorId id, TensorKind kind) {
  std::vector<TensorId> todo{id};
  std::set<TensorId> seen{id};
  while (!todo.empty()) {
    const TensorId t = todo.back();
    todo.pop_back();
    if (g().tensor(t).kind == kind) return true;
    const OpId producer = b_.producer(t);
    if (producer == kNone) continue;
    for (const TensorId input : g().op(producer).inputs)
      if (input != kNone && seen.insert(input).second) todo.push_back(input);
  }
  return false;
}

}  // namespace whale
