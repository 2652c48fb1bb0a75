// What the reshards of insert.h make of an operand, without inserting one.
#include <algorithm>

#include "base/error.h"
#include "shard/chooser.h"

namespace whale {
namespace {

bool is(const AxisSharding& sharding, Placement placement) { return sharding.placement == placement; }

}  // namespace

CutChooser::Operand CutChooser::operand(TensorId id, const Op& reader) {
  if (id == kNone) return {};
  Form& f = axes_.tasks.stages() > 1 ? at_stage(id, reader) : form(id);
  return {&f, f.sharding, f.late};
}

CutChooser::Form& CutChooser::at_stage(TensorId id, const Op& reader) {
  Form& source = form(id);
  const TensorKind kind = g_.tensor(id).kind;
  // What a later virtual stage of these devices was fed first is not there yet.
  const bool fed_later = kind == TensorKind::kInput && source.stage > reader.stage;
  const bool partial = is(source.sharding.axes[kTime], Placement::kPartial);
  if (axes_.same_devices(source.stage, reader.stage) && !fed_later) {
    if (source.stage != reader.stage && partial) reduce_over_time(source.sharding, &source);
    return source;
  }
  const bool made = kind != TensorKind::kInput && kind != TensorKind::kStep;
  const bool again = made && !source.reductions &&
                     (constant_[static_cast<size_t>(id)] ||
                      (!sums_of_unlike(id) && is_spread(g_, id, source.sharding, axes_.tasks.cost)));
  if (made && !again) {
    // Sums over micro-batches move once, when they are whole.
    if (partial) reduce_over_time(source.sharding, &source);
    for (size_t a = 1; a < axes(); ++a) {
      const MeshAxis &here = axes_.mesh_axis(a, source.stage), &there = axes_.mesh_axis(a, reader.stage);
      if (here.size == there.size && (here.shares == there.shares || !(here.has_gaps() || there.has_gaps()))) continue;
      if (!is(source.sharding.axes[a], Placement::kPartial)) continue;
      Operand whole{&source, source.sharding, source.late};
      to_sharding(whole, id, g_.op(g_.tensor(id).producer), a, {});
    }
  }
  const auto [at, fresh] = copies_.try_emplace({id, reader.stage, source.reductions}, source);
  Form& copy = at->second;
  if (!fresh) return copy;
  copy.stage = reader.stage;
  if (kind == TensorKind::kInput) copy.sharding = input_sharding(g_.tensor(id), axes_, reader);
  for (size_t a = 1; a < axes(); ++a)
    if ((again && !axes_.of_unlike(a)) || (made && !axes_.cuts(a, reader.stage))) copy.sharding.axes[a] = {};
  if (made && !again) charge_transfer(id, copy);
  return copy;
}

void CutChooser::hoist(std::vector<Operand>& operands, const Op& op, OpId number) const {
  if (out_.micro_batches == 1) return;
  const auto in_time = [](const Operand& o, Placement p) {
    return !o.sharding.axes.empty() && is(o.sharding.axes[kTime], p);
  };
  const auto whole = [&](Operand& o) {
    for (AxisSharding& l : o.sharding.axes)
      if (&l == &o.sharding.axes[kTime] || is(l, Placement::kPartial)) l = {};
    o.form = nullptr, o.late = false;
  };
  if (has_flag(op.code, kUpdateOp))
    for (Operand& o : operands)
      if (in_time(o, Placement::kShard)) whole(o);
  const bool body = has_own_rows(number) || std::any_of(operands.begin(), operands.end(), [&](const Operand& o) {
                      return in_time(o, Placement::kShard);
                    });
  const bool late =
      ends_sum(op) || std::any_of(operands.begin(), operands.end(), [](const Operand& o) { return o.late; });
  for (Operand& o : operands) {
    const bool partial = in_time(o, Placement::kPartial);
    if (body && (partial || o.late))
      whole(o);
    else if (!body && late && partial)
      reduce_over_time(o.sharding, o.form), o.late = true;
  }
}

// `form`: for all later readers too; may be null.
void CutChooser::reduce_over_time(Sharding& sharding, Form* form) const {
  const Combine combine = sharding.axes[kTime].combine;
  sharding.axes[kTime] = {};
  const bool exact = options_.exact;
  for (size_t a = 1; a < axes() && !exact; ++a)
    if (axes_.by_micro_batch(a) && form && axes_.size(a, form->stage) > 1)
      sharding.axes[a] = {
          .placement = Placement::kPartial, .sub_axis = {}, .state = false, .samples = false, .combine = combine};
  if (!form) return;
  form->sharding = sharding;
  form->late = true;
  ++form->reductions;
}

void CutChooser::reduce(Operand& o, TensorId id, const Op& reader, size_t a) {
  charge_move(id, reader, o.sharding, a, {});
  o.sharding.axes[a] = {};
  if (!o.form) return;
  o.form->sharding = o.sharding;
  ++o.form->reductions;
}

// Another value, which later readers who want it find as it is then.
void CutChooser::move(Operand& o, TensorId id, const Op& reader, size_t a, const AxisSharding& to) {
  if (!o.form) {
    charge_move(id, reader, o.sharding, a, to);
    o.sharding.axes[a] = to;
    return;
  }
  const auto [at, fresh] = moved_.try_emplace({o.form, o.form->reductions, a, to.placement, to.sub_axis.dim,
                                               to.sub_axis.outer, to.sub_axis.inner, to.state, to.window},
                                              *o.form);
  o.form = &at->second;
  if (fresh) {
    charge_move(id, reader, o.sharding, a, to);
    o.form->sharding.axes[a] = to;
  }
  o.sharding = o.form->sharding;
}

TensorId CutChooser::gradient_in(TensorId id) const {
  while (id != kNone && !parameter_of_.contains(id)) {
    const OpId made = g_.tensor(id).producer;
    id = made != kNone && g_.op(made).code == OpCode::k_cast ? g_.op(made).inputs[0] : kNone;
  }
  return id;
}

bool CutChooser::combine_gradient(Operand& o, TensorId id, const Op& reader, size_t a) {
  const bool narrow = options_.gradient_dtype && *options_.gradient_dtype != g_.tensor(id).dtype;
  std::vector<AxisSharding>& l = o.sharding.axes;
  const TensorId gradient = gradient_in(id);
  const auto role = [&](size_t b) { return axes_.role(g_.op(g_.tensor(id).producer), b); };
  if (!(narrow || options_.adasum) || l[a].combine != Combine::kSum || gradient == kNone ||
      role(a) != AxisRole::kReplica)
    return false;
  if (options_.adasum) {
    // A replica's gradient is whole first: over its micro-batches, and over the replicas inside of it.
    if (is(l[kTime], Placement::kPartial)) reduce_over_time(o.sharding, o.form);
    for (size_t b = axes(); b-- > a + 1;)
      if (is(l[b], Placement::kPartial)) to_sharding(o, id, reader, b, {});
    reduce(o, id, reader, a);
    return true;
  }
  const TensorId parameter = parameter_of_.at(gradient);
  for (size_t b = axes(); b-- > 1;) {  // in its own type over splits
    if (!is(l[b], Placement::kPartial) || role(b) == AxisRole::kReplica) continue;
    Form* const of = o.form;
    to_sharding(o, id, reader, b, parameter == kNone ? AxisSharding{} : form(parameter).sharding.axes[b]);
    if (of) of->sharding = o.sharding, o.form = of, ++of->reductions;  // everyone who reads the gradient reads this sum
  }
  return false;
}

void CutChooser::to_sharding(Operand& o, TensorId id, const Op& reader, size_t a, const AxisSharding& want) {
  std::vector<AxisSharding>& l = o.sharding.axes;
  const Dims& dims = g_.tensor(id).dims;
  const bool cut = is(want, Placement::kShard);
  // A smaller group's parts of a sum have no counterpart each in a larger one: groups sum theirs first.
  const auto sum_in_groups = [&](size_t outside) {
    for (size_t b = axes(); b-- > outside + 1;)
      if (is(l[b], Placement::kPartial) && axes_.mesh_axis(b, reader.stage).has_gaps()) reduce(o, id, reader, b);
  };
  if (want.window.present()) {
    for (size_t b = axes(); b-- > a + 1;)
      if (is(l[b], Placement::kShard) && l[b].sub_axis.dim == want.sub_axis.dim)
        sum_in_groups(b), move(o, id, reader, b, {});
    AxisSharding plain = want;
    plain.window = {};
    if (!is(l[a], Placement::kReplicate)) {
      to_sharding(o, id, reader, a, plain);
      sum_in_groups(a);
    }
    move(o, id, reader, a, want);
    return;
  }
  const auto same_shares = [&] {
    if (a == kTime || l[a].state == want.state) return true;
    const MeshAxis& axis = axes_.mesh_axis(a, reader.stage);
    return axis.shares == axis.state_shares;
  };
  if (l[a].placement == want.placement && (!cut || (l[a].sub_axis == want.sub_axis && same_shares()))) return;
  if (axes_.of_unlike(a) && is(l[a], Placement::kShard))
    throw unimplemented(
        "op '{}' ({}) needs samples of '{}' that are on other replicas: unlike replicas each compute their own "
        "samples; give replicas that are alike",
        reader.name, def(reader.code).name, g_.tensor(id).name)
        .at_op(reader.name)
        .at_scope(written_scope(g_, axes_.tasks, reader));
  if (a == kTime) {
    if (is(l[a], Placement::kPartial)) reduce_over_time(o.sharding, o.form), o.late = true;
    if (is(l[a], Placement::kShard)) l[a] = {}, o.form = nullptr, o.late = false;
    if (cut) move(o, id, reader, a, want);
    return;
  }
  for (size_t b = axes(); b-- > a + 1;) {
    if (!is(l[b], Placement::kShard)) continue;
    const SubAxis& inner = l[b].sub_axis;
    if ((is(l[a], Placement::kShard) && (inner == l[a].sub_axis || !compatible(dims, inner, l[a].sub_axis))) ||
        (cut && (inner == want.sub_axis || !compatible(dims, inner, want.sub_axis)))) {
      sum_in_groups(b);
      move(o, id, reader, b, {});
    }
  }
  if (is(l[a], Placement::kShard)) sum_in_groups(a);
  if (is(l[a], Placement::kPartial)) {
    const Combine combine = l[a].combine;
    if (!combine_gradient(o, id, reader, a)) {
      sum_in_groups(a);
      if (is(l[a], Placement::kPartial) && (!cut || combine != Combine::kSum)) reduce(o, id, reader, a);
    }
    if (!cut) return;
  }
  move(o, id, reader, a, want);
}

}  // namespace whale
