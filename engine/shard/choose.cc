#include "shard/choose.h"

#include <algorithm>
#include <set>
#include <string_view>
#include <unordered_map>

#include "base/error.h"
#include "shard/chooser.h"
#include "shard/samples_of_copies.h"
#include "shard/split.h"
#include "task/unlike.h"

namespace whale {
namespace {

int64_t samples_of(const Graph& graph) {
  int64_t batch = 0;
  for (const TensorId id : graph.inputs) {
    const Tensor& t = graph.tensor(id);
    if (t.batch_dim < 0) continue;
    const int64_t samples = t.dims[static_cast<size_t>(t.batch_dim)];
    if (batch && samples != batch)
      throw invalid(
          "input '{}' has {} samples in dimension {}, another input has {}; all batch dimensions must be equal", t.name,
          samples, t.batch_dim, batch);
    batch = samples;
  }
  return batch;
}

// Which forward tensor a result of the backward pass is the gradient of, or a part of it: the operand of the forward op
// that has its shape, one that the backward op does not read before others. Per tensor; kNone: of none.
std::vector<TensorId> adjoints_of(const Graph& g) {
  std::vector<TensorId> out(g.tensors.size(), kNone);
  for (const Op& op : g.ops) {
    if (op.phase != Phase::kBackward || op.origin == kNone || static_cast<size_t>(op.origin) >= g.ops.size()) continue;
    for (const TensorId id : op.outputs) {
      if (id == kNone) continue;
      TensorId best = kNone;
      for (const TensorId x : g.op(op.origin).inputs) {
        if (x == kNone || g.tensor(x).dims != g.tensor(id).dims || !is_float(g.tensor(x).dtype)) continue;
        const bool read = std::find(op.inputs.begin(), op.inputs.end(), x) != op.inputs.end();
        if (best == kNone || !read) best = x;
        if (!read) break;
      }
      out[static_cast<size_t>(id)] = best;
    }
  }
  return out;
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

std::map<TensorId, TensorId> parameters_of_gradients(const Graph& g) {
  if (g.gradients.empty()) return {};
  std::unordered_map<std::string_view, TensorId> named;
  for (const Variable& v : g.variables)
    if (v.role == Role::kParameter) named.emplace(g.tensor(v.tensor).name, v.tensor);
  std::map<TensorId, TensorId> out;
  for (const NamedTensor& t : g.gradients) {
    const auto parameter = named.find(t.name);
    out[t.tensor] = parameter == named.end() ? kNone : parameter->second;
    const OpId made = g.tensor(t.tensor).producer;  // with the loss scale still in it
    if (made != kNone && has_flag(g.op(made).code, kPreparesUpdate)) out[g.op(made).inputs[0]] = out[t.tensor];
  }
  // One that is made in pieces of columns (cut_gradients) is a gradient in each of them.
  for (const auto& [id, parameter] : std::map<TensorId, TensorId>(out)) {
    const OpId made = g.tensor(id).producer;
    if (made == kNone || g.op(made).code != OpCode::k_concat || g.op(made).phase != Phase::kBackward) continue;
    const int64_t rank = std::ssize(g.tensor(id).dims);
    if (rank > 1 && attr_int(g.op(made).attrs, "axis") == rank - 1)
      for (const TensorId piece : g.op(made).inputs) {
        out[piece] = parameter;
        const OpId sum = g.tensor(piece).producer;  // of two terms, each of which is reduced as it arrives
        if (sum != kNone && g.op(sum).code == OpCode::k_add)
          for (const TensorId term : g.op(sum).inputs) out[term] = parameter;
      }
  }
  return out;
}

// Gradients of parameters; of one that several stages read, each stage's term, so that none of them holds it whole.
std::map<TensorId, TensorId> settled_gradients(const Graph& g, const std::map<TensorId, TensorId>& parameter_of,
                                               const ShardOptions& options) {
  std::map<TensorId, TensorId> out;
  for (const auto& [gradient, parameter] : parameter_of) {
    if (parameter == kNone) continue;
    out[gradient] = parameter;
    if (options.exact || options.gradient_dtype) continue;
    std::vector<TensorId> todo{gradient}, terms;
    std::set<int32_t> stages;
    while (!todo.empty()) {
      const TensorId id = todo.back();
      todo.pop_back();
      const OpId made = g.tensor(id).producer;
      if (made == kNone || g.op(made).phase != Phase::kBackward) continue;
      const Op& op = g.op(made);
      if (op.code == OpCode::k_add && g.tensor(op.inputs[0]).dims == g.tensor(op.inputs[1]).dims)
        todo.insert(todo.end(), op.inputs.begin(), op.inputs.end());
      else
        terms.push_back(id), stages.insert(op.stage);
    }
    if (stages.size() > 1)
      for (const TensorId id : terms) out[id] = parameter;
  }
  return out;
}

CutChooser::CutChooser(const Graph& graph, const TaskGraphs& tasks, const ShardOptions& options)
    : g_(graph), options_(options), axes_{tasks}, factors_(graph) {
  out_.batch = samples_of(graph);
  out_.micro_batches = axes_.micro_batches = out_.batch > 1 ? options.micro_batches : 1;
  out_.shardings.resize(graph.tensors.size());
  out_.stages.resize(graph.tensors.size());
}

Choices CutChooser::run() {
  prepare();
  choose_splits();
  place_variables();
  place_inputs();
  const auto leave = [&](TensorId id) {
    out_.shardings[static_cast<size_t>(id)] = form(id).sharding;
    out_.stages[static_cast<size_t>(id)] = form(id).stage;
  };
  for (size_t t = 0; t < g_.tensors.size(); ++t)
    if (g_.tensors[t].producer == kNone) leave(static_cast<TensorId>(t));
  out_.cuts.assign(axes(), std::vector<OpCut>(g_.ops.size()));
  out_.prices.resize(g_.ops.size());
  for (size_t i = 0; i < g_.ops.size(); ++i) choose_op(static_cast<OpId>(i));
  for (const Variable& v : g_.variables) to_storage_sharding(v);
  return std::move(out_);
}

void CutChooser::prepare() {
  forms_.resize(g_.tensors.size());
  for (size_t t = 0; t < forms_.size(); ++t)  // an op gives its results theirs
    if (g_.tensors[t].producer == kNone) forms_[t].sharding.axes.resize(axes());
  first_user_.assign(g_.tensors.size(), kNone);
  samples_ = axes_.tasks.replicas.empty() ? follow_samples(g_, factors_) : follow_samples_of_copies(g_, factors_);
  gradients_of_.resize(g_.ops.size());
  for (size_t i = 0; i < g_.ops.size(); ++i)
    if (const Op& op = g_.ops[i];
        op.phase == Phase::kBackward && op.origin != kNone && static_cast<size_t>(op.origin) < g_.ops.size())
      gradients_of_[static_cast<size_t>(op.origin)].push_back(static_cast<OpId>(i));
  constant_.assign(g_.tensors.size(), 0);
  for (size_t t = 0; t < g_.tensors.size(); ++t) constant_[t] = g_.tensors[t].kind == TensorKind::kStep;
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    bool constant = true;
    for (const TensorId id : g_.ops[i].inputs) {
      if (id == kNone) continue;
      constant &= constant_[static_cast<size_t>(id)] != 0;
      if (OpId& first = first_user_[static_cast<size_t>(id)]; first == kNone) first = static_cast<OpId>(i);
    }
    for (const TensorId id : g_.ops[i].outputs)
      if (id != kNone) constant_[static_cast<size_t>(id)] = constant && !sums_of_unlike(id);
  }
  parameter_of_ = parameters_of_gradients(g_);
  if (options_.zero >= 2 && !options_.adasum) settles_ = settled_gradients(g_, parameter_of_, options_);
  adjoint_of_ = adjoints_of(g_);
  next_of_.assign(g_.tensors.size(), kNone);
  for (const Variable& v : g_.variables)
    if (v.next != kNone && v.next != v.tensor) next_of_[static_cast<size_t>(v.next)] = v.tensor;
  for (const Variable& v : g_.variables)
    if (v.owner != kNone) states_of_[v.owner].push_back(v.tensor);
}

bool CutChooser::sums_of_unlike(TensorId id) {
  const OpId made = g_.tensor(id).producer;
  if (made == kNone || axes_.tasks.replicas.empty() || out_.batch <= 1) return false;
  const OpCut& samples = samples_[static_cast<size_t>(made)];
  if (!samples.present()) return false;
  const Factor& f = factors_.of(g_.op(made)).list[static_cast<size_t>(samples.factor)];
  const auto o = static_cast<size_t>(g_.tensor(id).output);
  return o >= f.outputs.size() || !f.outputs[o].present();
}

void CutChooser::choose_splits() {
  const std::vector<OpCut> nothing(g_.ops.size());
  std::vector<std::vector<OpCut>> taken;
  splits_.assign(axes(), nothing);
  for (size_t a = 1; a < axes(); ++a) {
    if (!axes_.by_micro_batch(a)) {
      const SplitProblem problem{.graph = g_,
                                 .tasks = axes_.tasks,
                                 .factors = factors_,
                                 .axis = a,
                                 .samples = out_.batch > 1 ? samples_ : nothing,
                                 .taken = taken,
                                 .storage_shardings = options_.storage_shardings,
                                 .micro_batches = out_.micro_batches,
                                 .trains = !g_.gradients.empty()};
      splits_[a] = choose_split(problem);
    }
    taken.push_back(splits_[a]);
  }
}

void CutChooser::place_inputs() {
  for (size_t t = 0; t < g_.tensors.size(); ++t)
    if (const OpId user = first_user_[t]; g_.tensors[t].kind == TensorKind::kStep && user != kNone)
      forms_[t].stage = g_.op(user).stage;
  for (const TensorId id : g_.inputs) {
    const int dim = g_.tensor(id).batch_dim;
    if (const OpId user = first_user_[static_cast<size_t>(id)]; user != kNone) {
      form(id).stage = g_.op(user).stage;
      form(id).sharding = input_sharding(g_.tensor(id), axes_, g_.op(user));
    } else if (dim >= 0 && out_.batch > 1 && out_.micro_batches > 1) {
      form(id).sharding.axes[kTime] = shard({dim, 1, 1}, false, true);
    }
  }
}

void CutChooser::choose_op(OpId number) {
  const Op& op = g_.op(number);
  const Factors& factors = factors_.of(op);
  price_ = &out_.prices[static_cast<size_t>(number)];
  std::vector<Operand> operands;
  operands.reserve(op.inputs.size());
  for (const TensorId id : op.inputs) operands.push_back(operand(id, op));
  hoist(operands, op, number);
  std::vector<Sharding> results(op.outputs.size());
  for (Sharding& result : results) result.axes.resize(axes());
  Placed placed{g_, axes_, op, factors, {}, {}};
  placed.in.reserve(operands.size());
  placed.out.reserve(results.size());
  for (size_t i = 0; i < operands.size(); ++i)
    placed.in.push_back(op.inputs[i] == kNone ? nullptr : &operands[i].sharding);
  for (size_t o = 0; o < results.size(); ++o) placed.out.push_back(op.outputs[o] == kNone ? nullptr : &results[o]);
  const auto take = [&](size_t i, size_t a, const AxisSharding& want) {
    if (op.inputs[i] == kNone) return;
    // Another operand may have reduced it since.
    if (const Form* f = operands[i].form; f) operands[i].sharding = f->sharding, operands[i].late = f->late;
    to_sharding(operands[i], op.inputs[i], op, a, want);
  };
  for (size_t a = 0; a < axes(); ++a) {
    if (!axes_.cuts(a, op.stage)) continue;
    const OpCut cut = out_.cuts[a][static_cast<size_t>(number)] = choose(placed, number, a);
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
    const bool passes = !linear_parts(placed, a, options_.exact && out_.micro_batches > 1).empty();
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if (placed.operand(i, a) == Placement::kPartial && !passes) take(i, a, {});
    for (Sharding& result : results)
      if (passes) result.axes[a].placement = Placement::kPartial;
  }
  charge_compute(op, number);
  bool body = false, late = false;
  for (const Operand& o : operands) {
    if (o.sharding.axes.empty()) continue;
    body |= o.sharding.axes[kTime].placement != Placement::kReplicate;
    late |= o.late;
  }
  for (size_t o = 0; o < op.outputs.size(); ++o)
    if (op.outputs[o] != kNone) {
      mark_samples(results[o]);
      form(op.outputs[o]) = {std::move(results[o]), op.stage, late && !body};
    }
  for (const TensorId id : op.outputs) {
    if (id == kNone) continue;
    out_.shardings[static_cast<size_t>(id)] = form(id).sharding;
    out_.stages[static_cast<size_t>(id)] = op.stage;
    settle_gradient(op, id);
  }
}

void CutChooser::to_storage_sharding(const Variable& v) {
  const OpId last = v.next == kNone ? kNone : g_.tensor(v.next).producer;
  if (last == kNone) return;
  price_ = &out_.prices[static_cast<size_t>(last)];
  Operand next{&form(v.next), form(v.next).sharding, false};
  for (size_t a = 0; a < axes(); ++a)
    to_sharding(next, v.next, g_.op(last), a, out_.shardings[static_cast<size_t>(v.tensor)].axes[a]);
}

OpCut CutChooser::choose(const Placed& p, OpId number, size_t a) const {
  const OpCut samples = out_.batch > 1 ? samples_[static_cast<size_t>(number)] : OpCut{};
  if (a == kTime) {
    const OpCut cut = largest_cut(p, a);
    return !cut.present() && has_own_rows(number) &&
                   fits(p, p.factors.list[static_cast<size_t>(samples.factor)], samples.sub, a)
               ? samples
               : cut;
  }
  if (axes_.by_micro_batch(a))
    return samples.present() || whole_for_gradients(p, a) ? OpCut{} : followed_cut(p, a, options_.exact);
  if (axes_.role(p.op, a) == AxisRole::kReplica) {
    if (samples.present()) return samples;
    if (whole_for_gradients(p, a)) return {};
    // What prepares an update, the norm of a gradient and an update of several ops take the part whose state is here.
    const bool early = p.op.phase == Phase::kUpdate && !options_.exact && !options_.adasum;
    const bool reads = !p.op.inputs.empty() && p.op.inputs[0] != kNone && p.operand(0, a) == Placement::kPartial;
    if (reads && (early || has_flag(p.op.code, kPreparesUpdate)))
      if (const OpCut cut = cut_of_state(p, a); cut.present()) return cut;
    return largest_cut(p, a);
  }
  if (p.op.phase == Phase::kForward) {
    const OpCut& planned = splits_[a][static_cast<size_t>(number)];
    // State may have cut an operand along an axis outside in a way that was not foreseen.
    if (!planned.present() || fits(p, p.factors.list[static_cast<size_t>(planned.factor)], planned.sub, a))
      return planned;
  }
  return cheapest_cut(p, a);
}

// What replicas combine in a way of its own (Adasum, in fewer bits) is the gradient of a parameter. What a model makes
// of parameters alone is not computed on the parts of ZeRO 3 then: parts of its gradient would have to be sums before.
// But for casts, whose gradients are the parameters' own in another type.
bool CutChooser::whole_for_gradients(const Placed& p, size_t a) const {
  if (!options_.adasum && !options_.gradient_dtype) return false;
  if (p.op.phase != Phase::kBackward) return p.op.phase == Phase::kForward && p.op.code != OpCode::k_cast;
  for (size_t i = 0; i < p.op.inputs.size(); ++i)
    if (p.operand(i, a) == Placement::kPartial) return true;
  return false;
}

bool CutChooser::has_own_rows(OpId number) const {
  return out_.batch > 1 && samples_[static_cast<size_t>(number)].present() && g_.op(number).phase != Phase::kUpdate;
}

void CutChooser::settle_gradient(const Op& op, TensorId id) {
  const auto p = settles_.find(id);
  if (p == settles_.end()) return;
  bool settled = false;
  for (size_t a = 1; a < axes(); ++a) {
    const std::vector<AxisSharding>& now = form(id).sharding.axes;
    if (now[a].placement != Placement::kPartial || axes_.role(op, a) != AxisRole::kReplica) continue;
    AxisSharding want = out_.shardings[static_cast<size_t>(p->second)].axes[a];
    if (want.placement != Placement::kShard) {
      const SubAxis sub_axis = state_sub_axis(p->second, a, size(a, op));
      if (!sub_axis.present()) continue;
      want = shard(sub_axis, true);
    }
    // The gradient itself may be cut in ways that its parameter is not.
    bool fits = true;
    for (size_t b = 1; b < axes(); ++b)
      if (b != a && now[b].placement == Placement::kShard)
        fits &= compatible(g_.tensor(id).dims, now[b].sub_axis, want.sub_axis);
    if (!fits) continue;
    Operand whole{&form(id), form(id).sharding, false};
    to_sharding(whole, id, op, a, want);
    form(id).sharding = whole.sharding;
    settled = true;
  }
  if (!settled) return;
  ++form(id).reductions;
  // Pieces of one are added up where they are, and joined when all are there.
  if (g_.tensor(id).dims != g_.tensor(p->second).dims && form(id).sharding.axes[kTime].placement == Placement::kPartial)
    reduce_over_time(form(id).sharding, &form(id));
  out_.settled[id] = form(id).sharding;
}

Choices choose_cuts(const Graph& graph, const TaskGraphs& tasks, const ShardOptions& options) {
  return CutChooser(graph, tasks, options).run();
}

}  // namespace whale
