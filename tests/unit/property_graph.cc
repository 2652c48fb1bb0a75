#include "property_graph.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace whale::test {
namespace {

using enum OpCode;

constexpr int64_t kMostElements = 48;  // of a tensor

class Maker : public GraphMaker {
 public:
  explicit Maker(int64_t batch) {
    keep(parameter({2, 3}), 1);
    if (batch > 0) keep(input("images", {batch, 4, 2}), 1);
    if (batch > 0) keep(input("x", {batch, 3}), 1);
  }

  Dice dice{0};
  std::vector<TensorId> pool;

  // Bounds of absolute values, so that products can be kept small. Operands made here have the bound 1 unless they say
  // more.
  double bound(TensorId id) const { return static_cast<size_t>(id) < bounds_.size() ? bounds_[id] : 1; }
  TensorId keep(TensorId id, double bound) {
    if (bound > 2) id = op(k_mul, {id, constant(2 / bound)}), bound = 2;
    bounds_.resize(g.tensors.size(), 1);
    bounds_[id] = bound;
    pool.push_back(id);
    return id;
  }

  // A parameter; its values start away from each other (normal, deviation 0.5), and the bound 1 is an estimate.
  TensorId parameter(Dims dims) { return variable("p" + std::to_string(g.variables.size()), std::move(dims)); }

  TensorId pick() {
    return pool[dice.below(2) ? dice.below(static_cast<int64_t>(pool.size())) : static_cast<int64_t>(pool.size()) - 1];
  }
  TensorId pick_rank(size_t low, size_t high) {
    std::vector<TensorId> fit;
    for (const TensorId id : pool)
      if (dims(id).size() >= low && dims(id).size() <= high) fit.push_back(id);
    if (fit.empty() || dice.below(6) == 0) {
      Dims made;
      for (size_t d = 0; d < low; ++d) made.push_back(dice.between(1, 4));
      return keep(parameter(std::move(made)), 1);
    }
    return fit[dice.below(static_cast<int64_t>(fit.size()))];
  }
  // Something of these dims: from the pool, or a new parameter.
  TensorId of_dims(const Dims& wanted) {
    for (const TensorId id : pool)
      if (dims(id) == wanted && dice.below(3) == 0) return id;
    return parameter(wanted);
  }
  int64_t axis(TensorId id) { return dice.below(static_cast<int64_t>(dims(id).size())); }
  // A second operand that broadcasts with `a`.
  TensorId partner(TensorId a) {
    for (size_t tries = 0; tries < 3; ++tries) {
      const TensorId b = pick();
      const Dims da = dims(a), db = dims(b);
      bool fits = true;
      int64_t elements = 1;
      for (size_t i = 0; i < std::max(da.size(), db.size()); ++i) {
        const int64_t x = i < da.size() ? da[da.size() - 1 - i] : 1, y = i < db.size() ? db[db.size() - 1 - i] : 1;
        fits &= x == y || x == 1 || y == 1;
        elements *= std::max(x, y);
      }
      if (fits && elements <= kMostElements) return b;
    }
    Dims d = dims(a);
    d.erase(d.begin(), d.begin() + dice.below(static_cast<int64_t>(d.size()) + 1));
    for (int64_t& n : d)
      if (dice.below(3) == 0) n = 1;
    return parameter(d);
  }
  TensorId labels(const Dims& of, int64_t below, int64_t ignored = 0) {
    // Integers come from the graph itself: floor((sin(17 i) + 1) / 2 * below).
    if (of.empty())
      return op(k_cast, {constant(static_cast<double>(dice.below(below)))}, {{"dtype", std::string("i32")}});
    std::vector<TensorId> terms;
    for (size_t d = 0; d < of.size(); ++d)
      terms.push_back(
          op(k_mul, {op(k_iota, {}, {{"shape", of}, {"dim", static_cast<int64_t>(d)}, {"dtype", std::string("f32")}}),
                     constant(17.0 + 5.0 * static_cast<double>(d))}));
    TensorId sum = terms[0];
    for (size_t d = 1; d < terms.size(); ++d) sum = op(k_add, {sum, terms[d]});
    const TensorId noise = op(k_add, {op(k_mul, {op(k_sin, {sum}), constant(0.4999)}), constant(0.5)});
    const double span = static_cast<double>(below + (ignored != 0));
    TensorId ids = op(k_cast, {op(k_floor, {op(k_mul, {noise, constant(span)})})}, {{"dtype", std::string("i32")}});
    if (ignored == 0) return ids;
    const TensorId last = op(k_cast, {constant(static_cast<double>(below))}, {{"dtype", std::string("i32")}});
    const TensorId none = op(k_cast, {constant(static_cast<double>(ignored))}, {{"dtype", std::string("i32")}});
    return op(k_where, {op(k_equal, {ids, last}), none, ids});
  }
  TensorId positive(TensorId a) { return op(k_add, {op(k_square, {a}), constant(0.5)}); }

 private:
  std::vector<double> bounds_;
};

using Make = void (*)(Maker&);

template <OpCode kCode>
void unary(Maker& m) {
  const TensorId a = m.pick();
  m.keep(m.op(kCode, {a}), m.bound(a) + 1);
}
template <OpCode kCode>
void unary_positive(Maker& m) {
  const TensorId a = m.pick();
  m.keep(m.op(kCode, {m.positive(a)}), m.bound(a) * m.bound(a) + 2);
}
template <OpCode kCode>
void binary(Maker& m) {
  const TensorId a = m.pick(), b = m.partner(a);
  const bool swap = m.dice.coin();
  m.keep(m.op(kCode, swap ? std::vector{b, a} : std::vector{a, b}), m.bound(a) + m.bound(b));
}
template <OpCode kCode>
void reduce(Maker& m) {
  const TensorId a = m.pick_rank(1, 4);
  Dims axes;
  for (size_t d = 0; d < m.dims(a).size(); ++d)
    if (m.dice.coin())
      axes.push_back(m.dice.coin() ? static_cast<int64_t>(d)
                                   : static_cast<int64_t>(d) - static_cast<int64_t>(m.dims(a).size()));
  const double n = kCode == k_reduce_sum ? static_cast<double>(element_count(m.dims(a))) : 1;
  m.keep(m.op(kCode, {a}, {{"axes", axes}, {"keep_dims", m.dice.coin()}}), n * m.bound(a));
}
template <OpCode kCode>
void over_last(Maker& m) {
  const TensorId a = m.pick_rank(1, 4);
  m.keep(m.op(kCode, {a}), 2 * m.bound(a) + 2);
}
template <OpCode kCode>
void normalize(Maker& m) {
  const TensorId a = m.pick_rank(1, 4);
  const Dims d{m.dims(a).back()};
  std::vector<TensorId> in{a};
  if (m.dice.coin()) {
    in.push_back(m.parameter(d));
    if (kCode == k_layer_norm) in.push_back(m.dice.coin() ? m.parameter(d) : kNone);
  }
  while (in.back() == kNone) in.pop_back();
  m.keep(m.op(kCode, in, {{"epsilon", m.dice.coin() ? 0.1 : 0.01}}), 3);
}

void matmul(Maker& m) {
  const TensorId a = m.pick_rank(2, 4);
  const bool ta = m.dice.below(3) == 0, tb = m.dice.below(3) == 0;
  const Dims da = m.dims(a);
  const int64_t k = da[da.size() - (ta ? 2 : 1)], n = m.dice.between(1, 3);
  Dims db = m.dice.coin() ? Dims{} : Dims(da.begin(), da.end() - 2);
  db.insert(db.end(), {tb ? n : k, tb ? k : n});
  std::vector<TensorId> in{a, m.of_dims(db)};
  const bool bias = m.dice.below(3) == 0;
  if (bias) in.push_back(m.parameter({n}));
  Attrs attrs{{"transpose_a", ta}, {"transpose_b", tb}};
  const TensorId y = m.op(k_matmul, in, attrs);
  m.keep(y, static_cast<double>(k) * m.bound(a) * m.bound(in[1]) + bias);
}
void reshape(Maker& m) {
  const TensorId a = m.pick();
  int64_t rest = element_count(m.dims(a));
  Dims shape;
  while (rest > 1 && shape.size() < 3) {
    int64_t f = m.dice.between(1, rest);
    while (rest % f) --f;
    shape.push_back(f);
    rest /= f;
  }
  if (rest > 1 || m.dice.coin())
    shape.insert(shape.begin() + m.dice.below(static_cast<int64_t>(shape.size()) + 1), rest);
  if (!shape.empty() && m.dice.below(3) == 0) shape[m.dice.below(static_cast<int64_t>(shape.size()))] = -1;
  m.keep(m.op(k_reshape, {a}, {{"shape", shape}}), m.bound(a));
}
void transpose(Maker& m) {
  const TensorId a = m.pick_rank(2, 4);
  Dims perm(m.dims(a).size());
  std::iota(perm.begin(), perm.end(), 0);
  for (size_t i = perm.size(); i-- > 1;) std::swap(perm[i], perm[m.dice.below(static_cast<int64_t>(i) + 1)]);
  m.keep(m.op(k_transpose, {a}, {{"perm", perm}}), m.bound(a));
}
void slice(Maker& m) {
  const TensorId a = m.pick_rank(1, 4);
  Dims starts, limits, strides;
  for (const int64_t n : m.dims(a)) {
    starts.push_back(m.dice.coin() ? 0 : m.dice.below(n));
    limits.push_back(m.dice.coin() ? n : m.dice.between(starts.back() + 1, n));
    strides.push_back(m.dice.below(3) ? 1 : m.dice.between(1, 3));
  }
  Attrs attrs{{"starts", starts}, {"limits", limits}};
  if (m.dice.coin()) attrs["strides"] = strides;
  m.keep(m.op(k_slice, {a}, attrs), m.bound(a));
}
void concat(Maker& m) {
  const TensorId a = m.pick_rank(1, 4);
  const int64_t axis = m.axis(a);
  Dims d = m.dims(a);
  d[axis] = m.dice.between(1, 3);
  std::vector<TensorId> in{a, m.of_dims(d)};
  if (m.dice.coin()) in.push_back(m.dice.coin() ? a : m.of_dims(m.dims(a)));
  if (m.dice.coin()) std::swap(in.front(), in.back());
  m.keep(m.op(k_concat, in, {{"axis", axis}}), std::max(m.bound(a), 1.0));
}
void pad(Maker& m) {
  const TensorId a = m.pick_rank(1, 4);
  Dims low, high;
  for (size_t d = 0; d < m.dims(a).size(); ++d) low.push_back(m.dice.below(2)), high.push_back(m.dice.below(2));
  m.keep(m.op(k_pad, {a}, {{"low", low}, {"high", high}, {"value", 0.5}}), m.bound(a));
}
void broadcast(Maker& m) {
  const TensorId a = m.pick_rank(0, 3);
  Dims shape = m.dims(a);
  for (int64_t& n : shape)
    if (n == 1 && m.dice.coin()) n = m.dice.between(1, 3);
  if (m.dice.coin()) shape.insert(shape.begin(), m.dice.between(1, 3));
  m.keep(m.op(k_broadcast_to, {a}, {{"shape", shape}}), m.bound(a));
}
void where(Maker& m) {
  const TensorId a = m.pick(), b = m.partner(a), c = m.of_dims(m.dims(a));
  m.keep(m.op(k_where, {m.op(m.dice.coin() ? k_less : k_greater_equal, {a, c}), a, m.dice.coin() ? b : a}),
         std::max(m.bound(a), m.bound(b)));
}
void power(Maker& m) {
  const TensorId a = m.pick(), b = m.partner(a);
  m.keep(m.op(k_pow, {m.positive(a), m.op(k_tanh, {b})}), m.bound(a) * m.bound(a) + 2);
}
void divide(Maker& m) {
  const TensorId a = m.pick(), b = m.partner(a);
  m.keep(m.op(k_div, {a, m.positive(b)}), 2 * m.bound(a));
}
void multiply(Maker& m) {
  const TensorId a = m.pick(), b = m.partner(a);
  m.keep(m.op(k_mul, {a, b}), m.bound(a) * m.bound(b));
}
void squared_difference(Maker& m) {
  const TensorId a = m.pick(), b = m.partner(a);
  m.keep(m.op(k_squared_difference, {a, b}), (m.bound(a) + m.bound(b)) * (m.bound(a) + m.bound(b)));
}
void exponential(Maker& m) { m.keep(m.op(k_exp, {m.op(k_tanh, {m.pick()})}), 2.8); }
void bce(Maker& m) {
  const TensorId a = m.pick(), t = m.op(k_sigmoid, {m.of_dims(m.dims(a))});
  m.keep(m.op(k_bce_with_logits, {a, t}), m.bound(a) + 1);
}
void sum_of_squares(Maker& m) {
  const TensorId a = m.pick(), b = m.pick();
  const auto squares = [&](TensorId t) {
    return static_cast<double>(element_count(m.dims(t))) * m.bound(t) * m.bound(t);
  };
  m.keep(m.op(k_sum_of_squares, {a, b}), squares(a) + squares(b));
}
void cumsum(Maker& m) {
  const TensorId a = m.pick_rank(1, 4);
  const int64_t axis = m.axis(a);
  m.keep(m.op(k_cumsum, {a}, {{"axis", axis}, {"reverse", m.dice.coin()}, {"exclusive", m.dice.coin()}}),
         static_cast<double>(m.dims(a)[axis]) * m.bound(a));
}
void gather(Maker& m) {
  const TensorId a = m.pick_rank(1, 3);
  const int64_t axis = m.axis(a);
  Dims of;
  for (int64_t d = m.dice.below(3); d-- > 0;) of.push_back(m.dice.between(1, 3));
  m.keep(m.op(k_gather, {a, m.labels(of, m.dims(a)[axis])}, {{"axis", axis}}), m.bound(a));
}
void embedding(Maker& m) {
  const TensorId table = m.pick_rank(2, 2);
  Dims of;
  for (int64_t d = m.dice.between(1, 2); d-- > 0;) of.push_back(m.dice.between(1, 3));
  m.keep(m.op(k_embedding, {table, m.labels(of, m.dims(table)[0])}), m.bound(table));
}
void top_k(Maker& m) {
  const TensorId a = m.pick_rank(1, 3);
  m.keep(m.op(k_top_k, {a}, {{"k", m.dice.between(1, m.dims(a).back())}}), m.bound(a));
}
void cross_entropy(Maker& m) {
  const TensorId a = m.pick_rank(1, 3);
  Dims of = m.dims(a);
  of.pop_back();
  const bool ignore = m.dice.coin() && !of.empty();
  const TensorId labels = m.labels(of, m.dims(a).back(), ignore ? -100 : 0);
  m.keep(m.op(k_cross_entropy, {a, labels}, {{"label_smoothing", m.dice.coin() ? 0.0 : 0.2}}), 2 * m.bound(a) + 2);
}
// An operand [b, t, heads, d] from whatever there is: the batch stays in front where a fits.
TensorId rows(Maker& m, int64_t b, int64_t t, int64_t h, int64_t d) {
  for (const TensorId id : m.pool)
    if (const Dims x = m.dims(id); x == Dims{b, t * h * d} || x == Dims{b, t, h * d})
      return m.op(k_reshape, {id}, {{"shape", Dims{b, t, h, d}}});
  return m.parameter({b, t, h, d});
}
void attention(Maker& m) {
  TensorId first = m.pick_rank(2, 3);
  const int64_t b = std::min<int64_t>(m.dims(first)[0], 3), tq = m.dice.between(1, 3), hk = m.dice.between(1, 2),
                h = hk * m.dice.between(1, 2);
  const int64_t tk = m.dice.coin() ? tq : m.dice.between(1, 3), d = m.dice.between(1, 2), dv = m.dice.between(1, 2);
  const bool packed = m.dice.below(3) == 0;
  std::vector<TensorId> in;
  Attrs attrs{{"causal", m.dice.coin()}, {"scale", m.dice.coin() ? 0.0 : 0.7}};
  if (packed) {
    in = {rows(m, b, tq, h + 2 * hk, d)};
    attrs["kv_heads"] = hk;
  } else {
    in = {rows(m, b, tq, h, d), rows(m, b, tk, hk, d), rows(m, b, tk, hk, dv)};
  }
  if (m.dice.coin()) {
    in.resize(3, kNone);
    in.push_back(m.parameter({m.dice.coin() ? 1 : b, m.dice.coin() ? 1 : h, tq, packed ? tq : tk}));
  }
  m.keep(m.op(k_attention, in, attrs), 2);
}
void rotary(Maker& m) {
  const TensorId a = m.pick_rank(2, 3);
  const int64_t h = m.dice.between(1, 2), b = m.dims(a)[0];
  const TensorId x = rows(m, b, m.dice.between(1, 2), h, 2 * m.dice.between(1, 2));
  m.keep(m.op(k_rotary, {x},
              {{"heads", m.dice.coin() ? int64_t{-1} : m.dice.between(1, h)},
               {"interleaved", m.dice.coin()},
               {"base", 10.0}}),
         2);
}
TensorId image(Maker& m, size_t spatial) {  // [n, s..., c]
  for (const TensorId id : m.pool)
    if (m.dims(id).size() == spatial + 2 && m.dice.coin()) return id;
  Dims d{m.dice.between(1, 2)};
  for (size_t i = 0; i < spatial; ++i) d.push_back(m.dice.between(2, 4));
  d.push_back(m.dice.between(1, 2));
  return m.keep(m.parameter(d), 1);
}
void conv(Maker& m) {
  const size_t s = static_cast<size_t>(m.dice.between(1, 2));
  const TensorId x = image(m, s);
  const Dims d = m.dims(x);
  const int64_t groups = m.dice.coin() ? 1 : d.back(), o = groups * m.dice.between(1, 2);
  Dims w{o}, strides, padding, dilation;
  for (size_t i = 0; i < s; ++i) {
    w.push_back(m.dice.between(1, 2));
    strides.push_back(m.dice.between(1, 2));
    padding.push_back(m.dice.between(0, 1)), padding.push_back(m.dice.between(0, 1));
    dilation.push_back(d[i + 1] > 2 ? m.dice.between(1, 2) : 1);
    if (d[i + 1] == 1) w.back() = 1;
  }
  w.push_back(d.back() / groups);
  std::vector<TensorId> in{x, m.parameter(w)};
  if (m.dice.coin()) in.push_back(m.parameter({o}));
  m.keep(m.op(k_conv, in, {{"strides", strides}, {"padding", padding}, {"dilation", dilation}, {"groups", groups}}),
         static_cast<double>(element_count(w)) * m.bound(x) + 1);
}
template <OpCode kCode>
void pool(Maker& m) {
  const size_t s = static_cast<size_t>(m.dice.between(1, 2));
  const TensorId x = image(m, s);
  Dims window, strides, padding;
  for (size_t i = 0; i < s; ++i) {
    window.push_back(m.dice.between(1, m.dims(x)[i + 1]));
    strides.push_back(m.dice.between(1, 2));
    for (int side = 0; side < 2; ++side) padding.push_back(window.back() > 1 ? m.dice.between(0, 1) : 0);
  }
  Attrs attrs{{"window", window}, {"strides", strides}, {"padding", padding}};
  if (kCode == k_avg_pool) attrs["include_pad"] = m.dice.coin();
  m.keep(m.op(kCode, {x}, attrs), m.bound(x));
}
void batch_norm(Maker& m) {
  const TensorId x = m.pick_rank(2, 4);
  const Dims c{m.dims(x).back()};
  const auto running = [&](double value) {
    return m.variable("r" + std::to_string(m.g.variables.size()), c, {InitKind::kConstant, value, 1, "", ""},
                      Role::kBuffer);
  };
  TensorId y = m.op(k_batch_norm, {x, m.parameter(c), m.parameter(c), running(0), running(1)}, {{"epsilon", 0.1}});
  if (m.dice.coin()) y = m.op(k_add, {y, m.of_dims(m.dims(x))});
  if (m.dice.coin()) y = m.op(k_relu, {y});
  m.keep(y, 4);
}

struct Row {
  const char* name;
  Make make;
};
constexpr Row kRows[] = {
    {"add", binary<k_add>},
    {"sub", binary<k_sub>},
    {"mul", multiply},
    {"div", divide},
    {"pow", power},
    {"maximum", binary<k_maximum>},
    {"minimum", binary<k_minimum>},
    {"where", where},
    {"neg", unary<k_neg>},
    {"abs", unary<k_abs>},
    {"sign", unary<k_sign>},
    {"floor", unary<k_floor>},
    {"exp", exponential},
    {"log", unary_positive<k_log>},
    {"log1p", unary_positive<k_log1p>},
    {"sqrt", unary_positive<k_sqrt>},
    {"rsqrt", unary_positive<k_rsqrt>},
    {"reciprocal", unary_positive<k_reciprocal>},
    {"square",
     [](Maker& m) {
       const TensorId a = m.pick();
       m.keep(m.op(k_square, {a}), m.bound(a) * m.bound(a));
     }},
    {"sin", unary<k_sin>},
    {"cos", unary<k_cos>},
    {"erf", unary<k_erf>},
    {"tanh", unary<k_tanh>},
    {"sigmoid", unary<k_sigmoid>},
    {"softplus", unary<k_softplus>},
    {"relu", unary<k_relu>},
    {"gelu", unary<k_gelu>},
    {"gelu_erf", unary<k_gelu_erf>},
    {"silu", unary<k_silu>},
    {"bce_with_logits", bce},
    {"squared_difference", squared_difference},
    {"reduce_sum", reduce<k_reduce_sum>},
    {"reduce_mean", reduce<k_reduce_mean>},
    {"reduce_max", reduce<k_reduce_max>},
    {"reduce_min", reduce<k_reduce_min>},
    {"sum_of_squares", sum_of_squares},
    {"matmul", matmul},
    {"reshape", reshape},
    {"transpose", transpose},
    {"slice", slice},
    {"concat", concat},
    {"pad", pad},
    {"broadcast_to", broadcast},
    {"gather", gather},
    {"cumsum", cumsum},
    {"top_k", top_k},
    {"embedding", embedding},
    {"rotary", rotary},
    {"layer_norm", normalize<k_layer_norm>},
    {"rms_norm", normalize<k_rms_norm>},
    {"batch_norm", batch_norm},
    {"softmax", over_last<k_softmax>},
    {"log_softmax", over_last<k_log_softmax>},
    {"cross_entropy", cross_entropy},
    {"attention", attention},
    {"conv", conv},
    {"max_pool", pool<k_max_pool>},
    {"avg_pool", pool<k_avg_pool>},
};

}  // namespace

std::vector<std::string> random_graph_ops() {
  std::vector<std::string> names;
  for (const Row& row : kRows) names.emplace_back(row.name);
  return names;
}

struct RandomGraph::Impl {
  Maker m;
  int64_t batch;
  size_t words = 0;
  void add(const Row& row, Dice dice) {
    ++words;
    m.dice = dice;
    const size_t before = m.pool.size();
    row.make(m);
    if (element_count(m.dims(m.pool.back())) <= kMostElements) return;
    // Grown too large: go on with the sum over the last dimension.
    const TensorId y = m.pool.back();
    m.pool.resize(before);
    const double n = static_cast<double>(m.dims(y).back());
    m.keep(m.op(k_reduce_sum, {y}, {{"axes", Dims{-1}}}), n * m.bound(y));
  }
};

RandomGraph::RandomGraph(int64_t batch) : impl_(new Impl{.m = Maker(batch), .batch = batch}) {}
RandomGraph::~RandomGraph() = default;
GraphMaker& RandomGraph::maker() { return impl_->m; }

void RandomGraph::add(std::string_view name, uint32_t word) {
  for (const Row& row : kRows)
    if (name == row.name) return impl_->add(row, Dice(word));
  throw invalid("no random op is called '{}'", name);
}

Graph RandomGraph::finish() {
  Maker& m = impl_->m;
  // Everything that nobody reads is in the loss, each element with a weight of its own; so is every parameter.
  m.dice = Dice(impl_->words);
  const std::vector<int> uses = use_counts(m.g);
  TensorId loss = kNone;
  const auto add = [&](TensorId term) { loss = loss == kNone ? term : m.op(k_add, {loss, term}); };
  for (const TensorId id : m.pool) {
    if (uses[id] || m.g.tensor(id).kind != TensorKind::kValue) continue;
    Dims unit = m.dims(id);
    if (impl_->batch > 0 && !unit.empty()) unit[0] = 1;  // no constant of the batch's size: a model has none
    std::vector<double> w = m.dice.reals(1);
    TensorId weights = m.constant(1 + w[0]);
    for (size_t d = 0; d < unit.size(); ++d)
      weights = m.op(
          k_add,
          {weights,
           m.op(k_sin,
                {m.op(k_mul, {m.op(k_iota, {},
                                   {{"shape", unit}, {"dim", static_cast<int64_t>(d)}, {"dtype", std::string("f32")}}),
                              m.constant(3 + static_cast<double>(d))})})});
    add(m.op(k_reduce_mean, {m.op(k_mul, {id, weights})}));
  }
  for (size_t v = 0; v < m.g.variables.size(); ++v) {
    const Variable variable = m.g.variables[v];
    if (variable.role == Role::kParameter)
      add(m.op(k_mul, {m.op(k_reduce_mean, {m.op(k_square, {variable.tensor})}), m.constant(0.3)}));
  }
  m.g.name = "random";
  m.g.training.loss = loss;
  m.g.training.optimizer.kind = OptimizerKind::kSgd;
  m.g.training.optimizer.learning_rate = 0.01;
  m.g.training.precision = Precision::kFloat64;
  return m.g;
}

Graph random_graph(const std::vector<uint32_t>& words, int64_t batch) {
  RandomGraph graph(batch);
  for (const uint32_t word : words) {
    Dice dice(word);
    const Row& row = kRows[static_cast<size_t>(dice.below(std::size(kRows)))];
    graph.add(row.name, static_cast<uint32_t>(dice.next()));
  }
  return graph.finish();
}

}  // namespace whale::test
