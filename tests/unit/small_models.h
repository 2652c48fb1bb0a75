// Small models for tests of the planner: built as a user's graph, not yet differentiated.
#pragma once

#include <string>
#include <vector>

#include "ops/op.h"

namespace whale::small {

struct Model {
  Graph g;
  ScopeId scope = 0;
  TensorId input(const char* name, Dims dims, DType dtype = DType::kF32, int batch_dim = 0) {
    Tensor t;
    t.name = name, t.dtype = dtype, t.dims = std::move(dims), t.kind = TensorKind::kInput, t.batch_dim = batch_dim;
    g.tensors.push_back(std::move(t));
    g.inputs.push_back(static_cast<TensorId>(g.tensors.size() - 1));
    return g.inputs.back();
  }
  TensorId variable(const std::string& name, Dims dims, Role role = Role::kParameter) {
    Tensor t;
    t.name = name, t.dims = std::move(dims), t.kind = TensorKind::kVariable;
    g.tensors.push_back(std::move(t));
    Variable v;
    v.tensor = static_cast<TensorId>(g.tensors.size() - 1);
    v.role = role;
    v.trainable = role == Role::kParameter;
    v.init = {.kind = InitKind::kNormal, .a = 0, .b = 0.02, .file = {}, .key = {}};
    g.variables.push_back(v);
    return v.tensor;
  }
  TensorId op(OpCode code, std::vector<TensorId> inputs, Attrs attrs = {}, std::string name = {}) {
    return g.op(append_op(g, code, std::move(inputs), std::move(attrs), scope, std::move(name))).outputs[0];
  }
  ScopeId enter(ScopeKind kind, int64_t count = 0, std::vector<double> shares = {}) {
    Scope s;
    s.kind = kind, s.parent = scope, s.count = count, s.shares = std::move(shares);
    g.scopes.push_back(std::move(s));
    return scope = static_cast<ScopeId>(g.scopes.size()) - 1;
  }
  void minimize(TensorId loss, OptimizerKind kind) {
    g.training.loss = loss;
    g.training.optimizer.kind = kind;
  }
};

// matmul + bias + relu, matmul, cross entropy; weights [dim, hidden], [hidden, 3].
inline Model mlp(int64_t batch = 8, OptimizerKind kind = OptimizerKind::kSgd, int64_t dim = 4, int64_t hidden = 16) {
  using enum OpCode;
  Model m;
  m.g.name = "mlp";
  const TensorId x = m.input("x", {batch, dim}), y = m.input("y", {batch}, DType::kI32);
  const TensorId w1 = m.variable("w1", {dim, hidden}), b1 = m.variable("b1", {hidden}),
                 w2 = m.variable("w2", {hidden, 3});
  const TensorId h = m.op(k_relu, {m.op(k_add, {m.op(k_matmul, {x, w1}, {}, "fc1"), b1}, {}, "bias")}, {}, "act");
  const TensorId logits = m.op(k_matmul, {h, w2}, {}, "fc2");
  m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, y}, {}, "ce")}, {}, "loss"), kind);
  m.g.outputs = {{"logits", logits}};
  return m;
}

// One matrix [dim, dim] that is used `uses` times, in blocks with residuals.
inline Model shared(int64_t uses, int64_t batch = 8, int64_t dim = 16) {
  using enum OpCode;
  Model m;
  m.g.name = "shared";
  TensorId h = m.input("x", {batch, dim});
  const TensorId y = m.input("y", {batch}, DType::kI32), w = m.variable("w", {dim, dim});
  for (int64_t l = 0; l < uses; ++l) h = m.op(k_add, {h, m.op(k_relu, {m.op(k_matmul, {h, w})})});
  const TensorId logits = m.op(k_matmul, {h, m.variable("head", {dim, 5})}, {}, "logits");
  m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, y}, {}, "ce")}, {}, "loss"), OptimizerKind::kAdamW);
  m.g.outputs = {{"logits", logits}};
  return m;
}

// Token and position embeddings (position's gradient is a sum over the batch), blocks of attention and a gelu
// feed-forward with dropout and residuals, tied head, labels counted where they are not ignored.
inline Model gpt(int64_t batch = 6, OptimizerKind kind = OptimizerKind::kAdamW, int64_t layers = 2, int64_t seq = 8,
                 int64_t dim = 16, int64_t vocab = 32, int64_t heads = 2) {
  using enum OpCode;
  Model m;
  m.g.name = "gpt";
  const TensorId tokens = m.input("tokens", {batch, seq}, DType::kI32),
                 targets = m.input("targets", {batch, seq}, DType::kI32);
  const TensorId wte = m.variable("wte", {vocab, dim}), wpe = m.variable("wpe", {seq, dim});
  TensorId h = m.op(k_add, {m.op(k_embedding, {wte, tokens}), wpe}, {}, "embed");
  for (int64_t l = 0; l < layers; ++l) {
    const std::string p = "h" + std::to_string(l) + ".";
    const TensorId n1 = m.op(k_layer_norm, {h, m.variable(p + "ln1.g", {dim}), m.variable(p + "ln1.b", {dim})});
    TensorId qkv = m.op(
        k_add, {m.op(k_matmul, {n1, m.variable(p + "qkv.w", {dim, 3 * dim})}), m.variable(p + "qkv.b", {3 * dim})});
    qkv = m.op(k_reshape, {qkv}, {{"shape", std::vector<int64_t>{batch, seq, 3 * heads, dim / heads}}});
    TensorId a = m.op(k_attention, {qkv}, {{"causal", true}, {"kv_heads", heads}}, p + "attention");
    a = m.op(k_reshape, {a}, {{"shape", std::vector<int64_t>{batch, seq, dim}}});
    a = m.op(k_add, {m.op(k_matmul, {a, m.variable(p + "proj.w", {dim, dim})}), m.variable(p + "proj.b", {dim})});
    h = m.op(k_add, {h, m.op(k_dropout, {a}, {{"rate", 0.1}, {"key", int64_t{2 * l + 1}}})});
    const TensorId n2 = m.op(k_layer_norm, {h, m.variable(p + "ln2.g", {dim}), m.variable(p + "ln2.b", {dim})});
    TensorId f = m.op(k_gelu, {m.op(k_add, {m.op(k_matmul, {n2, m.variable(p + "up.w", {dim, 4 * dim})}),
                                            m.variable(p + "up.b", {4 * dim})})});
    f = m.op(k_add, {m.op(k_matmul, {f, m.variable(p + "down.w", {4 * dim, dim})}), m.variable(p + "down.b", {dim})});
    h = m.op(k_add, {h, m.op(k_dropout, {f}, {{"rate", 0.1}, {"key", int64_t{2 * l + 2}}})});
  }
  const TensorId logits = m.op(k_matmul, {h, wte}, {{"transpose_b", true}}, "logits");
  const TensorId ce = m.op(k_cross_entropy, {logits, targets}, {}, "ce");
  const TensorId ignored =
      m.op(k_fill, {}, {{"shape", std::vector<int64_t>{}}, {"value", -100.0}, {"dtype", std::string("i32")}});
  const TensorId counted = m.op(k_cast, {m.op(k_not_equal, {targets, ignored})}, {{"dtype", std::string("f32")}});
  const TensorId count = m.op(k_reduce_sum, {counted}, {}, "count");
  m.minimize(m.op(k_div, {m.op(k_reduce_sum, {ce}), count}, {}, "loss"), kind);
  m.g.outputs = {{"logits", logits}};
  return m;
}

// A convolution, batch norm, relu, a residual block with batch norm, pooling by mean, a linear head.
inline Model resnet(int64_t batch = 6, OptimizerKind kind = OptimizerKind::kSgd) {
  using enum OpCode;
  Model m;
  m.g.name = "resnet";
  const TensorId x = m.input("x", {batch, 8, 8, 3}), y = m.input("y", {batch}, DType::kI32);
  const auto block = [&](TensorId in, int64_t from, int64_t to, const std::string& name) {
    const Attrs same{{"padding", std::vector<int64_t>{1, 1, 1, 1}}};
    const TensorId c = m.op(k_conv, {in, m.variable(name + ".w", {to, 3, 3, from})}, same);
    return m.op(k_batch_norm,
                {c, m.variable(name + ".gamma", {to}), m.variable(name + ".beta", {to}),
                 m.variable(name + ".mean", {to}, Role::kBuffer), m.variable(name + ".var", {to}, Role::kBuffer)});
  };
  const TensorId h = m.op(k_relu, {block(x, 3, 8, "stem")});
  const TensorId r = m.op(k_relu, {m.op(k_add, {block(h, 8, 8, "block"), h})});
  const TensorId pooled = m.op(k_reduce_mean, {r}, {{"axes", std::vector<int64_t>{1, 2}}});
  const TensorId logits =
      m.op(k_add, {m.op(k_matmul, {pooled, m.variable("head.w", {8, 5})}), m.variable("head.b", {5})});
  m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, y}, {}, "ce")}, {}, "loss"), kind);
  m.g.outputs = {{"logits", logits}};
  return m;
}

}  // namespace whale::small
