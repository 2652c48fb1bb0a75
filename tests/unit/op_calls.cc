#include "op_calls.h"

#include <cmath>
#include <map>
#include <set>

#include "base/error.h"
#include "base/philox.h"
#include "grad/passes.h"
#include "op_graph.h"
#include "ops/fused.h"
#include "property_graph.h"

namespace whale::test {
namespace {

using enum OpCode;

constexpr int64_t kKey = 11;
constexpr int64_t kWide = 67;  // what vector instructions take at once, several times and a rest

class Table {
 public:
  explicit Table(const OpDevice& device) : device_(device) {}

  // ---- operands: numbers without structure, no two alike where they are floating point ----------------------------
  Value real(Dims dims, double low, double high, DType dtype = DType::kF64) {
    Value v{dtype, std::move(dims), {}};
    const RandomStream random(17, ++made_, 0);
    for (int64_t i = 0; i < element_count(v.dims); ++i)
      v.data.push_back(low + (high - low) * random.word(static_cast<uint64_t>(i)) / 4294967296.0);
    return v;
  }
  Value whole(Dims dims, int64_t low, int64_t end, DType dtype = DType::kI32) {
    Value v = real(std::move(dims), static_cast<double>(low), static_cast<double>(end), dtype);
    for (double& x : v.data) x = std::floor(x);
    return v;
  }
  Value f(Dims dims) { return real(std::move(dims), -1, 1); }
  Value positive(Dims dims) { return real(std::move(dims), 0.5, 1.5); }
  Value below(Dims dims, int64_t limit) { return whole(std::move(dims), 0, limit); }
  Value truth(Dims dims) { return whole(std::move(dims), 0, 2, DType::kBool); }
  Value bf16(Dims dims) {
    Value v = whole(std::move(dims), -128, 128, DType::kBF16);
    for (double& x : v.data) x /= 64;
    return v;
  }
  static Value scalar(double x, DType dtype = DType::kF64) { return {dtype, {}, {x}}; }

  // ---- calls --------------------------------------------------------------------------------------------------------
  std::vector<Value> add(OpCode code, std::vector<Value> in, Attrs attrs = {}) {
    const OpDef& d = def(code);
    const bool list = !d.inputs.empty() && d.inputs.back().kind == PortKind::kVariadic;
    in.resize(std::max(in.size(), d.inputs.size() - list));
    const OpCall call{code, complete_attrs(d, std::move(attrs)), std::move(in),
                      has_flag(code, kRandom) ? uint64_t{kKey} : 0};
    keep(call);
    if (d.gradient != nullptr || code == k_batch_norm) add_gradient(call);
    return device_.run(call);
  }

  // All of a training step.
  void add(Graph g) {
    canonicalise(g), apply_precision(g), clean(g), differentiate(g), split_weights(g), add_updates(g), clean(g);
    std::vector<Value> known;
    for (const Tensor& t : g.tensors)
      known.push_back(t.kind == TensorKind::kValue ? Value{}
                      : is_float(t.dtype)          ? real(t.dims, 0.1, 1, t.dtype)
                                                   : whole(t.dims, 0, 2, t.dtype));
    keep_all(g, std::move(known));
  }

  std::vector<OpCall> calls;

 private:
  void keep(const OpCall& call) {
    if (!seen_.insert(to_string(call)).second) return;
    calls.push_back(call);
    for (const auto form : {def(call.code).decompose, def(call.code).unpack}) {
      if (form == nullptr) continue;
      OpGraph g = graph_of(call);
      if (!form(g.graph, Op(g.op())).empty()) keep_all(g.graph, g.known);
    }
  }
  void keep_all(const Graph& g, std::vector<Value> known) {
    run_graph(device_, g, std::move(known), [&](const OpCall& call) { keep(call); });
  }

  // Those that make the gradient of a sum of the results' elements, each with a weight of its own.
  void add_gradient(const OpCall& call) {
    try {
      add_gradient(call, call.code == k_batch_norm ? 1 : SIZE_MAX);
    } catch (const Error& e) {
      if (e.code() != Code::kUnimplemented) throw;
      add_gradient(call, 1);  // the other results have none
    }
  }
  void add_gradient(const OpCall& call, size_t results) {
    OpGraph made = graph_of(call);
    Graph& g = made.graph;
    for (size_t v = 3; v < g.variables.size() && call.code == k_batch_norm; ++v)  // running statistics
      g.variables[v].role = Role::kBuffer, g.variables[v].trainable = false;
    std::map<std::string, Value> known;  // by name: passes number tensors anew
    for (size_t id = 0; id < made.known.size(); ++id) known[g.tensors[id].name] = made.known[id];
    const TensorIds outputs = made.op().outputs;
    const auto op = [&](OpCode code, TensorIds in) { return g.op(append_op(g, code, std::move(in))).outputs[0]; };
    for (size_t o = 0; o < std::min(outputs.size(), results); ++o) {
      const TensorType type{g.tensor(outputs[o]).dtype, g.tensor(outputs[o]).dims};
      if (type.dtype != DType::kF64) continue;
      const auto weights = static_cast<TensorId>(g.tensors.size());
      g.tensors.push_back(
          {.name = fmt::format("w{}", o), .dtype = type.dtype, .dims = type.dims, .kind = TensorKind::kInput});
      g.inputs.push_back(weights);
      known[g.tensors.back().name] = real(type.dims, -1, 1);
      const TensorId term = op(k_reduce_sum, {op(k_mul, {outputs[o], weights})});
      TensorId& loss = g.training.loss;
      loss = loss == kNone ? term : op(k_add, {loss, term});
    }
    if (g.training.loss == kNone) return;
    canonicalise(g), differentiate(g);
    std::vector<Value> values;
    for (const Tensor& t : g.tensors) values.push_back(t.kind == TensorKind::kValue ? Value{} : known.at(t.name));
    keep_all(g, std::move(values));
  }

  const OpDevice& device_;
  uint64_t made_ = 0;
  std::set<std::string> seen_;
};

Attr text(const char* s) { return std::string(s); }
Attr n(int64_t x) { return x; }

// ---- families -----------------------------------------------------------------------------------------------------
void elementwise(Table& t) {
  for (const OpCode code : {k_stop_gradient, k_neg, k_abs, k_sign, k_floor, k_exp, k_sin, k_cos, k_erf, k_tanh,
                            k_sigmoid, k_softplus, k_relu, k_gelu, k_gelu_erf, k_silu, k_square})
    for (const Dims& dims : {Dims{4, 3}, Dims{2, kWide}}) t.add(code, {t.f(dims)});
  for (const OpCode code : {k_log, k_log1p, k_sqrt, k_rsqrt, k_reciprocal})
    for (const Dims& dims : {Dims{4, 3}, Dims{2, kWide}}) t.add(code, {t.positive(dims)});
  for (const OpCode code : {k_neg, k_abs, k_sign, k_square}) t.add(code, {t.whole({3, 4}, -5, 5)});
  const std::pair<Dims, Dims> shapes[] = {{{4, 3}, {4, 3}}, {{4, 3}, {3}},       {{4, 1}, {1, 3}},
                                          {{}, {2, 3}},     {{2, 3, 4}, {3, 1}}, {{2, kWide}, {kWide}}};
  for (const auto& [a, b] : shapes) {
    for (const OpCode code : {k_add, k_sub, k_mul, k_maximum, k_minimum, k_squared_difference})
      t.add(code, {t.f(a), t.f(b)});
    for (const OpCode code : {k_div, k_pow}) t.add(code, {t.positive(a), t.positive(b)});
    t.add(k_bce_with_logits, {t.f(a), t.real(b, 0, 1)});
    for (const OpCode code : {k_equal, k_not_equal, k_less, k_less_equal, k_greater, k_greater_equal})
      t.add(code, {t.below(a, 3), t.below(b, 3)});
    for (const OpCode code : {k_logical_and, k_logical_or}) t.add(code, {t.truth(a), t.truth(b)});
    t.add(k_where, {t.truth(b), t.f(a), t.f({})});
    t.add(k_where, {t.truth(a), t.f(b), t.f(a)});
  }
  for (const OpCode code : {k_add, k_sub, k_mul, k_maximum, k_minimum})
    t.add(code, {t.below({4, 3}, 9), t.below({3}, 9)});
  t.add(k_logical_not, {t.truth({4, 3})});
  for (const char* to : {"i32", "f64", "f32", "bool"}) t.add(k_cast, {t.real({4, 3}, -3, 3)}, {{"dtype", text(to)}});
  t.add(k_cast, {t.below({4, 3}, 9)}, {{"dtype", text("i32")}});
  t.add(k_cast, {t.below({4, 3}, 9)}, {{"dtype", text("f64")}});
  for (const OpCode code : {k_relu_grad, k_gelu_grad, k_gelu_erf_grad, k_silu_grad})
    for (const Dims& dims : {Dims{5, 3}, Dims{2, kWide}}) t.add(code, {t.f(dims), t.f(dims)});
  FusedBody body;
  body.steps.push_back({k_mul, DType::kF64, {0, 1}, 0, 0});
  body.steps.push_back({k_gelu, DType::kF64, {2}, 0, 0});
  body.results = {2, 3};
  t.add(k_fused, {t.f({4, 3}), t.f({3})}, encode(body, 2));
  body.steps.push_back({k_dropout, DType::kF64, {3}, 0.5, kKey});
  body.results = {3, 4};
  t.add(k_fused, {t.f({4, 6}), t.f({4, 1})}, encode(body, 2));
  t.add(k_fused, {t.f({2, kWide}), t.f({kWide})}, encode(body, 2));
}

void movement(Table& t) {
  for (const Dims& shape : {Dims{4, 3}, Dims{5}, Dims{}})
    t.add(k_fill, {}, {{"shape", shape}, {"value", 0.75}, {"dtype", text("f64")}});
  for (const int64_t dim : {0, 1, 2})
    t.add(k_iota, {}, {{"shape", Dims{4, 3, 2}}, {"dim", n(dim)}, {"dtype", text("i32")}});
  const std::pair<Dims, Dims> shapes[] = {{{4, 6}, {24}},       {{4, 6}, {2, 2, 6}}, {{4, 6}, {4, 2, 3}},
                                          {{4, 6}, {8, 3}},     {{4, 6}, {3, 8}},    {{24}, {4, 1, 6}},
                                          {{2, 9, 4}, {6, 12}}, {{3, 5}, {5, 3}},    {{6, 4}, {2, -1}}};
  for (const auto& [from, to] : shapes) t.add(k_reshape, {t.f(from)}, {{"shape", to}});
  t.add(k_reshape, {t.below({6, 2}, 9)}, {{"shape", Dims{3, 4}}});
  for (const Ints& perm : {Ints{2, 0, 1}, Ints{0, 2, 1}, Ints{-1, -2, -3}})
    t.add(k_transpose, {t.f({2, 3, 4})}, {{"perm", perm}});
  t.add(k_transpose, {t.f({4, 4})}, {{"perm", Ints{1, 0}}});
  t.add(k_slice, {t.f({5, 4, 3})}, {{"starts", Ints{0, 1, 0}}, {"limits", Ints{5, 4, 3}}});
  t.add(k_slice, {t.f({5, 6, 3})}, {{"starts", Ints{0, 1, 0}}, {"limits", Ints{5, 6, 3}}, {"strides", Ints{1, 2, 1}}});
  t.add(k_slice, {t.f({4, 6})}, {{"limits", Ints{4, 4}}});
  for (const int64_t axis : {0, 1, -1}) t.add(k_concat, {t.f({4, 3}), t.f({4, 3}), t.f({4, 3})}, {{"axis", n(axis)}});
  t.add(k_concat, {t.f({4, 3, 2}), t.f({4, 1, 2})}, {{"axis", n(1)}});
  for (const double value : {0.0, 0.5})
    t.add(k_pad, {t.f({4, 3, 2})}, {{"low", Ints{0, 1, 0}}, {"high", Ints{0, 2, 0}}, {"value", value}});
  t.add(k_broadcast_to, {t.f({4, 1})}, {{"shape", Dims{3, 4, 5}}});
  t.add(k_broadcast_to, {t.f({})}, {{"shape", Dims{3, 4}}});
  for (const bool reverse : {false, true})
    for (const Dims& dims : {Dims{4, 3}, Dims{2, kWide}})
      t.add(k_cumsum, {t.f(dims)}, {{"axis", n(1)}, {"reverse", reverse}, {"exclusive", reverse}});
  for (const double rate : {0.0, 0.5})
    for (const Dims& dims : {Dims{6, 4, 3}, Dims{2, kWide}})
      t.add(k_dropout, {t.f(dims)}, {{"rate", rate}, {"key", n(kKey)}});
  t.add(k_local_slice, {t.f({4, 6})}, {{"sub_axis", Ints{1, 2, 1}}, {"begin", n(1)}, {"end", n(3)}});
}

void reductions(Table& t) {
  for (const Ints& axes : {Ints{}, Ints{1}, Ints{0, 2}, Ints{-1}, Ints{0}})
    for (const bool keep : {false, true})
      for (const OpCode code : {k_reduce_sum, k_reduce_mean, k_reduce_max, k_reduce_min})
        t.add(code, {t.f({3, 4, 5})}, {{"axes", axes}, {"keep_dims", keep}});
  t.add(k_reduce_sum, {t.below({4, 5}, 9)}, {{"axes", Ints{0}}});
  t.add(k_reduce_max, {t.below({4, 5}, 9)}, {{"axes", Ints{0}}});
  t.add(k_argmax, {t.f({4, 5})});
  t.add(k_argmax, {t.f({4, 5, 3})}, {{"axis", n(1)}, {"keep_dims", true}});
  t.add(k_sum_of_squares, {t.f({4, 3})});
  t.add(k_sum_of_squares, {t.f({4, 3}), t.f({5})});
  t.add(k_logaddexp, {t.f({4, 3}), t.f({4, 3})});
  for (const char* combine : {"sum", "max", "min"})
    for (const Dims& dims : {Dims{4, 3}, Dims{2, kWide}})
      t.add(k_accumulate, {t.f(dims), t.f(dims)}, {{"combine", text(combine)}});
}

void products(Table& t) {
  for (const bool ta : {false, true})
    for (const bool tb : {false, true}) {
      const Attrs attrs{{"transpose_a", ta}, {"transpose_b", tb}};
      const auto pair = [&](Dims batch_a, Dims batch_b) {
        batch_a.insert(batch_a.end(), {ta ? 3 : 4, ta ? 4 : 3});
        batch_b.insert(batch_b.end(), {tb ? 5 : 3, tb ? 3 : 5});
        return std::vector<Value>{t.f(batch_a), t.f(batch_b)};
      };
      t.add(k_matmul, pair({}, {}), attrs);
      t.add(k_matmul, {t.f({4, 4}), t.f({4, 4})}, attrs);
      t.add(k_matmul, pair({2, 3}, {2, 3}), attrs);
      t.add(k_matmul, pair({3}, {}), attrs);
      t.add(k_matmul, pair({3, 2}, {}), attrs);
      std::vector<Value> biased = pair({3}, {});
      biased.push_back(t.f({5}));
      t.add(k_matmul, biased, attrs);
      Attrs active = attrs;
      active["activation"] = text("relu");
      t.add(k_matmul, pair({}, {}), active);
      t.add(k_matmul, biased, active);
      active["activation"] = text("gelu");
      t.add(k_matmul, biased, active);
    }
  for (const bool transpose : {false, true})
    for (const bool bias : {false, true})
      for (const Dims& rows : {Dims{4}, Dims{3, 4}, Dims{2, 3, 4}}) {
        Dims a = rows, dy = rows;
        a.push_back(3), dy.push_back(5);
        t.add(k_matmul_weight_grad, {t.f(a), t.f(dy)}, {{"transpose", transpose}, {"bias", bias}});
      }
  for (const int count : {2, 3, 4}) {
    std::vector<Value> x;
    for (int k = 0; k < count; ++k) x.push_back(t.f({3, 2, 5}));
    t.add(k_pairwise_dot, x);
  }
}

void indices(Table& t) {
  for (const Dims& ids : {Dims{}, Dims{3}, Dims{2, 3}})
    for (const int64_t axis : {0, 1, 2, -1})
      t.add(k_gather, {t.f({4, 5, 3}), t.below(ids, axis == 0 ? 4 : 3)}, {{"axis", n(axis)}});
  t.add(k_one_hot, {t.below({3, 4}, 5)}, {{"depth", n(5)}, {"dtype", text("f64")}});
  for (const int64_t k : {1, 2, 4}) t.add(k_top_k, {t.f({3, 2, 4})}, {{"k", n(k)}});
  t.add(k_embedding, {t.f({6, 3}), t.below({4}, 6)});
  t.add(k_embedding, {t.f({6, 3}), t.below({2, 5}, 6)});
  for (const char* mode : {"sum", "mean"})
    for (const Dims& ids : {Dims{4}, Dims{3, 4}, Dims{2, 3, 4}})
      t.add(k_embedding_bag, {t.f({6, 3}), t.below(ids, 6)}, {{"mode", text(mode)}});
  for (const bool interleaved : {false, true})
    for (const int64_t heads : {-1, 2, 0})
      for (const int64_t width : {4, 38})
        t.add(k_rotary, {t.f({3, 5, 3, width})}, {{"heads", n(heads)}, {"interleaved", interleaved}, {"base", 10.0}});
  t.add(k_pad_to_batch, {t.f({4, 3})}, {{"dims", Dims{4, 3}}});
  t.add(k_pad_to_batch, {t.f({4, 2, 3})}, {{"dims", Dims{4, 2, 3}}});
}

void norms(Table& t) {
  for (const Dims& dims : {Dims{4, 5}, Dims{3, 4, 5}, Dims{5}, Dims{3, kWide}}) {
    const Dims last{dims.back()};
    for (const bool gamma : {false, true}) {
      const auto scale = [&](bool there) { return there ? t.f(last) : Value{}; };
      for (const bool beta : {false, true}) t.add(k_layer_norm, {t.f(dims), scale(gamma), scale(beta)});
      t.add(k_rms_norm, {t.f(dims), scale(gamma)});
    }
    for (const OpCode code : {k_softmax, k_log_softmax}) t.add(code, {t.f(dims)});
  }
  for (const int64_t groups : {1, 2, 3, 6}) {
    const int64_t c = groups == 6 ? kWide : 4;
    for (const Dims& dims : {Dims{6, c}, Dims{6, 3, c}, Dims{6, 2, 3, c}}) {
      t.add(k_batch_norm, {t.f(dims), t.f({c}), t.f({c}), t.f({c}), t.positive({c})}, {{"groups", n(groups)}});
      const int64_t rows = groups == 1 ? 0 : 6 / groups, count = element_count(dims) / c / groups;
      t.add(k_batch_stats, {t.f(dims)}, {{"group", n(rows)}});
      const Value stats = t.add(k_batch_stats, {t.f(dims)}, {{"group", n(rows)}, {"dims", Dims{groups, 2, c}}})[0];
      for (const bool relu : {false, true})
        for (const bool residual : {false, true})
          t.add(k_batch_norm_apply, {t.f(dims), stats, t.f({c}), t.f({c}), residual ? t.f(dims) : Value{}},
                {{"count", n(count)}, {"group", n(rows)}, {"relu", relu}});
      t.add(k_batch_norm_moments, {stats}, {{"count", n(count)}, {"groups", n(groups)}});
      t.add(k_batch_norm_inference, {t.f(dims), t.f({c}), t.f({c}), t.f({c}), t.positive({c})});
    }
    for (const Value& scale : {Value{}, Table::scalar(1), Table::scalar(std::nan(""), DType::kF32)})
      t.add(k_batch_norm_running, {t.f({c}), t.positive({c}), t.positive({2, c}), scale});
  }
}

void losses(Table& t) {
  for (const Dims& rows : {Dims{5}, Dims{3, 4}, Dims{}})
    for (const double smoothing : {0.0, 0.3})
      for (const int64_t ignored : {-100, 1}) {
        Dims logits = rows;
        logits.push_back(rows.empty() ? kWide : 6);
        const Attrs attrs{{"label_smoothing", smoothing}, {"ignore_index", n(ignored)}};
        t.add(k_cross_entropy, {t.f(logits), t.below(rows, 6)}, attrs);
        t.add(k_cross_entropy_stats, {t.f(logits), t.below(rows, 6)}, attrs);
        t.add(k_cross_entropy_grad, {t.f(rows), t.f(logits), t.below(rows, 6), t.f(rows)}, attrs);
      }
}

void attention(Table& t) {
  const int64_t b = 3, d = 2;
  for (const bool causal : {false, true})
    for (const double dropout : {0.0, 0.4}) {
      const Attrs attrs{{"causal", causal}, {"dropout", dropout}, {"key", n(kKey)}};
      for (const auto& [heads, kv] : {std::pair<int64_t, int64_t>{3, 3}, {4, 2}}) {
        Attrs packed = attrs;
        packed["kv_heads"] = n(kv);
        t.add(k_attention, {t.f({b, 4, heads + 2 * kv, d})}, packed);
        t.add(k_attention, {t.f({b, 4, heads + 2 * kv, d}), Value{}, Value{}, t.f({1, heads, 4, 4})}, packed);
        for (const auto& [tq, tk] : {std::pair<int64_t, int64_t>{4, 4}, {3, 5}, {5, 3}}) {
          const std::vector<Value> qkv{t.f({b, tq, heads, d}), t.f({b, tk, kv, d}), t.f({b, tk, kv, 3})};
          t.add(k_attention, qkv, attrs);
          if (tq == tk) t.add(k_attention, qkv, packed);
          for (const auto& [bias_b, bias_h] : {std::pair<int64_t, int64_t>{1, 1}, {b, 1}, {1, heads}, {b, heads}}) {
            std::vector<Value> biased = qkv;
            biased.push_back(t.f({bias_b, bias_h, tq, tk}));
            t.add(k_attention, biased, attrs);
          }
        }
      }
    }
  for (const int64_t width : {int64_t{5}, kWide})
    t.add(k_attention_merge, {t.f({3, 4, 2, width}), t.f({3, 2, 4}), t.f({3, 4, 2, width}), t.f({3, 2, 4})});
}

void windows(Table& t) {
  struct Case {
    Dims spatial, kernel, strides, padding, dilation;
  };
  const Case cases[] = {
      {{7}, {3}, {}, {}, {}},
      {{7}, {3}, {2}, {1, 1}, {}},
      {{8}, {2}, {2}, {}, {}},
      {{9}, {2}, {3}, {1, 0}, {}},
      {{9}, {3}, {1}, {2, 1}, {2}},
      {{5}, {1}, {}, {}, {}},
      {{7}, {1}, {2}, {}, {}},
      {{6, 5}, {3, 2}, {1, 2}, {1, 1, 0, 1}, {}},
      {{5, 6}, {3, 3}, {2, 1}, {1, 1, 1, 1}, {1, 2}},
      {{4, 3, 5}, {2, 2, 3}, {1, 1, 2}, {0, 1, 1, 0, 1, 1}, {}},
  };
  for (const Case& c : cases) {
    const auto image = [&](int64_t samples, int64_t channels) {
      Dims dims{samples};
      dims.insert(dims.end(), c.spatial.begin(), c.spatial.end());
      dims.push_back(channels);
      return dims;
    };
    const auto filter = [&](int64_t out, int64_t in) {
      Dims dims{out};
      dims.insert(dims.end(), c.kernel.begin(), c.kernel.end());
      dims.push_back(in);
      return dims;
    };
    for (const int64_t groups : {1, 3}) {
      const int64_t in = groups == 1 ? 4 : 6, out = groups == 1 ? 5 : 6;
      for (const bool bias : {false, true}) {
        Attrs attrs{{"strides", c.strides}, {"padding", c.padding}, {"dilation", c.dilation}, {"groups", n(groups)}};
        t.add(k_conv, {t.f(image(3, in)), t.f(filter(out, in / groups)), bias ? t.f({out}) : Value{}}, attrs);
        const auto transposed = [&] {
          t.add(k_conv_transpose, {t.f(image(3, in)), t.f(filter(in, out / groups)), bias ? t.f({out}) : Value{}},
                attrs);
        };
        transposed();
        Ints more;
        for (const int64_t s : c.strides) more.push_back(s - 1);
        attrs["output_padding"] = more;
        transposed();
      }
    }
    const bool dilated = std::any_of(c.dilation.begin(), c.dilation.end(), [](int64_t x) { return x != 1; });
    const bool wide = std::any_of(c.padding.begin(), c.padding.end(), [](int64_t x) { return x > 1; });
    if (dilated || wide || c.kernel[0] == 1) continue;  // of convolutions only
    Attrs attrs{{"window", c.kernel}, {"strides", c.strides}, {"padding", c.padding}};
    t.add(k_max_pool, {t.f(image(3, 4))}, attrs);
    for (const bool include : {false, true}) {
      attrs["include_pad"] = include;
      t.add(k_avg_pool, {t.f(image(3, 4))}, attrs);
    }
  }
}

void experts(Table& t) {
  for (const int64_t k : {1, 2})
    for (const bool normalize : {false, true})
      for (const int64_t capacity : {2, 4}) {
        const int64_t g = 3, s = 4, e = 3, d = 5;
        const Attrs attrs{{"k", n(k)}, {"capacity", n(capacity)}, {"normalize", normalize}};
        const Value slot = t.add(k_moe_gate, {t.f({g, s, e})}, attrs)[0];
        for (const Value& weight : {Value{}, t.f({g, s, k})}) {
          t.add(k_moe_dispatch, {t.f({g, s, d}), slot, weight}, {{"experts", n(e)}, {"capacity", n(capacity)}});
          t.add(k_moe_combine, {t.f({e, g, capacity, d}), slot, weight});
        }
      }
}

// Of one tuple and of two, with and without what is optional.
void updates(Table& t) {
  const auto tuples = [&](OpCode code, std::vector<Value> scalars, auto tuple, const Attrs& attrs) {
    for (const int count : {1, 2})
      for (const bool decays : {false, true}) {
        std::vector<Value> in = scalars;
        for (int k = 0; k < count; ++k)
          for (Value& v : tuple(k == 0 ? Dims{4, 3} : Dims{5, kWide})) in.push_back(std::move(v));
        Attrs all = attrs;
        if (decays) all["decays"] = count == 1 ? Ints{0} : Ints{1, 0};
        t.add(code, in, all);
      }
  };
  const Value lr = Table::scalar(0.1), steps = Table::scalar(3, DType::kI64);
  for (const Value& scale : {Value{}, Table::scalar(0.5), Table::scalar(std::nan(""), DType::kF32)}) {
    const auto two = [&](const Dims& d) { return std::vector<Value>{t.f(d), t.f(d)}; };
    const auto three = [&](const Dims& d) { return std::vector<Value>{t.f(d), t.f(d), t.positive(d)}; };
    const auto four = [&](const Dims& d) { return std::vector<Value>{t.f(d), t.f(d), t.f(d), t.positive(d)}; };
    tuples(k_sgd, {lr, scale}, two, {{"weight_decay", 0.1}});
    for (const bool nesterov : {false, true})
      tuples(k_sgd, {lr, scale}, three, {{"momentum", 0.9}, {"nesterov", nesterov}, {"weight_decay", 0.1}});
    for (const bool decoupled : {false, true})
      tuples(k_adam, {lr, steps, scale}, four, {{"weight_decay", 0.1}, {"decoupled", decoupled}});
    tuples(k_adagrad, {lr, scale}, three, {{"weight_decay", 0.1}});
    tuples(k_lamb_direction, {steps, scale}, four, {{"weight_decay", 0.1}});
    tuples(k_split_sgd, {lr, scale},
           [&](const Dims& d) {
             return std::vector<Value>{t.bf16(d), t.whole(d, 0, 65536, DType::kU16), t.f(d)};
           },
           {{"weight_decay", 0.1}});
    for (const Dims& ids : {Dims{5}, Dims{2, 4}, Dims{2, 3, 2}})
      for (const bool bags : {false, true}) {
        Dims of = ids;
        if (bags) of.pop_back();
        const auto rows = [&](const Dims& d, std::vector<Value> table) {
          Dims dy = of;
          dy.push_back(d[1]);
          table.push_back(t.below(ids, d[0]));
          table.push_back(t.f(dy));
          return table;
        };
        const Attrs attrs{{"weight_decay", 0.1}, {"mean", bags}};
        tuples(
            k_sgd_rows, {lr, scale}, [&](const Dims& d) { return rows(d, {t.f(d)}); }, attrs);
        tuples(
            k_adagrad_rows, {lr, scale},
            [&](const Dims& d) {
              return rows(d, {t.f(d), t.positive(d)});
            },
            attrs);
        tuples(
            k_adam_rows, {lr, steps, scale},
            [&](const Dims& d) {
              return rows(d, {t.f(d), t.f(d), t.positive(d)});
            },
            attrs);
        tuples(
            k_split_sgd_rows, {lr, scale},
            [&](const Dims& d) {
              return rows(d, {t.bf16(d), t.whole(d, 0, 65536, DType::kU16)});
            },
            attrs);
      }
  }
  for (const Dims& d : {Dims{4, 3}, Dims{kWide}})
    t.add(k_lamb_apply, {lr, t.f(d), t.f(d), Table::scalar(0.7), Table::scalar(1.3)});
  t.add(k_lamb_apply, {lr, t.f({3}), t.f({3}), Table::scalar(0.7), Table::scalar(1.3), t.f({2, 2}), t.f({2, 2}),
                       Table::scalar(0), Table::scalar(2)});
  t.add(k_clip_factor, {Table::scalar(3), Table::scalar(5)}, {{"max_norm", 1.0}});
  for (const Dims& d : {Dims{4, 3}, Dims{kWide}}) t.add(k_unscale, {t.f(d), Table::scalar(8)});
  Value infinite = t.f({4, 3});
  infinite.data[5] = INFINITY;
  t.add(k_unscale, {infinite, Table::scalar(4, DType::kF32)});
  t.add(k_overflow, {Table::scalar(0), Table::scalar(0)});
}

}  // namespace

const std::vector<OpCall>& op_calls() {
  static const std::vector<OpCall> all = [] {
    constexpr int kPrograms = 120, kOps = 8;
    Table t(ref_device());
    for (const auto family :
         {elementwise, movement, reductions, products, indices, norms, losses, attention, windows, experts, updates})
      family(t);
    Dice dice(5);
    for (int program = 0; program < kPrograms; ++program) {
      std::vector<uint32_t> words;
      for (int k = 0; k < kOps; ++k) words.push_back(static_cast<uint32_t>(dice.next()));
      t.add(random_graph(words, 4));
    }
    return t.calls;
  }();
  return all;
}

}  // namespace whale::test
