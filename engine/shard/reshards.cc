#include "shard/reshards.h"

#include <algorithm>

#include "base/error.h"
#include "ops/nothing.h"

namespace whale {
namespace {

enum Kind : int {
  kGather = 100,
  kScatter,
  kSlice,
  kExchange,
  kMove,
  kCast,
  kHalo,
  kFirst
};  // + use for gathers of several uses

Attrs merged(std::initializer_list<Attrs> parts) {
  Attrs all;
  for (const Attrs& part : parts)
    for (const auto& [name, value] : part) all.try_emplace(name, value);
  return all;
}

}  // namespace

Attrs sub_axis_attr(const char* name, const SubAxis& d) { return {{name, Ints{d.dim, d.outer, d.inner}}}; }

ReshardBuilder::ReshardBuilder(Graph graph, const TaskGraphs& tasks, int64_t batch, int64_t micro_batches)
    : out(tasks) {
  const size_t tensors = graph.tensors.size();
  out.graph = std::move(graph);
  out.batch = batch;
  out.micro_batches = micro_batches;
  out.shardings.assign(tensors, Sharding{std::vector<AxisSharding>(out.axes())});
  out.stages.assign(tensors, 0);
  producer_.assign(tensors, kNone);
  unlike_.assign(tensors, 0);
}

OpId ReshardBuilder::producer(TensorId id) const { return producer_[id]; }

Region ReshardBuilder::region(TensorId id) const {
  if (id == kNone) return Region::kPrologue;
  if (out.time_varies(id)) return Region::kBody;
  const OpId made = producer(id);
  if (made == kNone) return Region::kPrologue;
  const Op& op = out.graph.op(made);
  return op.code == OpCode::k_accumulate ? Region::kEpilogue : op.region;  // a sum is finished after the body
}

TensorId ReshardBuilder::like(TensorId id, const char* suffix) {
  const TensorId made = add_like(out, id, suffix);
  out.shardings.back().axes.assign(out.axes(), {});
  producer_.push_back(kNone);
  unlike_.push_back(0);
  return made;
}

TensorId ReshardBuilder::latest(TensorId id) const {
  for (auto it = reduced_.find(id); it != reduced_.end(); it = reduced_.find(id)) id = it->second;
  return id;
}

OpId ReshardBuilder::append(Op op) {
  const auto id = static_cast<OpId>(out.graph.ops.size());
  Region at = Region::kPrologue;
  const uint32_t unlike = unlike_after(op);
  for (const TensorId input : op.inputs) {
    if (input == kNone) continue;
    const Region r = out.time_varies(input) ? Region::kBody : region(input);
    if (r == Region::kBody) at = Region::kBody;
    if (r == Region::kEpilogue && at == Region::kPrologue) at = Region::kEpilogue;
  }
  for (size_t i = 0; i < op.outputs.size(); ++i) {
    if (op.outputs[i] == kNone) continue;
    if (out.time_varies(op.outputs[i])) at = Region::kBody;
    producer_[op.outputs[i]] = id;
    out.stages[op.outputs[i]] = op.stage;
    out.graph.tensor(op.outputs[i]).producer = id;
    out.graph.tensor(op.outputs[i]).output = static_cast<int>(i);
    for (size_t a = 1; a < out.axes(); ++a)
      if (unlike >> a & 1 && out.at(op.outputs[i], a).placement == Placement::kReplicate)
        unlike_[op.outputs[i]] |= uint32_t{1} << a;
  }
  op.region = at;
  op.origin = kNone;  // op numbers have changed
  out.graph.ops.push_back(std::move(op));
  return id;
}

uint32_t ReshardBuilder::unlike_after(const Op& op) const {
  uint32_t unlike = 0, cut = 0;
  const auto partial = [&](TensorId id) {
    const auto& axes = out.shardings[id].axes;
    return std::any_of(axes.begin() + 1, axes.end(),
                       [](const AxisSharding& l) { return l.placement == Placement::kPartial; });
  };
  const auto look = [&](TensorId id) {
    for (size_t a = 1; id != kNone && a < out.axes(); ++a)
      if (out.at(id, a).placement != Placement::kReplicate) cut |= uint32_t{1} << a;
  };
  for (const TensorId id : op.inputs) {
    if (id != kNone) unlike |= unlike_[id];
    look(id);
  }
  for (const TensorId id : op.outputs) look(id);
  const bool moves = has_flag(op.code, kCollective) || op.code == OpCode::k_transfer;
  const bool sums = moves ? std::any_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return partial(id); })
                          : !keeps_bits(op);
  for (size_t b = 2; b < out.axes() && sums; ++b)
    if (cut >> b & 1 && out.mesh_axis(b, op.stage).ragged())
      for (size_t a = 1; a < b; ++a)
        if (out.size(a, op.stage) > 1) unlike |= uint32_t{1} << a;
  // Along its own axis a collective gives everyone the same.
  if (moves && op.attrs.contains("group")) unlike &= ~(uint32_t{1} << (attr_int(op.attrs, "group") + 1));
  return unlike;
}

TensorId ReshardBuilder::from_first(TensorId id, size_t axis) {
  return reshard(OpCode::k_transfer, {id}, id, ".first",
                 {{"group", static_cast<int64_t>(axis) - 1}, {"from", int64_t{0}}}, axis, {});
}

TensorId ReshardBuilder::alike(TensorId id) {
  for (size_t a = 1; a < out.axes(); ++a) {
    if (!(unlike_[id] >> a & 1) || parts_differ(id, a)) continue;
    const auto at = key(id, a, kFirst, {});
    const auto known = made_.find(at);
    id = known != made_.end() ? known->second : made_[at] = from_first(id, a);
  }
  return id;
}

TensorId ReshardBuilder::reshard(OpCode code, TensorIds inputs, TensorId id, const char* suffix, Attrs attrs,
                                 size_t axis, AxisSharding to) {
  const TensorId made = like(id, suffix);
  out.shardings[made] = out.shardings[id];
  out.at(made, axis) = to;
  append_behind(id, code, std::move(inputs), made, std::move(attrs), out.stage(id));
  return made;
}

void ReshardBuilder::append_behind(TensorId id, OpCode code, TensorIds inputs, TensorId made, Attrs attrs,
                                   int32_t stage) {
  Op op;
  op.code = code;
  op.name = out.graph.tensor(made).name;
  op.inputs = std::move(inputs);
  op.outputs = {made};
  op.attrs = std::move(attrs);
  op.stage = stage;
  if (const OpId source = producer(id); source != kNone) {
    op.scope = out.graph.op(source).scope;
    op.phase = out.graph.op(source).phase;
  }
  append(std::move(op));
}

// How micro-batches of a partial value are put together.
Attrs ReshardBuilder::over_time(TensorId id, Combine combine) const {
  if (combine == Combine::kLogSumExp) {  // a softmax along the batch, whose gradient the body needs
    const Op& op = out.graph.op(producer(id));
    throw invalid(
        "op '{}' ({}) needs all samples of '{}' at once, which micro-batches do not have; plan with one micro-batch "
        "(accumulation 1), or keep samples apart in this op",
        op.name, def(op.code).name, out.graph.tensor(op.inputs[0]).name)
        .at_op(op.name);
  }
  return {{"combine", std::string(name_of(combine))}};
}

bool ReshardBuilder::parts_differ(TensorId id, size_t axis) const {
  for (size_t b = axis + 1; b < out.axes(); ++b)
    if (out.at(id, b).placement == Placement::kPartial && out.mesh_axis(b, out.stage(id)).has_gaps()) return true;
  return false;
}

// A smaller group's parts of a sum have no counterpart each in a larger one: groups sum theirs first.
TensorId ReshardBuilder::sum_in_groups(TensorId id, size_t axis) {
  for (size_t b = out.axes(); b-- > axis + 1;)
    if (out.at(id, b).placement == Placement::kPartial && out.mesh_axis(b, out.stage(id)).has_gaps())
      id = reduce(id, b);
  return id;
}

// Parts of micro-batches, put together.
TensorId ReshardBuilder::sum_over_time(TensorId id, Combine combine) {
  const Attrs attrs = over_time(id, combine);
  if (out.exact) return reshard(OpCode::k_accumulate, {id, id}, id, ".sum", attrs, kTime, {});
  const DType own = out.graph.tensor(id).dtype;
  const DType dtype = dtype_over_time_ && combine == Combine::kSum ? dtype_over_time_(id) : own;
  // The sum starts from zero in the prologue; along the devices it is as partial as what is added.
  const TensorId zero = like(id, ".zero");
  out.graph.tensor(zero).dtype = dtype;
  out.shardings[zero] = out.shardings[id];
  out.at(zero, kTime) = {};
  Op fill;
  fill.code = OpCode::k_fill;
  fill.name = out.graph.tensor(zero).name;
  fill.outputs = {zero};
  fill.attrs = {{"shape", out.graph.tensor(id).dims},
                {"value", neutral_of(combine, dtype)},
                {"dtype", std::string(name_of(dtype))}};
  fill.stage = out.stage(id);
  if (const OpId source = producer(id); source != kNone)
    fill.phase = out.graph.op(source).phase, fill.scope = out.graph.op(source).scope;
  OpId maker = producer(id);  // before it was moved
  while (maker != kNone && has_flag(out.graph.op(maker).code, kCollective))
    maker = producer(out.graph.op(maker).inputs[0]);
  if (maker != kNone) fill.name = name_of_nothing(out.graph.tensor(id).name, out.graph.op(maker).code);
  append(std::move(fill));
  const TensorId made = reshard(OpCode::k_accumulate, {zero, id}, id, ".sum", attrs, kTime, {});
  out.graph.tensor(made).dtype = dtype;
  for (size_t a = 1; a < out.axes(); ++a)
    if (out.by_micro_batch(a) && out.size(a, out.stage(made)) > 1)
      out.at(made, a) = {
          .placement = Placement::kPartial, .sub_axis = {}, .state = false, .samples = false, .combine = combine};
  if (dtype == own) return made;
  // Parts that no replicas add up are added up before they are rounded.
  TensorId sum = made;
  if (size_of(own) < size_of(dtype))
    for (size_t a = 1; a < out.axes(); ++a)
      if (out.at(sum, a).placement == Placement::kPartial &&
          out.tasks.task(out.graph.op(producer(made))).roles[a - 1] != AxisRole::kReplica)
        sum = reduce(sum, a);
  return cast(sum, own, Phase::kUpdate);
}

TensorId ReshardBuilder::reduce(TensorId id, size_t axis) {
  id = latest(id);
  const AxisSharding sharding = out.at(id, axis);
  if (sharding.placement != Placement::kPartial) return id;
  if (axis != kTime) id = sum_in_groups(id, axis);
  TensorId made = kNone;
  if (axis == kTime) {
    made = sum_over_time(id, sharding.combine);
    if (out.exact) return reduced_[id] = made;
  } else if (cut_apart(id, axis)) {
    made = sum_of_parts(id, axis);
  } else {
    made = reshard(OpCode::k_all_reduce, {id}, id, ".all",
                   {{"group", static_cast<int64_t>(axis) - 1}, {"combine", std::string(name_of(sharding.combine))}},
                   axis, {});
  }
  // Groups of other shares add up other parts. Where they hold copies of one value, all take the first group's, so that
  // copies of what follows from it (a clipped gradient, a parameter) stay equal bit by bit.
  const int32_t stage = out.stage(made);
  const bool rounds = sharding.combine == Combine::kSum || sharding.combine == Combine::kLogSumExp;
  for (size_t a = 1; a < axis; ++a)
    if (rounds && out.mesh_axis(axis, stage).ragged() && out.size(a, stage) > 1 &&
        out.at(made, a).placement == Placement::kReplicate && !parts_differ(made, a) &&
        !(out.by_micro_batch(a) && out.time_varies(made)))
      made = from_first(made, a);
  reduced_[id] = made;
  return made;
}

bool ReshardBuilder::cut_apart(TensorId id, size_t axis) const {
  for (size_t b = axis + 1; axis != kTime && b < out.axes(); ++b)
    if (const MeshAxis& inner = out.mesh_axis(b, out.stage(id)); inner.ragged())
      if (inner.has_gaps() || (out.at(id, b).placement == Placement::kShard && !out.at(id, b).state)) return true;
  return false;
}

// Every device gets its box from each coordinate along the axis and combines them in their order, so that all copies
// are equal.
TensorId ReshardBuilder::sum_of_parts(TensorId id, size_t axis) {
  constexpr OpCode kCombine[] = {OpCode::k_add, OpCode::k_maximum, OpCode::k_minimum, OpCode::k_logaddexp};
  const auto combine = static_cast<size_t>(out.at(id, axis).combine);
  TensorId sum = kNone;
  for (int64_t k = 0; k < out.size(axis, out.stage(id)); ++k) {
    const TensorId part = reshard(OpCode::k_transfer, {id}, id, fmt::format(".from{}", k).c_str(),
                                  {{"group", static_cast<int64_t>(axis) - 1}, {"from", k}}, axis, {});
    sum = k == 0 ? part : reshard(kCombine[combine], {sum, part}, part, ".all", {}, axis, {});
  }
  sums_[sum] = {id, axis};
  return sum;
}

TensorId ReshardBuilder::cast(TensorId id, DType dtype, Phase phase) {
  if (const TensorId sum = before_cast(id); out.graph.tensor(sum).dtype == dtype) return latest(sum);
  const auto at = key(id, static_cast<size_t>(dtype), kCast, {});
  if (const auto known = made_.find(at); known != made_.end()) return latest(known->second);
  const std::string suffix = fmt::format(".{}", name_of(dtype));
  const TensorId made = like(id, suffix.c_str());
  out.shardings[made] = out.shardings[id];
  out.graph.tensor(made).dtype = dtype;
  Op op;
  op.code = OpCode::k_cast;
  op.name = out.graph.tensor(made).name;
  op.inputs = {id};
  op.outputs = {made};
  op.attrs = {{"dtype", std::string(name_of(dtype))}};
  op.stage = out.stage(id);
  op.phase = phase;
  if (const OpId source = producer(id); source != kNone) op.scope = out.graph.op(source).scope;
  append(std::move(op));
  if (dtype_over_time_) cast_sums_[made] = id;
  return made_[at] = made;
}

TensorId ReshardBuilder::adasum(TensorId id, size_t axis) {
  if (cut_apart(id, axis))
    throw unimplemented(
        "'{}': Adasum between groups that cut it in different ways is not implemented; give all groups "
        "equal shares",
        out.graph.tensor(id).name);
  const TensorId made = reshard(OpCode::k_adasum, {id}, id, ".adasum",
                                {{"group", static_cast<int64_t>(axis) - 1}, {"weights", Ints{}}}, axis, {});
  reduced_[id] = made;
  return made;
}

TensorId ReshardBuilder::reduce_to(TensorId id, size_t axis, const AxisSharding& to) {
  id = latest(id);
  bool copies = false;  // in groups of other shares: see reduce
  for (size_t a = 1; a < axis; ++a)
    copies |= out.mesh_axis(axis, out.stage(id)).ragged() && out.size(a, out.stage(id)) > 1 &&
              out.at(id, a).placement == Placement::kReplicate;
  if (copies || cut_apart(id, axis)) return slice(reduce(id, axis), axis, to);
  const auto [known, fresh] = made_.try_emplace(key(id, axis, kScatter, to), kNone);
  if (!fresh) return latest(known->second);
  const TensorId made = reshard(OpCode::k_reduce_scatter, {id}, id, ".part",
                                merged({{{"group", static_cast<int64_t>(axis) - 1},
                                         {"combine", std::string(name_of(out.at(id, axis).combine))},
                                         {"cuts", Ints{}}},
                                        sub_axis_attr("sub_axis", to.sub_axis)}),
                                axis, to);
  return made_[key(id, axis, kScatter, to)] = made;
}

TensorId ReshardBuilder::gather(TensorId id, size_t axis, int use) {
  const auto at = key(id, axis, kGather - 1 - use, {});
  if (const auto known = made_.find(at); known != made_.end()) return latest(known->second);
  if (cut_apart(id, axis)) {
    id = sum_in_groups(id, axis);
    return made_[at] = reshard(OpCode::k_transfer, {id}, id, ".gathered", {}, axis, {});
  }
  // The intervals are filled in by lowering: they differ between micro-batches.
  const TensorId made = reshard(OpCode::k_all_gather, {id}, id, ".gathered",
                                merged({{{"group", static_cast<int64_t>(axis) - 1}, {"cuts", Ints{}}},
                                        sub_axis_attr("sub_axis", out.at(id, axis).sub_axis)}),
                                axis, {});
  return made_[at] = made;
}

TensorId ReshardBuilder::slice(TensorId id, size_t axis, const AxisSharding& to) {
  return reshard(OpCode::k_local_slice, {id}, id, ".slice",
                 merged({{{"group", static_cast<int64_t>(axis) - 1}, {"begin", int64_t{0}}, {"end", int64_t{0}}},
                         sub_axis_attr("sub_axis", to.sub_axis)}),
                 axis, to);
}

TensorId ReshardBuilder::exchange(TensorId id, size_t axis, const AxisSharding& to) {
  const auto at = key(id, axis, kExchange, to);
  if (const auto known = made_.find(at); known != made_.end()) return latest(known->second);
  if (cut_apart(id, axis)) {
    id = sum_in_groups(id, axis);
    return made_[at] = reshard(OpCode::k_transfer, {id}, id, ".exchanged", {}, axis, to);
  }
  const TensorId made =
      reshard(OpCode::k_all_to_all, {id}, id, ".exchanged",
              merged({{{"group", static_cast<int64_t>(axis) - 1}, {"cuts", Ints{}}, {"to_cuts", Ints{}}},
                      sub_axis_attr("sub_axis", out.at(id, axis).sub_axis),
                      sub_axis_attr("to_sub_axis", to.sub_axis)}),
              axis, to);
  return made_[at] = made;
}

TensorId ReshardBuilder::halo(TensorId id, size_t axis, const AxisSharding& to) {
  const auto at = key(id, axis, kHalo, to);
  if (const auto known = made_.find(at); known != made_.end()) return latest(known->second);
  id = sum_in_groups(id, axis);
  return made_[at] = reshard(OpCode::k_transfer, {id}, id, ".halo", {}, axis, to);
}

TensorId ReshardBuilder::rearrange(TensorId id, Sharding to) {
  id = sum_in_groups(id, kTime);
  for (size_t a = 1; a < out.axes(); ++a)
    if (to.axes[a].placement == Placement::kPartial) to.axes[a] = out.at(id, a);
  for (const auto& [from, made] : moves_)
    if (from == id && out.shardings[made] == to) return latest(made);
  const TensorId made = reshard(OpCode::k_transfer, {id}, id, ".moved", {}, kTime, to.axes[kTime]);
  out.shardings[made] = to;
  moves_.emplace_back(id, made);
  return made;
}

TensorId ReshardBuilder::transfer(TensorId id, int32_t stage, Phase reader) {
  const auto at = key(id, static_cast<size_t>(stage), kMove, {});
  if (const auto known = made_.find(at); known != made_.end()) return latest(known->second);
  const TensorId made = like(id, fmt::format(".at{}", stage).c_str());
  Sharding& sharding = out.shardings[made] = out.shardings[id];
  for (size_t a = 1; a < out.axes(); ++a)
    if (!out.cuts(a, stage)) sharding.axes[a] = {};
  append_behind(id, OpCode::k_transfer, {id}, made, {}, stage);
  // A gradient may be a value of the forward pass (of a sum: what its other factor is). No forward pass waits for a
  // later stage's: it goes with the gradients.
  Phase& phase = out.graph.ops.back().phase;
  if (phase == Phase::kForward && reader != Phase::kForward && stage < out.stage(id)) phase = Phase::kBackward;
  return made_[at] = made;
}

TensorId ReshardBuilder::input_form(TensorId id, int32_t stage, bool whole) {
  if (!whole && out.stage(id) == stage) return id;
  const auto [known, fresh] = forms_.try_emplace({id, stage, whole}, kNone);
  if (!fresh) return known->second;
  const Tensor source = out.graph.tensor(id);
  TensorId original = id;
  for (const auto& [form, input] : out.input_forms)
    if (form == id) original = input;
  const TensorId made = like(id, whole ? ".whole" : fmt::format(".at{}", stage).c_str());
  out.graph.tensor(made).kind = source.kind;
  out.graph.tensor(made).batch_dim = source.batch_dim;
  out.graph.tensor(made).name = source.kind == TensorKind::kStep ? source.name : out.graph.tensor(made).name;
  out.shardings[made] = out.shardings[id];
  out.stages[made] = stage;
  if (whole) out.at(made, kTime) = {};
  if (source.kind == TensorKind::kInput) out.input_forms.emplace_back(made, original);
  return forms_[{id, stage, whole}] = made;
}

void ReshardBuilder::finish() {
  Graph& g = out.graph;
  std::vector<char> used(g.tensors.size());
  const auto use = [&](TensorId id) {
    if (id != kNone) used[id] = 1;
  };
  for (const NamedTensor& f : out.fetches) use(f.tensor);
  for (const Variable& v : g.variables) use(v.next);
  std::vector<char> keep(g.ops.size()), body(g.tensors.size());
  for (size_t i = g.ops.size(); i-- > 0;) {
    Op& op = g.ops[i];
    keep[i] = std::any_of(op.outputs.begin(), op.outputs.end(), [&](TensorId id) { return id != kNone && used[id]; });
    if (!keep[i]) continue;
    // The prologue holds only what the body reads.
    const bool read_early =
        std::any_of(op.outputs.begin(), op.outputs.end(), [&](TensorId id) { return id != kNone && body[id]; });
    if (op.region == Region::kPrologue && !read_early) op.region = Region::kEpilogue;
    if (out.micro_batches == 1) op.region = Region::kBody;  // one micro-batch: one segment
    for (const TensorId id : op.inputs) {
      use(id);
      if (id != kNone && op.region != Region::kEpilogue) body[id] = 1;
    }
  }
  size_t kept = 0;
  for (size_t i = 0; i < g.ops.size(); ++i) {
    if (!keep[i]) continue;
    if (kept != i) g.ops[kept] = std::move(g.ops[i]);
    ++kept;
  }
  g.ops.resize(kept);
  for (size_t i = 0; i < g.ops.size(); ++i)
    for (const TensorId id : g.ops[i].outputs)
      if (id != kNone) g.tensor(id).producer = static_cast<OpId>(i);
}

}  // namespace whale
