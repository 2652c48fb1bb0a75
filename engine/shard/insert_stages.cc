// Operands that are made in another stage.
#include "shard/inserter.h"

#include <algorithm>

#include "base/error.h"

namespace whale {

bool Inserter::sums_of_unlike(TensorId id) const {
  const OpId producer = b_.producer(id);
  if (producer == kNone || tasks().replicas.empty()) return false;
  for (size_t a = 1; a < axes(); ++a)
    if (b_.out.of_unlike(a) && placement(id, a) != Placement::kShard)
      for (const TensorId x : g().op(producer).inputs)
        if (placement(x, a) == Placement::kShard) return true;
  return false;
}

bool Inserter::is_constant(TensorId id, int depth) {
  if (g().tensor(id).kind == TensorKind::kStep) return true;
  const OpId producer = b_.producer(id);
  if (producer == kNone || depth > kDeepest || has_flag(g().op(producer).code, kCollective) ||
      g().op(producer).code == OpCode::k_accumulate)
    return false;
  const TensorIds inputs = g().op(producer).inputs;
  if (sums_of_unlike(id)) return false;
  // What was reduced since stands for its parts: a copy of what reduces it would read itself.
  return std::all_of(inputs.begin(), inputs.end(),
                     [&](TensorId x) { return x == kNone || (b_.latest(x) == x && is_constant(x, depth + 1)); });
}

TensorId Inserter::at_stage(TensorId id, const Op& reader) {
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
    if (fresh && kind == TensorKind::kInput)
      b_.out.shardings[static_cast<size_t>(form)] = input_sharding(g().tensor(form), b_.out, reader);
    input_forms_.insert({id, reader.stage});
    return form;
  }
  if (is_constant(id) ||
      (!sums_of_unlike(id) && is_spread(g(), id, b_.out.shardings[static_cast<size_t>(id)], tasks().cost))) {
    while (b_.producer(id) != kNone &&
           g().op(b_.producer(id)).code == OpCode::k_local_slice)  // the reader cuts it anew
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
  // Sums over micro-batches move once, when they are whole: a stage never waits for a later one's parts.
  if (placement(id, kTime) == Placement::kPartial) id = b_.reduce(id, kTime);
  for (size_t a = 1; a < axes(); ++a) {
    const MeshAxis &here = b_.out.mesh_axis(a, b_.out.stage(id)), &there = b_.out.mesh_axis(a, reader.stage);
    check_tied(reader, id, a, here, there);
    if (here.size == there.size && (here.shares == there.shares || !(here.has_gaps() || there.has_gaps()))) continue;
    if (placement(id, a) == Placement::kPartial) id = to_sharding(reader, id, a, {});
  }
  return b_.latest(b_.transfer(id, reader.stage, reader.phase));  // it may have been a part of a sum and reduced since
}

// Adasum combines what whole replicas made of a parameter: of one that stages share, the replicas have to be the same.
void Inserter::check_tied(const Op& reader, TensorId id, size_t a, const MeshAxis& here, const MeshAxis& there) const {
  if (!options_.adasum || reader.phase != Phase::kBackward || placement(id, a) != Placement::kPartial ||
      (here.size == there.size && here.shares == there.shares))
    return;
  throw tied_unlike(reader, b_.out.stage(id), here, there);
}

Error Inserter::tied_unlike(const Op& reader, int32_t stage, const MeshAxis& here, const MeshAxis& there) const {
  const char* form = here.size == there.size ? "have unlike shares" : "have {} and {} replicas";
  Error error = unimplemented(
      "Adasum of a gradient that stages {} and {} add up, which {}: a replica of one is none of the other; give both "
      "the same replicas, or use the parameter in one stage",
      stage, reader.stage, fmt::format(fmt::runtime(form), here.size, there.size));
  return error.at_op(reader.name).at_scope(written_scope(reader));
}

void Inserter::check_came_alike(const Op& reader, TensorId id) const {
  for (OpId made = b_.producer(id); made != kNone && passes_on(g().op(made)); made = b_.producer(id)) {
    id = g().op(made).inputs[0];
    if (g().op(made).code != OpCode::k_transfer) continue;
    for (size_t a = 1; a < axes(); ++a)
      if (const MeshAxis& here = b_.out.mesh_axis(a, b_.out.stage(id)), &there = b_.out.mesh_axis(a, reader.stage);
          here.size != there.size)
        throw tied_unlike(reader, b_.out.stage(id), here, there);
  }
}

}  // namespace whale
