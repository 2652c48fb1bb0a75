#include "plan_blocks.h"

#include <algorithm>
#include <span>

#include "base/error.h"

namespace whale::test {
namespace {

using enum OpCode;

constexpr int64_t kIds = 3;  // inputs of integers are below

// ---- first ------------------------------------------------------------------------------------------------------
void features(BlockGraph& m) { m.h = m.input(m.name + "x", {m.batch, m.dice.between(1, 6)}); }
void sequence(BlockGraph& m) { m.h = m.input(m.name + "x", {m.batch, m.dice.between(1, 5), m.dice.between(1, 6)}); }
void image(BlockGraph& m) {
  m.h = m.input(m.name + "x", {m.batch, m.dice.between(2, 6), m.dice.between(1, 5), m.dice.between(1, 3)});
}
void volume(BlockGraph& m) {
  m.h = m.input(m.name + "x", {m.batch, m.dice.between(2, 4), 3, m.dice.between(1, 3), m.dice.between(1, 2)});
}
void tokens(BlockGraph& m) {
  const int64_t t = m.dice.between(1, 5), d = m.dice.between(1, 6);
  m.table = m.parameter("table", {m.dice.between(kIds, 8), d});
  m.h = m.op(k_embedding, {m.table, m.input(m.name + "ids", {m.batch, t}, DType::kI32)});
  if (m.dice.coin()) m.h = m.op(k_add, {m.h, m.parameter("positions", {t, d})});
}
void bags(BlockGraph& m) {
  const int64_t d = m.dice.between(1, 4), n = m.dice.between(1, 3);
  std::vector<TensorId> all;
  for (int64_t i = 0; i < n; ++i) {
    const std::string number = std::to_string(i);
    const TensorId ids = m.input(m.name + "ids" + number, {m.batch, m.dice.between(1, 3)}, DType::kI32);
    all.push_back(m.op(k_embedding_bag, {m.parameter(("table" + number).c_str(), {m.dice.between(kIds, 7), d}), ids},
                       {{"mode", std::string(m.dice.coin() ? "sum" : "mean")}}));
  }
  if (n > 1 && m.dice.coin()) all.push_back(m.op(k_pairwise_dot, all));
  m.h = all.size() == 1 ? all[0] : m.op(k_concat, all, {{"axis", int64_t{1}}});
}

// ---- middle -----------------------------------------------------------------------------------------------------
void linear(BlockGraph& m) { m.h = m.linear("w", m.h, m.dice.between(1, 8)); }
// A weight that is made of parameters alone: low-rank terms, normed, mixed or looked up in itself.
void made_weights(BlockGraph& m) {
  const int64_t in = m.features(m.h), out = m.dice.between(1, 6);
  TensorId w = m.parameter("w", {in, out});
  for (int64_t n = m.dice.between(1, 3); n-- > 0;) {
    const std::string p = fmt::format("made{}.", n);
    switch (m.dice.below(6)) {
      case 0: {
        const int64_t rank = m.dice.between(1, 3);
        w = m.op(k_add, {w, m.op(k_matmul, {m.parameter((p + "a").c_str(), {in, rank}),
                                            m.parameter((p + "b").c_str(), {rank, out})})});
        break;
      }
      case 1: w = m.op(k_matmul, {w, m.op(k_softmax, {m.parameter((p + "mix").c_str(), {out, out})})}); break;
      case 2:
        w = m.op(k_layer_norm, {w, m.ones((p + "gamma").c_str(), {out}), m.parameter((p + "beta").c_str(), {out})},
                 {{"epsilon", 0.1}});
        break;
      case 3: w = m.op(k_matmul, {m.op(k_softmax, {m.op(k_matmul, {w, w}, {{"transpose_b", true}})}), w}); break;
      case 4:
        w = m.op(k_tanh, {m.op(k_mul, {w, m.parameter((p + "scale").c_str(), {m.dice.coin() ? out : 1})})});
        break;
      default: m.extra.push_back(m.op(k_reduce_mean, {m.op(k_square, {w})})); break;
    }
  }
  m.h = m.op(k_matmul, {m.h, w});
}
void act(BlockGraph& m) { m.h = m.activation(m.h); }
void dropout(BlockGraph& m) {
  m.h = m.op(k_dropout, {m.h}, {{"rate", 0.25}, {"key", static_cast<int64_t>(m.g.tensors.size())}});
}
void norm(BlockGraph& m) {
  const Dims d{m.features(m.h)};
  if (m.dice.coin())
    m.h = m.op(k_layer_norm, {m.h, m.ones("gamma", d), m.parameter("beta", d)}, {{"epsilon", 0.1}});
  else
    m.h = m.op(k_rms_norm, {m.h, m.ones("gamma", d)}, {{"epsilon", 0.1}});
}
void normalize(BlockGraph& m, int64_t groups) {
  const Dims d{m.features(m.h)};
  const auto running = [&](const char* what, double value) {
    return m.variable(m.name + what, d, {InitKind::kConstant, value, 1, "", ""}, Role::kBuffer);
  };
  m.h = m.op(k_batch_norm, {m.h, m.ones("gamma", d), m.parameter("beta", d), running("mean", 0), running("var", 1)},
             {{"epsilon", 0.1}, {"groups", groups}});
}
void batch_norm(BlockGraph& m) { normalize(m, 1); }
// A group is a sample or a few, so that micro-batches often hold whole ones.
void groups_norm(BlockGraph& m) {
  const int64_t rows = m.dims(m.h)[0];
  int64_t groups = rows;
  for (const int64_t k : {2, 3, 4, 5})
    if (rows % k == 0 && m.dice.below(3)) groups = k;
  normalize(m, groups);
}
void residual(BlockGraph& m) {
  const TensorId up = m.activation(m.linear("up", m.h, m.dice.between(1, 8)));
  m.h = m.op(k_add, {m.h, m.linear("down", up, m.features(m.h))});
}
void gate(BlockGraph& m) {
  m.h = m.op(k_mul, {m.h, m.op(k_sigmoid, {m.linear("gate", m.h, m.dice.coin() ? 1 : m.features(m.h))})});
}
void attention(BlockGraph& m) {
  m.rank(3, 3);
  const Dims d = m.dims(m.h);
  const int64_t kv = m.dice.between(1, 3), heads = kv * m.dice.between(1, 2), width = m.dice.between(1, 2) * 2,
                t = d[1];
  Attrs attrs{{"causal", m.dice.coin()}};
  if (m.dice.below(4) == 0) attrs["dropout"] = 0.25, attrs["key"] = static_cast<int64_t>(m.g.tensors.size());
  std::vector<TensorId> in;
  if (m.dice.coin()) {
    in = {m.reshape(m.linear("qkv", m.h, (heads + 2 * kv) * width), {m.batch, t, heads + 2 * kv, width})};
    attrs["kv_heads"] = kv;
  } else {
    in = {m.reshape(m.linear("q", m.h, heads * width), {m.batch, t, heads, width}),
          m.reshape(m.linear("k", m.h, kv * width), {m.batch, t, kv, width}),
          m.reshape(m.linear("v", m.h, kv * width), {m.batch, t, kv, width})};
    if (m.dice.coin())
      for (size_t i = 0; i < 2; ++i) in[i] = m.op(k_rotary, {in[i]}, {{"base", 10.0}});
    if (m.dice.below(3) == 0) in.push_back(m.parameter("bias", {1, m.dice.coin() ? heads : 1, t, t}));
  }
  const TensorId out = m.reshape(m.op(k_attention, in, attrs), {m.batch, t, heads * width});
  const TensorId y = m.linear("out", out, d[2]);
  m.h = m.dice.coin() ? m.op(k_add, {m.h, y}) : y;
}
void moe(BlockGraph& m) {
  m.rank(3, 3);
  const Dims d = m.dims(m.h);
  const int64_t experts = m.dice.between(2, 5), k = m.dice.between(1, 2), capacity = m.dice.between(1, d[1] + 1),
                hidden = m.dice.between(1, 4);
  const TensorIds gate = m.g.op(append_op(m.g, k_moe_gate, {m.linear("gate", m.h, experts)},
                                          {{"k", k}, {"capacity", capacity}, {"normalize", k > 1}}, m.scope))
                             .outputs;
  TensorId y = m.op(k_moe_dispatch, {m.h, gate[0]}, {{"experts", experts}, {"capacity", capacity}});
  y = m.reshape(y, {experts, m.batch * capacity, d[2]});
  y = m.activation(m.op(k_add, {m.op(k_matmul, {y, m.parameter("up", {experts, d[2], hidden})}),
                                m.parameter("up.b", {experts, 1, hidden})}));
  y = m.op(k_matmul, {y, m.parameter("down", {experts, hidden, d[2]})});
  y = m.reshape(y, {experts, m.batch, capacity, d[2]});
  y = m.op(k_moe_combine, {y, gate[0], gate[1]});
  m.h = m.dice.coin() ? m.op(k_add, {m.h, y}) : y;
  if (m.dice.coin()) m.extra.push_back(m.op(k_reduce_mean, {gate[2]}));
}
void conv(BlockGraph& m) {
  m.rank(3, 5);
  const Dims d = m.dims(m.h);
  const int64_t groups = m.dice.below(4) == 0 ? d.back() : 1, out = groups * m.dice.between(1, 4);
  const bool transposed = m.dice.below(4) == 0 && groups == 1;
  Dims w{out}, strides, padding, dilation;
  for (size_t i = 1; i + 1 < d.size(); ++i) {
    const int64_t k = std::min(m.dice.between(1, 3), d[i]);
    w.push_back(k);
    strides.push_back(m.dice.below(3) ? 1 : 2);
    for (int side = 0; side < 2; ++side) padding.push_back(m.dice.below(k));
    dilation.push_back(k > 1 && d[i] > 2 * (k - 1) && m.dice.below(4) == 0 ? 2 : 1);
  }
  w.push_back(d.back() / groups);
  if (transposed) {
    std::swap(w.front(), w.back());
    m.h = m.op(k_conv_transpose, {m.h, m.parameter("filter", w)}, {{"strides", strides}});
  } else {
    std::vector<TensorId> in{m.h, m.parameter("filter", w)};
    if (m.dice.coin()) in.push_back(m.parameter("bias", {out}));
    m.h = m.op(k_conv, in, {{"strides", strides}, {"padding", padding}, {"dilation", dilation}, {"groups", groups}});
  }
}
void pool(BlockGraph& m) {
  m.rank(3, 5);
  const Dims d = m.dims(m.h);
  Dims window, strides, padding;
  for (size_t i = 1; i + 1 < d.size(); ++i) {
    window.push_back(m.dice.between(1, std::min<int64_t>(3, d[i])));
    strides.push_back(m.dice.between(1, 2));
    for (int side = 0; side < 2; ++side) padding.push_back(m.dice.below(window.back()));
  }
  const Attrs attrs{{"window", window}, {"strides", strides}, {"padding", padding}};
  m.h = m.op(m.dice.coin() ? k_max_pool : k_avg_pool, {m.h}, attrs);
}
void flatten(BlockGraph& m) {
  const int64_t n = element_count(m.dims(m.h)) / m.batch;
  if (n <= 48) m.h = m.reshape(m.h, {m.batch, n});
}
void middle_mean(BlockGraph& m) {
  m.rank(3, 5);
  Dims axes;
  for (size_t i = 1; i + 1 < m.dims(m.h).size(); ++i) axes.push_back(static_cast<int64_t>(i));
  m.h = m.op(m.dice.below(3) ? k_reduce_mean : k_reduce_max, {m.h}, {{"axes", axes}});
}
void softmax(BlockGraph& m) { m.h = m.op(m.dice.coin() ? k_softmax : k_log_softmax, {m.h}); }
void scale(BlockGraph& m) {
  m.h = m.op(m.dice.coin() ? k_mul : k_add, {m.h, m.parameter("scale", {m.dice.coin() ? 1 : m.features(m.h)})});
}
void cut_features(BlockGraph& m) {
  Dims starts(m.dims(m.h).size()), limits = m.dims(m.h);
  const size_t d = m.dice.coin() ? limits.size() - 1 : 1;
  starts[d] = m.dice.below(limits[d]);
  limits[d] = m.dice.between(starts[d] + 1, limits[d]);
  m.h = m.op(k_slice, {m.h}, {{"starts", starts}, {"limits", limits}});
}
void concat(BlockGraph& m) {
  const TensorId y = m.activation(m.linear("w", m.h, m.dice.between(1, 3)));
  m.h = m.op(k_concat, m.dice.coin() ? std::vector{m.h, y} : std::vector{y, m.h},
             {{"axis", static_cast<int64_t>(m.dims(m.h).size()) - 1}});
}
void pad(BlockGraph& m) {
  Dims low(m.dims(m.h).size()), high = low;
  const size_t d = m.dice.coin() ? low.size() - 1 : 1;
  low[d] = m.dice.below(2), high[d] = 1 - low[d];
  m.h = m.op(k_pad, {m.h}, {{"low", low}, {"high", high}, {"value", 0.5}});
}
void cumsum(BlockGraph& m) {
  m.h = m.op(k_cumsum, {m.h},
             {{"axis", m.dice.between(1, static_cast<int64_t>(m.dims(m.h).size()) - 1)},
              {"reverse", m.dice.coin()},
              {"exclusive", false}});
}
void mixer(BlockGraph& m) {  // over the middle dimension
  m.rank(3, 3);
  const Dims back{0, 2, 1};
  const TensorId y = m.linear("w", m.op(k_transpose, {m.h}, {{"perm", back}}), m.dice.between(1, 5));
  m.h = m.op(k_transpose, {y}, {{"perm", back}});
}
void time_first(BlockGraph& m) {  // the batch in the middle for a while
  m.rank(3, 3);
  const Dims swap{1, 0, 2};
  const TensorId y = m.activation(m.linear("w", m.op(k_transpose, {m.h}, {{"perm", swap}}), m.dice.between(1, 5)));
  m.h = m.op(k_transpose, {y}, {{"perm", swap}});
}
void rows(BlockGraph& m) {  // samples and places in one dimension for a while
  m.rank(3, 3);
  const Dims d = m.dims(m.h);
  const TensorId y = m.linear("w", m.reshape(m.h, {d[0] * d[1], d[2]}), m.dice.between(1, 5));
  m.h = m.reshape(y, {d[0], d[1], m.features(y)});
}
void heads(BlockGraph& m) {  // features as a product of two sub-axes
  const int64_t k = m.dice.between(1, 3), d = m.dice.between(1, 3);
  Dims shape = m.dims(m.h);
  shape.back() = k, shape.push_back(d);
  const TensorId y = m.reshape(m.linear("w", m.h, k * d), shape);
  if (m.dice.coin()) {
    m.h = m.op(k_reduce_sum, {y}, {{"axes", Dims{m.dice.coin() ? -1 : -2}}});
    return;
  }
  shape.pop_back(), shape.back() = k * d;
  m.h = m.reshape(m.op(k_softmax, {y}), shape);
}
void twice(BlockGraph& m) {  // one parameter in two places
  const int64_t n = m.features(m.h);
  const TensorId w = m.parameter("w", {n, n});
  m.h = m.op(k_matmul, {m.activation(m.op(k_matmul, {m.h, w})), w}, {{"transpose_b", m.dice.coin()}});
}
void center(BlockGraph& m) {
  const Dims axes{m.dice.coin() ? -1 : 1};
  m.h = m.op(k_sub,
             {m.h, m.op(m.dice.coin() ? k_reduce_mean : k_reduce_max, {m.h}, {{"axes", axes}, {"keep_dims", true}})});
}
void frozen(BlockGraph& m) {
  const size_t first = m.g.variables.size();
  m.h = m.op(k_add, {m.h, m.op(k_stop_gradient, {m.linear("w", m.h, m.features(m.h))})});
  for (size_t v = first; v < m.g.variables.size(); ++v) m.g.variables[v].trainable = false;
}

void temperature(BlockGraph& m) {
  m.scalar = m.ones("scalar", {});
  m.h = m.op(k_div, {m.h, m.scalar});
}

// ---- last -------------------------------------------------------------------------------------------------------
void classes_of(BlockGraph& m, TensorId logits) {
  Dims of = m.dims(logits);
  of.pop_back();
  const TensorId labels = m.input(m.name + "labels", of, DType::kI32);
  const double smoothing = m.dice.coin() ? 0.0 : 0.2;
  if (m.dice.coin()) {
    m.loss = m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, labels}, {{"label_smoothing", smoothing}})});
    return;
  }
  // Labels of 1 are not counted: the denominator differs from device to device.
  const TensorId each =
      m.op(k_cross_entropy, {logits, labels}, {{"ignore_index", int64_t{1}}, {"label_smoothing", smoothing}});
  const TensorId one = m.op(k_cast, {m.constant(1)}, {{"dtype", std::string("i32")}});
  const TensorId counted =
      m.op(k_reduce_sum, {m.op(k_cast, {m.op(k_not_equal, {labels, one})}, {{"dtype", std::string("f32")}})});
  m.loss = m.op(k_div, {m.op(k_reduce_sum, {each}), m.op(k_maximum, {counted, m.constant(1)})});
}
void classes(BlockGraph& m) { classes_of(m, m.linear("head", m.h, m.dice.between(kIds, 9))); }
void tied(BlockGraph& m) {
  if (m.table == kNone) return classes(m);
  const TensorId x = m.linear("to", m.h, m.features(m.table));
  classes_of(m, m.op(k_matmul, {x, m.table}, {{"transpose_b", true}}));
}
void regression(BlockGraph& m) {
  const TensorId y = m.linear("head", m.h, m.dice.between(1, 3));
  m.loss = m.op(k_reduce_mean, {m.op(k_squared_difference, {y, m.input(m.name + "y", m.dims(y))})});
}
void yes_no(BlockGraph& m) {
  const TensorId y = m.linear("head", m.h, m.dice.between(1, 3));
  m.loss = m.op(k_reduce_mean, {m.op(k_bce_with_logits, {y, m.op(k_sigmoid, {m.input(m.name + "y", m.dims(y))})})});
}

void weighted_rows(BlockGraph& m) {
  const TensorId y = m.linear("head", m.h, m.dice.between(1, 3));
  const TensorId each = m.op(k_squared_difference, {y, m.input(m.name + "y", m.dims(y))});
  const TensorId weights = m.op(k_sigmoid, {m.input(m.name + "weights", m.dims(y))});
  m.loss = m.op(k_div, {m.op(k_reduce_sum, {m.op(k_mul, {each, weights})}), m.op(k_reduce_sum, {weights})});
}
void learned(BlockGraph& m) {  // how much each task counts
  const std::string name = m.name;
  TensorId sum = kNone;
  for (int64_t task = m.dice.between(1, 2); task > 0; --task) {
    m.name = fmt::format("{}{}.", name, task);
    m.dice.coin() ? classes(m) : weighted_rows(m);
    const TensorId w = m.scalar != kNone && m.dice.coin() ? m.scalar : m.ones("weight", {});
    const int64_t form = m.dice.below(3);
    if (form == 0) m.loss = m.op(k_mul, {m.op(k_exp, {m.op(k_neg, {w})}), m.loss});
    if (form == 1) m.loss = m.op(k_mul, {m.loss, w});
    if (form == 2) m.loss = m.op(k_div, {m.loss, w});
    m.extra.push_back(m.op(k_square, {w}));
    sum = sum == kNone ? m.loss : m.op(k_add, {sum, m.loss});
  }
  m.loss = sum;
}

using Row = BlockRow;
constexpr Row kFirst[] = {{"features", features}, {"sequence", sequence}, {"image", image},
                          {"volume", volume},     {"tokens", tokens},     {"bags", bags}};
constexpr Row kMiddle[] = {{"linear", linear},
                           {"act", act},
                           {"dropout", dropout},
                           {"norm", norm},
                           {"batch_norm", batch_norm},
                           {"groups_norm", groups_norm},
                           {"residual", residual},
                           {"gate", gate},
                           {"attention", attention},
                           {"moe", moe},
                           {"conv", conv},
                           {"pool", pool},
                           {"flatten", flatten},
                           {"mean", middle_mean},
                           {"softmax", softmax},
                           {"scale", scale},
                           {"slice", cut_features},
                           {"concat", concat},
                           {"pad", pad},
                           {"cumsum", cumsum},
                           {"mixer", mixer},
                           {"time_first", time_first},
                           {"rows", rows},
                           {"heads", heads},
                           {"twice", twice},
                           {"center", center},
                           {"frozen", frozen},
                           {"temperature", temperature},
                           {"made_weights", made_weights}};
constexpr Row kLast[] = {
    {"classes", classes}, {"tied", tied}, {"regression", regression}, {"yes_no", yes_no}, {"learned", learned}};

using Rows = std::span<const Row>;

std::vector<std::string> names(std::initializer_list<Rows> tables) {
  std::vector<std::string> out;
  for (const Rows& rows : tables)
    for (const Row& row : rows) out.emplace_back(row.name);
  return out;
}

}  // namespace

std::vector<std::string> first_blocks() { return names({kFirst}); }
std::vector<std::string> middle_blocks() { return names({kMiddle, written_middle_blocks()}); }
std::vector<std::string> last_blocks() { return names({kLast, written_last_blocks()}); }

TensorId BlockGraph::parameter(const char* what, Dims dims, Initializer init) {
  return variable(name + what, std::move(dims), std::move(init));
}

TensorId BlockGraph::linear(const char* what, TensorId x, int64_t features) {
  const TensorId w = parameter(what, {this->features(x), features});
  const TensorId y = op(k_matmul, {x, w});
  return dice.coin() ? y : op(k_add, {y, parameter((std::string(what) + ".b").c_str(), {features})});
}

TensorId BlockGraph::activation(TensorId x) {
  constexpr OpCode kCodes[] = {k_relu, k_gelu, k_tanh, k_silu, k_sigmoid, k_softplus};
  return op(kCodes[dice.below(std::ssize(kCodes))], {x});
}

void BlockGraph::rank(size_t low, size_t high) {
  Dims d = dims(h);
  const size_t before = d.size();
  while (d.size() > high) d[1] *= d[2], d.erase(d.begin() + 2);
  while (d.size() < low) {  // half of the features, or one place
    const int64_t n = d.back() % 2 ? 1 : 2;
    d.back() /= n;
    d.insert(d.end() - 1, n);
  }
  if (d.size() != before) h = reshape(h, d);
}

void BlockGraph::add(std::string_view block, uint32_t word, const std::string& prefix) {
  dice = Dice(word);
  name = prefix;
  const bool first = std::any_of(std::begin(kFirst), std::end(kFirst), [&](const Row& r) { return block == r.name; });
  if (loss != kNone || (first && h != kNone)) return;  // what shrinking leaves behind
  if (!first && h == kNone) add("features", word, prefix);
  for (const Rows& rows : {Rows(kFirst), Rows(kMiddle), Rows(kLast), written_middle_blocks(), written_last_blocks()})
    for (const Row& row : rows)
      if (block == row.name) return row.make(*this);
  throw invalid("no block is called '{}'", block);
}

Graph BlockGraph::finish() {
  if (loss == kNone) {
    const uint32_t word = 1;
    add("regression", word, "end.");
  }
  for (const TensorId term : extra) loss = op(k_add, {loss, op(k_mul, {term, constant(0.1)})});
  g.name = "blocks";
  g.outputs = {{"h", h}};
  g.training.loss = loss;
  return std::move(g);
}

}  // namespace whale::test
