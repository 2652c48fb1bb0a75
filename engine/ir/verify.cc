#include <algorithm>
#include <cmath>
#include <set>
#include <string_view>
#include <unordered_set>

#include "base/error.h"
#include "base/text.h"
#include "ir/graph.h"
#include "ir/learning_rate.h"
#include "ir/number_range.h"
#include "schedule/schedule.h"

namespace whale {
namespace {

bool in_range(int32_t id, size_t size) { return id >= 0 && static_cast<size_t>(id) < size; }

void check_scopes(const Graph& graph) {
  if (graph.scopes.empty() || graph.scopes[0].kind != ScopeKind::kRoot || graph.scopes[0].parent != kNone)
    throw invalid("scope 0 must be the root, without a parent");
  for (size_t i = 1; i < graph.scopes.size(); ++i) {
    const Scope& s = graph.scopes[i];
    if (static_cast<int>(s.kind) < 1 || s.kind > ScopeKind::kName)
      throw invalid("scope {} has kind number {}; expected 1 to {} (only scope 0 is the root)", i,
                    static_cast<int>(s.kind), static_cast<int>(ScopeKind::kName));
    if (s.parent < 0 || static_cast<size_t>(s.parent) >= i)
      throw invalid("scope {} has parent {}; expected an earlier scope, 0 to {}", i, s.parent, i - 1);
    const auto bad = [&](std::string what) {
      return invalid("{}", what).at_scope(graph.scope_path(static_cast<ScopeId>(i)));
    };
    const std::string told = graph.scope_path(static_cast<ScopeId>(i));
    if (s.kind == ScopeKind::kName && s.name.empty()) throw bad("a name scope has no name");
    if (s.count < 0 || s.micro_batches < 0 || s.virtual_stages < 0)
      throw bad(
          fmt::format("scope '{}': count {}, micro_batches {} and virtual_stages {} must not be negative (0: inferred)",
                      told, s.count, s.micro_batches, s.virtual_stages));
    if (s.count != 0 && s.shares.size() % static_cast<size_t>(s.count) != 0)
      throw bad(
          fmt::format("scope '{}': {} shares for a count of {}; give one share for each (or a row of them for each "
                      "position of the scopes around it)",
                      told, s.shares.size(), s.count));
    const size_t row = s.count ? static_cast<size_t>(s.count) : s.shares.size();
    double sum = 0;
    for (size_t k = 0; k < s.shares.size(); ++k) {
      const double share = s.shares[k];
      const bool first = k % row == 0, gap = share == kNoDevice && row < s.shares.size() && !first;
      if (!gap && (!std::isfinite(share) || share < 0 || (!first && s.shares[k - 1] == kNoDevice)))
        throw bad(fmt::format("scope '{}': share {} must be finite and >= 0 (or -1 at the end of a row: no device)",
                              told, share));
      sum += gap ? 0 : share;
      if ((k + 1) % row) continue;
      if (!(sum > 0 && std::isfinite(sum)))
        throw bad(fmt::format("scope '{}': the shares sum to {}; at least one must be positive", told, sum));
      sum = 0;
    }
    if (!s.nests.empty() && (s.kind != ScopeKind::kReplica || s.count < 2))
      throw bad(fmt::format("scope '{}': a list of nests is of two or more replicas", told));
    if (!s.by.empty() && s.by != "sample" && s.by != "micro_batch")
      throw bad(fmt::format("scope '{}': by is '{}', expected 'sample' or 'micro_batch'", told, s.by));
    try {
      read_schedule(s.schedule);
    } catch (const Error& e) {
      throw bad(fmt::format("scope '{}': schedule is '{}': {}", told, brief(s.schedule), e.message()));
    }
  }
}

void check_tensors(const Graph& graph) {
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    const Tensor& t = graph.tensors[i];
    if (!is_valid_dtype(static_cast<int>(t.dtype)))
      throw invalid("tensor {} ('{}') has dtype number {}", i, t.name, static_cast<int>(t.dtype));
    if (static_cast<int>(t.kind) > static_cast<int>(TensorKind::kStep))
      throw invalid("tensor {} ('{}') has kind number {}", i, t.name, static_cast<int>(t.kind));
    if (t.dims.size() > static_cast<size_t>(kMaxRank))
      throw invalid("tensor {} ('{}') has rank {}; at most {} is supported", i, t.name, t.dims.size(), kMaxRank);
    if (element_count(t.dims) > INT64_MAX / 16)
      throw invalid("tensor {} ('{}') of shape {} is too large", i, t.name, to_string(t.dims));
    if (t.kind == TensorKind::kInput) {
      if (t.batch_dim < -1 || t.batch_dim >= static_cast<int>(t.dims.size()))
        throw invalid("input '{}' of shape {} has batch dimension {}; expected -1 (none) to {}", t.name,
                      to_string(t.dims), t.batch_dim, static_cast<int>(t.dims.size()) - 1);
    } else if (t.batch_dim != -1) {
      throw invalid("tensor {} ('{}') is no input but has batch dimension {}", i, t.name, t.batch_dim);
    }
    if (t.kind == TensorKind::kStep) {
      static const std::set<std::string> kNames = {"learning_rate", "updates", "loss_scale"};
      if (!kNames.contains(t.name) || !t.dims.empty())
        throw invalid("step tensor '{}' of shape {}; expected a scalar named learning_rate, updates or loss_scale",
                      t.name, to_string(t.dims));
    }
    if (t.kind != TensorKind::kValue) {
      if (t.producer != kNone)
        throw invalid("tensor {} ('{}') is fed from outside but op {} produces it", i, t.name, t.producer);
      continue;
    }
    if (!in_range(t.producer, graph.ops.size()))
      throw invalid("tensor {} ('{}') has producer {}; expected an op, 0 to {}", i, t.name, t.producer,
                    static_cast<int64_t>(graph.ops.size()) - 1);
    const Op& op = graph.op(t.producer);
    if (!in_range(t.output, op.outputs.size()) || op.outputs[t.output] != static_cast<TensorId>(i))
      throw invalid("tensor {} ('{}') says it is output {} of op {} ('{}'), which does not list it there", i, t.name,
                    t.output, t.producer, op.name);
  }
}

void check_ops(const Graph& graph) {
  std::vector<bool> made(graph.tensors.size());
  for (size_t i = 0; i < graph.tensors.size(); ++i) made[i] = graph.tensors[i].kind != TensorKind::kValue;
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const Op& op = graph.ops[i];
    if (!in_range(op.scope, graph.scopes.size()))
      throw invalid("op {} ('{}') has scope {}; expected 0 to {}", i, op.name, op.scope, graph.scopes.size() - 1)
          .at_op(op.name);
    const auto bad = [&](std::string what) {
      return invalid("{}", what).at_op(op.name).at_scope(graph.scope_path(op.scope));
    };
    if (op.name.empty()) throw bad(fmt::format("op {} has no name", i));
    if (op.phase > Phase::kUpdate) throw bad(fmt::format("phase number {} is unknown", static_cast<int>(op.phase)));
    if (op.region > Region::kEpilogue)
      throw bad(fmt::format("region number {} is unknown", static_cast<int>(op.region)));
    if (op.origin != kNone && !in_range(op.origin, i))
      throw bad(fmt::format("origin is op {}; expected an earlier op than {}", op.origin, i));
    for (size_t k = 0; k < op.inputs.size(); ++k) {
      const TensorId id = op.inputs[k];
      if (id == kNone) continue;
      if (!in_range(id, graph.tensors.size()))
        throw bad(fmt::format("operand {} is tensor {}; expected 0 to {}", k, id,
                              static_cast<int64_t>(graph.tensors.size()) - 1));
      if (!made[id])
        throw bad(fmt::format(
            "operand {} is tensor {} ('{}'), which is made later; ops must stand in the order in which they run", k, id,
            graph.tensor(id).name));
    }
    for (size_t k = 0; k < op.outputs.size(); ++k) {
      const TensorId id = op.outputs[k];
      if (!in_range(id, graph.tensors.size()))
        throw bad(fmt::format("output {} is tensor {}; expected 0 to {}", k, id,
                              static_cast<int64_t>(graph.tensors.size()) - 1));
      const Tensor& t = graph.tensor(id);
      if (t.kind != TensorKind::kValue || t.producer != static_cast<OpId>(i) || t.output != static_cast<int>(k))
        throw bad(fmt::format("output {} is tensor {} ('{}'), which says that something else makes it", k, id, t.name));
      made[id] = true;
    }
  }
}

// A list of names, each non-empty and used once.
struct Names {
  const char* what;
  std::unordered_set<std::string_view> seen;
  void add(const std::string& name) {
    if (name.empty()) throw invalid("an {} has no name; give each a name of its own", what);
    if (!seen.insert(name).second) throw invalid("two {}s are named '{}'; give each a name of its own", what, name);
  }
};

void check_inputs(const Graph& graph) {
  std::vector<bool> listed(graph.tensors.size());
  Names names{"input", {}};
  for (const TensorId id : graph.inputs) {
    if (!in_range(id, graph.tensors.size()) || graph.tensor(id).kind != TensorKind::kInput)
      throw invalid("the list of inputs holds tensor {}, which is no input", id);
    if (listed[id]) throw invalid("input '{}' is listed twice", graph.tensor(id).name);
    listed[id] = true;
    names.add(graph.tensor(id).name);
  }
  for (size_t i = 0; i < graph.tensors.size(); ++i)
    if (graph.tensors[i].kind == TensorKind::kInput && !listed[i])
      throw invalid("tensor {} ('{}') is an input but not in the list of inputs", i, graph.tensors[i].name);
}

void check_variables(const Graph& graph) {
  std::vector<const Variable*> of(graph.tensors.size());
  Names names{"variable", {}};
  for (const Variable& v : graph.variables) {
    if (!in_range(v.tensor, graph.tensors.size()) || graph.tensor(v.tensor).kind != TensorKind::kVariable)
      throw invalid("the list of variables holds tensor {}, which is no variable", v.tensor);
    const Tensor& t = graph.tensor(v.tensor);
    if (of[v.tensor]) throw invalid("variable '{}' is listed twice", t.name);
    of[v.tensor] = &v;
    names.add(t.name);
    if (t.name == "__metadata__")
      throw invalid("no parameter can be named '{}': files of safetensors keep that name; choose another", t.name);
    if (v.role > Role::kBuffer) throw invalid("variable '{}' has role number {}", t.name, static_cast<int>(v.role));
    if (v.init.kind > InitKind::kData)
      throw invalid("variable '{}' has initializer number {}", t.name, static_cast<int>(v.init.kind));
    if (!std::isfinite(v.init.a) || !std::isfinite(v.init.b))
      throw invalid("variable '{}': initializer parameters {} and {} must be finite", t.name, v.init.a, v.init.b);
    const bool drawn = v.init.kind == InitKind::kNormal || v.init.kind == InitKind::kTruncatedNormal;
    if (drawn && v.init.b < 0)
      throw invalid("variable '{}': initializer's standard deviation is {}, expected 0 or more", t.name, v.init.b);
    if (v.init.kind == InitKind::kUniform && v.init.a > v.init.b)
      throw invalid("variable '{}': initializer is uniform from {} to {}, expected the lower bound first", t.name,
                    v.init.a, v.init.b);
    if (v.init.kind == InitKind::kConstant && !has_number(t.dtype, v.init.a))
      throw invalid("variable '{}': its initial value is {}, which {} does not have", t.name, v.init.a,
                    name_of(t.dtype));
    if (v.init.kind == InitKind::kFile && v.init.file.empty())
      throw invalid("variable '{}' is read from a file without a name", t.name);
    if (v.init.kind == InitKind::kData) {
      const auto bytes = static_cast<size_t>(element_count(t.dims) * size_of(v.init.data_type));
      if (v.init.data == nullptr || v.init.data->size() != bytes)
        throw invalid("variable '{}' of shape {} has {} bytes of initial values in {}, expected {}", t.name,
                      to_string(t.dims), v.init.data == nullptr ? 0 : v.init.data->size(), name_of(v.init.data_type),
                      bytes);
      if (v.init.data_type != t.dtype && !(is_float(v.init.data_type) && is_float(t.dtype)))
        throw invalid("variable '{}' is {}, and its initial values are {}", t.name, name_of(t.dtype),
                      name_of(v.init.data_type));
    }
    if (v.role == Role::kParameter && v.trainable && !is_float(t.dtype))
      throw invalid("parameter '{}' of dtype {} cannot be trained; use a floating point dtype, or make it frozen",
                    t.name, name_of(t.dtype));
    if (v.next == kNone) continue;
    if (!in_range(v.next, graph.tensors.size()))
      throw invalid("variable '{}' has next value {}, no tensor", t.name, v.next);
    const Tensor& next = graph.tensor(v.next);
    if (next.dtype != t.dtype || next.dims != t.dims)
      throw invalid("variable '{}' is {} {} but its next value '{}' is {} {}", t.name, name_of(t.dtype),
                    to_string(t.dims), next.name, name_of(next.dtype), to_string(next.dims));
  }
  for (size_t i = 0; i < graph.tensors.size(); ++i)
    if (graph.tensors[i].kind == TensorKind::kVariable && !of[i])
      throw invalid("tensor {} ('{}') is a variable but not in the list of variables", i, graph.tensors[i].name);
  for (const Variable& v : graph.variables) {
    const std::string& name = graph.tensor(v.tensor).name;
    constexpr double kLarge = 1e30;
    if (!(v.learning_rate >= 0 && v.learning_rate <= kLarge))
      throw invalid("variable '{}' has {} as its factor of the learning rate, expected 0 to {}", name, v.learning_rate,
                    kLarge);
    if (v.weight_decay && !(*v.weight_decay >= 0 && *v.weight_decay <= kLarge))
      throw invalid("variable '{}' has a weight decay of {}, expected 0 to {}", name, *v.weight_decay, kLarge);
    if (v.role != Role::kState) {
      if (v.owner != kNone) throw invalid("variable '{}' is no optimizer state but has owner {}", name, v.owner);
      continue;
    }
    if (!in_range(v.owner, graph.tensors.size()) || !of[v.owner] || of[v.owner]->role != Role::kParameter)
      throw invalid("optimizer state '{}' has owner {}, which is no parameter", name, v.owner);
    if (v.state_name.empty()) throw invalid("optimizer state '{}' has no state name", name);
  }
}

void check_named(const Graph& graph, const std::vector<NamedTensor>& list, const char* what) {
  Names names{what, {}};
  for (const NamedTensor& named : list) {
    names.add(named.name);
    if (!in_range(named.tensor, graph.tensors.size()))
      throw invalid("{} '{}' is tensor {}, which does not exist", what, named.name, named.tensor);
  }
}

void check_range(const char* name, double value, double low, double high) {
  if (!(value >= low && value <= high)) throw invalid("training: {} is {}, expected {} to {}", name, value, low, high);
}

// A share of what there was that is kept: never all of it.
void check_decay(const char* name, double value) {
  if (!(value >= 0 && value < 1)) throw invalid("training: {} is {}, expected 0 <= {} < 1", name, value, name);
}

void check_training(const Graph& graph) {
  const Training& training = graph.training;
  if (training.loss != kNone) {
    if (!in_range(training.loss, graph.tensors.size()))
      throw invalid("the loss is tensor {}, which does not exist", training.loss);
    const Tensor& loss = graph.tensor(training.loss);
    if (!loss.dims.empty() || !is_float(loss.dtype))
      throw invalid("the loss '{}' is {} {}; expected a floating point scalar (take a mean or a sum)", loss.name,
                    name_of(loss.dtype), to_string(loss.dims));
  }
  for (const NamedTensor& output : graph.outputs)
    if (output.name == "loss" && output.tensor != training.loss)
      throw invalid("output 'loss' is tensor {}, but that name is the loss's (tensor {}); choose another",
                    output.tensor, training.loss);
  for (const NamedTensor& output : graph.outputs)
    if (output.name.starts_with("grad:"))
      throw invalid("output '{}': names that begin with 'grad:' are those of gradients; choose another", output.name);
  const Optimizer& o = training.optimizer;
  if (o.kind > OptimizerKind::kAdafactor)
    throw invalid("training: optimizer number {} is unknown", static_cast<int>(o.kind));
  constexpr double kLarge = 1e30;
  check_range("learning_rate", o.learning_rate, 0, kLargestLearningRate);
  check_range("momentum", o.momentum, 0, 1);
  check_decay("beta1", o.beta1);
  check_decay("beta2", o.beta2);
  check_range("epsilon", o.epsilon, 0, kLarge);
  check_range("weight_decay", o.weight_decay, 0, kLarge);
  check_range("decay_rate", o.decay_rate, -kLarge, 0);
  check_range("clip_threshold", o.clip_threshold, 0, kLarge);
  if (o.kind == OptimizerKind::kAdafactor && o.clip_threshold == 0)
    throw invalid("training: clip_threshold is 0, expected above 0: it is the largest RMS of adafactor's updates");
  check_range("clip_norm", training.clip_norm, 0, kLarge);
  const bool sgd = o.kind == OptimizerKind::kSgd || o.kind == OptimizerKind::kNone;
  if (o.nesterov && o.momentum == 0)
    throw invalid(
        "training: nesterov is a form of momentum, which is 0; give a momentum such as 0.9, or leave nesterov out");
  if (o.momentum != 0 && !sgd)
    throw invalid("training: momentum is {}, which only sgd has; leave it out (adam's is beta1)", o.momentum);
  const bool by_rows = o.kind == OptimizerKind::kNone || o.kind == OptimizerKind::kSgd ||
                       o.kind == OptimizerKind::kAdam || o.kind == OptimizerKind::kAdamW ||
                       o.kind == OptimizerKind::kAdagrad;
  if (o.sparse_updates && !by_rows)
    throw invalid(
        "training: sparse updates of rows need sgd, adam, adamw or adagrad; LAMB and Adafactor use norms of "
        "whole parameters");
  if (o.split_master_weights && (o.kind != OptimizerKind::kSgd && o.kind != OptimizerKind::kNone))
    throw invalid("training: split master weights need the optimizer sgd");
  if (o.split_master_weights && o.momentum != 0)
    throw invalid("training: split master weights need momentum 0, found {}; use bf16 without split_master_weights",
                  o.momentum);
  if (training.accumulation < 1)
    throw invalid("training: accumulation is {}, expected at least 1", training.accumulation);
  if (training.precision > Precision::kFloat16)
    throw invalid("training: precision number {} is unknown", static_cast<int>(training.precision));
  const LearningRateSchedule& s = training.lr_schedule;
  if (s.kind > LrScheduleKind::kInverseSqrt)
    throw invalid("training: lr_schedule number {} is unknown", static_cast<int>(s.kind));
  check_range("final_fraction", s.final_fraction, 0, 1);
  if (s.warmup_steps < 0 || s.total_steps < 0)
    throw invalid("training: warmup_steps {} and total_steps {} must not be negative", s.warmup_steps, s.total_steps);
  if ((s.kind == LrScheduleKind::kLinear || s.kind == LrScheduleKind::kCosine) && s.total_steps <= s.warmup_steps)
    throw invalid("training: total_steps is {}; a linear or cosine schedule must end after its {} warm-up steps",
                  s.total_steps, s.warmup_steps);
  const bool ends = s.kind == LrScheduleKind::kLinear || s.kind == LrScheduleKind::kCosine;
  if (!ends && s.total_steps != 0)
    throw invalid("training: total_steps is {}, which only linear and cosine schedules have; leave it out",
                  s.total_steps);
  if (s.kind == LrScheduleKind::kConstant && s.final_fraction != 0)
    throw invalid("training: final_fraction is {}, and a constant schedule does not decay; leave it out",
                  s.final_fraction);
}

}  // namespace

void verify(const Graph& graph) {
  constexpr size_t kMost = 1u << 30;
  if (graph.tensors.size() > kMost || graph.ops.size() > kMost || graph.scopes.size() > kMost)
    throw invalid("the graph has more than 2^30 tensors, ops or scopes");
  check_scopes(graph);
  check_tensors(graph);
  check_ops(graph);
  check_inputs(graph);
  check_variables(graph);
  check_named(graph, graph.outputs, "output");
  check_named(graph, graph.gradients, "gradient");
  check_training(graph);
}

}  // namespace whale
