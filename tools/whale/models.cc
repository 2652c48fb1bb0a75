#include "models.h"

#include <algorithm>
#include <cmath>

#include "models_deepseek.h"
#include "models_dlrm.h"
#include "models_llama.h"
#include "models_lm.h"
#include "models_vision.h"

namespace tool {
namespace {

int64_t or_else(int64_t value, int64_t otherwise) { return value < 0 ? otherwise : value; }

Value maybe_dropout(Builder& b, Value x, double rate) { return rate > 0 ? b.op("dropout", {x}, {{"rate", rate}}) : x; }

// x + attention(norm(x)), then x + mlp(norm(x)).
Value block(Builder& b, const std::string& name, Value x, const ModelOptions& o, bool causal) {
  const auto scope = b.scope(name);
  const double out = 0.02 / std::sqrt(2.0 * static_cast<double>(o.layers));  // GPT-2's scaled initialization
  Builder::Attention attention;
  attention.heads = o.heads;
  attention.causal = causal;
  attention.dropout = o.dropout;
  attention.out_deviation = out;
  x = b.add(x, maybe_dropout(b, b.attention("attention", b.layer_norm("norm1", x), attention), o.dropout));
  const auto mlp = b.scope("mlp");
  Value y = b.linear("up", b.layer_norm("norm", x), or_else(o.hidden, 4 * o.dim), true, Init::normal(0.02));
  y = b.linear("down", b.op("gelu", {y}), o.dim, true, Init::normal(out));
  return b.add(x, maybe_dropout(b, y, o.dropout));
}

// A decoder as GPT-2 (Radford et al., 2019): learned positions, pre-norm, tanh gelu.
Value gpt(Builder& b, const ModelOptions& o) {
  const Value tokens = b.input("tokens", WHALE_I32, {o.batch, o.seq}),
              targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
  const Value table = b.parameter("tokens.weight", {o.vocab, o.dim}, Init::normal(0.02));
  Value x =
      b.add(b.op("embedding", {table, tokens}), b.parameter("positions.weight", {o.seq, o.dim}, Init::normal(0.02)));
  x = maybe_dropout(b, x, o.dropout);
  for (int64_t i = 0; i < o.layers; ++i) x = block(b, "block" + std::to_string(i), x, o, true);
  x = b.layer_norm("norm", x);
  const Value logits = o.tied ? b.op("matmul", {x, table}, {{"transpose_b", true}})
                              : b.linear("head", x, o.vocab, false, Init::normal(0.02));
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return b.cross_entropy(logits, targets);
}

// An encoder as BERT (Devlin et al., 2019): post-norm, erf gelu, masked tokens as targets (-100: not predicted), tied
// output.
Value bert(Builder& b, const ModelOptions& o) {
  const Value tokens = b.input("tokens", WHALE_I32, {o.batch, o.seq}),
              targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
  const Value table = b.parameter("tokens.weight", {o.vocab, o.dim}, Init::normal(0.02));
  Value x =
      b.add(b.op("embedding", {table, tokens}), b.parameter("positions.weight", {o.seq, o.dim}, Init::normal(0.02)));
  x = maybe_dropout(b, b.layer_norm("norm", x), o.dropout);
  for (int64_t i = 0; i < o.layers; ++i) {
    const auto scope = b.scope("block" + std::to_string(i));
    Builder::Attention attention;
    attention.heads = o.heads;
    attention.dropout = o.dropout;
    x = b.layer_norm("norm1", b.add(x, maybe_dropout(b, b.attention("attention", x, attention), o.dropout)));
    Value y = b.op("gelu_erf", {b.linear("up", x, or_else(o.hidden, 4 * o.dim), true, Init::normal(0.02))});
    y = maybe_dropout(b, b.linear("down", y, o.dim, true, Init::normal(0.02)), o.dropout);
    x = b.layer_norm("norm2", b.add(x, y));
  }
  {
    const auto scope = b.scope("head");
    x = b.layer_norm("norm", b.op("gelu_erf", {b.linear("dense", x, o.dim, true, Init::normal(0.02))}));
    x = b.op("matmul", {x, table, b.parameter("bias", {o.vocab}, Init::zeros())}, {{"transpose_b", true}});
  }
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), x));
  return b.cross_entropy(x, targets);
}

// Buckets of T5's relative positions (Raffel et al., 2020, section 2.1), as constants: a table [buckets, heads] is
// looked up for each pair (query, key) and added to the scores of every layer of a stack.
Value relative_bias(Builder& b, const std::string& name, int64_t seq, int64_t heads, bool bidirectional) {
  constexpr int64_t kBuckets = 32, kMaxDistance = 128;
  const auto scope = b.scope(name);
  const Value table = b.parameter("weight", {kBuckets, heads}, Init::normal(0.1));
  const auto i32 = std::string("i32"), f32 = std::string("f32");
  const Value query = b.op("iota", {}, {{"shape", Dims{seq, seq}}, {"dim", int64_t{0}}, {"dtype", i32}});
  const Value key = b.op("iota", {}, {{"shape", Dims{seq, seq}}, {"dim", int64_t{1}}, {"dtype", i32}});
  const Value relative = b.op("sub", {key, query});
  const int64_t buckets = bidirectional ? kBuckets / 2 : kBuckets, exact = buckets / 2;
  const Value zero = b.constant(0, i32);
  const Value distance = bidirectional ? b.op("abs", {relative}) : b.op("maximum", {b.op("neg", {relative}), zero});
  const Value as_float = b.op("cast", {b.op("maximum", {distance, b.constant(1, i32)})}, {{"dtype", f32}});
  const double scale =
      static_cast<double>(buckets - exact) / std::log(static_cast<double>(kMaxDistance) / static_cast<double>(exact));
  Value far = b.mul(b.op("log", {b.mul(as_float, b.constant(1.0 / static_cast<double>(exact)))}), b.constant(scale));
  far = b.op("add", {b.op("cast", {b.op("floor", {b.op("maximum", {far, b.constant(0)})})}, {{"dtype", i32}}),
                     b.constant(static_cast<double>(exact), i32)});
  far = b.op("minimum", {far, b.constant(static_cast<double>(buckets - 1), i32)});
  Value bucket = b.op("where", {b.op("less", {distance, b.constant(static_cast<double>(exact), i32)}), distance, far});
  if (bidirectional) {
    const Value after = b.op("cast", {b.op("greater", {relative, zero})}, {{"dtype", i32}});
    bucket = b.add(bucket, b.mul(after, b.constant(static_cast<double>(buckets), i32)));
  }
  const Value rows = b.op("embedding", {table, bucket});  // [seq, seq, heads]
  return b.reshape(b.op("transpose", {rows}, {{"perm", Dims{2, 0, 1}}}), {1, heads, seq, seq});
}

Value t5_stack(Builder& b, const std::string& name, Value x, const ModelOptions& o, Value context) {
  const auto scope = b.scope(name);
  const bool decoder = context != WHALE_NONE;
  const Value bias = relative_bias(b, "relative_bias", o.seq, o.heads, !decoder);
  Builder::Attention self;
  self.heads = o.heads;
  self.causal = decoder;
  self.bias = false;
  self.scale = 1;  // T5 does not scale the scores
  self.score_bias = bias;
  self.head_features = 64 * o.heads > o.dim ? o.dim / o.heads : 64;
  self.deviation = 1.0 / std::sqrt(static_cast<double>(o.dim));
  self.out_deviation = 1.0 / std::sqrt(static_cast<double>(o.dim));
  Builder::Attention cross = self;
  cross.causal = false;
  cross.score_bias = WHALE_NONE;
  cross.context = context;
  for (int64_t i = 0; i < o.layers; ++i) {
    const auto layer = b.scope("block" + std::to_string(i));
    x = b.add(x, maybe_dropout(b, b.attention("self", b.rms_norm("norm1", x), self), o.dropout));
    if (decoder) x = b.add(x, maybe_dropout(b, b.attention("cross", b.rms_norm("norm2", x), cross), o.dropout));
    Value y = b.op("relu", {b.linear("up", b.rms_norm("norm3", x), or_else(o.hidden, 4 * o.dim), false)});
    x = b.add(x, maybe_dropout(b, b.linear("down", y, o.dim, false), o.dropout));
  }
  return b.rms_norm("norm", x);
}

// An encoder and a decoder as T5 (Raffel et al., 2020): RMS norms, relative positions, no biases, tied embeddings.
Value t5(Builder& b, const ModelOptions& o) {
  const Value source = b.input("source", WHALE_I32, {o.batch, o.seq});
  const Value tokens = b.input("tokens", WHALE_I32, {o.batch, o.seq}),
              targets = b.input("targets", WHALE_I32, {o.batch, o.seq});
  const Value table = b.parameter("tokens.weight", {o.vocab, o.dim}, Init::normal(1.0));
  const Value memory = t5_stack(b, "encoder", b.op("embedding", {table, source}), o, WHALE_NONE);
  Value x = t5_stack(b, "decoder", b.op("embedding", {table, tokens}), o, memory);
  x = b.mul(x, b.constant(1 / std::sqrt(static_cast<double>(o.dim))));
  const Value logits = b.op("matmul", {x, table}, {{"transpose_b", true}});
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return b.cross_entropy(logits, targets);
}

// Residual networks (He et al., 2016). layers 20, 32, 44, 56 (6n + 2): for small images, basic blocks; 50: bottlenecks.
// The last norm of a block starts at zero (Goyal et al., 2017, section 5.1): the network is then well conditioned when
// training begins.
Value resnet(Builder& b, const ModelOptions& o) {
  const Value images = b.input("images", WHALE_F32, {o.batch, o.image, o.image, 3}),
              labels = b.input("labels", WHALE_I32, {o.batch});
  const bool deep = o.layers == 50;
  if (!deep && (o.layers < 8 || (o.layers - 2) % 6 != 0))
    throw Failure("resnet: layers is 50, or 6 n + 2 such as 8, 20, 32; got " + std::to_string(o.layers));
  const std::vector<int64_t> counts =
      deep ? std::vector<int64_t>{3, 4, 6, 3} : std::vector<int64_t>(3, (o.layers - 2) / 6);
  const auto conv_norm = [&](const std::string& name, Value x, int64_t features, int64_t kernel, int64_t stride,
                             Init weight = Init::ones()) {
    const auto scope = b.scope(name);
    return b.batch_norm("norm", b.conv("conv", x, features, kernel, stride, kernel / 2), weight, o.norm_groups);
  };
  const int64_t base = deep ? 64 : or_else(o.dim, 16);
  Value x = b.op("relu", {conv_norm("stem", images, base, deep ? 7 : 3, deep ? 2 : 1)});
  if (deep)
    x = b.ops("max_pool", {x}, {{"window", Dims{3, 3}}, {"strides", Dims{2, 2}}, {"padding", Dims{1, 1, 1, 1}}})[0];
  for (size_t stage = 0; stage < counts.size(); ++stage) {
    const int64_t features = base << stage, out = deep ? 4 * features : features;
    for (int64_t i = 0; i < counts[stage]; ++i) {
      const auto scope = b.scope("stage" + std::to_string(stage) + ".block" + std::to_string(i));
      const int64_t stride = stage > 0 && i == 0 ? 2 : 1;
      Value y;
      if (deep) {
        y = b.op("relu", {conv_norm("a", x, features, 1, 1)});
        y = b.op("relu", {conv_norm("b", y, features, 3, stride)});
        y = conv_norm("c", y, out, 1, 1, Init::zeros());
      } else {
        y = b.op("relu", {conv_norm("a", x, features, 3, stride)});
        y = conv_norm("b", y, features, 3, 1, Init::zeros());
      }
      const Value skip = stride != 1 || b.dims(x).back() != out ? conv_norm("skip", x, out, 1, stride) : x;
      x = b.op("relu", {b.add(y, skip)});
    }
  }
  const Value pooled = b.op("reduce_mean", {x}, {{"axes", Dims{1, 2}}});
  const Value logits = b.linear("head", pooled, o.classes);
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return b.cross_entropy(logits, labels);
}

Value mlp(Builder& b, const ModelOptions& o) {
  const Value x0 = b.input("x", WHALE_F32, {o.batch, o.dim}), labels = b.input("y", WHALE_I32, {o.batch});
  Value x = x0;
  for (int64_t i = 0; i < o.layers - 1; ++i)
    x = maybe_dropout(b, b.op("relu", {b.linear("layer" + std::to_string(i), x, o.hidden)}), o.dropout);
  const Value logits = b.linear("head", x, o.classes);
  check(whale_graph_output(b.graph(), WHALE_STR("logits"), logits));
  return b.cross_entropy(logits, labels);
}

ModelOptions text_sizes(int64_t layers, int64_t dim, int64_t heads, int64_t seq, int64_t vocab, int64_t batch,
                        const char* optimizer, double lr) {
  ModelOptions o;
  o.layers = layers, o.dim = dim, o.heads = heads, o.seq = seq, o.vocab = vocab, o.batch = batch;
  o.dropout = 0, o.optimizer = optimizer, o.learning_rate = lr;
  return o;
}
ModelOptions tied(ModelOptions o) {
  o.tied = true;
  return o;
}
// Every `every`-th MLP is a layer of `experts` experts, of which a token goes to `top_k`.
ModelOptions mixed(ModelOptions o, int64_t experts, int64_t top_k, int64_t every, int64_t hidden = -1) {
  o.experts = experts, o.top_k = top_k, o.moe_every = every, o.hidden = hidden;
  return o;
}
// `image` patches stand before the text; with decoder layers of their own.
ModelOptions multimodal(ModelOptions o, int64_t patches, int64_t decoder) {
  o.image = patches, o.decoder = decoder;
  return o;
}
ModelOptions image_sizes(int64_t layers, int64_t image, int64_t classes, int64_t batch, double lr) {
  ModelOptions o;
  o.layers = layers, o.image = image, o.classes = classes, o.batch = batch, o.optimizer = "momentum",
  o.learning_rate = lr;
  o.weight_decay = 1e-4;
  return o;
}
ModelOptions mlp_sizes() {
  ModelOptions o;
  o.layers = 3, o.dim = 784, o.hidden = 512, o.classes = 10, o.batch = 256, o.dropout = 0, o.optimizer = "momentum",
  o.learning_rate = 0.05;
  o.weight_decay = 0;
  return o;
}

// ---- which sizes each family reads ----------------------------------------------------------------------------------
using Reads = std::vector<Read>;

Reads operator+(Reads a, const Reads& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

bool has_mixtures(const ModelOptions& o) {
  return o.experts > 0 && o.moe_every > 0 && o.moe_every <= std::max(o.layers, o.decoder);
}
bool has_routed_layers(const ModelOptions& o) { return o.dense_layers < o.layers; }
bool is_small_resnet(const ModelOptions& o) { return o.layers != 50; }
bool has_hidden_layers(const ModelOptions& o) { return o.layers > 1; }

constexpr const char* kMixtures = "--experts, and --moe-every of at most the layers";
constexpr const char* kRoutedLayers = "--dense-layers of less than the layers";
const Reads kTransformer{{"--layers"}, {"--dim"}, {"--heads"}, {"--seq"}, {"--vocab"}, {"--hidden"}, {"--dropout"}};
const Reads kExperts{{"--experts", has_mixtures, kMixtures},
                     {"--top-k", has_mixtures, kMixtures},
                     {"--capacity", has_mixtures, kMixtures},
                     {"--moe-every", has_mixtures, kMixtures}};
const ModelFamily kGpt{gpt, kTransformer + Reads{{"--tied"}}};
const ModelFamily kBert{bert, kTransformer};
const ModelFamily kT5{t5, kTransformer};
const ModelFamily kMoeGpt{moe_gpt, kTransformer + kExperts};
const ModelFamily kM6{m6, kTransformer + kExperts + Reads{{"--image"}, {"--decoder"}}};
const ModelFamily kLlama{llama,
                         {{"--layers"}, {"--dim"}, {"--heads"}, {"--kv-heads"}, {"--seq"}, {"--vocab"}, {"--hidden"}}};
const ModelFamily kDeepseek{deepseek,
                            {{"--layers"},
                             {"--dim"},
                             {"--heads"},
                             {"--head-dim"},
                             {"--seq"},
                             {"--vocab"},
                             {"--hidden"},
                             {"--dense-layers"},
                             {"--experts", has_routed_layers, kRoutedLayers},
                             {"--top-k"},
                             {"--capacity", has_routed_layers, kRoutedLayers}}};
const ModelFamily kGnmt{gnmt, {{"--layers"}, {"--dim"}, {"--seq"}, {"--vocab"}, {"--dropout"}}};
const ModelFamily kResnet{resnet,
                          {{"--layers"},
                           {"--dim", is_small_resnet, "--layers other than 50, whose first stage has 64 channels"},
                           {"--image"},
                           {"--classes"},
                           {"--norm-groups"}}};
const ModelFamily kMlp{mlp,
                       {{"--layers"},
                        {"--dim"},
                        {"--hidden", has_hidden_layers, "--layers of 2 or more"},
                        {"--classes"},
                        {"--dropout", has_hidden_layers, "--layers of 2 or more"}}};
const ModelFamily kDlrm{dlrm, {{"--layers"}, {"--dim"}, {"--seq"}, {"--vocab"}, {"--hidden"}}};
const ModelFamily kCosmoflow{cosmoflow, {{"--layers"}, {"--dim"}, {"--image"}, {"--hidden"}, {"--classes"}}};
const ModelFamily kUnet3d{unet3d, {{"--layers"}, {"--dim"}, {"--image"}, {"--classes"}}};
const ModelFamily kClassifier{classifier, {{"--layers"}, {"--dim"}, {"--classes"}}};

}  // namespace

const std::vector<ModelRow>& model_rows() {
  static const std::vector<ModelRow> rows{
      {"gpt", "a small GPT decoder", text_sizes(4, 256, 4, 128, 256, 16, "adamw", 3e-4), kGpt},
      {"gpt2", "GPT-2, 124M parameters", tied(text_sizes(12, 768, 12, 256, 50257, 4, "adamw", 3e-4)), kGpt},
      {"bert", "a small BERT encoder with masked targets", text_sizes(4, 256, 4, 128, 256, 16, "adamw", 3e-4), kBert},
      {"bert-large", "BERT-Large, 335M parameters", text_sizes(24, 1024, 16, 512, 30522, 8, "lamb", 1e-3), kBert},
      {"t5", "a small T5 encoder and decoder", text_sizes(2, 128, 4, 64, 256, 16, "adafactor", 1e-2), kT5},
      {"t5-large", "T5-Large, 738M parameters", text_sizes(24, 1024, 16, 512, 32128, 8, "adafactor", 1e-2), kT5},
      {"gpt3-175b", "GPT-3, 175B parameters", tied(text_sizes(96, 12288, 96, 2048, 50257, 1536, "adam", 6e-5)), kGpt},
      {"moe-gpt", "a small GPT decoder, every second MLP a mixture of 8 experts",
       mixed(text_sizes(4, 256, 4, 128, 256, 16, "adamw", 3e-4), 8, 2, 2), kMoeGpt},
      {"m6", "a small multimodal encoder: image patches and text, with experts",
       mixed(multimodal(text_sizes(4, 256, 4, 64, 256, 16, "adamw", 3e-4), 16, 0), 8, 1, 2), kM6},
      {"m6-10b", "M6, 10B parameters: 24 encoder and 24 decoder layers",
       mixed(multimodal(text_sizes(24, 3840, 40, 512, 21128, 280, "adafactor", 1e-2), 16, 24), 0, 1, 1), kM6},
      {"m6-1t", "M6-T, 1T parameters: 960 experts in each of 24 layers",
       mixed(multimodal(text_sizes(24, 1024, 16, 512, 21128, 480, "adafactor", 5e-3), 16, 0), 960, 1, 1, 21248), kM6},
      {"m6-10t", "M6, 10T parameters: 10,240 experts in each of 48 layers",
       mixed(multimodal(text_sizes(48, 1024, 16, 512, 21128, 512, "adafactor", 5e-3), 16, 0), 10240, 1, 1, 9984), kM6},
      {"llama", "a small Llama decoder: rotary positions, SwiGLU, grouped queries",
       llama_sizes(4, 256, 8, 2, 704, 128, 256, 16), kLlama},
      {"llama3-405b", "Llama 3.1, 405B parameters", llama_sizes(126, 16384, 128, 8, 53248, 8192, 128256, 512), kLlama},
      {"deepseek", "a small DeepSeek decoder: latent attention, routed experts and a shared one",
       deepseek_sizes(4, 256, 8, 16, 96, 1, 8, 2, 128, 256, 16), kDeepseek},
      {"deepseek-v3", "DeepSeek-V3, 671B parameters: 256 experts in each of 58 layers",
       deepseek_sizes(61, 7168, 128, 128, 2048, 3, 256, 8, 4096, 129280, 3072), kDeepseek},
      {"gnmt", "GNMT, 8 and 8 LSTM layers with attention, unrolled",
       text_sizes(8, 1024, 1, 12, 32000, 16, "adam", 1e-3), kGnmt},
      {"resnet", "a small ResNet for 32x32 images", image_sizes(8, 32, 10, 64, 0.1), kResnet},
      {"resnet20", "ResNet-20 for 32x32 images", image_sizes(20, 32, 10, 64, 0.1), kResnet},
      {"resnet50", "ResNet-50", image_sizes(50, 224, 1000, 16, 0.01), kResnet},
      {"mlp", "three layers, 784-512-512-10", mlp_sizes(), kMlp},
      {"dlrm", "DLRM: 26 tables of 100,000 rows, sparse updates", dlrm_sizes(), kDlrm},
      {"cosmoflow", "CosmoFlow on 64^3 volumes", cosmoflow_sizes(), kCosmoflow},
      {"unet3d", "3D U-Net on 64^3 volumes", unet3d_sizes(), kUnet3d},
      {"classifier100k", "a backbone and a classifier of 100,000 classes", classifier_sizes(), kClassifier},
  };
  return rows;
}

const ModelRow& find_model(const std::string& name) {
  std::string names;
  for (const ModelRow& row : model_rows()) {
    if (name == row.name) return row;
    names += (names.empty() ? "" : ", ") + std::string(row.name);
  }
  throw Failure("no model '" + shown(name) + "'; there are " + names);
}

ModelOptions merge(const ModelOptions& given, const ModelOptions& defaults) {
  ModelOptions o = given;
  const auto fill = [](auto& value, const auto& fallback) {
    if (value < 0) value = fallback;
  };
  fill(o.layers, defaults.layers), fill(o.dim, defaults.dim), fill(o.heads, defaults.heads), fill(o.seq, defaults.seq);
  fill(o.vocab, defaults.vocab), fill(o.batch, defaults.batch), fill(o.hidden, defaults.hidden),
      fill(o.classes, defaults.classes);
  fill(o.experts, defaults.experts), fill(o.top_k, defaults.top_k), fill(o.moe_every, defaults.moe_every),
      fill(o.decoder, defaults.decoder), fill(o.capacity, defaults.capacity < 0 ? 1.25 : defaults.capacity);
  fill(o.kv_heads, defaults.kv_heads), fill(o.head_dim, defaults.head_dim), fill(o.dense_layers, defaults.dense_layers);
  fill(o.image, defaults.image), fill(o.dropout, defaults.dropout < 0 ? 0 : defaults.dropout);
  fill(o.learning_rate, defaults.learning_rate),
      fill(o.weight_decay, defaults.weight_decay < 0 ? 0.01 : defaults.weight_decay);
  if (o.optimizer.empty()) o.optimizer = defaults.optimizer;
  o.tied = o.tied || defaults.tied;
  fill(o.sparse_updates, defaults.sparse_updates);
  return o;
}

void check_reads(const ModelRow& row, const ModelOptions& given, const std::vector<std::string>& sizes) {
  const ModelOptions o = merge(given, row.defaults);
  std::string all;
  for (const Read& read : row.family.reads) all += (all.empty() ? "" : ", ") + std::string(read.option);
  for (const std::string& size : sizes) {
    const auto read = std::find_if(row.family.reads.begin(), row.family.reads.end(),
                                   [&](const Read& each) { return size == each.option; });
    if (read == row.family.reads.end())
      throw Failure("model '" + std::string(row.name) + "' has no " + size + "; its sizes are --batch, " + all);
    if (read->when && !read->when(o))
      throw Failure("model '" + std::string(row.name) + "' would not use " + size + ": it wants " + read->wants);
  }
}

GraphHandle build_model(whale_engine* engine, const ModelRow& row, const ModelOptions& given) {
  const ModelOptions o = merge(given, row.defaults);
  if (o.heads > 0 && o.dim % o.heads != 0)
    throw Failure("dim " + std::to_string(o.dim) + " does not divide into " + std::to_string(o.heads) + " heads");
  struct Named {
    const char* name;
    int value;
  };
  const auto pick = [](const std::string& what, const std::string& name, std::initializer_list<Named> rows) {
    std::string names;
    for (const Named& each : rows) {
      if (name == each.name) return each.value;
      names += (names.empty() ? "" : ", ") + std::string(each.name);
    }
    throw Failure("no " + what + " '" + shown(name) + "'; there are " + names);
  };
  whale_training_options training = WHALE_TRAINING_OPTIONS_INIT;
  training.optimizer = pick("optimizer", o.optimizer,
                            {{"sgd", WHALE_OPTIMIZER_SGD},
                             {"split_sgd", WHALE_OPTIMIZER_SGD},
                             {"momentum", WHALE_OPTIMIZER_SGD},
                             {"nesterov", WHALE_OPTIMIZER_SGD},
                             {"adam", WHALE_OPTIMIZER_ADAM},
                             {"adamw", WHALE_OPTIMIZER_ADAMW},
                             {"lamb", WHALE_OPTIMIZER_LAMB},
                             {"adagrad", WHALE_OPTIMIZER_ADAGRAD},
                             {"adafactor", WHALE_OPTIMIZER_ADAFACTOR}});
  training.momentum = o.optimizer == "momentum" || o.optimizer == "nesterov" ? 0.9 : 0;
  training.nesterov = o.optimizer == "nesterov";
  training.split_master_weights = o.optimizer == "split_sgd";
  training.sparse_updates = o.sparse_updates == 1;
  training.learning_rate = o.learning_rate;
  training.weight_decay = o.weight_decay;
  training.epsilon = o.optimizer == "adafactor" ? 1e-30 : 1e-8;
  training.zeros = o.learning_rate == 0 ? WHALE_ZERO_LEARNING_RATE : 0;
  training.clip_norm = o.clip;
  training.accumulation = o.accumulation;
  training.precision = pick("precision", o.precision,
                            {{"f32", WHALE_PRECISION_F32},
                             {"bf16", WHALE_PRECISION_BF16},
                             {"f16", WHALE_PRECISION_F16},
                             {"f64", WHALE_PRECISION_F64}});
  training.lr_schedule = pick("lr-schedule", o.lr_schedule,
                              {{"constant", WHALE_LR_CONSTANT},
                               {"linear", WHALE_LR_LINEAR},
                               {"cosine", WHALE_LR_COSINE},
                               {"inverse_sqrt", WHALE_LR_INVERSE_SQRT}});
  training.warmup_steps = o.warmup;
  training.total_steps = o.total_steps;

  Builder b(engine, row.name, pick("parameters", o.parameters, {{"f32", WHALE_F32}, {"bf16", WHALE_BF16}}));
  if (!o.strategy.empty()) check(whale_graph_default_strategy(b.graph(), str(o.strategy)));
  const Value loss = row.family.build(b, o);
  check(whale_graph_minimize(b.graph(), loss, &training));
  check(whale_graph_seal(b.graph()));
  return b.take();
}

}  // namespace tool
