// Plans of GPTs of real proportions on null devices, against closed forms of the papers. Rows of the tables in
// docs/memory.md (tools/generate/golden_table.py).
#pragma once

#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/format.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "plan/figures.h"
#include "small_models.h"

namespace whale::golden {

// GPT-3's, with few layers and words; a device's numbers are those of the first one of a stage.
struct Gpt {
  int64_t layers = 4, batch = 1, seq = 2048, dim = 12288, heads = 96, vocab = 512;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  bool tied = false;
  double clip_norm = 0;
  bool apart = false;  // queries, keys and values are products of their own
  double layer() const { return static_cast<double>(12 * dim * dim + 13 * dim); }  // parameters
  double table() const { return static_cast<double>(vocab * dim); }
  double parameters() const {
    return static_cast<double>(layers) * layer() + (tied ? 1 : 2) * table() + static_cast<double>((seq + 2) * dim);
  }
  double sbh(int64_t micro_batches = 1) const { return static_cast<double>(seq * batch / micro_batches * dim); }
};

// Pre-norm blocks with biases, each a name scope; no dropout, whose masks are made again and take no bytes.
inline Graph graph_of(const Gpt& s) {
  using enum OpCode;
  small::Model m;
  m.g.name = "gpt";
  const TensorId tokens = m.input("tokens", {s.batch, s.seq}, DType::kI32),
                 targets = m.input("targets", {s.batch, s.seq}, DType::kI32);
  const auto affine = [&](TensorId x, const std::string& name, int64_t in, int64_t out) {
    const TensorId y = m.op(k_matmul, {x, m.variable(name + ".weight", {in, out})}, {}, name);
    return m.op(k_add, {y, m.variable(name + ".bias", {out})}, {}, name + ".add");
  };
  const auto norm = [&](TensorId x, const std::string& name) {
    const TensorId gain = m.variable(name + ".gain", {s.dim}), shift = m.variable(name + ".shift", {s.dim});
    return m.op(k_layer_norm, {x, gain, shift}, {}, name);
  };
  const TensorId table = m.variable("tokens.weight", {s.vocab, s.dim}),
                 positions = m.variable("positions.weight", {s.seq, s.dim});
  TensorId h = m.op(k_add, {m.op(k_embedding, {table, tokens}, {}, "embedding"), positions}, {}, "positions");
  for (int64_t l = 0; l < s.layers; ++l) {
    m.scope = 0;
    m.g.scopes[m.enter(ScopeKind::kName)].name = fmt::format("block{}", l);
    const std::string p = fmt::format("block{}.", l);
    TensorId x = norm(h, p + "norm1");
    const auto of_heads = [&](const std::string& name, int64_t times) {
      return m.op(k_reshape, {affine(x, p + name, s.dim, times * s.dim)},
                  {{"shape", Dims{s.batch, s.seq, times * s.heads, s.dim / s.heads}}});
    };
    const std::vector<TensorId> qkv =
        s.apart ? std::vector{of_heads("q", 1), of_heads("k", 1), of_heads("v", 1)} : std::vector{of_heads("qkv", 3)};
    x = m.op(k_attention, qkv, s.apart ? Attrs{{"causal", true}} : Attrs{{"causal", true}, {"kv_heads", s.heads}},
             p + "attention");
    x = m.op(k_reshape, {x}, {{"shape", Dims{s.batch, s.seq, s.dim}}});
    h = m.op(k_add, {h, affine(x, p + "proj", s.dim, s.dim)}, {}, p + "residual1");
    x = m.op(k_gelu, {affine(norm(h, p + "norm2"), p + "up", s.dim, 4 * s.dim)}, {}, p + "gelu");
    h = m.op(k_add, {h, affine(x, p + "down", 4 * s.dim, s.dim)}, {}, p + "residual2");
  }
  m.scope = 0;
  h = norm(h, "norm");
  const TensorId logits = s.tied ? m.op(k_matmul, {h, table}, {{"transpose_b", true}}, "head")
                                 : m.op(k_matmul, {h, m.variable("head.weight", {s.dim, s.vocab})}, {}, "head");
  const TensorId loss = m.op(k_cross_entropy, {logits, targets}, {}, "cross_entropy");
  m.minimize(m.op(k_reduce_mean, {loss}, {}, "loss"), s.optimizer);
  m.g.training.clip_norm = s.clip_norm;
  m.g.outputs = {{"logits", logits}};
  return m.g;
}

struct How {
  int devices = 1;
  std::string strategy = "replica";
  int64_t micro_batches = 1;
  int zero = 0;
  Recompute recompute = Recompute::kNone;
  Precision precision = Precision::kFloat32;
  UpdateForm update = UpdateForm::kWhole;
  std::string cluster = {};  // empty: `devices` that compute nothing and have no figures
};

inline Plan plan_of(const Gpt& s, const How& how) {
  CompileOptions options;
  options.strategy = how.strategy;
  options.accumulation = how.micro_batches;
  options.zero = how.zero;
  options.recompute = how.recompute;
  options.precision = how.precision;
  options.update = how.update;
  const std::string devices = how.cluster.empty() ? fmt::format("null:{}", how.devices) : how.cluster;
  return compile(graph_of(s), parse_devices(devices, {0}), options);
}

inline MemoryClasses memory(const Plan& plan, int device) {
  const Entry& train = plan.entries[0];
  return memory_of(plan, train, static_cast<size_t>(train.rows[device].program)).device;
}

// `paper`: the closed form; `form`: what the plan must be within 5 % of. Where it is further from `paper`, `why` is the
// reason.
inline void row(const std::string& what, const std::string& unit, double paper, double form, double plan,
                const std::string& why = {}) {
  CAPTURE(what);
  CHECK(plan == doctest::Approx(form).epsilon(0.05).scale(0));
  const bool deviates = std::abs(plan - paper) > 0.05 * paper;
  CHECK_FALSE((deviates && why.empty()));
  if (std::getenv("WHALE_GOLDEN_TABLE"))
    std::printf("| %s | %s | %.4g | %.4g | %s |\n", what.c_str(), unit.c_str(), paper, plan,
                deviates ? why.c_str() : "");
}

}  // namespace whale::golden
