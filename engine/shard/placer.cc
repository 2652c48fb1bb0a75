#include "shard/placer.h"

#include <algorithm>

#include "shard/adasum_check.h"

namespace whale {

Placer::Placer(Graph graph, const TaskGraphs& tasks, const ShardOptions& options, const Choices& choices)
    : options_(options),
      choices_(choices),
      gradients_(graph, options.accumulate_dtype.has_value()),
      source_(graph),
      b_(std::move(graph), tasks, choices.batch, choices.micro_batches) {
  b_.out.exact = options.exact && b_.out.micro_batches > 1;
  if (options.accumulate_dtype)
    b_.sum_over_time_in(
        [this](TensorId id) { return gradients_.term_in(b_, id) ? *options_.accumulate_dtype : g().tensor(id).dtype; });
  for (size_t t = 0; t < source_.producers.size(); ++t)
    if (source_.producers[t] == kNone) b_.out.shardings[t] = choices.shardings[t], b_.out.stages[t] = choices.stages[t];
}

void Placer::place_all() {
  g().ops.reserve(source_.ops.size());
  for (size_t i = 0; i < source_.ops.size(); ++i) place(source_.ops[i], static_cast<OpId>(i), {});
  if (options_.adasum) check_adasum(b_, gradients_);
}

TensorId Placer::as_update_reads(TensorId gradient) const {
  const auto used = used_.find(gradient);
  return used == used_.end() ? gradient : used->second;
}

Placed Placer::placed(const Op& op, const Factors& factors) const {
  const auto shardings = [&](const TensorIds& ids) {
    std::vector<const Sharding*> out;
    out.reserve(ids.size());
    for (const TensorId id : ids) out.push_back(id == kNone ? nullptr : &b_.out.shardings[id]);
    return out;
  };
  return {g(), b_.out, op, factors, shardings(op.inputs), shardings(op.outputs)};
}

void Placer::place(Op op, OpId number, const Forced& forced) {
  const TensorIds asked = op.inputs;
  for (TensorId& id : op.inputs) id = b_.latest(id);
  if (tasks().stages() > 1)
    for (TensorId& id : op.inputs)
      if (id != kNone) id = at_stage(id, op);
  hoist_operands(op, number);
  const Factors& factors = factors_.of(g(), op);
  for (size_t a = 0; a < axes(); ++a) {
    if (!b_.out.cuts(a, op.stage)) continue;
    OpCut cut;
    if (number != kNone) {
      cut = choices_.cuts[a][number];
    } else if (const auto at = std::find_if(forced.begin(), forced.end(), [&](const auto& f) { return f.first == a; });
               at != forced.end()) {
      cut = at->second;
    } else {
      cut = followed_cut(placed(op, factors), a, options_.exact);
    }
    if (cut.present())
      apply_cut(op, factors, a, cut);
    else
      pass_partial(op, factors, a);
  }
  if (op.phase == Phase::kUpdate)
    for (TensorId& id : op.inputs)
      if (id != kNone) id = b_.alike(id);
  for (const TensorId id : op.outputs)
    if (id != kNone) mark_samples(b_.out.shardings[id]);
  // An optimizer that is made of several ops (Adafactor) reads it in each; an update of one op has the last word.
  for (size_t i = 0; i < asked.size() && op.phase == Phase::kUpdate; ++i)
    if (gradients_.parameter_of.contains(asked[i])) {
      if (has_flag(op.code, kUpdateOp))
        used_[asked[i]] = op.inputs[i];
      else
        used_.emplace(asked[i], op.inputs[i]);
    }
  // An update reads numbers of any type: the sum itself, not a wider copy of it.
  if (options_.accumulate_dtype && (has_flag(op.code, kUpdateOp) || has_flag(op.code, kPreparesUpdate)))
    for (TensorId& id : op.inputs)
      if (id != kNone) id = b_.before_cast(id);
  const TensorIds results = op.outputs;
  b_.append(std::move(op));
  if (number == kNone) return;
  for (const TensorId id : results)
    if (id != kNone) settle(id);
}

void Placer::apply_cut(Op& op, const Factors& factors, size_t a, const OpCut& cut) {
  const Placed how{g(), b_.out, op, factors, {}, {}};
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    if (op.inputs[i] == kNone) continue;
    if (const SubAxis piece = streamed_piece(how, i, a, cut); piece.present())
      op.inputs[i] = to_sharding(op, op.inputs[i], a, shard(piece));
    op.inputs[i] = to_sharding(op, op.inputs[i], a, wanted_operand(how, i, a, cut));
  }
  for (size_t o = 0; o < op.outputs.size(); ++o)
    if (op.outputs[o] != kNone) b_.out.at(op.outputs[o], a) = made_result(how, o, a, cut);
}

void Placer::pass_partial(Op& op, const Factors& factors, size_t a) {
  const auto whole = [&](Placement is_at) {
    for (TensorId& id : op.inputs)
      if (placement(id, a) == is_at) id = to_sharding(op, id, a, {});
  };
  whole(Placement::kShard);
  if (linear_parts(placed(op, factors), a, b_.out.exact).empty())
    whole(Placement::kPartial);
  else
    for (const TensorId o : op.outputs)
      if (o != kNone) b_.out.at(o, a).placement = Placement::kPartial;
}

void Placer::settle(TensorId id) {
  const auto sharding = choices_.settled.find(id);
  if (sharding == choices_.settled.end()) return;
  const Op op = g().op(b_.producer(id));  // a copy: reshards are appended
  for (const size_t a : settling_order(b_.out, op)) {
    const TensorId from = b_.latest(id);
    if (placement(from, a) == Placement::kPartial && sharding->second.axes[a].placement == Placement::kShard)
      b_.replace(from, to_sharding(op, from, a, sharding->second.axes[a]));
  }
  if (sharding->second.axes[kTime].placement == Placement::kReplicate) b_.reduce(id, kTime);
}

}  // namespace whale
