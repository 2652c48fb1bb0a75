#include "parallel/propagate.h"

#include <algorithm>
#include <string_view>
#include <unordered_map>

#include "parallel/propagator.h"
#include "parallel/split.h"

namespace whale {

LayoutGraph Propagator::run() {
  find_stages();
  samples_ = follow_samples(g());
  choose_splits();
  place_variables();
  for (const TensorId id : std::vector<TensorId>(g().inputs)) place_input(id);
  place_steps();
  std::unordered_map<std::string_view, TensorId> variable_named;
  for (const Variable& v : g().variables) variable_named.emplace(g().tensor(v.tensor).name, v.tensor);
  for (const NamedTensor& t : g().gradients) {
    const auto parameter = variable_named.find(t.name);
    parameter_of_[t.tensor] = parameter == variable_named.end() ? kNone : parameter->second;
    const OpId made = g().tensor(t.tensor).producer;  // with the loss scale still in it
    if (made != kNone && g().op(made).code == OpCode::k_unscale)
      parameter_of_[g().op(made).inputs[0]] = parameter_of_[t.tensor];
  }
  for (const Variable& v : g().variables)
    if (v.next != kNone && v.next != v.tensor) next_of_[v.next] = v.tensor;
  std::vector<Op> ops;
  std::swap(ops, g().ops);
  find_adjoints(ops);
  for (size_t i = 0; i < ops.size(); ++i) place(std::move(ops[i]), static_cast<OpId>(i), {});
  check_adasum();
  finish();
  return std::move(b_.out);
}

void Propagator::find_stages() {
  first_user_.assign(g().tensors.size(), kNone);
  for (size_t i = 0; i < g().ops.size(); ++i) {
    Op& op = g().ops[i];
    const auto scope = static_cast<size_t>(op.scope);
    int32_t stage = scope < tasks().stage_of_scope.size() ? tasks().stage_of_scope[scope] : -1;
    if (stage < 0) {
      stage = 0;
      for (const TensorId id : op.inputs)
        if (id != kNone && g().tensor(id).producer != kNone)
          stage = std::max(stage, g().op(g().tensor(id).producer).stage);
    }
    op.stage = stage;
    // Gradients go to earlier stages only: contributions to one value are added in the earliest that has one.
    for (const TensorId id : op.inputs) {
      if (op.phase != Phase::kBackward || id == kNone || g().tensor(id).producer == kNone) continue;
      const Op& part = g().op(g().tensor(id).producer);
      if (part.phase == Phase::kBackward && !part.inputs.empty() && part.stage < op.stage)
        op.stage = part.stage, op.scope = part.scope;
    }
    for (const TensorId id : op.inputs)
      if (id != kNone && first_user_[static_cast<size_t>(id)] == kNone)
        first_user_[static_cast<size_t>(id)] = static_cast<OpId>(i);
  }
}

void Propagator::find_adjoints(const std::vector<Op>& ops) {
  for (const Op& op : ops) {
    if (op.phase != Phase::kBackward || op.origin == kNone || static_cast<size_t>(op.origin) >= ops.size()) continue;
    const Op& forward = ops[static_cast<size_t>(op.origin)];
    for (const TensorId id : op.outputs) {
      if (id == kNone) continue;
      TensorId best = kNone;
      for (const TensorId x : forward.inputs) {
        if (x == kNone || g().tensor(x).dims != g().tensor(id).dims || !is_float(g().tensor(x).dtype)) continue;
        const bool read = std::find(op.inputs.begin(), op.inputs.end(), x) != op.inputs.end();
        if (best == kNone || !read) best = x;
        if (!read) break;
      }
      if (best != kNone) adjoint_of_[id] = best;
    }
  }
}

void Propagator::choose_splits() {
  cuts_.assign(axes(), std::vector<OpCut>(g().ops.size()));
  std::vector<std::vector<OpCut>> taken;
  const std::vector<OpCut> nothing(g().ops.size());
  for (size_t a = 1; a < axes(); ++a) {
    if (b_.out.by_micro_batch(a)) {
      taken.push_back(nothing);
      continue;
    }
    const SplitProblem problem{.graph = g(),
                               .tasks = tasks(),
                               .axis = a,
                               .samples = b_.out.batch > 1 ? samples_ : nothing,
                               .taken = taken,
                               .cost = tasks().cost,
                               .homes = options_.homes,
                               .micro_batches = micro_batches(),
                               .trains = !g().gradients.empty()};
    cuts_[a] = choose_split(problem);
    taken.push_back(cuts_[a]);
  }
}

void Propagator::lay_input(TensorId id, const Op& reader) {
  const int dim = g().tensor(id).batch_dim;
  if (dim < 0 || b_.out.batch <= 1) return;
  if (micro_batches() > 1) b_.out.at(id, kTime) = shard({dim, 1, 1}, false, kSamples);
  for (size_t a = 1; a < axes(); ++a)
    b_.out.at(id, a) = size(a, reader) > 1 && role(reader, a) == AxisRole::kReplica && !b_.out.by_micro_batch(a)
                           ? shard({dim, 1, 1}, false, kSamples)
                           : AxisLayout{};
}

void Propagator::place_input(TensorId id) {
  const OpId user = first_user_[static_cast<size_t>(id)];
  if (user == kNone) {
    if (g().tensor(id).batch_dim >= 0 && b_.out.batch > 1 && micro_batches() > 1)
      b_.out.at(id, kTime) = shard({g().tensor(id).batch_dim, 1, 1}, false, kSamples);
    return;
  }
  b_.out.stages[static_cast<size_t>(id)] = g().op(user).stage;
  lay_input(id, g().op(user));
}

void Propagator::place_steps() {
  for (size_t t = 0; t < g().tensors.size(); ++t)
    if (g().tensors[t].kind == TensorKind::kStep && first_user_[t] != kNone)
      b_.out.stages[t] = g().op(first_user_[t]).stage;
}

void Propagator::place(Op op, OpId number, const Forced& forced) {
  const std::vector<TensorId> asked = op.inputs;
  for (TensorId& id : op.inputs) id = b_.latest(id);
  if (tasks().stages() > 1)
    for (TensorId& id : op.inputs)
      if (id != kNone) id = at_stage(id, op);
  hoist_operands(op, number);
  const Factors factors = factors_of(g(), op);
  for (size_t a = 0; a < axes(); ++a) {
    if (size(a, op) == 1) continue;
    OpCut cut;
    bool given = false;
    for (const auto& [at, wanted] : forced)
      if (at == a) cut = wanted, given = true;
    if (!given) cut = choose(op, factors, a, number);
    if (cut.present())
      apply_cut(op, factors, a, cut);
    else
      pass_partial(op, factors, a);
  }
  // What cuts the digit of the samples further is of samples too, whoever chose it.
  for (const TensorId id : op.outputs)
    for (size_t a = 0; id != kNone && a < axes(); ++a)
      for (size_t b = 0; b < axes() && b_.out.at(id, a).samples; ++b)
        if (placement(id, b) == Placement::kShard && b_.out.at(id, b).digit == b_.out.at(id, a).digit)
          b_.out.at(id, b).samples = true;
  for (size_t i = 0; i < asked.size() && has_flag(op.code, kUpdateOp); ++i)
    if (parameter_of_.contains(asked[i])) used_[asked[i]] = op.inputs[i];
  const std::vector<TensorId> results = op.outputs;
  b_.append(std::move(op));
  if (options_.zero >= 2 && !options_.adasum)
    for (const TensorId id : results) cut_gradient(id);
}

LayoutGraph propagate(const Graph& graph, const TaskGraphs& tasks, const PropagateOptions& options) {
  return Propagator(graph, tasks, options).run();
}

}  // namespace whale
