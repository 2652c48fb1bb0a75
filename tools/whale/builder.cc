#include "builder.h"

#include <cmath>

namespace tool {

Builder::Builder(whale_engine* engine, const std::string& name, int parameters)
    : graph_(own<GraphHandle>(whale_graph_create, engine, str(name))), parameters_(parameters) {}

Value Builder::input(const std::string& name, int dtype, const Dims& dims, int batch_dim) {
  Value out = WHALE_NONE;
  check(whale_graph_input(graph(), str(name), dtype, dims.data(), dims.size(), batch_dim, &out));
  return out;
}

Value Builder::parameter(const std::string& name, const Dims& dims, Init init, bool buffer, bool decay) {
  whale_parameter_options options = WHALE_PARAMETER_OPTIONS_INIT;
  options.init = init.kind;
  options.a = init.a;
  options.b = init.b;
  options.buffer = buffer;
  options.frozen = buffer;
  options.decay = decay ? WHALE_DECAY_BY_RANK : WHALE_DECAY_NEVER;
  const int dtype = buffer ? WHALE_F32 : parameters_;
  Value out = WHALE_NONE;
  check(whale_graph_parameter(graph(), str(name), dtype, dims.data(), dims.size(), &options, &out));
  return dtype == WHALE_F32 ? out : op("cast", {out}, {{"dtype", std::string("f32")}});
}

std::vector<Value> Builder::ops(const std::string& op, const std::vector<Value>& inputs, const AttrList& attrs) {
  constexpr int64_t kMostOps = 200'000;  // some hundred times those of the largest model here
  if (++ops_ > kMostOps)
    throw Failure("the model has more than " + std::to_string(kMostOps) +
                  " ops: give fewer --layers, or a smaller --seq where the model is unrolled (gnmt)");
  std::vector<whale_attr> rows;
  for (const auto& [name, value] : attrs) {
    whale_attr row{};
    row.name = str(name);
    if (const auto* i = std::get_if<int64_t>(&value)) {
      row.kind = WHALE_ATTR_INT, row.i = *i;
    } else if (const auto* f = std::get_if<double>(&value)) {
      row.kind = WHALE_ATTR_FLOAT, row.f = *f;
    } else if (const auto* b = std::get_if<bool>(&value)) {
      row.kind = WHALE_ATTR_BOOL, row.i = *b;
    } else if (const auto* s = std::get_if<std::string>(&value)) {
      row.kind = WHALE_ATTR_STRING, row.s = str(*s);
    } else {
      const auto& ints = std::get<std::vector<int64_t>>(value);
      row.kind = WHALE_ATTR_INTS, row.ints = ints.data(), row.count = ints.size();
    }
    rows.push_back(row);
  }
  std::vector<Value> outputs(16);
  size_t count = 0;
  check(whale_graph_op(graph(), str(op), inputs.data(), inputs.size(), rows.data(), rows.size(), nullptr,
                       outputs.data(), outputs.size(), &count));
  outputs.resize(count);
  return outputs;
}

Dims Builder::dims(Value value) const {
  int32_t dtype = 0;
  const int64_t* dims = nullptr;
  size_t rank = 0;
  check(whale_graph_value(graph(), value, &dtype, &dims, &rank));
  return Dims(dims, dims + rank);
}

Builder::Scope Builder::scope(const std::string& name) {
  whale_scope_options options = WHALE_SCOPE_OPTIONS_INIT;
  options.kind = WHALE_SCOPE_NAME;
  options.name = str(name);
  return Scope(*this, options);
}

Value Builder::linear(const std::string& name, Value x, int64_t features, bool bias, std::optional<Init> init) {
  const auto scope_ = scope(name);
  const int64_t width = dims(x).back();
  const Value weight =
      parameter("weight", {width, features}, init.value_or(Init::uniform(1 / std::sqrt(static_cast<double>(width)))));
  return op("matmul", {x, weight, bias ? parameter("bias", {features}, Init::zeros()) : WHALE_NONE});
}

Value Builder::embedding(const std::string& name, Value ids, int64_t rows, int64_t features, double deviation) {
  const auto scope_ = scope(name);
  return op("embedding", {parameter("weight", {rows, features}, Init::normal(deviation)), ids});
}

Value Builder::layer_norm(const std::string& name, Value x) {
  const auto scope_ = scope(name);
  const int64_t width = dims(x).back();
  return op("layer_norm", {x, parameter("weight", {width}, Init::ones()), parameter("bias", {width}, Init::zeros())});
}

Value Builder::rms_norm(const std::string& name, Value x) {
  const auto scope_ = scope(name);
  return op("rms_norm", {x, parameter("weight", {dims(x).back()}, Init::ones())});
}

Value Builder::swiglu(const std::string& name, Value x, int64_t hidden, double deviation, double out_deviation) {
  const auto scope_ = scope(name);
  const int64_t width = dims(x).back();
  const Value gate = linear("gate", x, hidden, false, Init::normal(deviation));
  const Value up = linear("up", x, hidden, false, Init::normal(deviation));
  return linear("down", mul(op("silu", {gate}), up), width, false, Init::normal(out_deviation));
}

Value Builder::batch_norm(const std::string& name, Value x, Init weight, int64_t groups) {
  const auto scope_ = scope(name);
  const int64_t width = dims(x).back();
  return op(
      "batch_norm",
      {x, parameter("weight", {width}, weight), parameter("bias", {width}, Init::zeros()),
       parameter("running_mean", {width}, Init::zeros(), true), parameter("running_var", {width}, Init::ones(), true)},
      {{"groups", groups}});
}

Value Builder::conv(const std::string& name, Value x, int64_t features, int64_t kernel, int64_t stride,
                    int64_t padding) {
  const auto scope_ = scope(name);
  const int64_t channels = dims(x).back();
  const double fan = static_cast<double>(channels * kernel * kernel);
  const Value weight = parameter("weight", {features, kernel, kernel, channels}, Init::normal(std::sqrt(2 / fan)));
  return op("conv", {x, weight},
            {{"strides", Dims{stride, stride}}, {"padding", Dims{padding, padding, padding, padding}}});
}

Value Builder::attention(const std::string& name, Value x, const Attention& options) {
  const auto scope_ = scope(name);
  const Dims shape = dims(x);
  const int64_t width = shape.back(), heads = options.heads, kv_heads = options.kv_heads ? options.kv_heads : heads;
  const int64_t features = options.head_features ? options.head_features : width / heads;
  const Init init = Init::normal(options.deviation);
  const AttrList attrs{{"causal", options.causal}, {"dropout", options.dropout}, {"scale", options.scale}};
  Value out;
  if (options.context == WHALE_NONE && kv_heads == heads && options.rotary == 0) {
    const Value packed =
        reshape(linear("qkv", x, 3 * heads * features, options.bias, init), {-1, shape[1], 3 * heads, features});
    AttrList packed_attrs = attrs;
    packed_attrs.emplace_back("kv_heads", heads);
    out = ops("attention", {packed, WHALE_NONE, WHALE_NONE, options.score_bias}, packed_attrs)[0];
  } else {  // grouped heads too: no even cut of the packed ones has whole groups
    const Value context = options.context == WHALE_NONE ? x : options.context;
    const int64_t length = dims(context)[1];
    const auto turned = [&](Value part) {
      return options.rotary > 0 ? op("rotary", {part}, {{"base", options.rotary}}) : part;
    };
    const auto project = [&](const char* what, Value from, int64_t places, int64_t count) {
      return reshape(linear(what, from, count * features, options.bias, init), {-1, places, count, features});
    };
    const Value q = turned(project("query", x, shape[1], heads));
    const Value k = turned(project("key", context, length, kv_heads));
    const Value v = project("value", context, length, kv_heads);
    out = ops("attention", {q, k, v, options.score_bias}, attrs)[0];
  }
  return linear("out", reshape(out, {-1, shape[1], heads * features}), width, options.bias,
                Init::normal(options.out_deviation));
}

Value Builder::cross_entropy(Value logits, Value labels, int64_t ignore, double smoothing) {
  const Value rows =
      ops("cross_entropy", {logits, labels}, {{"ignore_index", ignore}, {"label_smoothing", smoothing}})[0];
  const Value counted = op("cast", {op("not_equal", {labels, constant(static_cast<double>(ignore), "i32")})},
                           {{"dtype", std::string("f32")}});
  return op("div", {op("reduce_sum", {rows}), op("maximum", {op("reduce_sum", {counted}), constant(1)})});
}

}  // namespace tool
