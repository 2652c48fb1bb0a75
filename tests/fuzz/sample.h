// Small honest inputs that the fuzz targets start from and the tests of the readers use.
#pragma once

#include "ops/op.h"
#include "plan/plan.h"

namespace whale {

inline TensorId add_variable(Graph& g, const std::string& name, Dims dims, Role role = Role::kParameter) {
  const auto id = static_cast<TensorId>(g.tensors.size());
  Tensor t;
  t.name = name;
  t.dims = std::move(dims);
  t.kind = TensorKind::kVariable;
  Variable v;
  v.tensor = id;
  v.role = role;
  v.trainable = role == Role::kParameter;
  v.decay = t.dims.size() >= 2;
  v.init = {InitKind::kNormal, 0.0, 0.02, "", ""};
  g.tensors.push_back(std::move(t));
  g.variables.push_back(v);
  return id;
}

inline TensorId add_input(Graph& g, const std::string& name, DType dtype, Dims dims) {
  const auto id = static_cast<TensorId>(g.tensors.size());
  Tensor t;
  t.name = name;
  t.dtype = dtype;
  t.dims = std::move(dims);
  t.kind = TensorKind::kInput;
  t.batch_dim = 0;
  g.tensors.push_back(std::move(t));
  g.inputs.push_back(id);
  return id;
}

// An embedding, a linear layer under scopes of several kinds, dropout, cross entropy, AdamW: every table of graph.fbs.
inline Graph sample_graph() {
  Graph g;
  g.name = "sample";
  g.default_strategy = "replica(2)";
  Scope replica;
  replica.kind = ScopeKind::kReplica;
  replica.parent = 0;
  replica.count = 2;
  replica.shares = {3, 1};
  g.scopes.push_back(replica);
  Scope block;
  block.kind = ScopeKind::kName;
  block.parent = 1;
  block.name = "block";
  g.scopes.push_back(block);
  const TensorId tokens = add_input(g, "tokens", DType::kI32, {8, 4});
  const TensorId targets = add_input(g, "targets", DType::kI32, {8, 4});
  const TensorId table = add_variable(g, "embedding", {16, 6});
  const TensorId w = add_variable(g, "block.w", {6, 16});
  const TensorId b = add_variable(g, "block.b", {16});
  const auto op = [&g](OpCode code, std::vector<TensorId> in, Attrs attrs, ScopeId scope, const char* name) {
    const OpId id = append_op(g, code, std::move(in), std::move(attrs), scope, name);
    g.op(id).location = "model.py:7";
    return g.op(id).outputs[0];
  };
  TensorId x = op(OpCode::k_embedding, {table, tokens}, {}, 1, "lookup");
  x = op(OpCode::k_dropout, {x}, {{"rate", 0.1}, {"key", int64_t{7}}}, 2, "drop");
  x = op(OpCode::k_matmul, {x, w, b}, {}, 2, "linear");
  g.outputs.push_back({"logits", x});
  x = op(OpCode::k_cross_entropy, {x, targets}, {}, 1, "entropy");
  x = op(OpCode::k_reduce_mean, {x}, {}, 1, "loss_mean");
  g.training.loss = x;
  g.training.optimizer.kind = OptimizerKind::kAdamW;
  g.training.optimizer.weight_decay = 0.1;
  g.training.lr_schedule = {LrScheduleKind::kCosine, 10, 100, 0.1};
  g.training.clip_norm = 1;
  return g;
}

}  // namespace whale
