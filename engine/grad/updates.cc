// Clipping and the optimizer's update, one op per parameter (planning groups them later). Adafactor is in adafactor.cc.
#include "grad/updates.h"

#include <algorithm>
#include <map>
#include <set>
#include <string_view>

#include "grad/passes.h"
#include "grad/rows.h"

namespace whale {

TensorIds UpdateBuilder::emit_all(OpCode code, TensorIds inputs, Attrs attrs) {
  const OpId id = append_op(g, code, std::move(inputs), std::move(attrs), origin == kNone ? 0 : g.op(origin).scope,
                            of == kNone ? "" : fmt::format("{}.{}", g.tensor(of).name, def(code).name));
  Op& op = g.op(id);
  op.phase = Phase::kUpdate;
  op.region = Region::kEpilogue;
  op.origin = origin;
  return op.outputs;
}

TensorId UpdateBuilder::constant(double value, DType dtype) {
  return emit(OpCode::k_fill, {}, {{"shape", Dims{}}, {"value", value}, {"dtype", std::string(name_of(dtype))}});
}

TensorId UpdateBuilder::step_scalar(const char* name, DType dtype) {
  const auto [known, fresh] = step_scalars_.try_emplace(name, kNone);
  if (!fresh) return known->second;
  for (size_t i = 0; i < g.tensors.size() && known->second == kNone; ++i)
    if (g.tensors[i].kind == TensorKind::kStep && g.tensors[i].name == name) known->second = static_cast<TensorId>(i);
  if (known->second != kNone) return known->second;
  g.tensors.push_back({.name = name, .dtype = dtype, .dims = {}, .kind = TensorKind::kStep});
  return known->second = static_cast<TensorId>(g.tensors.size() - 1);
}

TensorId UpdateBuilder::state(TensorId parameter, const char* state_name, Dims dims) {
  return state(parameter, state_name, std::move(dims), accumulate_dtype(g.tensor(parameter).dtype));
}

TensorId UpdateBuilder::state(TensorId parameter, const char* state_name, Dims dims, DType dtype) {
  const Tensor p = g.tensor(parameter);
  g.tensors.push_back(
      {.name = p.name + "/" + state_name, .dtype = dtype, .dims = std::move(dims), .kind = TensorKind::kVariable});
  const auto id = static_cast<TensorId>(g.tensors.size() - 1);
  Variable v;
  v.tensor = id;
  v.role = Role::kState;
  v.trainable = v.decay = false;
  v.owner = parameter;
  v.state_name = state_name;
  g.variables.push_back(std::move(v));
  return id;
}

TensorId UpdateBuilder::state(TensorId parameter, const char* state_name, Dims dims, std::vector<int> of_owner) {
  const TensorId id = state(parameter, state_name, std::move(dims));
  g.variables.back().of_owner = std::move(of_owner);
  return id;
}

void UpdateBuilder::set_next(TensorId variable, TensorId next) {
  for (size_t k = variable_number_.size(); k < g.variables.size(); ++k)
    variable_number_.emplace(g.variables[k].tensor, k);
  const auto at = variable_number_.find(variable);
  if (at == variable_number_.end()) throw internal("no variable");
  Variable& v = g.variables[at->second];
  if (v.next != kNone)
    throw invalid("parameter '{}' is already given a next value by another op; make it frozen",
                  g.tensor(variable).name);
  v.next = next;
  g.tensor(next).name = g.tensor(variable).name + ".new";
}

namespace {

struct Parameter {
  TensorId p, grad;
  bool decay;
  double rate;                         // a factor of the learning rate
  std::optional<double> weight_decay;  // instead of the optimizer's
  OpId use;                            // the first op that reads it: its scope is the update's
  RowGradient rows;                    // sparse_updates: instead of grad, for tables
};

std::vector<Parameter> parameters(const Graph& g) {
  std::map<std::string, TensorId> grads;
  for (const NamedTensor& t : g.gradients) grads[t.name] = t.tensor;
  std::vector<OpId> first(g.tensors.size(), kNone);
  for (size_t i = g.ops.size(); i-- > 0;)
    for (const TensorId id : g.ops[i].inputs)
      if (id != kNone) first[id] = static_cast<OpId>(i);
  std::vector<Parameter> all;
  for (const Variable& v : g.variables) {
    const auto it = v.role == Role::kParameter && v.trainable ? grads.find(g.tensor(v.tensor).name) : grads.end();
    if (it != grads.end())
      all.push_back(
          {v.tensor, it->second, v.decay || v.weight_decay, v.learning_rate, v.weight_decay, first[v.tensor], {}});
  }
  return all;
}

// The factor of global-norm clipping; kNone without clipping.
TensorId clip(UpdateBuilder& b, const std::vector<Parameter>& all, double max_norm) {
  if (max_norm <= 0) return kNone;
  // One sum a gradient: each may be cut in its own way.
  TensorIds sums;
  for (const Parameter& p : all) b.of = p.p, sums.push_back(b.emit(OpCode::k_sum_of_squares, {p.grad}));
  b.of = kNone;
  return b.emit(OpCode::k_clip_factor, sums, {{"max_norm", max_norm}});
}

// f16: gradients lose the factor of the loss; when one of them, or the loss, is not finite, the scale is NaN, and no
// variable changes.
void unscale(UpdateBuilder& b, std::vector<Parameter>& all) {
  const TensorId loss_scale = b.step_scalar("loss_scale", DType::kF32);
  TensorIds flags{b.g.training.loss};
  for (Parameter& p : all) {
    b.origin = p.use, b.of = p.p;
    TensorId& scaled = p.rows.dy != kNone ? p.rows.dy : p.grad;
    const TensorIds results = b.emit_all(OpCode::k_unscale, {scaled, loss_scale});
    for (NamedTensor& t : b.g.gradients)
      if (t.tensor == scaled && t.name == b.g.tensor(p.p).name) t.tensor = results[0];
    scaled = results[0];
    flags.push_back(results[1]);
  }
  b.origin = b.of = kNone;
  b.scale = b.emit(OpCode::k_overflow, flags);
}

// Where an update op that the model itself has takes the scale of a step; 0: it has one, or takes none.
size_t scale_operand(const Graph& g, OpId id) {
  if (id == kNone || !has_flag(g.op(id).code, kUpdateOp)) return 0;
  const auto& ports = def(g.op(id).code).inputs;
  for (size_t i = 1; i < ports.size() && i < g.op(id).inputs.size(); ++i)
    if (ports[i].name == std::string_view("scale") && g.op(id).inputs[i] == kNone) return i;
  return 0;
}

// Variables whose next values are not made by an update op that knows the scale keep their old ones instead.
void keep_on_overflow(UpdateBuilder& b) {
  const TensorId scale = b.scale;
  TensorId fine = kNone;
  for (size_t v = 0; v < b.g.variables.size(); ++v) {
    const TensorId variable = b.g.variables[v].tensor, next = b.g.variables[v].next;
    if (next == kNone || next == variable) continue;
    const OpId producer = b.g.tensor(next).producer;
    b.origin = producer, b.of = variable;
    if (const size_t at = scale_operand(b.g, producer); at > 0) {
      const Op op = b.g.op(producer);
      TensorIds inputs = op.inputs;
      inputs[at] = scale;
      const TensorIds results = b.emit_all(op.code, inputs, op.attrs);
      for (Variable& other : b.g.variables)
        for (size_t o = 0; o < results.size(); ++o)
          if (other.next == op.outputs[o]) other.next = results[o];
    } else if (producer == kNone || !has_flag(b.g.op(producer).code, kUpdateOp)) {
      if (fine == kNone) fine = b.emit(OpCode::k_equal, {scale, scale});  // not NaN
      const TensorId kept = b.emit(OpCode::k_where, {fine, next, variable});
      b.g.variables[v].next = kept;
    }
  }
}

struct Rule {
  OptimizerKind kind;
  void (*update)(UpdateBuilder& b, const Parameter& p, const Optimizer& o);
};

Attrs decay_attrs(const Parameter& p, const Optimizer& o) {
  Attrs attrs{{"weight_decay", o.weight_decay}, {"decays", Ints{p.decay ? 1 : 0}}};
  if (p.rows.dy != kNone) attrs["mean"] = p.rows.mean;
  return attrs;
}

// The operands of an update op: the parameter, its states, and its gradient where the dense rule has it (behind the
// parameter) or, for rows, ids and dy at the end.
TensorIds operands(TensorIds scalars, const Parameter& p, const TensorIds& states) {
  scalars.push_back(p.p);
  if (p.rows.dy == kNone) scalars.push_back(p.grad);
  scalars.insert(scalars.end(), states.begin(), states.end());
  if (p.rows.dy != kNone) scalars.push_back(p.rows.ids), scalars.push_back(p.rows.dy);
  return scalars;
}

// Emits an update op whose results are the next values of `variables`.
void update(UpdateBuilder& b, OpCode code, TensorIds inputs, Attrs attrs, const TensorIds& variables) {
  const auto results = b.emit_all(code, std::move(inputs), std::move(attrs));
  for (size_t i = 0; i < variables.size(); ++i) b.set_next(variables[i], results[i]);
}

// In place of the fp32 weight: its two halves.
void split_sgd(UpdateBuilder& b, const Parameter& p, const Optimizer& o) {
  const TensorId low = b.state(p.p, "low", b.g.tensor(p.p).dims, DType::kU16);
  if (p.rows.dy != kNone)
    return update(b, OpCode::k_split_sgd_rows, operands({b.rate, b.scale}, p, {low}), decay_attrs(p, o), {p.p, low});
  update(b, OpCode::k_split_sgd, {b.rate, b.scale, p.p, low, p.grad}, decay_attrs(p, o), {p.p, low});
}

void sgd(UpdateBuilder& b, const Parameter& p, const Optimizer& o) {
  Attrs attrs = decay_attrs(p, o);
  if (o.split_master_weights && b.g.training.precision == Precision::kBFloat16 && b.g.tensor(p.p).dtype == DType::kBF16)
    return split_sgd(b, p, o);
  if (p.rows.dy != kNone) return update(b, OpCode::k_sgd_rows, operands({b.rate, b.scale}, p, {}), attrs, {p.p});
  attrs["momentum"] = o.momentum;
  attrs["nesterov"] = o.nesterov;
  if (o.momentum == 0) return update(b, OpCode::k_sgd, {b.rate, b.scale, p.p, p.grad}, attrs, {p.p});
  const TensorId m = b.state(p.p, "momentum", b.g.tensor(p.p).dims);
  update(b, OpCode::k_sgd, {b.rate, b.scale, p.p, p.grad, m}, attrs, {p.p, m});
}

void adam(UpdateBuilder& b, const Parameter& p, const Optimizer& o) {
  Attrs attrs = decay_attrs(p, o);
  attrs["beta1"] = o.beta1;
  attrs["beta2"] = o.beta2;
  attrs["epsilon"] = o.epsilon;
  attrs["decoupled"] = o.kind == OptimizerKind::kAdamW;
  const TensorId m = b.state(p.p, "m", b.g.tensor(p.p).dims), v = b.state(p.p, "v", b.g.tensor(p.p).dims);
  const OpCode code = p.rows.dy != kNone ? OpCode::k_adam_rows : OpCode::k_adam;
  update(b, code, operands({b.rate, b.updates(), b.scale}, p, {m, v}), attrs, {p.p, m, v});
}

void adagrad(UpdateBuilder& b, const Parameter& p, const Optimizer& o) {
  Attrs attrs = decay_attrs(p, o);
  attrs["epsilon"] = o.epsilon;
  const TensorId h = b.state(p.p, "h", b.g.tensor(p.p).dims);
  const OpCode code = p.rows.dy != kNone ? OpCode::k_adagrad_rows : OpCode::k_adagrad;
  update(b, code, operands({b.rate, b.scale}, p, {h}), attrs, {p.p, h});
}

void lamb(UpdateBuilder& b, const Parameter& p, const Optimizer& o) {
  Attrs attrs = decay_attrs(p, o);
  attrs["beta1"] = o.beta1;
  attrs["beta2"] = o.beta2;
  attrs["epsilon"] = o.epsilon;
  const TensorId m = b.state(p.p, "m", b.g.tensor(p.p).dims), v = b.state(p.p, "v", b.g.tensor(p.p).dims);
  const auto r = b.emit_all(OpCode::k_lamb_direction, {b.updates(), b.scale, p.p, p.grad, m, v}, attrs);
  b.set_next(m, r[1]);
  b.set_next(v, r[2]);
  const TensorId pn = b.emit(OpCode::k_sum_of_squares, {p.p}), un = b.emit(OpCode::k_sum_of_squares, {r[0]});
  update(b, OpCode::k_lamb_apply, {b.rate, p.p, r[0], pn, un}, {}, {p.p});
}

void factored(UpdateBuilder& b, const Parameter& p, const Optimizer& o) { adafactor(b, p.p, p.grad, p.decay, o); }

constexpr Rule kRules[] = {{OptimizerKind::kSgd, sgd},         {OptimizerKind::kAdam, adam},
                           {OptimizerKind::kAdamW, adam},      {OptimizerKind::kLamb, lamb},
                           {OptimizerKind::kAdagrad, adagrad}, {OptimizerKind::kAdafactor, factored}};

// Sparse updates: the gradients of tables become rows, and are no tensors of their shape any more.
void find_rows(UpdateBuilder& b, std::vector<Parameter>& all) {
  const Training& training = b.g.training;
  if (!training.optimizer.sparse_updates) return;
  bool any = false;
  for (Parameter& p : all) {
    b.origin = p.use, b.of = p.p;
    p.rows = row_gradient(b, p.p, p.grad);
    if (p.rows.dy == kNone) continue;
    any = true;
    const std::string& name = b.g.tensor(p.p).name;
    if (training.optimizer.momentum != 0 && training.optimizer.kind == OptimizerKind::kSgd)
      throw unimplemented("training: sparse updates of table '{}' with momentum {}; use momentum 0, or adam or adagrad",
                          name, training.optimizer.momentum);
    if (training.clip_norm > 0)
      throw unimplemented(
          "training: clip_norm {} needs the norm of the whole gradient of table '{}', which sparse updates do not "
          "make; "
          "use clip_norm 0, or train without sparse_updates",
          training.clip_norm, name);
    std::erase_if(b.g.gradients, [&](const NamedTensor& t) { return t.name == name; });
  }
  b.of = kNone;
  if (!any)
    throw invalid(
        "training: sparse updates are of tables that steps look up (embedding, embedding_bag), and no trained "
        "parameter "
        "of this model is one; leave sparse_updates out");
}

// Updates work in the parameter's accumulate type, where an epsilon that is too small would be no epsilon.
void check_epsilon(const Graph& g, const std::vector<Parameter>& all) {
  const Optimizer& o = g.training.optimizer;
  if (o.kind == OptimizerKind::kSgd || o.epsilon == 0 || static_cast<float>(o.epsilon) != 0) return;
  for (const Parameter& p : all)
    if (accumulate_dtype(g.tensor(p.p).dtype) == DType::kF32)
      throw invalid(
          "training: epsilon is {}, which f32 does not have: it is 0 in the updates of parameter '{}' ({}). Give at "
          "least 1e-45, or 0",
          o.epsilon, g.tensor(p.p).name, name_of(g.tensor(p.p).dtype));
}

// State is named after its parameter, and the user may have given that name to another one.
void check_names(const Graph& g) {
  std::set<std::string_view> theirs;
  for (const Variable& v : g.variables)
    if (v.role != Role::kState) theirs.insert(g.tensor(v.tensor).name);
  for (const Variable& v : g.variables)
    if (v.role == Role::kState && theirs.contains(g.tensor(v.tensor).name))
      throw invalid(
          "parameter '{}' has the name of the optimizer's state '{}' of parameter '{}'; rename one of the two",
          g.tensor(v.tensor).name, v.state_name, g.tensor(v.owner).name);
}

const Rule* rule_of(OptimizerKind kind) {
  const auto at = std::ranges::find(kRules, kind, &Rule::kind);
  return at == std::end(kRules) ? nullptr : at;
}

}  // namespace

// What its rule makes of one.
double states_of(const Optimizer& optimizer) {
  const Rule* rule = rule_of(optimizer.kind);
  if (rule == nullptr) return 0;
  Graph g;
  g.scopes.emplace_back();
  const Dims dims{1 << 10, 1 << 10};
  g.tensors = {{.name = "p", .dtype = DType::kF32, .dims = dims, .kind = TensorKind::kVariable},
               {.name = "grad", .dtype = DType::kF32, .dims = dims, .kind = TensorKind::kInput}};
  g.variables.emplace_back().tensor = 0;
  UpdateBuilder b(g);
  b.rate = b.step_scalar("learning_rate", DType::kF32);
  rule->update(b, {.p = 0, .grad = 1, .decay = true, .rate = 1, .weight_decay = {}, .use = kNone, .rows = {}},
               optimizer);
  const auto bytes_of = [&](TensorId id) {
    return static_cast<double>(element_count(g.tensor(id).dims) * size_of(g.tensor(id).dtype));
  };
  double bytes = 0;
  for (const Variable& v : g.variables)
    if (v.role == Role::kState) bytes += bytes_of(v.tensor);
  return bytes / bytes_of(0);
}

void add_updates(Graph& graph) {
  const Optimizer& o = graph.training.optimizer;
  if (o.kind == OptimizerKind::kNone) return;
  std::vector<Parameter> all = parameters(graph);
  if (all.empty()) throw invalid("the loss does not depend on any trainable parameter: there is nothing to update");
  check_epsilon(graph, all);
  UpdateBuilder b(graph);
  const bool f64 = graph.training.precision == Precision::kFloat64;
  b.rate = b.step_scalar("learning_rate", f64 ? DType::kF64 : DType::kF32);
  const TensorId rate = b.rate;
  find_rows(b, all);
  const bool scaled = graph.training.precision == Precision::kFloat16;
  if (scaled) unscale(b, all);
  const TensorId factor = clip(b, all, graph.training.clip_norm);
  const TensorId overflow = b.scale;
  b.scale = !scaled ? factor : factor == kNone ? overflow : b.emit(OpCode::k_mul, {factor, overflow});
  const Rule* rule = rule_of(o.kind);
  if (rule == nullptr) throw invalid("training: optimizer number {} is unknown", static_cast<int>(o.kind));
  for (const Parameter& p : all) {
    b.origin = p.use, b.of = p.p;
    Optimizer own = o;
    if (p.weight_decay) own.weight_decay = *p.weight_decay;
    b.rate = p.rate == 1 ? rate : b.emit(OpCode::k_mul, {rate, b.constant(p.rate, b.g.tensor(rate).dtype)});
    rule->update(b, p, own);
  }
  b.of = kNone;
  if (scaled) keep_on_overflow(b);
  check_names(graph);
}

}  // namespace whale
