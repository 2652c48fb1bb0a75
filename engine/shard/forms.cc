#include "shard/forms.h"

#include <algorithm>

#include "base/error.h"
#include "shard/prices.h"

namespace whale {
namespace {

bool is(const AxisSharding& sharding, Placement placement) { return sharding.placement == placement; }

}  // namespace

ReadForm Forms::operand(TensorId id, const Op& reader) {
  if (id == kNone) return {};
  Form& f = p_.axes.tasks.stages() > 1 ? at_stage(id, reader) : of(id);
  return {&f, f.sharding, f.late};
}

Form& Forms::at_stage(TensorId id, const Op& reader) {
  Form& source = of(id);
  const TensorKind kind = p_.graph.tensor(id).kind;
  // What a later virtual stage of these devices was fed first is not there yet.
  const bool fed_later = kind == TensorKind::kInput && source.stage > reader.stage;
  const bool partial = is(source.sharding.axes[kTime], Placement::kPartial);
  if (p_.axes.same_devices(source.stage, reader.stage) && !fed_later) {
    if (source.stage != reader.stage && partial) reduce_over_time(source.sharding, &source);
    return source;
  }
  const bool made = kind != TensorKind::kInput && kind != TensorKind::kStep;
  const bool again =
      made && !source.reductions &&
      (p_.constant[id] || (!p_.sums_of_unlike[id] && is_spread(p_.graph, id, source.sharding, p_.axes.tasks.cost)));
  if (made && !again) {
    // Sums over micro-batches move once, when they are whole.
    if (partial) reduce_over_time(source.sharding, &source);
    for (size_t a = 1; a < p_.axes.axes(); ++a) {
      const MeshAxis &here = p_.axes.mesh_axis(a, source.stage), &there = p_.axes.mesh_axis(a, reader.stage);
      if (here.size == there.size && (here.shares == there.shares || !(here.has_gaps() || there.has_gaps()))) continue;
      if (!is(source.sharding.axes[a], Placement::kPartial)) continue;
      ReadForm whole{&source, source.sharding, source.late};
      to_sharding(whole, id, p_.graph.op(p_.graph.tensor(id).producer), a, {});
    }
  }
  const auto [at, fresh] = copies_.try_emplace({id, reader.stage, source.reductions}, source);
  Form& copy = at->second;
  if (!fresh) return copy;
  copy.stage = reader.stage;
  if (kind == TensorKind::kInput) copy.sharding = input_sharding(p_.graph.tensor(id), p_.axes, reader);
  for (size_t a = 1; a < p_.axes.axes(); ++a)
    if ((again && !p_.axes.of_unlike(a)) || (made && !p_.axes.cuts(a, reader.stage))) copy.sharding.axes[a] = {};
  if (made && !again) charge(price_of_transfer(p_, id, copy.sharding, copy.stage));
  return copy;
}

void Forms::hoist(std::vector<ReadForm>& operands, const Op& op, OpId number) const {
  if (p_.micro_batches == 1) return;
  const auto in_time = [](const ReadForm& o, Placement p) {
    return !o.sharding.axes.empty() && is(o.sharding.axes[kTime], p);
  };
  const auto whole = [&](ReadForm& o) {
    for (AxisSharding& l : o.sharding.axes)
      if (&l == &o.sharding.axes[kTime] || is(l, Placement::kPartial)) l = {};
    o.form = nullptr, o.late = false;
  };
  if (has_flag(op.code, kUpdateOp))
    for (ReadForm& o : operands)
      if (in_time(o, Placement::kShard)) whole(o);
  const bool body = p_.has_own_rows(number) || std::any_of(operands.begin(), operands.end(), [&](const ReadForm& o) {
                      return in_time(o, Placement::kShard);
                    });
  const bool late =
      ends_sum(op) || std::any_of(operands.begin(), operands.end(), [](const ReadForm& o) { return o.late; });
  for (ReadForm& o : operands) {
    const bool partial = in_time(o, Placement::kPartial);
    if (body && (partial || o.late))
      whole(o);
    else if (!body && late && partial)
      reduce_over_time(o.sharding, o.form), o.late = true;
  }
}

// `form`: for all later readers too; may be null.
void Forms::reduce_over_time(Sharding& sharding, Form* form) const {
  const Combine combine = sharding.axes[kTime].combine;
  sharding.axes[kTime] = {};
  const bool exact = p_.options.exact;
  for (size_t a = 1; a < p_.axes.axes() && !exact; ++a)
    if (p_.axes.by_micro_batch(a) && form && p_.axes.size(a, form->stage) > 1)
      sharding.axes[a] = {
          .placement = Placement::kPartial, .sub_axis = {}, .state = false, .samples = false, .combine = combine};
  if (!form) return;
  form->sharding = sharding;
  form->late = true;
  ++form->reductions;
}

void Forms::reduce(ReadForm& o, TensorId id, const Op& reader, size_t a) {
  charge(price_of_move(p_, id, o.sharding, reader.stage, a, {}));
  o.sharding.axes[a] = {};
  if (!o.form) return;
  o.form->sharding = o.sharding;
  ++o.form->reductions;
}

// Another value, which later readers who want it find as it is then.
void Forms::move(ReadForm& o, TensorId id, const Op& reader, size_t a, const AxisSharding& to) {
  if (!o.form) {
    charge(price_of_move(p_, id, o.sharding, reader.stage, a, to));
    o.sharding.axes[a] = to;
    return;
  }
  const auto [at, fresh] = moved_.try_emplace({o.form, o.form->reductions, a, to.placement, to.sub_axis.dim,
                                               to.sub_axis.outer, to.sub_axis.inner, to.state, to.window},
                                              *o.form);
  o.form = &at->second;
  if (fresh) {
    charge(price_of_move(p_, id, o.sharding, reader.stage, a, to));
    o.form->sharding.axes[a] = to;
  }
  o.sharding = o.form->sharding;
}

bool Forms::is_summed_over_replicas(const ReadForm& o, TensorId id, size_t a) const {
  const AxisSharding& now = o.sharding.axes[a];
  return is(now, Placement::kPartial) && now.combine == Combine::kSum && p_.gradient_in(id) != kNone &&
         p_.axes.role(p_.graph.op(p_.graph.tensor(id).producer), a) == AxisRole::kReplica;
}

// A replica's gradient is whole first: over its micro-batches, and over the replicas inside of it.
void Forms::combine_by_adasum(ReadForm& o, TensorId id, const Op& reader, size_t a) {
  if (is(o.sharding.axes[kTime], Placement::kPartial)) reduce_over_time(o.sharding, o.form);
  for (size_t b = p_.axes.axes(); b-- > a + 1;)
    if (is(o.sharding.axes[b], Placement::kPartial)) to_sharding(o, id, reader, b, {});
  reduce(o, id, reader, a);
}

void Forms::sum_over_splits(ReadForm& o, TensorId id, const Op& reader, size_t a, const AxisSharding& want) {
  const TensorId parameter = p_.parameter_of.at(p_.gradient_in(id));
  for (size_t b = p_.axes.axes(); b-- > 1;) {
    if (p_.axes.role(p_.graph.op(p_.graph.tensor(id).producer), b) == AxisRole::kReplica) continue;
    const AxisSharding lives = parameter == kNone ? AxisSharding{} : of(parameter).sharding.axes[b];
    const auto first = first_along_split(p_.axes, p_.graph.tensor(id), o.sharding, reader.stage, a, b, lives, want,
                                         p_.options.gradient_dtype.has_value());
    if (!first) continue;
    Form* const own = o.form;
    to_sharding(o, id, reader, b, *first);
    if (own)
      own->sharding = o.sharding, o.form = own, ++own->reductions;  // everyone who reads the gradient reads this sum
  }
}

// A smaller group's parts of a sum have no counterpart each in a larger one: groups sum theirs first.
void Forms::sum_in_groups(ReadForm& o, TensorId id, const Op& reader, size_t outside) {
  for (size_t b = p_.axes.axes(); b-- > outside + 1;)
    if (is(o.sharding.axes[b], Placement::kPartial) && p_.axes.mesh_axis(b, reader.stage).has_gaps())
      reduce(o, id, reader, b);
}

void Forms::with_halo(ReadForm& o, TensorId id, const Op& reader, size_t a, const AxisSharding& want) {
  const std::vector<AxisSharding>& l = o.sharding.axes;
  for (size_t b = p_.axes.axes(); b-- > a + 1;) {
    if (!is(l[b], Placement::kShard) || l[b].sub_axis.dim != want.sub_axis.dim) continue;
    sum_in_groups(o, id, reader, b);
    move(o, id, reader, b, {});
  }
  AxisSharding plain = want;
  plain.window = {};
  if (!is(l[a], Placement::kReplicate)) {
    to_sharding(o, id, reader, a, plain);
    sum_in_groups(o, id, reader, a);
  }
  move(o, id, reader, a, want);
}

void Forms::to_sharding(ReadForm& o, TensorId id, const Op& reader, size_t a, const AxisSharding& want) {
  std::vector<AxisSharding>& l = o.sharding.axes;
  const Dims& dims = p_.graph.tensor(id).dims;
  const bool cut = is(want, Placement::kShard);
  if (want.window.present()) return with_halo(o, id, reader, a, want);
  const auto same_shares = [&] {
    if (a == kTime || l[a].state == want.state) return true;
    const MeshAxis& axis = p_.axes.mesh_axis(a, reader.stage);
    return axis.shares == axis.state_shares;
  };
  if (l[a].placement == want.placement && (!cut || (l[a].sub_axis == want.sub_axis && same_shares()))) return;
  if (p_.axes.of_unlike(a) && is(l[a], Placement::kShard))
    throw unimplemented(
        "op '{}' ({}) needs samples of '{}' that are on other replicas: unlike replicas each compute their own "
        "samples; give replicas that are alike",
        reader.name, def(reader.code).name, p_.graph.tensor(id).name)
        .at_op(reader.name)
        .at_scope(written_scope(p_.graph, p_.axes.tasks, reader));
  if (a == kTime) {
    if (is(l[a], Placement::kPartial)) reduce_over_time(o.sharding, o.form), o.late = true;
    if (is(l[a], Placement::kShard)) l[a] = {}, o.form = nullptr, o.late = false;
    if (cut) move(o, id, reader, a, want);
    return;
  }
  const bool of_replicas = is_summed_over_replicas(o, id, a);
  if (of_replicas && !p_.options.exact && !p_.options.adasum) sum_over_splits(o, id, reader, a, want);
  if (of_replicas && !cut && is(l[a], Placement::kReplicate)) return;  // groups of unlike sizes came first
  for (size_t b = p_.axes.axes(); b-- > a + 1;) {
    if (!is(l[b], Placement::kShard)) continue;
    const SubAxis& inner = l[b].sub_axis;
    if ((is(l[a], Placement::kShard) && (inner == l[a].sub_axis || !compatible(dims, inner, l[a].sub_axis))) ||
        (cut && (inner == want.sub_axis || !compatible(dims, inner, want.sub_axis)))) {
      sum_in_groups(o, id, reader, b);
      move(o, id, reader, b, {});
    }
  }
  if (is(l[a], Placement::kShard)) sum_in_groups(o, id, reader, a);
  if (is(l[a], Placement::kPartial)) {
    const Combine combine = l[a].combine;
    if (of_replicas && p_.options.adasum) {
      combine_by_adasum(o, id, reader, a);
    } else {
      sum_in_groups(o, id, reader, a);
      if (is(l[a], Placement::kPartial) && (!cut || combine != Combine::kSum)) reduce(o, id, reader, a);
    }
    if (!cut) return;
  }
  move(o, id, reader, a, want);
}

}  // namespace whale
