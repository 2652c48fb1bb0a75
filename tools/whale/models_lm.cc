#include "models_lm.h"

#include <algorithm>
#include <cmath>

namespace tool {
namespace {

constexpr double kBalance = 0.01;  // weight of the load-balancing loss (Fedus et al., 2021)

Value dropped_out(Builder& b, Value x, double rate) { return rate > 0 ? b.op("dropout", {x}, {{"rate", rate}}) : x; }

int64_t hidden_of(const ModelOptions& o) { return o.hidden > 0 ? o.hidden : 4 * o.dim; }

// ---- mixture of experts ---------------------------------------------------------------------------------------------
// What the mixtures of a model leave to its end.
struct Routing {
  Value aux = WHALE_NONE, dropped = WHALE_NONE;  // per routing group, summed over layers

  void add(Builder& b, Value more_aux, Value more_dropped) {
    aux = aux == WHALE_NONE ? more_aux : b.add(aux, more_aux);
    dropped = dropped == WHALE_NONE ? more_dropped : b.add(dropped, more_dropped);
  }
  // The loss with the balance of all layers; tokens without a place can be fetched as "dropped".
  Value finish(Builder& b, Value loss) const {
    if (aux == WHALE_NONE) return loss;
    check(whale_graph_output(b.graph(), WHALE_STR("dropped"), dropped));
    return b.add(loss, b.mul(b.op("reduce_mean", {aux}), b.constant(kBalance)));
  }
};

// A layer of experts over x [b, t, d]; a sequence is a routing group. The experts are batched products over [experts,
// all places, features] in a scope of their own, so that a strategy can cut them.
Value mixture(Builder& b, const std::string& name, Value x, const ModelOptions& o, double out_deviation,
              Routing& routing) {
  const auto scope = b.scope(name);
  const int64_t experts = o.experts, d = o.dim, hidden = hidden_of(o), tokens = b.dims(x)[1];
  if (o.top_k < 1 || o.top_k > experts)
    throw Failure("top-k is 1 to the number of experts, " + std::to_string(experts) + "; got " +
                  std::to_string(o.top_k));
  const double places = std::ceil(o.capacity * static_cast<double>(o.top_k * tokens) / static_cast<double>(experts));
  const auto capacity = static_cast<int64_t>(std::clamp(places, 1.0, static_cast<double>(tokens)));
  const Value logits = b.linear("router", x, experts, false, Init::normal(0.02));
  const std::vector<Value> gate =
      b.ops("moe_gate", {logits}, {{"k", o.top_k}, {"capacity", capacity}, {"normalize", o.top_k > 1}});
  routing.add(b, gate[2], gate[3]);
  Value y = b.op("moe_dispatch", {x, gate[0]}, {{"experts", experts}, {"capacity", capacity}});
  {
    const auto inside = b.scope("experts");
    const Value up = b.parameter("up.weight", {experts, d, hidden}, Init::normal(0.02));
    const Value up_bias = b.parameter("up.bias", {experts, 1, hidden}, Init::zeros(), false, false);
    const Value down = b.parameter("down.weight", {experts, hidden, d}, Init::normal(out_deviation));
    const Value down_bias = b.parameter("down.bias", {experts, 1, d}, Init::zeros(), false, false);
    y = b.reshape(y, {experts, -1, d});
    y = b.op("gelu", {b.add(b.op("matmul", {y, up}), up_bias)});
    y = b.add(b.op("matmul", {y, down}), down_bias);
    y = b.reshape(y, {experts, -1, capacity, d});
  }
  return b.op("moe_combine", {y, gate[0], gate[1]});
}

// ---- transformer blocks ---------------------------------------------------------------------------------------------
struct Block {
  bool causal = false;
  Value context = WHALE_NONE;  // a decoder's memory
  bool experts = false;
  // Biases of the attention's projections. That of the keys has no influence on the result: its gradient is rounding,
  // which Adafactor would make a full step of.
  bool attention_bias = true;
};

// Pre-norm: attention, attention to the memory when there is one, and an MLP or a layer of experts.
Value block(Builder& b, const std::string& name, Value x, const ModelOptions& o, const Block& kind, Routing& routing) {
  const auto scope = b.scope(name);
  const double out = 0.02 / std::sqrt(2.0 * static_cast<double>(o.layers));
  Builder::Attention attention;
  attention.heads = o.heads;
  attention.causal = kind.causal;
  attention.dropout = o.dropout;
  attention.bias = kind.attention_bias;
  attention.out_deviation = out;
  x = b.add(x, dropped_out(b, b.attention("attention", b.layer_norm("norm1", x), attention), o.dropout));
  if (kind.context != WHALE_NONE) {
    Builder::Attention cross = attention;
    cross.causal = false;
    cross.context = kind.context;
    x = b.add(x, dropped_out(b, b.attention("cross", b.layer_norm("norm3", x), cross), o.dropout));
  }
  const Value normed = b.layer_norm("norm2", x);
  if (kind.experts) return b.add(x, dropped_out(b, mixture(b, "moe", normed, o, out, routing), o.dropout));
  const auto mlp = b.scope("mlp");
  Value y = b.linear("up", normed, hidden_of(o), true, Init::normal(0.02));
  y = b.linear("down", b.op("gelu", {y}), o.dim, true, Init::normal(out));
  return b.add(x, dropped_out(b, y, o.dropout));
}

// Every `moe_every`-th block has experts, the last of a round: 2 gives blocks 1, 3, 5, ...
bool has_experts(const ModelOptions& o, int64_t layer) {
  return o.experts > 0 && o.moe_every > 0 && (layer + 1) % o.moe_every == 0;
}

Value embed(Builder& b, Value table, Value tokens, const std::string& positions, const ModelOptions& o) {
  const Value places = b.parameter(positions, {b.dims(tokens)[1], o.dim}, Init::normal(0.02));
  return b.add(b.op("embedding", {table, tokens}), places);
}

Value tied_logits(Builder& b, Value x, Value table) {
  const Value logits = b.op("matmul", {x, table}, {{"transpose_b", true}});
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return logits;
}

// ---- LSTM -----------------------------------------------------------------------------------------------------------
Value part(Builder& b, Value x, int64_t dim, int64_t begin, int64_t end) {
  Dims limits = b.dims(x), starts(limits.size(), 0);
  starts[dim] = begin;
  limits[dim] = end;
  return b.op("slice", {x}, {{"starts", starts}, {"limits", limits}});
}

// One layer over x [b, t, d], unrolled: the inputs' products are one matrix product for all steps, each step adds the
// state's. Gates are (input, forget, output, candidate); the state starts at zero.
Value lstm(Builder& b, const std::string& name, Value x, int64_t features, bool backwards = false) {
  const auto scope = b.scope(name);
  const int64_t steps = b.dims(x)[1], h = features;
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(h)));
  const Value from_input = b.linear("input", x, 4 * h, true, init);
  const Value weight = b.parameter("state.weight", {h, 4 * h}, init);
  std::vector<Value> outputs(static_cast<size_t>(steps));
  Value state = WHALE_NONE, cell = WHALE_NONE;
  for (int64_t i = 0; i < steps; ++i) {
    const int64_t t = backwards ? steps - 1 - i : i;
    Value all = b.reshape(part(b, from_input, 1, t, t + 1), {-1, 4 * h});
    if (i > 0) all = b.add(all, b.op("matmul", {state, weight}));
    const Value gates = b.op("sigmoid", {part(b, all, 1, 0, 3 * h)});
    const Value candidate = b.mul(part(b, gates, 1, 0, h), b.op("tanh", {part(b, all, 1, 3 * h, 4 * h)}));
    cell = i > 0 ? b.add(b.mul(part(b, gates, 1, h, 2 * h), cell), candidate) : candidate;
    state = b.mul(part(b, gates, 1, 2 * h, 3 * h), b.op("tanh", {cell}));
    outputs[t] = b.reshape(state, {-1, 1, h});
  }
  return b.op("concat", outputs, {{"axis", int64_t{1}}});
}

}  // namespace

// A GPT decoder in which every second MLP is a layer of experts (as M6 and GShard).
Value moe_gpt(Builder& b, const ModelOptions& o) {
  const Value tokens = b.input("tokens", WHALE_I32, {o.batch, o.seq}),
              targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
  const Value table = b.parameter("tokens.weight", {o.vocab, o.dim}, Init::normal(0.02));
  Value x = dropped_out(b, embed(b, table, tokens, "positions.weight", o), o.dropout);
  Routing routing;
  for (int64_t i = 0; i < o.layers; ++i)
    x = block(b, "block" + std::to_string(i), x, o, {.causal = true, .experts = has_experts(o, i)}, routing);
  const Value logits = tied_logits(b, b.layer_norm("norm", x), table);
  return routing.finish(b, b.cross_entropy(logits, targets));
}

// Multimodal as M6 (Lin et al., 2021): features of image patches through a linear layer stand before the text in one
// encoder. With decoder layers, these write the text (`tokens`, `targets`) from the encoder's memory; without, the
// encoder predicts masked words of its own text.
Value m6(Builder& b, const ModelOptions& o) {
  constexpr int64_t kPatchFeatures = 768;  // 16 x 16 x 3
  const int64_t patches = o.image, decoder = std::max<int64_t>(0, o.decoder);
  const Value image = b.input("patches", WHALE_F32, {o.batch, patches, kPatchFeatures});
  const Value source = b.input(decoder > 0 ? "source" : "tokens", WHALE_I32, {o.batch, o.seq});
  const Value table = b.parameter("tokens.weight", {o.vocab, o.dim}, Init::normal(0.02));
  Routing routing;
  Value x;
  {
    const auto scope = b.scope("encoder");
    const Value seen = b.add(b.linear("patches", image, o.dim, true, Init::normal(0.02)),
                             b.parameter("patches.positions", {patches, o.dim}, Init::normal(0.02)));
    x = b.op("concat", {seen, embed(b, table, source, "positions.weight", o)}, {{"axis", int64_t{1}}});
    x = dropped_out(b, x, o.dropout);
    for (int64_t i = 0; i < o.layers; ++i)
      x = block(b, "block" + std::to_string(i), x, o, {.experts = has_experts(o, i), .attention_bias = false}, routing);
    x = b.layer_norm("norm", x);
  }
  if (decoder == 0) {
    const Value targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
    const Value text = part(b, x, 1, patches, patches + o.seq);
    return routing.finish(b, b.cross_entropy(tied_logits(b, text, table), targets));
  }
  const Value tokens = b.input("tokens", WHALE_I32, {o.batch, o.seq}),
              targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
  Value y;
  {
    const auto scope = b.scope("decoder");
    y = dropped_out(b, embed(b, table, tokens, "positions.weight", o), o.dropout);
    for (int64_t i = 0; i < decoder; ++i)
      y = block(b, "block" + std::to_string(i), y, o,
                {.causal = true, .context = x, .experts = has_experts(o, i), .attention_bias = false}, routing);
    y = b.layer_norm("norm", y);
  }
  return routing.finish(b, b.cross_entropy(tied_logits(b, y, table), targets));
}

// Google's translator (Wu et al., 2016), with the attention of its second version: the first decoder layer asks, and
// what it finds is joined to the inputs of all layers above. The first encoder layer reads both ways; residual
// connections from the third layer on.
Value gnmt(Builder& b, const ModelOptions& o) {
  const Value source = b.input("source", WHALE_I32, {o.batch, o.seq});
  const Value tokens = b.input("tokens", WHALE_I32, {o.batch, o.seq}),
              targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
  const Value table = b.parameter("tokens.weight", {o.vocab, o.dim}, Init::uniform(0.1));
  Value memory;
  {
    const auto scope = b.scope("encoder");
    Value x = dropped_out(b, b.op("embedding", {table, source}), o.dropout);
    x = b.op("concat", {lstm(b, "block0.forwards", x, o.dim), lstm(b, "block0.backwards", x, o.dim, true)},
             {{"axis", int64_t{2}}});
    for (int64_t i = 1; i < o.layers; ++i) {
      const Value y = lstm(b, "block" + std::to_string(i), dropped_out(b, x, o.dropout), o.dim);
      x = i > 1 ? b.add(y, x) : y;
    }
    memory = x;
  }
  const auto scope = b.scope("decoder");
  Value x = lstm(b, "block0", dropped_out(b, b.op("embedding", {table, tokens}), o.dropout), o.dim);
  Builder::Attention ask;
  ask.heads = 1;
  ask.context = memory;
  const Value found = b.attention("attention", x, ask);
  for (int64_t i = 1; i < o.layers; ++i) {
    const Value in = b.op("concat", {dropped_out(b, x, o.dropout), found}, {{"axis", int64_t{2}}});
    const Value y = lstm(b, "block" + std::to_string(i), in, o.dim);
    x = i > 1 ? b.add(y, x) : y;
  }
  const Value logits = b.linear("head", x, o.vocab);
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return b.cross_entropy(logits, targets);
}

}  // namespace tool
