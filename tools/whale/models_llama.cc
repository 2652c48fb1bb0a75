#include "models_llama.h"

#include <cmath>

namespace tool {

ModelOptions llama_sizes(int64_t layers, int64_t dim, int64_t heads, int64_t kv_heads, int64_t hidden, int64_t seq,
                         int64_t vocab, int64_t batch) {
  ModelOptions o;
  o.layers = layers, o.dim = dim, o.heads = heads, o.kv_heads = kv_heads, o.hidden = hidden, o.seq = seq;
  o.vocab = vocab, o.batch = batch, o.dropout = 0;
  o.optimizer = "adamw", o.learning_rate = 8e-5, o.weight_decay = 0.1;
  return o;
}

// A decoder as Llama 3 (Grattafiori et al., 2024, section 3.2): RMS norms, rotary positions of base 500,000,
// grouped queries, SwiGLU, no biases, an output of its own.
Value llama(Builder& b, const ModelOptions& o) {
  if (o.heads % o.kv_heads != 0)
    throw Failure("--kv-heads is a divisor of the heads, " + std::to_string(o.heads) + "; got " +
                  std::to_string(o.kv_heads));
  if (o.dim / o.heads % 2 != 0)
    throw Failure("rotary positions turn pairs: dim " + std::to_string(o.dim) + " in " + std::to_string(o.heads) +
                  " heads gives heads of " + std::to_string(o.dim / o.heads) + ", expected an even number");
  const Value tokens = b.input("tokens", WHALE_I32, {o.batch, o.seq}),
              targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
  const double out = 0.02 / std::sqrt(2.0 * static_cast<double>(o.layers));
  Builder::Attention attention;
  attention.heads = o.heads, attention.kv_heads = o.kv_heads;
  attention.causal = true, attention.bias = false, attention.rotary = 500'000;
  attention.out_deviation = out;
  Value x = b.embedding("tokens", tokens, o.vocab, o.dim);
  for (int64_t i = 0; i < o.layers; ++i) {
    const auto scope = b.scope("block" + std::to_string(i));
    x = b.add(x, b.attention("attention", b.rms_norm("norm1", x), attention));
    x = b.add(x, b.swiglu("mlp", b.rms_norm("norm2", x), o.hidden, 0.02, out));
  }
  const Value logits = b.linear("head", b.rms_norm("norm", x), o.vocab, false, Init::normal(0.02));
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return b.cross_entropy(logits, targets);
}

}  // namespace tool
