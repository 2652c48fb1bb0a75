// Random models, cuts and batches: many devices are one device. How samples are dealt out.
#include <doctest/doctest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "base/error.h"
#include "cluster/shares.h"
#include "property.h"

using namespace whale;
using namespace whale::test;
using enum OpCode;

namespace {

constexpr int64_t kIds = 5;  // of vocabularies and classes

struct Case {
  Graph graph;
  std::string strategy;
  int64_t devices = 1, batch = 1, micro_batches = 1;
  bool random = false;  // dropout
  std::string text() const {
    const Training& t = graph.training;
    return fmt::format("{} on {} devices, {}, batch {}, {} micro-batches, optimizer {}, clipping {}\n", graph.name,
                       devices, strategy, batch, micro_batches, static_cast<int>(t.optimizer.kind), t.clip_norm);
  }
};

void mlp(GraphMaker& m, Dice& dice, int64_t batch, double dropout) {
  m.g.name = "mlp";
  int64_t width = dice.between(1, 5);
  TensorId h = m.input("x", {batch, width});
  const bool classes = dice.coin();
  const TensorId y = classes ? m.input("y", {batch}, DType::kI32) : m.input("y", {batch, kIds});
  constexpr OpCode kActivations[] = {k_relu, k_gelu, k_tanh, k_silu};
  for (int64_t layer = dice.between(0, 2); layer-- > 0;) {
    const int64_t next = dice.between(1, 6);
    const std::string name = "layer" + std::to_string(layer);
    h = m.op(k_matmul, {h, m.variable(name + ".w", {width, next})});
    if (dice.coin()) h = m.op(k_add, {h, m.variable(name + ".b", {next}, {})});
    h = m.op(kActivations[dice.below(4)], {h});
    if (dropout > 0) h = m.op(k_dropout, {h}, {{"rate", dropout}});
    width = next;
  }
  h = m.op(k_matmul, {h, m.variable("head", {width, kIds}), m.variable("head.b", {kIds}, {})});
  m.g.outputs = {{"logits", h}};
  m.g.training.loss = m.op(k_reduce_mean, {m.op(classes ? k_cross_entropy : k_squared_difference, {h, y})});
}

void transformer(GraphMaker& m, Dice& dice, int64_t batch, double dropout) {
  m.g.name = "transformer";
  const int64_t t = dice.between(1, 4), heads = dice.between(1, 2), d = 2 * heads;
  const TensorId ids = m.input("ids", {batch, t}, DType::kI32), labels = m.input("labels", {batch, t}, DType::kI32);
  const TensorId table = m.variable("table", {kIds, d});
  TensorId x = m.op(k_add, {m.op(k_embedding, {table, ids}), m.variable("positions", {t, d})});
  TensorId h =
      m.op(k_layer_norm, {x, m.variable("gamma", {d}, {InitKind::kOnes, 0, 1, "", ""}), m.variable("beta", {d}, {})});
  h = m.op(k_matmul, {h, m.variable("qkv", {d, 3 * d})});
  h = m.op(k_reshape, {h}, {{"shape", Dims{batch, t, 3 * heads, d / heads}}});
  h = m.op(k_attention, {h}, {{"causal", dice.coin()}, {"kv_heads", heads}, {"dropout", dropout}});
  h = m.op(k_matmul, {m.op(k_reshape, {h}, {{"shape", Dims{batch, t, d}}}), m.variable("out", {d, d})});
  if (dropout > 0) h = m.op(k_dropout, {h}, {{"rate", dropout}});
  x = m.op(k_rms_norm, {m.op(k_add, {x, h})});
  const bool tied = dice.coin();
  const TensorId logits =
      tied ? m.op(k_matmul, {x, table}, {{"transpose_b", true}}) : m.op(k_matmul, {x, m.variable("head", {d, kIds})});
  m.g.outputs = {{"logits", logits}};
  // Labels of 1 are not counted: the denominator differs from device to device.
  TensorId loss = m.op(k_cross_entropy, {logits, labels}, {{"ignore_index", int64_t{1}}});
  const TensorId one = m.op(k_cast, {m.constant(1)}, {{"dtype", std::string("i32")}});
  const TensorId counted =
      m.op(k_reduce_sum, {m.op(k_cast, {m.op(k_not_equal, {labels, one})}, {{"dtype", std::string("f32")}})});
  m.g.training.loss = m.op(k_div, {m.op(k_reduce_sum, {loss}), m.op(k_maximum, {counted, m.constant(1)})});
}

void convolutions(GraphMaker& m, Dice& dice, int64_t batch, double dropout) {
  m.g.name = "convolutions";
  const int64_t c = dice.between(1, 3);
  TensorId h =
      m.op(k_conv,
           {m.input("images", {batch, 4, 3, 2}), m.variable("filter", {c, 2, 2, 2}), m.variable("filter.b", {c}, {})},
           {{"padding", Dims{1, 0, 0, 1}}});
  h = m.op(dice.coin() ? k_max_pool : k_avg_pool, {h}, {{"window", Dims{2, 2}}, {"strides", Dims{2, 1}}});
  h = m.op(k_tanh, {h});
  if (dropout > 0) h = m.op(k_dropout, {h}, {{"rate", dropout}});
  h = m.op(k_reduce_mean, {h}, {{"axes", Dims{1, 2}}});
  h = m.op(k_matmul, {h, m.variable("head", {c, kIds})});
  m.g.outputs = {{"logits", h}};
  m.g.training.loss = m.op(k_reduce_mean, {m.op(k_cross_entropy, {h, m.input("y", {batch}, DType::kI32)})});
}

void optimizer(Graph& g, Dice& dice, Precision precision = Precision::kFloat64) {
  Optimizer& o = g.training.optimizer;
  constexpr OptimizerKind kKinds[] = {OptimizerKind::kSgd,  OptimizerKind::kAdamW,   OptimizerKind::kAdam,
                                      OptimizerKind::kLamb, OptimizerKind::kAdagrad, OptimizerKind::kAdafactor};
  const bool usual = dice.below(3) != 0 || precision == Precision::kFloat32;
  o.kind = kKinds[dice.below(usual ? 2 : std::ssize(kKinds))];
  o.learning_rate = o.kind == OptimizerKind::kSgd ? 0.05 : 0.003;
  o.momentum = o.kind == OptimizerKind::kSgd && dice.coin() ? 0.9 : 0;
  o.nesterov = o.momentum > 0 && dice.coin();
  o.weight_decay = dice.coin() ? 0.01 : 0;
  if (o.kind == OptimizerKind::kAdafactor) o.epsilon = 1e-30;
  // Where the true gradient is zero (one key to attend to), Adam would turn rounding into full steps: epsilon is above
  // rounding.
  if (precision == Precision::kFloat32) o.epsilon = 1e-3;
  if (dice.coin()) g.training.clip_norm = 0.1;
  if (dice.below(3) == 0) g.training.lr_schedule = {LrScheduleKind::kCosine, 3, 20, 0.1};
}

Case random_case(Precision precision) {
  Dice dice(*rc::gen::inRange<uint32_t>(0, 1u << 30));
  Case c;
  c.batch = dice.between(1, 11);
  c.devices = dice.between(1, 6);
  c.micro_batches = dice.between(1, std::min<int64_t>(4, c.batch));
  c.strategy = replica(random_shares(c.devices, dice));
  const double dropout = dice.below(3) == 0 ? 0.25 : 0;
  GraphMaker m;
  constexpr void (*kModels[])(GraphMaker&, Dice&, int64_t, double) = {mlp, transformer, convolutions};
  kModels[dice.below(3)](m, dice, c.batch, dropout);
  optimizer(m.g, dice, precision);
  m.g.training.precision = precision;
  c.graph = std::move(m.g);
  return c;
}

CompileOptions options_of(const Case& c) {
  CompileOptions options;
  options.strategy = c.strategy;
  options.accumulation = c.micro_batches;
  options.bucket_bytes = 64 * c.batch;
  return options;
}

double largest(const Values& a) {
  double most = 0;
  for (const auto& [name, x] : a) most = std::max(most, norm(x));
  return most;
}

// The metric of float64: losses, and parameters relative to the larger of their norm and the way that steps can go.
void assert_equal_exactly(Runner& a, Runner& b, double learning_rate, int steps) {
  const Values of_b = b.parameters();
  for (const auto& [name, x] : a.parameters()) {
    const double size = std::max(norm(x), learning_rate * steps * std::sqrt(static_cast<double>(x.size())));
    const double off = distance(x, of_b.at(name));
    if (off > 1e-9 * size) RC_LOG() << name << " is off by " << off << " of " << size << "\n";
    RC_ASSERT(off <= 1e-9 * size);
  }
}

std::vector<int64_t> sizes_of(const std::vector<Interval>& cut) {
  std::vector<int64_t> out;
  for (const Interval& i : cut) out.push_back(i.size());
  return out;
}

void assert_partition(const std::vector<Interval>& cut, int64_t begin, int64_t end) {
  for (const Interval& i : cut) {
    RC_ASSERT(i.begin == begin);
    RC_ASSERT(i.end >= i.begin);
    begin = i.end;
  }
  RC_ASSERT(begin == end);
}

}  // namespace

TEST_CASE("property: replicas and micro-batches in float64 are one device") {
  CHECK(holds("float64", 60, [] {
    constexpr int kSteps = 20;
    const Case c = random_case(Precision::kFloat64);
    RC_LOG() << c.text() << print(c.graph);
    CompileOptions alone;
    Runner one(c.graph, "ref:1", alone), many(c.graph, fmt::format("ref:{}", c.devices), options_of(c));
    Dice dice(static_cast<uint64_t>(c.batch));
    for (int step = 0; step < kSteps; ++step) {
      const Values inputs = random_inputs(c.graph, c.batch, dice, kIds);
      const Values a = one.step(inputs, {"loss", "logits"}), b = many.step(inputs, {"loss", "logits"});
      const double off = distance(a.at("loss"), b.at("loss")), size = std::max(1.0, norm(a.at("loss")));
      if (off > 1e-9 * size)
        RC_LOG() << "loss of step " << step << " is " << a.at("loss")[0] << ", on many " << b.at("loss")[0] << "\n";
      RC_ASSERT(off <= 1e-9 * size);
      RC_ASSERT(distance(a.at("logits"), b.at("logits")) <= 1e-9 * std::max(1.0, norm(a.at("logits"))));
    }
    assert_equal_exactly(one, many, c.graph.training.optimizer.learning_rate, kSteps);
    RC_ASSERT(one.session().updates() == kSteps);
  }));
}

namespace {

// Losses of the steps, and the parameters after them.
struct Trained {
  std::vector<double> losses;
  Values start, end;
};
Trained train(Runner& run, const Values& inputs, int steps) {
  Trained t{.losses = {}, .start = run.parameters(), .end = {}};
  for (int step = 0; step < steps; ++step) t.losses.push_back(run.step(inputs, {"loss"}).at("loss")[0]);
  t.end = run.parameters();
  return t;
}

// The metric of fp32: losses within `tolerance` of each other, parameters within ten times that of the way they went.
bool within(const Trained& a, const Trained& b, double tolerance) {
  for (size_t step = 0; step < a.losses.size(); ++step)
    if (!(std::abs(a.losses[step] - b.losses[step]) <= tolerance * std::max(0.1, std::abs(a.losses[step])))) {
      RC_LOG() << "loss of step " << step << " is " << a.losses[step] << " and " << b.losses[step] << "\n";
      return false;
    }
  double off = 0, moved = 0;
  for (const auto& [name, x] : a.end)
    off += std::pow(distance(x, b.end.at(name)), 2), moved += std::pow(distance(x, a.start.at(name)), 2);
  RC_LOG() << "parameters are off by " << std::sqrt(off) << ", they moved by " << std::sqrt(moved) << "\n";
  return std::sqrt(off) <= 10 * tolerance * std::sqrt(moved) + 1e-7;
}

}  // namespace

TEST_CASE("property: replicas in fp32 on cpu are one device") {
  int compared = 0, unstable = 0;
  CHECK(holds("float32", 20, [&] {
    constexpr int kSteps = 20;
    const Case c = random_case(Precision::kFloat32);
    RC_LOG() << c.text() << print(c.graph);
    Dice dice(static_cast<uint64_t>(c.batch));
    const Values inputs = random_inputs(c.graph, c.batch, dice, kIds);
    // A bound on rounding means something only where training does not magnify it: in float64, on one device, one
    // rounding of fp32 in the initial parameters must stay below a tenth of the bound. (A step too far at a layer norm
    // of nearly equal numbers does not.)
    Graph exact = c.graph;
    exact.training.precision = Precision::kFloat64;
    Runner plain(exact, "ref:1"), moved(exact, "ref:1");
    for (auto& [name, values] : moved.parameters()) {
      std::vector<double> rounded = values;
      for (double& x : rounded) x *= 1 + 0x1p-24 * static_cast<double>(dice.between(-1, 1));
      moved.write(name, rounded);
    }
    if (!within(train(plain, inputs, kSteps), train(moved, inputs, kSteps), 1e-6)) {
      ++unstable;
      return;
    }
    ++compared;
    Runner one(c.graph, "cpu:1"), many(c.graph, fmt::format("cpu:{}", c.devices), options_of(c));
    RC_ASSERT(within(train(one, inputs, kSteps), train(many, inputs, kSteps), 1e-5));
  }));
  MESSAGE(compared << " compared, " << unstable << " magnify rounding");
  CHECK(unstable * 5 <= compared);
}

TEST_CASE("property: a smaller last batch is a model of that batch") {
  CHECK(holds("smaller batches", 50, [] {
    const uint32_t seed = *rc::gen::inRange<uint32_t>(0, 1u << 30);
    Dice dice(seed);
    const int64_t batch = dice.between(2, 9), smaller = dice.between(1, batch - 1), devices = dice.between(1, 4),
                  micro_batches = dice.between(1, std::min<int64_t>(3, batch));
    constexpr void (*kModels[])(GraphMaker&, Dice&, int64_t, double) = {mlp, transformer, convolutions};
    const auto make = kModels[dice.below(3)];
    const auto graph = [&](int64_t n) {
      Dice same(seed);
      GraphMaker m;
      make(m, same, n, 0);
      optimizer(m.g, same);
      m.g.training.precision = Precision::kFloat64;
      return m.g;
    };
    CompileOptions options;
    options.strategy = replica(random_shares(devices, dice));
    options.accumulation = micro_batches;
    RC_LOG() << options.strategy << ", batches of " << batch << " and " << smaller << ", " << micro_batches
             << " micro-batches\n"
             << print(graph(batch));
    const std::string list = fmt::format("ref:{}", devices);
    // A last batch may leave micro-batches empty; a plan may not.
    const bool same = micro_batches <= smaller;
    CompileOptions fewer = options;
    fewer.accumulation = std::min(micro_batches, smaller);
    Runner large(graph(batch), list, options), small(graph(smaller), list, fewer), alone(graph(smaller), "ref:1");
    for (int step = 0; step < 3; ++step) {
      const Values inputs = random_inputs(graph(batch), smaller, dice, kIds);
      const Values a = large.step(inputs, {"loss", "logits"}), b = small.step(inputs, {"loss", "logits"}),
                   c = alone.step(inputs, {"loss", "logits"});
      RC_ASSERT(!same || a == b);  // the same plan: bit for bit
      RC_ASSERT(distance(a.at("loss"), c.at("loss")) <= 1e-9 * std::max(1.0, largest(c)));
    }
    RC_ASSERT(!same || large.parameters() == small.parameters());
    assert_equal_exactly(alone, large, alone.session().plan().optimizer.learning_rate, 3);
    // Evaluation takes any batch, also a larger one; samples do not feel each other.
    const int64_t evaluated = dice.between(1, 2 * batch);
    const Values inputs = random_inputs(graph(batch), evaluated, dice, kIds);
    const Values whole = large.eval(inputs, {"logits"});
    if (same && smaller > 1)
      RC_ASSERT(whole == small.eval(inputs, {"logits"}));  // a program of one sample does not say where its batch is
    Runner single(graph(evaluated), "ref:1");
    for (const auto& [name, values] : alone.parameters()) single.write(name, values);
    RC_ASSERT(distance(whole.at("logits"), single.eval(inputs, {"logits"}).at("logits")) <=
              1e-9 * std::max(1.0, largest(whole)));
  }));
}

TEST_CASE("property: shares are rounded by largest remainder") {
  CHECK(holds("shares", 500, [] {
    Dice dice(*rc::gen::inRange<uint32_t>(0, 1u << 30));
    const int64_t total = dice.between(0, 60);
    std::vector<int64_t> whole(static_cast<size_t>(dice.between(1, 7)));
    for (int64_t& w : whole) w = dice.below(4) ? dice.between(0, 12) : 0;
    const int64_t sum = std::accumulate(whole.begin(), whole.end(), int64_t{0});
    if (sum == 0) whole[0] = 1;
    const int64_t all = std::max<int64_t>(sum, 1);
    // Scaling changes nothing.
    const double scale = std::vector{1.0, 0.1, 1.0 / 3, 1e6, 1e-6}[dice.below(5)];
    std::vector<double> weights;
    for (const int64_t w : whole) weights.push_back(static_cast<double>(w) * scale);
    // In whole numbers: total * w / all, the largest remainders first, the lower index first.
    std::vector<int64_t> want;
    std::vector<bool> more(whole.size());
    int64_t given = 0;
    for (const int64_t w : whole) want.push_back(total * w / all), given += want.back();
    for (; given < total; ++given) {
      size_t best = whole.size();
      for (size_t i = 0; i < whole.size(); ++i)
        if (!more[i] && whole[i] > 0 && (best == whole.size() || total * whole[i] % all > total * whole[best] % all))
          best = i;
      RC_ASSERT(best < whole.size());
      more[best] = true, ++want[best];
    }
    RC_LOG() << fmt::format("{} by [{}]\n", total, fmt::join(weights, ", "));
    const Ints found = round_shares(total, weights);
    RC_ASSERT(found == want);
    RC_ASSERT(sizes_of(cut_by_shares(total, weights)) == found);
    assert_partition(cut_by_shares(total, weights), 0, total);
  }));
  CHECK(holds("any weights", 500, [] {
    Dice dice(*rc::gen::inRange<uint32_t>(0, 1u << 30));
    const int64_t total = dice.between(0, 100000);
    std::vector<double> weights = dice.reals(static_cast<size_t>(dice.between(1, 9)));
    for (double& w : weights) w = std::abs(w) * std::pow(10.0, static_cast<double>(dice.between(-6, 6)));
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    if (sum == 0) return;
    const Ints found = round_shares(total, weights);
    RC_ASSERT(std::accumulate(found.begin(), found.end(), int64_t{0}) == total);
    for (size_t i = 0; i < weights.size(); ++i) {
      const double exact = static_cast<double>(total) * weights[i] / sum;
      RC_ASSERT(found[i] >= 0);
      RC_ASSERT(std::abs(static_cast<double>(found[i]) - exact) < 1 + 1e-6);
    }
  }));
}

TEST_CASE("property: micro-batches are of nearly one size") {
  CHECK(holds("micro-batches", 300, [] {
    Dice dice(*rc::gen::inRange<uint32_t>(0, 1u << 30));
    const int64_t batch = dice.between(1, 40), micro_batches = dice.between(1, 9);
    const std::vector<double> shares = random_shares(dice.between(1, 6), dice);
    RC_LOG() << fmt::format("{} in {} over [{}]\n", batch, micro_batches, fmt::join(shares, ", "));
    const MeshAxis time{.name = "time", .size = micro_batches, .shares = {}, .state_shares = {}};
    std::vector<Interval> runs;
    for (int64_t u = 0; u < micro_batches; ++u) runs.push_back(cut_of(time, false, batch, u));
    assert_partition(runs, 0, batch);
    const std::vector<int64_t> sizes = sizes_of(runs);
    RC_ASSERT(*std::max_element(sizes.begin(), sizes.end()) - *std::min_element(sizes.begin(), sizes.end()) <= 1);
    RC_ASSERT(std::is_sorted(sizes.rbegin(), sizes.rend()));
    for (const int64_t size : sizes) {
      const std::vector<Interval> parts = cut_by_shares(size, shares);
      assert_partition(parts, 0, size);
      for (size_t d = 0; d < shares.size(); ++d)
        if (shares[d] == 0) RC_ASSERT(parts[d].size() == 0);
    }
  }));
}
