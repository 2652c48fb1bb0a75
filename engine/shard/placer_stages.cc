// Operands that are made in another stage.
#include "shard/placer.h"

#include <algorithm>

#include "base/error.h"
#include "shard/adasum_check.h"

namespace whale {

TensorId Placer::at_stage(TensorId id, const Op& reader) {
  id = b_.latest(id);
  const TensorKind kind = g().tensor(id).kind;
  // What a later virtual stage of these devices was fed first is not there yet.
  const bool fed_later = kind == TensorKind::kInput && b_.out.stage(id) > reader.stage;
  if (b_.out.same_devices(b_.out.stage(id), reader.stage) && !fed_later) {
    // Another virtual stage of the same devices runs at another time.
    return b_.out.stage(id) != reader.stage && placement(id, kTime) == Placement::kPartial ? b_.reduce(id, kTime) : id;
  }
  if (kind == TensorKind::kInput || kind == TensorKind::kStep) {
    const bool fresh = !input_forms_.contains({id, reader.stage});
    const TensorId form = b_.input_form(id, reader.stage, false);
    if (fresh && kind == TensorKind::kInput) b_.out.shardings[form] = input_sharding(g().tensor(form), b_.out, reader);
    input_forms_.insert({id, reader.stage});
    return form;
  }
  if (is_constant(b_, id) || (!sums_of_unlike(b_, id) && is_spread(g(), id, b_.out.shardings[id], tasks().cost)))
    return made_again_at(id, reader);
  // Sums over micro-batches move once, when they are whole: a stage never waits for a later one's parts.
  if (placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
  for (size_t a = 1; a < axes(); ++a) {
    const MeshAxis &here = b_.out.mesh_axis(a, b_.out.stage(id)), &there = b_.out.mesh_axis(a, reader.stage);
    if (options_.adasum) check_tied(b_, reader, id, a);
    if (here.size == there.size && (here.shares == there.shares || !(here.has_gaps() || there.has_gaps()))) continue;
    if (placement(id, a) == Placement::kPartial) id = to_sharding(reader, id, a, {});
  }
  return b_.latest(b_.transfer(id, reader.stage, reader.phase));  // it may have been a part of a sum and reduced since
}

TensorId Placer::made_again_at(TensorId id, const Op& reader) {
  while (b_.producer(id) != kNone && g().op(b_.producer(id)).code == OpCode::k_local_slice)  // the reader cuts it anew
    id = g().op(b_.producer(id)).inputs[0];
  const auto known = copies_.find({id, reader.stage});
  if (known != copies_.end()) return known->second;
  Op op = g().op(b_.producer(id));
  const auto at = static_cast<size_t>(std::find(op.outputs.begin(), op.outputs.end(), id) - op.outputs.begin());
  op.name += fmt::format(".at{}", reader.stage);
  op.stage = reader.stage;
  op.scope = reader.scope;
  for (TensorId& o : op.outputs)
    if (o != kNone) o = b_.like(o, fmt::format(".at{}", reader.stage).c_str());
  const TensorId out = op.outputs[at];
  Forced whole;
  for (size_t a = 0; a < axes(); ++a) {
    OpCut kept;  // along time nobody cuts it anew, nor what an unlike replica has
    if ((a == kTime || b_.out.of_unlike(a)) && placement(id, a) == Placement::kShard)
      kept = cut_of_result(op, b_.out.at(id, a).sub_axis, a), kept.samples = b_.out.at(id, a).samples;
    whole.emplace_back(a, kept);
  }
  place(std::move(op), kNone, whole);
  return copies_[{id, reader.stage}] = out;
}

}  // namespace whale
