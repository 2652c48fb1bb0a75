// Building graphs: inputs, parameters, ops, scopes, training. Each call checks first and changes the graph last; a
// failure in between is rolled back.
#include <algorithm>

#include "grad/gradients.h"
#include "guard.h"
#include "handles.h"
#include "ops/op.h"
#include "schema/graph_file.h"
#include "task/strategy.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace whale::capi {
namespace {

// The graph as it was, unless keep() is called.
class Rollback {
 public:
  explicit Rollback(Graph& graph)
      : g_(graph),
        tensors_(g_.tensors.size()),
        ops_(g_.ops.size()),
        scopes_(g_.scopes.size()),
        variables_(g_.variables.size()),
        inputs_(g_.inputs.size()),
        outputs_(g_.outputs.size()) {}
  ~Rollback() {
    if (kept_) return;
    g_.tensors.resize(tensors_);
    g_.ops.resize(ops_);
    g_.scopes.resize(scopes_);
    g_.variables.resize(variables_);
    g_.inputs.resize(inputs_);
    g_.outputs.resize(outputs_);
  }
  void keep() { kept_ = true; }

 private:
  Graph& g_;
  size_t tensors_, ops_, scopes_, variables_, inputs_, outputs_;
  bool kept_ = false;
};

whale_graph& unsealed(whale_graph* graph) {
  whale_graph& g = need(graph, "graph");
  if (g.sealed)
    throw error(Code::kFailedPrecondition, "graph '{}' is sealed: it cannot be changed any more", g.graph->name);
  return g;
}

TensorId checked_value(const Graph& graph, whale_value value) {
  if (value < 0 || static_cast<size_t>(value) >= graph.tensors.size()) {
    throw invalid("value {} does not exist; graph '{}' has {}", value, graph.name, graph.tensors.size());
  }
  return value;
}

// The scope that an option names; 0: the innermost open one.
ScopeId checked_scope(const whale_graph& g, whale_scope scope, const char* what) {
  if (scope == 0) return g.scope_stack.back();
  if (scope == WHALE_ROOT) return 0;
  if (scope < 0 || static_cast<size_t>(scope) >= g.graph->scopes.size())
    throw invalid("argument `{}` is {}; graph '{}' has scopes 1 to {}", what, scope, g.graph->name,
                  g.graph->scopes.size() - 1);
  return scope;
}

// "block.3." inside name scopes "block" and "3".
std::string prefix(const whale_graph& g, ScopeId scope) {
  std::string out;
  for (ScopeId id = scope; id > 0; id = g.graph->scopes[id].parent) {
    const Scope& s = g.graph->scopes[id];
    if (s.kind == ScopeKind::kName) out.insert(0, s.name + ".");
  }
  return out;
}

// Every value is copied: the caller's tensor may go.
Initializer data_of(const HostTensor& tensor) {
  Initializer out;
  out.kind = InitKind::kData;
  out.data_type = tensor.dtype;
  const auto* bytes = static_cast<const uint8_t*>(tensor.data);
  out.data = std::make_shared<const std::vector<uint8_t>>(bytes, bytes + tensor.bytes());
  return out;
}

// `*`: any text; `?`: one character.
bool matches(std::string_view pattern, std::string_view name) {
  size_t star = std::string_view::npos, from = 0, p = 0, n = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++, from = n;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == name[n])) {
      ++p, ++n;
    } else if (star != std::string_view::npos) {
      p = star + 1, n = ++from;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

// What `zeros` says of a field whose default is another number than 0.
double or_zero(double given, double fallback, int32_t zeros, int zero, const char* what) {
  if ((zeros & zero) != 0 && given != 0)
    throw invalid("options.zeros says that options.{} is meant to be 0, and it is {}", what, given);
  return given != 0 || (zeros & zero) != 0 ? given : fallback;
}

void check_new(const whale_graph& g, const std::string& name, const char* what) {
  if (g.names.count(name) != 0)
    throw error(Code::kAlreadyExists, "{} '{}': that name is taken in graph '{}'", what, brief(name),
                brief(g.graph->name));
}

// The rules of ir/verify for one new thing, by itself in a graph, so that an error comes from the call that made it.
void verify_alone(const Tensor& tensor, const Variable* variable) {
  Graph g;
  g.tensors.push_back(tensor);
  if (variable != nullptr) {
    g.variables.push_back(*variable);
    g.variables[0].tensor = 0;
  } else {
    g.inputs.push_back(0);
  }
  verify(g);
}

TensorId add_tensor(whale_graph& g, Tensor tensor, const Variable* variable) {
  Graph& graph = *g.graph;
  verify_alone(tensor, variable);
  Rollback rollback(graph);
  const auto id = static_cast<TensorId>(graph.tensors.size());
  if (variable != nullptr) {
    graph.variables.push_back(*variable);
    graph.variables.back().tensor = id;
  } else {
    graph.inputs.push_back(id);
  }
  graph.tensors.push_back(std::move(tensor));
  g.names.emplace(graph.tensors.back().name, 1);
  rollback.keep();
  return id;
}

Attr attr_value(const whale_attr& a, const std::string& name) {
  switch (a.kind) {
    case WHALE_ATTR_INT: return a.i;
    case WHALE_ATTR_FLOAT: return a.f;
    case WHALE_ATTR_BOOL: return a.i != 0;
    case WHALE_ATTR_STRING: return text(a.s, "attr.s");
    case WHALE_ATTR_INTS: {
      const auto list = array(a.ints, a.count, "attr.ints");
      return std::vector<int64_t>(list.begin(), list.end());
    }
    case WHALE_ATTR_FLOATS: {
      const auto list = array(a.floats, a.count, "attr.floats");
      return std::vector<double>(list.begin(), list.end());
    }
  }
  throw invalid("attribute '{}' has kind {}, expected a whale_attr_kind (0 to 5)", name, a.kind);
}

Attrs read_attrs(const whale_attr* attrs, size_t count) {
  Attrs out;
  for (const whale_attr& a : array(attrs, count, "attrs")) {
    std::string name = nonempty(a.name, "attr.name");
    if (!out.try_emplace(name, attr_value(a, name)).second) throw invalid("attribute '{}' is given twice", name);
  }
  return out;
}

// Which kinds of scope have an option; name is any's.
void check_scope_options(const Scope& s) {
  using enum ScopeKind;
  const struct {
    const char* name;
    bool given;
    std::vector<ScopeKind> kinds;
  } options[] = {
      {"count", s.count != 0, {kReplica, kSplit, kStage, kPipeline}},
      {"shares", !s.shares.empty(), {kReplica, kSplit}},
      {"by", !s.by.empty(), {kReplica}},
      {"factor", !s.factor.empty(), {kSplit}},
      {"micro_batches", s.micro_batches != 0, {kPipeline}},
      {"schedule", !s.schedule.empty(), {kPipeline}},
      {"virtual_stages", s.virtual_stages != 0, {kPipeline}},
      {"device_order", !s.device_order.empty(), {kReplica, kCluster}},
      {"devices", !s.devices.empty(), {kCluster}},
  };
  for (const auto& option : options) {
    if (!option.given || std::ranges::find(option.kinds, s.kind) != option.kinds.end()) continue;
    std::string kinds;
    for (const ScopeKind k : option.kinds) kinds += fmt::format("{}{}", kinds.empty() ? "" : ", ", name_of(k));
    throw invalid("options.{} is given for a {} scope; it is an option of {}", option.name, name_of(s.kind), kinds);
  }
}

Scope read_scope(const whale_scope_options& o, ScopeId parent) {
  Scope s;
  s.kind = number<ScopeKind>(o.kind, WHALE_SCOPE_REPLICA, WHALE_SCOPE_NAME, "options.kind");
  s.parent = parent;
  s.name = text(o.name, "options.name");
  s.count = o.count;
  const auto shares = array(o.shares, o.share_count, "options.shares");
  s.shares.assign(shares.begin(), shares.end());
  s.by = text(o.by, "options.by");
  s.factor = text(o.factor, "options.factor");
  s.micro_batches = o.micro_batches;
  s.schedule = text(o.schedule, "options.schedule");
  s.virtual_stages = o.virtual_stages;
  s.device_order = text(o.device_order, "options.device_order");
  s.devices = text(o.devices, "options.devices");
  check_scope_options(s);
  return s;
}

OptimizerKind optimizer_of(int32_t kind) {
  switch (number<int>(kind, WHALE_OPTIMIZER_SGD, WHALE_OPTIMIZER_ADAFACTOR, "options.optimizer")) {
    case WHALE_OPTIMIZER_SGD: return OptimizerKind::kSgd;
    case WHALE_OPTIMIZER_NONE: return OptimizerKind::kNone;
    default: return static_cast<OptimizerKind>(kind);
  }
}

double epsilon_of(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kLamb: return 1e-6;
    case OptimizerKind::kAdagrad: return 1e-10;
    case OptimizerKind::kAdafactor: return 1e-30;
    default: return 1e-8;
  }
}

Training read_training(const whale_training_options& o, TensorId loss) {
  Training t;
  t.loss = loss;
  t.optimizer.kind = optimizer_of(o.optimizer);
  const auto zeros = number<int>(o.zeros, 0, 31, "options.zeros");
  const auto value = [&](double given, double fallback, int zero, const char* what) {
    return or_zero(given, fallback, zeros, zero, what);
  };
  t.optimizer.learning_rate = value(o.learning_rate, 1e-3, WHALE_ZERO_LEARNING_RATE, "learning_rate");
  t.optimizer.momentum = o.momentum;
  t.optimizer.nesterov = flag(o.nesterov, "options.nesterov");
  t.optimizer.beta1 = value(o.beta1, 0.9, WHALE_ZERO_BETA1, "beta1");
  t.optimizer.beta2 = value(o.beta2, 0.999, WHALE_ZERO_BETA2, "beta2");
  t.optimizer.epsilon = value(o.epsilon, epsilon_of(t.optimizer.kind), WHALE_ZERO_EPSILON, "epsilon");
  t.optimizer.weight_decay = o.weight_decay;
  t.optimizer.decay_rate = value(o.decay_rate, -0.8, WHALE_ZERO_DECAY_RATE, "decay_rate");
  t.optimizer.clip_threshold = o.clip_threshold != 0 ? o.clip_threshold : 1;
  t.optimizer.sparse_updates = flag(o.sparse_updates, "options.sparse_updates");
  t.optimizer.split_master_weights = flag(o.split_master_weights, "options.split_master_weights");
  t.lr_schedule.kind =
      number<LrScheduleKind>(o.lr_schedule, WHALE_LR_CONSTANT, WHALE_LR_INVERSE_SQRT, "options.lr_schedule");
  t.lr_schedule.warmup_steps = o.warmup_steps;
  t.lr_schedule.total_steps = o.total_steps;
  t.lr_schedule.final_fraction = o.final_fraction;
  t.clip_norm = o.clip_norm;
  t.accumulation = o.accumulation != 0 ? o.accumulation : 1;
  t.precision = checked_precision(o.precision, "options.precision").value_or(Precision::kFloat32);
  return t;
}

}  // namespace

std::string unique_name(whale_graph& g, const std::string& name) {
  if (g.names.count(name) == 0) return name;
  for (int& last = g.names[name];;) {
    std::string next = fmt::format("{}_{}", name, ++last);
    if (g.names.count(next) == 0) return next;
  }
}

}  // namespace whale::capi

whale_status* whale_graph_create(whale_engine* engine, whale_str name, whale_graph** out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    auto graph = std::make_unique<whale_graph>();
    graph->graph = std::make_shared<Graph>();
    graph->graph->name = text(name, "name");
    *out = graph.release();
  });
}

void whale_graph_release(whale_graph* graph) { delete graph; }

whale_status* whale_graph_input(whale_graph* graph, whale_str name, int32_t dtype, const int64_t* dims, size_t rank,
                                int32_t batch_dim, whale_value* out) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    need(out, "out");
    Tensor t;
    t.name = nonempty(name, "name");
    t.dtype = checked_dtype(dtype);
    t.dims = checked_dims(t.dtype, dims, rank);
    t.kind = TensorKind::kInput;
    t.batch_dim = batch_dim;
    check_new(g, t.name, "input");
    *out = add_tensor(g, std::move(t), nullptr);
  });
}

whale_status* whale_graph_parameter(whale_graph* graph, whale_str name, int32_t dtype, const int64_t* dims, size_t rank,
                                    const whale_parameter_options* options, whale_value* out) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    need(out, "out");
    const whale_parameter_options o =
        capi::options(options, whale_parameter_options WHALE_PARAMETER_OPTIONS_INIT, "options");
    Tensor t;
    t.name = prefix(g, checked_scope(g, o.scope, "options.scope")) + nonempty(name, "name");
    t.dtype = checked_dtype(dtype);
    t.dims = checked_dims(t.dtype, dims, rank);
    t.kind = TensorKind::kVariable;
    check_new(g, t.name, "parameter");
    Variable v;
    v.role = flag(o.buffer, "options.buffer") ? Role::kBuffer : Role::kParameter;
    v.trainable = !flag(o.frozen, "options.frozen") && v.role == Role::kParameter;
    const auto decay = number<int>(o.decay, WHALE_DECAY_BY_RANK, WHALE_DECAY_NEVER, "options.decay");
    v.decay = decay == WHALE_DECAY_ALWAYS || (decay == WHALE_DECAY_BY_RANK && rank >= 2);
    const auto init = number<InitKind>(o.init, WHALE_INIT_ZEROS, WHALE_INIT_DATA, "options.init");
    if ((init == InitKind::kData) != (o.data != nullptr))
      throw invalid("`options.data` is {}, and `options.init` is {}: one asks for the other",
                    o.data == nullptr ? "NULL" : "given", o.init);
    if (o.data != nullptr) {
      if (o.data->host.dims != t.dims)
        throw invalid("parameter '{}' is {}, and its initial values are {}", t.name, to_string(t.dims),
                      to_string(o.data->host.dims));
      v.init = data_of(o.data->host);
    }
    v.init.kind = init;
    v.init.a = o.a;
    v.init.b = o.b;
    v.init.file = text(o.file, "options.file");
    v.init.key = text(o.key, "options.key");
    if (v.init.kind == InitKind::kFile && v.init.key.empty()) v.init.key = t.name;
    *out = add_tensor(g, std::move(t), &v);
  });
}

whale_status* whale_graph_constant(whale_graph* graph, whale_str name, const whale_tensor* tensor, whale_value* out) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    need(out, "out");
    const HostTensor& values = need(tensor, "tensor").host;
    Tensor t;
    t.name = prefix(g, g.scope_stack.back()) + nonempty(name, "name");
    t.dtype = values.dtype;
    t.dims = values.dims;
    t.kind = TensorKind::kVariable;
    check_new(g, t.name, "constant");
    Variable v;
    v.role = Role::kBuffer;
    v.trainable = v.decay = false;
    v.init = data_of(values);
    *out = add_tensor(g, std::move(t), &v);
  });
}

whale_status* whale_graph_parameter_group(whale_graph* graph, whale_str pattern, const whale_group_options* options) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    const std::string wanted = nonempty(pattern, "pattern");
    need(options, "options");
    const whale_group_options o = capi::options(options, whale_group_options WHALE_GROUP_OPTIONS_INIT, "options");
    const auto zeros = number<int>(o.zeros, 0, WHALE_ZERO_LEARNING_RATE | WHALE_ZERO_WEIGHT_DECAY, "options.zeros");
    if ((zeros & ~(WHALE_ZERO_LEARNING_RATE | WHALE_ZERO_WEIGHT_DECAY)) != 0)
      throw invalid("argument `options.zeros` is {}, expected WHALE_ZERO_LEARNING_RATE and WHALE_ZERO_WEIGHT_DECAY",
                    zeros);
    Variable as;
    as.learning_rate = or_zero(o.learning_rate_factor, 1, zeros, WHALE_ZERO_LEARNING_RATE, "learning_rate_factor");
    if (const double decay = or_zero(o.weight_decay, 0, zeros, WHALE_ZERO_WEIGHT_DECAY, "weight_decay");
        decay != 0 || (zeros & WHALE_ZERO_WEIGHT_DECAY) != 0)
      as.weight_decay = decay;
    constexpr double kLarge = 1e30;
    if (!(as.learning_rate >= 0 && as.learning_rate <= kLarge))
      throw invalid("argument `options.learning_rate_factor` is {}, expected 0 to {}", as.learning_rate, kLarge);
    if (as.weight_decay && !(*as.weight_decay >= 0 && *as.weight_decay <= kLarge))
      throw invalid("argument `options.weight_decay` is {}, expected 0 to {}", *as.weight_decay, kLarge);
    bool any = false;
    for (Variable& v : g.graph->variables) {
      if (v.role != Role::kParameter || !v.trainable || !matches(wanted, g.graph->tensor(v.tensor).name)) continue;
      any = true;
      v.learning_rate = as.learning_rate;
      v.weight_decay = as.weight_decay;
    }
    if (!any) throw error(Code::kNotFound, "no trained parameter of '{}' matches '{}'", g.graph->name, brief(wanted));
  });
}

whale_status* whale_graph_op(whale_graph* graph, whale_str op, const whale_value* inputs, size_t input_count,
                             const whale_attr* attrs, size_t attr_count, const whale_op_options* options,
                             whale_value* outputs, size_t capacity, size_t* output_count) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    Graph& ir = *g.graph;
    const whale_op_options o = capi::options(options, whale_op_options WHALE_OP_OPTIONS_INIT, "options");
    const std::string location = text(o.location, "options.location");
    const ScopeId scope = checked_scope(g, o.scope, "options.scope");
    Rollback rollback(ir);
    std::string name = text(o.name, "options.name");
    try {
      const std::string type = nonempty(op, "op");
      name = unique_name(g, prefix(g, scope) + (name.empty() ? type : name));
      const OpCode code = code_of(type);
      if (has_flag(code, kInternal)) throw invalid("op '{}' is made by the planner only", type);
      TensorIds operands;
      for (const whale_value v : array(inputs, input_count, "inputs"))
        operands.push_back(v == WHALE_NONE ? kNone : checked_value(ir, v));
      const OpId id = append_op(ir, code, std::move(operands), read_attrs(attrs, attr_count), scope, name);
      const TensorIds& made = ir.op(id).outputs;
      if (made.size() > capacity)
        throw invalid("op '{}' has {} outputs; there is room for {}", type, made.size(), capacity);
      if (!made.empty()) need(outputs, "outputs");
      need(output_count, "output_count");
      ir.op(id).location = location;
      for (const TensorId t : made) g.names.emplace(ir.tensor(t).name, 1);
      g.names.emplace(name, 1);
      std::copy(made.begin(), made.end(), outputs);
      *output_count = made.size();
    } catch (const Error& e) {
      Error located(e.code(), location.empty() ? e.message() : fmt::format("{}: {}", location, e.message()));
      throw located.at_op(e.where().op)
          .at_op(name)
          .at_scope(e.where().scope)
          .at_scope(ir.scope_path(scope))
          .with_damage(e.damage());
    }
    rollback.keep();
  });
}

whale_status* whale_graph_value(const whale_graph* graph, whale_value value, int32_t* dtype, const int64_t** dims,
                                size_t* rank) {
  return guard([&] {
    const Graph& g = *need(graph, "graph").graph;
    const Tensor& t = g.tensor(checked_value(g, value));
    need(dtype, "dtype");
    need(dims, "dims");
    need(rank, "rank");
    *dtype = static_cast<int32_t>(t.dtype);
    *dims = t.dims.data();
    *rank = t.dims.size();
  });
}

namespace whale::capi {
namespace {
ScopeId add_scope(whale_graph& g, ScopeId parent, const whale_scope_options* options) {
  need(options, "options");
  const whale_scope_options o = capi::options(options, whale_scope_options WHALE_SCOPE_OPTIONS_INIT, "options");
  int depth = 0;
  for (ScopeId id = parent; id > 0; id = g.graph->scopes[id].parent) ++depth;
  if (depth >= 200) throw invalid("scopes nest deeper than 200");
  Scope scope = read_scope(o, parent);
  Graph alone;
  alone.scopes.push_back(scope);
  alone.scopes[1].parent = 0;
  verify(alone);
  g.graph->scopes.push_back(std::move(scope));
  return static_cast<ScopeId>(g.graph->scopes.size() - 1);
}
}  // namespace
}  // namespace whale::capi

whale_status* whale_graph_scope_begin(whale_graph* graph, const whale_scope_options* options) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    Rollback rollback(*g.graph);
    g.scope_stack.push_back(add_scope(g, g.scope_stack.back(), options));
    rollback.keep();
  });
}

whale_status* whale_graph_scope(whale_graph* graph, whale_scope parent, const whale_scope_options* options,
                                whale_scope* out) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    need(out, "out");
    *out = add_scope(g, checked_scope(g, parent, "parent"), options);
  });
}

whale_status* whale_graph_scope_open(whale_graph* graph, whale_scope scope) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    g.scope_stack.push_back(checked_scope(g, scope, "scope"));
  });
}

whale_status* whale_graph_scope_end(whale_graph* graph) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    if (g.scope_stack.size() == 1) throw error(Code::kFailedPrecondition, "no scope is open");
    g.scope_stack.pop_back();
  });
}

whale_status* whale_graph_gradients(whale_graph* graph, whale_value of, const whale_value* by, size_t by_count,
                                    whale_value* outputs) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    Graph& ir = *g.graph;
    const TensorId differentiated = checked_value(ir, of);
    TensorIds values;
    for (const whale_value v : array(by, by_count, "by")) values.push_back(checked_value(ir, v));
    if (values.empty()) throw invalid("argument `by` is empty: there is nothing to differentiate by");
    need(outputs, "outputs");
    Rollback rollback(ir);
    const size_t first = ir.ops.size();
    const TensorIds made = append_gradients(ir, differentiated, values);
    // Names as whale_graph_op gives them.
    std::vector<std::string> names;
    try {
      for (size_t i = first; i < ir.ops.size(); ++i) {
        Op& op = ir.ops[i];
        const std::string old = op.name;
        op.name = unique_name(g, prefix(g, op.scope) + "grad." + def(op.code).name);
        for (const TensorId id : op.outputs) {
          Tensor& t = ir.tensor(id);
          t.name = op.name + t.name.substr(old.size());
          g.names.emplace(t.name, 1), names.push_back(t.name);
        }
        g.names.emplace(op.name, 1), names.push_back(op.name);
      }
    } catch (...) {
      for (const std::string& name : names) g.names.erase(name);
      throw;
    }
    std::copy(made.begin(), made.end(), outputs);
    rollback.keep();
  });
}

whale_status* whale_graph_output(whale_graph* graph, whale_str name, whale_value value) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    const std::string text = nonempty(name, "name");
    const TensorId id = checked_value(*g.graph, value);
    for (const NamedTensor& o : g.graph->outputs) {
      if (o.name == text) throw error(Code::kAlreadyExists, "output '{}' exists already", text);
    }
    if (text == "loss" && id != g.graph->training.loss) {
      throw invalid("output name 'loss' belongs to the value that is minimized; choose another");
    }
    g.graph->outputs.push_back({text, id});
  });
}

whale_status* whale_graph_minimize(whale_graph* graph, whale_value loss, const whale_training_options* options) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    const whale_training_options o =
        capi::options(options, whale_training_options WHALE_TRAINING_OPTIONS_INIT, "options");
    const TensorId id = checked_value(*g.graph, loss);
    const Training training = read_training(o, id);
    Graph alone;
    alone.tensors.push_back(g.graph->tensor(id));
    alone.tensors[0].kind = TensorKind::kInput;
    alone.tensors[0].producer = kNone;
    alone.tensors[0].output = 0;
    alone.tensors[0].batch_dim = -1;
    if (alone.tensors[0].name.empty()) alone.tensors[0].name = "loss";
    alone.inputs.push_back(0);
    alone.training = training;
    alone.training.loss = 0;
    verify(alone);
    for (const NamedTensor& output : g.graph->outputs) {
      if (output.name == "loss" && output.tensor != id)
        throw invalid("output 'loss' is another value than the loss; rename it");
    }
    g.graph->training = training;
  });
}

whale_status* whale_graph_default_strategy(whale_graph* graph, whale_str strategy) {
  return guard([&] {
    whale_graph& g = unsealed(graph);
    std::string nest = text(strategy, "strategy");
    if (!nest.empty()) (void)parse_clauses(nest);
    g.graph->default_strategy = std::move(nest);
  });
}

whale_status* whale_graph_seal(whale_graph* graph) {
  return guard([&] {
    whale_graph& g = need(graph, "graph");
    if (g.sealed) return;
    if (g.scope_stack.size() > 1) {
      const std::string path = g.graph->scope_path(g.scope_stack.back());
      throw error(Code::kFailedPrecondition, "scope '{}' is still open; end it before sealing", path).at_scope(path);
    }
    verify(*g.graph);
    verify_ops(*g.graph);
    if (!g.graph->default_strategy.empty()) check_clauses(*g.graph, parse_clauses(g.graph->default_strategy));
    g.sealed = true;
  });
}
