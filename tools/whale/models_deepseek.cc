// A decoder as DeepSeek-V3 (DeepSeek-AI, 2024, sections 2.1 and 4.2): latent attention, and from the layer
// `dense_layers` on mixtures of many small experts beside one that takes every token. Left out: the prediction of
// further tokens, the bias of the router that balances experts without a loss (it starts at zero), and the limit of
// nodes that a token is sent to. The balance of experts counts first choices, and an expert has a fixed number of
// places.
#include "models_deepseek.h"

#include <algorithm>
#include <cmath>

namespace tool {
namespace {

constexpr double kDeviation = 0.006;  // section 4.2
constexpr double kBalance = 1e-4;     // weight of the balance within a sequence
constexpr double kRouted = 2.5;       // the routed experts' factor beside the shared one

Value last(Builder& b, Value x, int64_t begin, int64_t end) {  // of the last dimension
  Dims limits = b.dims(x), starts(limits.size(), 0);
  starts.back() = begin, limits.back() = end;
  return b.op("slice", {x}, {{"starts", starts}, {"limits", limits}});
}

// Queries, keys and values come from two latent vectors of a token; the part of the keys that knows the position is one
// for all heads. The widths are in the proportions of the paper: of a head of n features the part that knows the
// position is n / 2, the latent of queries 12 n, that of keys and values 4 n.
Value latent_attention(Builder& b, const std::string& name, Value x, const ModelOptions& o) {
  const auto scope = b.scope(name);
  const int64_t n = o.head_dim, turned = n / 2, heads = o.heads, width = b.dims(x).back(), seq = b.dims(x)[1];
  const Init init = Init::normal(kDeviation);
  const auto turn = [&](Value part) { return b.op("rotary", {part}); };
  const auto join = [&](Value a, Value c) { return b.op("concat", {a, c}, {{"axis", int64_t{3}}}); };
  const Value queries = b.rms_norm("query_norm", b.linear("query_down", x, 12 * n, false, init));
  const Value q =
      b.reshape(b.linear("query_up", queries, heads * (n + turned), false, init), {-1, seq, heads, n + turned});
  const Value latent = b.linear("kv_down", x, 4 * n, false, init);
  const Value position = turn(b.reshape(b.linear("key_position", x, turned, false, init), {-1, seq, 1, turned}));
  const Value kv =
      b.reshape(b.linear("kv_up", b.rms_norm("kv_norm", latent), heads * 2 * n, false, init), {-1, seq, heads, 2 * n});
  const Value everywhere = b.op("broadcast_to", {position}, {{"shape", Dims{b.dims(x)[0], seq, heads, turned}}});
  const Value key = join(last(b, kv, 0, n), everywhere);
  const Value query = join(last(b, q, 0, n), turn(last(b, q, n, n + turned)));
  const Value out = b.ops("attention", {query, key, last(b, kv, n, 2 * n)}, {{"causal", true}})[0];
  return b.linear("out", b.reshape(out, {-1, seq, heads * n}), width, false, init);
}

// The gate takes the softmax of its scores among a token's choices. Of the logarithms of sigmoids that is each sigmoid
// over the sum of those chosen, the paper's weights.
Value mixture(Builder& b, Value x, const ModelOptions& o, Value& balance, Value& dropped) {
  const int64_t experts = o.experts, width = b.dims(x).back(), tokens = b.dims(x)[1];
  const double wanted = o.capacity * static_cast<double>(o.top_k * tokens) / static_cast<double>(experts);
  const auto places = static_cast<int64_t>(std::clamp(std::ceil(wanted), 1.0, static_cast<double>(tokens)));
  const Value scores = b.linear("router", x, experts, false, Init::normal(kDeviation));
  const Value logits = b.op("neg", {b.op("softplus", {b.op("neg", {scores})})});
  const std::vector<Value> gate =
      b.ops("moe_gate", {logits}, {{"k", o.top_k}, {"capacity", places}, {"normalize", true}});
  balance = balance == WHALE_NONE ? gate[2] : b.add(balance, gate[2]);
  dropped = dropped == WHALE_NONE ? gate[3] : b.add(dropped, gate[3]);
  Value y = b.op("moe_dispatch", {x, gate[0]}, {{"experts", experts}, {"capacity", places}});
  {
    const auto inside = b.scope("experts");
    const auto weight = [&](const char* name, int64_t from, int64_t to) {
      return b.parameter(name, {experts, from, to}, Init::normal(kDeviation));
    };
    y = b.reshape(y, {experts, -1, width});
    const Value hidden = b.op("silu", {b.op("matmul", {y, weight("gate.weight", width, o.hidden)})});
    y = b.mul(hidden, b.op("matmul", {y, weight("up.weight", width, o.hidden)}));
    y = b.reshape(b.op("matmul", {y, weight("down.weight", o.hidden, width)}), {experts, -1, places, width});
  }
  const Value routed = b.op("moe_combine", {y, gate[0], b.mul(gate[1], b.constant(kRouted))});
  return b.add(b.swiglu("shared", x, o.hidden, kDeviation, kDeviation), routed);
}

}  // namespace

ModelOptions deepseek_sizes(int64_t layers, int64_t dim, int64_t heads, int64_t head_dim, int64_t hidden,
                            int64_t dense_layers, int64_t experts, int64_t top_k, int64_t seq, int64_t vocab,
                            int64_t batch) {
  ModelOptions o;
  o.layers = layers, o.dim = dim, o.heads = heads, o.head_dim = head_dim, o.hidden = hidden;
  o.dense_layers = dense_layers, o.experts = experts, o.top_k = top_k;
  o.seq = seq, o.vocab = vocab, o.batch = batch, o.dropout = 0;
  o.optimizer = "adamw", o.learning_rate = 2.2e-4, o.weight_decay = 0.1;
  return o;
}

Value deepseek(Builder& b, const ModelOptions& o) {
  if (o.head_dim % 4 != 0)
    throw Failure("--head-dim is a multiple of 4, so that half of it are pairs that positions turn; got " +
                  std::to_string(o.head_dim));
  if (o.top_k > o.experts)
    throw Failure("top-k is 1 to the number of experts, " + std::to_string(o.experts) + "; got " +
                  std::to_string(o.top_k));
  const Value tokens = b.input("tokens", WHALE_I32, {o.batch, o.seq}),
              targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
  Value x = b.embedding("tokens", tokens, o.vocab, o.dim, kDeviation);
  Value balance = WHALE_NONE, dropped = WHALE_NONE;
  for (int64_t i = 0; i < o.layers; ++i) {
    const auto scope = b.scope("block" + std::to_string(i));
    x = b.add(x, latent_attention(b, "attention", b.rms_norm("norm1", x), o));
    const Value normed = b.rms_norm("norm2", x);
    if (i < o.dense_layers) {  // as wide as the experts that a token goes to, and the shared one
      x = b.add(x, b.swiglu("mlp", normed, (o.top_k + 1) * o.hidden, kDeviation, kDeviation));
    } else {
      const auto moe = b.scope("moe");
      x = b.add(x, mixture(b, normed, o, balance, dropped));
    }
  }
  const Value logits = b.linear("head", b.rms_norm("norm", x), o.vocab, false, Init::normal(kDeviation));
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  const Value loss = b.cross_entropy(logits, targets);
  if (balance == WHALE_NONE) return loss;
  check(whale_graph_output(b.graph(), WHALE_STR("dropped"), dropped));
  return b.add(loss, b.mul(b.op("reduce_mean", {balance}), b.constant(kBalance)));
}

}  // namespace tool
