// Layers on the C ABI's graph builder: what the models of `whale model` are written with.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "api.h"

namespace tool {

using Value = whale_value;
using Dims = std::vector<int64_t>;
using AttrValue = std::variant<int64_t, double, bool, std::string, std::vector<int64_t>>;
using AttrList = std::vector<std::pair<std::string, AttrValue>>;

struct Init {
  int kind = WHALE_INIT_ZEROS;
  double a = 0, b = 0;
  static Init zeros() { return {}; }
  static Init ones() { return {WHALE_INIT_ONES, 0, 0}; }
  static Init normal(double deviation) { return {WHALE_INIT_NORMAL, 0, deviation}; }
  static Init uniform(double bound) { return {WHALE_INIT_UNIFORM, -bound, bound}; }
};

class Builder {
 public:
  // 16-bit parameters are read as 32-bit numbers; no others are kept.
  Builder(whale_engine* engine, const std::string& name, int parameters = WHALE_F32);
  whale_graph* graph() const { return graph_.get(); }
  GraphHandle take() { return std::move(graph_); }

  Value input(const std::string& name, int dtype, const Dims& dims, int batch_dim = 0);
  Value parameter(const std::string& name, const Dims& dims, Init init, bool buffer = false, bool decay = true);
  std::vector<Value> ops(const std::string& op, const std::vector<Value>& inputs, const AttrList& attrs = {});
  Value op(const std::string& name, const std::vector<Value>& inputs, const AttrList& attrs = {}) {
    return ops(name, inputs, attrs)[0];
  }
  Dims dims(Value value) const;

  // A name scope for the life of the returned object.
  class Scope {
   public:
    Scope(Builder& builder, whale_scope_options options) : builder_(builder) {
      check(whale_graph_scope_begin(builder.graph(), &options));
    }
    ~Scope() { whale_status_release(whale_graph_scope_end(builder_.graph())); }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Builder& builder_;
  };
  Scope scope(const std::string& name);

  // Arithmetic.
  Value add(Value a, Value b) { return op("add", {a, b}); }
  Value mul(Value a, Value b) { return op("mul", {a, b}); }
  Value reshape(Value x, const Dims& dims) { return op("reshape", {x}, {{"shape", dims}}); }
  Value constant(double value, const std::string& dtype = "f32") {
    return op("fill", {}, {{"shape", Dims{}}, {"value", value}, {"dtype", dtype}});
  }

  // Layers; each makes its parameters under `name`.
  Value linear(const std::string& name, Value x, int64_t features, bool bias = true, std::optional<Init> init = {});
  Value embedding(const std::string& name, Value ids, int64_t rows, int64_t features, double deviation = 0.02);
  Value layer_norm(const std::string& name, Value x);
  Value rms_norm(const std::string& name, Value x);
  // down(silu(gate(x)) * up(x)), without biases (Shazeer, 2020).
  Value swiglu(const std::string& name, Value x, int64_t hidden, double deviation, double out_deviation);
  // groups: so many runs of samples have statistics of their own.
  Value batch_norm(const std::string& name, Value x, Init weight = Init::ones(), int64_t groups = 1);
  Value conv(const std::string& name, Value x, int64_t features, int64_t kernel, int64_t stride, int64_t padding);
  struct Attention {
    int64_t heads = 1;
    bool causal = false;
    bool bias = true;  // of the projections
    double dropout = 0;
    double scale = 0;               // 0: 1/sqrt(features of a head)
    Value context = WHALE_NONE;     // cross attention
    Value score_bias = WHALE_NONE;  // added to the scores
    int64_t head_features = 0;      // 0: d / heads
    int64_t kv_heads = 0;           // of keys and values, which so many queries share; 0: heads
    double rotary = 0;              // base of rotary positions of queries and keys; 0: none
    double deviation = 0.02, out_deviation = 0.02;
  };
  Value attention(const std::string& name, Value x, const Attention& options);
  // Mean over labels that are not `ignore`.
  Value cross_entropy(Value logits, Value labels, int64_t ignore = -100, double smoothing = 0);

 private:
  GraphHandle graph_;
  int parameters_;  // type of those that are trained
  int64_t ops_ = 0;
};

}  // namespace tool
