#include "shard/choose.h"

#include <algorithm>

#include "cost/cost.h"
#include "shard/cheapest_cut.h"
#include "shard/place_variables.h"
#include "shard/prices.h"
#include "shard/split.h"
#include "task/unlike.h"

namespace whale {
namespace {

SplitCuts choose_splits(const CutProblem& p) {
  const std::vector<OpCut> nothing(p.graph.ops.size());
  std::vector<std::vector<OpCut>> taken;
  SplitCuts out(p.axes.axes(), nothing);
  for (size_t a = 1; a < p.axes.axes(); ++a) {
    if (!p.axes.by_micro_batch(a)) {
      const SplitProblem problem{.graph = p.graph,
                                 .tasks = p.axes.tasks,
                                 .factors = p.factors,
                                 .axis = a,
                                 .samples = p.batch > 1 ? p.samples : nothing,
                                 .taken = taken,
                                 .storage_shardings = p.options.storage_shardings,
                                 .micro_batches = p.micro_batches,
                                 .trains = !p.graph.gradients.empty()};
      out[a] = choose_split(problem);
    }
    taken.push_back(out[a]);
  }
  return out;
}

void place_inputs(const CutProblem& p, std::vector<Form>& forms) {
  for (size_t t = 0; t < p.graph.tensors.size(); ++t)
    if (const OpId reader = p.first_reader[t]; p.graph.tensors[t].kind == TensorKind::kStep && reader != kNone)
      forms[t].stage = p.graph.op(reader).stage;
  for (const TensorId id : p.graph.inputs) {
    const auto t = static_cast<size_t>(id);
    const int dim = p.graph.tensor(id).batch_dim;
    if (const OpId reader = p.first_reader[t]; reader != kNone) {
      forms[t].stage = p.graph.op(reader).stage;
      forms[t].sharding = input_sharding(p.graph.tensor(id), p.axes, p.graph.op(reader));
    } else if (dim >= 0 && p.micro_batches > 1) {
      forms[t].sharding.axes[kTime] = shard({dim, 1, 1}, false, true);
    }
  }
}

// Before any op has run.
std::vector<Form> first_forms(const CutProblem& p, const SplitCuts& splits) {
  std::vector<Form> out(p.graph.tensors.size());
  for (size_t t = 0; t < out.size(); ++t)  // an op gives its results theirs
    if (p.graph.tensors[t].producer == kNone) out[t].sharding.axes.resize(p.axes.axes());
  place_variables(p, splits, out);
  place_inputs(p, out);
  return out;
}

// Op by op in order: where its operands lie, by which factor it is cut along each axis, where its results lie then.
class Walk {
 public:
  explicit Walk(const CutProblem& problem)
      : p_(problem), splits_(choose_splits(problem)), forms_(problem, first_forms(problem, splits_)) {}
  Choices run();

 private:
  void choose_op(OpId number);
  OpCut choose(const Placed& placed, OpId number, size_t a) const;
  bool whole_for_gradients(const Placed& p, size_t a) const;
  // ZeRO: an unscaled gradient lies as the state that it goes into.
  OpCut cut_of_state(const Placed& placed, size_t a) const;
  void settle_gradient(const Op& op, TensorId id);
  // As soon as it is made, along an axis over which it is partial; not cut: it stays so.
  AxisSharding settled_along(const Op& op, TensorId gradient, TensorId parameter, size_t a) const;
  bool pays_to_settle(const Op& op, TensorId gradient, size_t a) const;
  void to_storage_sharding(const Variable& variable);

  const CutProblem& p_;
  const SplitCuts splits_;
  Forms forms_;
  Choices out_;
};

Choices Walk::run() {
  out_.batch = p_.batch;
  out_.micro_batches = p_.micro_batches;
  out_.shardings.resize(p_.graph.tensors.size());
  out_.stages.resize(p_.graph.tensors.size());
  for (size_t t = 0; t < p_.graph.tensors.size(); ++t)
    if (p_.graph.tensors[t].producer == kNone) {
      const Form& form = forms_.of(static_cast<TensorId>(t));
      out_.shardings[t] = form.sharding, out_.stages[t] = form.stage;
    }
  out_.cuts.assign(p_.axes.axes(), std::vector<OpCut>(p_.graph.ops.size()));
  out_.prices.resize(p_.graph.ops.size());
  for (size_t i = 0; i < p_.graph.ops.size(); ++i) choose_op(static_cast<OpId>(i));
  for (const Variable& v : p_.graph.variables) to_storage_sharding(v);
  return std::move(out_);
}

void Walk::choose_op(OpId number) {
  const Op& op = p_.graph.op(number);
  const size_t axes = p_.axes.axes();
  const Factors& factors = p_.factors.of(op);
  Price& price = out_.prices[number];
  forms_.charge_to(price);
  std::vector<ReadForm> operands;
  operands.reserve(op.inputs.size());
  for (const TensorId id : op.inputs) operands.push_back(forms_.operand(id, op));
  forms_.hoist(operands, op, number);
  std::vector<Sharding> results(op.outputs.size());
  for (Sharding& result : results) result.axes.resize(p_.axes.axes());
  Placed placed{p_.graph, p_.axes, op, factors, {}, {}};
  placed.in.reserve(operands.size());
  placed.out.reserve(results.size());
  for (size_t i = 0; i < operands.size(); ++i)
    placed.in.push_back(op.inputs[i] == kNone ? nullptr : &operands[i].sharding);
  for (size_t o = 0; o < results.size(); ++o) placed.out.push_back(op.outputs[o] == kNone ? nullptr : &results[o]);
  const auto take = [&](size_t i, size_t a, const AxisSharding& want) {
    if (op.inputs[i] == kNone) return;
    // Another operand may have reduced it since.
    if (const Form* f = operands[i].form; f) operands[i].sharding = f->sharding, operands[i].late = f->late;
    forms_.to_sharding(operands[i], op.inputs[i], op, a, want);
  };
  std::vector<OpCut> cuts(axes);
  for (size_t a = 0; a < axes; ++a) {
    if (!p_.axes.cuts(a, op.stage)) continue;
    const OpCut& cut = cuts[a] = out_.cuts[a][number] = choose(placed, number, a);
    if (cut.present()) {
      for (size_t i = 0; i < op.inputs.size(); ++i) {
        if (const SubAxis piece = streamed_piece(placed, i, a, cut); piece.present()) take(i, a, shard(piece));
        take(i, a, wanted_operand(placed, i, a, cut));
      }
      for (size_t o = 0; o < results.size(); ++o) results[o].axes[a] = made_result(placed, o, a, cut);
      continue;
    }
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if (placed.operand(i, a) == Placement::kShard) take(i, a, {});
    const bool passes = !linear_parts(placed, a, p_.options.exact && p_.micro_batches > 1).empty();
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if (placed.operand(i, a) == Placement::kPartial && !passes) take(i, a, {});
    for (Sharding& result : results)
      if (passes) result.axes[a].placement = Placement::kPartial;
  }
  price += price_of_op(p_, op, cuts);
  bool body = false, late = false;
  for (const ReadForm& o : operands) {
    if (o.sharding.axes.empty()) continue;
    body |= o.sharding.axes[kTime].placement != Placement::kReplicate;
    late |= o.late;
  }
  for (size_t o = 0; o < op.outputs.size(); ++o)
    if (op.outputs[o] != kNone) {
      mark_samples(results[o]);
      forms_.of(op.outputs[o]) = {std::move(results[o]), op.stage, late && !body};
    }
  for (const TensorId id : op.outputs) {
    if (id == kNone) continue;
    out_.shardings[id] = forms_.of(id).sharding;
    out_.stages[id] = op.stage;
    settle_gradient(op, id);
  }
}

void Walk::to_storage_sharding(const Variable& v) {
  const OpId last = v.next == kNone ? kNone : p_.graph.tensor(v.next).producer;
  if (last == kNone) return;
  forms_.charge_to(out_.prices[last]);
  ReadForm next = forms_.as_made(v.next);
  for (size_t a = 0; a < p_.axes.axes(); ++a)
    forms_.to_sharding(next, v.next, p_.graph.op(last), a, out_.shardings[v.tensor].axes[a]);
}

OpCut Walk::choose(const Placed& p, OpId number, size_t a) const {
  const OpCut samples = p_.has_samples(number) ? p_.samples[number] : OpCut{};
  if (a == kTime) {
    const OpCut cut = largest_cut(p, a);
    return !cut.present() && p_.has_own_rows(number) && fits(p, p.factors.list[samples.factor], samples.sub, a)
               ? samples
               : cut;
  }
  if (p_.axes.by_micro_batch(a))
    return samples.present() || whole_for_gradients(p, a) ? OpCut{} : followed_cut(p, a, p_.options.exact);
  if (p_.axes.role(p.op, a) == AxisRole::kReplica) {
    if (samples.present()) return samples;
    if (whole_for_gradients(p, a)) return {};
    // What prepares an update, the norm of a gradient and an update of several ops take the part whose state is here.
    const bool early = p.op.phase == Phase::kUpdate && !p_.options.exact && !p_.options.adasum;
    const bool reads = !p.op.inputs.empty() && p.op.inputs[0] != kNone && p.operand(0, a) == Placement::kPartial;
    if (reads && (early || has_flag(p.op.code, kPreparesUpdate)))
      if (const OpCut cut = cut_of_state(p, a); cut.present()) return cut;
    return largest_cut(p, a);
  }
  if (p.op.phase == Phase::kForward) {
    const OpCut& planned = splits_[a][number];
    // State may have cut an operand along an axis outside in a way that was not foreseen.
    if (!planned.present() || fits(p, p.factors.list[planned.factor], planned.sub, a)) return planned;
  }
  return cheapest_cut(p_, forms_, p, a);
}

// What replicas combine in a way of its own (Adasum, in fewer bits) is the gradient of a parameter. What a model makes
// of parameters alone is not computed on the parts of ZeRO 3 then: parts of its gradient would have to be sums before.
// But for casts, whose gradients are the parameters' own in another type.
bool Walk::whole_for_gradients(const Placed& p, size_t a) const {
  if (!p_.options.adasum && !p_.options.gradient_dtype) return false;
  if (p.op.phase != Phase::kBackward) return p.op.phase == Phase::kForward && p.op.code != OpCode::k_cast;
  for (size_t i = 0; i < p.op.inputs.size(); ++i)
    if (p.operand(i, a) == Placement::kPartial) return true;
  return false;
}

OpCut Walk::cut_of_state(const Placed& placed, size_t a) const {
  const TensorId gradient = placed.op.inputs[0];
  const auto p = p_.parameter_of.find(gradient);
  const auto states = p == p_.parameter_of.end() ? p_.states_of.end() : p_.states_of.find(p->second);
  if (states == p_.states_of.end()) return {};
  const Dims& dims = p_.graph.tensor(gradient).dims;
  const auto along = [&](const SubAxis& sub_axis) {
    for (size_t k = 0; k < placed.factors.list.size(); ++k) {
      OpCut cut{static_cast<int>(k), {}, true};
      const Factor& f = placed.factors.list[k];
      if (find_sub_axis_part(f.inputs[0], f.extent, sub_axis, extent_of(dims, sub_axis), cut.sub) &&
          fits(placed, f, cut.sub, a))
        return cut;
    }
    return OpCut{};
  };
  bool factored = false;  // some state is of other dimensions
  for (const TensorId state : states->second) {
    const AxisSharding& l = forms_.of(state).sharding.axes[a];
    if (p_.graph.tensor(state).dims != dims)
      factored = true;
    else if (l.placement == Placement::kShard && l.state)
      if (const OpCut cut = along(l.sub_axis); cut.present()) return cut;
  }
  if (!factored || p_.options.zero == 0) return {};
  const SubAxis sub_axis =
      state_sub_axis(p_, p->second, forms_.of(p->second).sharding, a, p_.axes.size(a, placed.op.stage));
  return sub_axis.present() ? along(sub_axis) : OpCut{};
}

AxisSharding Walk::settled_along(const Op& op, TensorId id, TensorId parameter, size_t a) const {
  const AxisSharding& stored = out_.shardings[parameter].axes[a];
  if (p_.axes.role(op, a) != AxisRole::kReplica)
    return stored.placement == Placement::kShard && pays_to_settle(op, id, a) ? stored : AxisSharding{};
  if (p_.options.zero < 2) return {};
  if (stored.placement == Placement::kShard) return stored;
  const SubAxis sub_axis = state_sub_axis(p_, parameter, forms_.of(parameter).sharding, a, p_.axes.size(a, op.stage));
  return sub_axis.present() ? shard(sub_axis, true) : AxisSharding{};
}

// What a split's devices have terms of: summed in every micro-batch each keeps and adds up its part alone, and replicas
// then sum that part; summed behind the last one it moves once.
bool Walk::pays_to_settle(const Op& op, TensorId id, size_t a) const {
  if (p_.options.exact || p_.micro_batches == 1) return false;
  if (p_.options.zero >= 2) return true;
  const CostModel& cost = p_.axes.tasks.cost;
  const Sharding& now = forms_.of(id).sharding;
  const int64_t n = p_.axes.size(a, op.stage);
  const double freed = received_bytes({}, bytes_beside(p_, id, now, op.stage, a), n);
  const double once = price_of_move(p_, id, now, op.stage, a, shard({0, 1, 1})).move_seconds;
  const auto m = static_cast<double>(p_.micro_batches);
  return (m - 1) / m * once < pass_seconds(m * cost.add_passes * freed, cost.device) + cost.held_seconds(freed);
}

void Walk::settle_gradient(const Op& op, TensorId id) {
  const auto p = p_.settles.find(id);
  if (p == p_.settles.end()) return;
  bool settled = false;
  for (const size_t a : settling_order(p_.axes, op)) {
    const std::vector<AxisSharding>& now = forms_.of(id).sharding.axes;
    if (now[a].placement != Placement::kPartial) continue;
    const AxisSharding want = settled_along(op, id, p->second, a);
    if (want.placement != Placement::kShard) continue;
    // The gradient itself may be cut in ways that its parameter is not; along a split it goes to where that lives.
    bool fits = true;
    for (size_t b = 1; b < p_.axes.axes(); ++b)
      if (b != a && now[b].placement == Placement::kShard)
        fits &= compatible(p_.graph.tensor(id).dims, now[b].sub_axis, want.sub_axis) ||
                (p_.axes.role(op, b) != AxisRole::kReplica && !p_.options.exact && !p_.options.adasum &&
                 first_along_split(p_.axes, p_.graph.tensor(id), forms_.of(id).sharding, op.stage, a, b,
                                   out_.shardings[p->second].axes[b], want, false));
    if (!fits) continue;
    ReadForm whole = forms_.as_made(id);
    forms_.to_sharding(whole, id, op, a, want);
    forms_.of(id).sharding = whole.sharding;
    settled = true;
  }
  if (!settled) return;
  ++forms_.of(id).reductions;
  // Pieces of one are added up where they are, and joined when all are there.
  if (p_.graph.tensor(id).dims != p_.graph.tensor(p->second).dims &&
      forms_.of(id).sharding.axes[kTime].placement == Placement::kPartial)
    forms_.reduce_over_time(forms_.of(id).sharding, &forms_.of(id));
  out_.settled[id] = forms_.of(id).sharding;
}

}  // namespace

void place_in_stages(Graph& g, const TaskGraphs& tasks) {
  // What unlike replicas make of their samples stays with each; what they add goes to the first.
  const auto apart = [&](const Op& op, const Op& part) {
    return op.code != OpCode::k_add && replica_of(tasks, op.stage) != replica_of(tasks, part.stage);
  };
  for (Op& op : g.ops) {
    const auto scope = static_cast<size_t>(op.scope);
    int32_t stage = scope < tasks.stage_of_scope.size() ? tasks.stage_of_scope[scope] : -1;
    if (stage < 0) {
      stage = 0;
      for (const TensorId id : op.inputs)
        if (id != kNone && g.tensor(id).producer != kNone) stage = std::max(stage, g.op(g.tensor(id).producer).stage);
    }
    op.stage = stage;
    // Gradients go to earlier stages only: contributions to one value are added in the earliest that has one.
    for (const TensorId id : op.inputs) {
      if (op.phase != Phase::kBackward || id == kNone || g.tensor(id).producer == kNone) continue;
      const Op& part = g.op(g.tensor(id).producer);
      if (part.phase == Phase::kBackward && !part.inputs.empty() && part.stage < op.stage && !apart(op, part))
        op.stage = part.stage, op.scope = part.scope;
    }
  }
}

Choices choose_cuts(const Graph& graph, const TaskGraphs& tasks, const ShardOptions& options) {
  return Walk(CutProblem(graph, tasks, options)).run();
}

}  // namespace whale
