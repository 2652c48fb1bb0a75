#include "models_dlrm.h"

#include <cmath>

namespace tool {
namespace {

constexpr int64_t kDense = 13;  // numbers that are no categories, as in Criteo's data

Value relu_layers(Builder& b, const std::string& name, Value x, std::initializer_list<int64_t> features) {
  const auto scope = b.scope(name);
  int i = 0;
  for (const int64_t n : features) x = b.op("relu", {b.linear("layer" + std::to_string(i++), x, n)});
  return x;
}

}  // namespace

ModelOptions dlrm_sizes() {
  ModelOptions o;
  o.layers = 26, o.dim = 64, o.hidden = 512, o.vocab = 100000, o.batch = 2048, o.seq = 1;
  o.dropout = 0, o.weight_decay = 0, o.optimizer = "sgd", o.learning_rate = 0.1, o.sparse_updates = 1;
  return o;
}

// A deep learning recommendation model (Naumov et al., 2019): categories are looked up in tables, numbers go through a
// bottom MLP; all pairs of their vectors interact by dot products, and a top MLP predicts a click.
Value dlrm(Builder& b, const ModelOptions& o) {
  const Value numbers = b.input("dense", WHALE_F32, {o.batch, kDense}),
              labels = b.input("labels", WHALE_I32, {o.batch});
  std::vector<Value> ids;
  for (int64_t t = 0; t < o.layers; ++t) ids.push_back(b.input("ids" + std::to_string(t), WHALE_I32, {o.batch, o.seq}));
  const Value x = relu_layers(b, "bottom", numbers, {o.hidden, o.hidden / 2, o.dim});
  std::vector<Value> vectors{x};
  const Init init = Init::uniform(1 / std::sqrt(static_cast<double>(o.vocab)));
  for (int64_t t = 0; t < o.layers; ++t) {
    const Value table = b.parameter("tables." + std::to_string(t) + ".weight", {o.vocab, o.dim}, init);
    vectors.push_back(b.op("embedding_bag", {table, ids[t]}));
  }
  const Value features = b.op("concat", {x, b.op("pairwise_dot", vectors)}, {{"axis", int64_t{1}}});
  const Value y = relu_layers(b, "top", features, {o.hidden, o.hidden / 2});
  const Value logits = b.reshape(b.linear("head", y, 1), {-1});
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  const Value target = b.op("cast", {labels}, {{"dtype", std::string("f32")}});
  return b.op("reduce_mean", {b.op("bce_with_logits", {logits, target})});
}

}  // namespace tool
