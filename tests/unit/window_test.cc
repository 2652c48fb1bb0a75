// Dimensions that convolution and pooling read through windows: what a device reads, what it gets from its neighbours,
// and that cutting them changes no result.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "cluster/shares.h"
#include "task/window.h"
#include "trained.h"

namespace whale {
namespace {

using enum OpCode;

MeshAxis axis_of(int64_t size) { return {"split", size, {}, {}}; }

// What an interval touches, from the definition of convolution: result r meets source s when tap t of the kernel says
// r * stride - low + t * dilation == s (transposed: the other way round).
Interval touched(const WindowRead& w, int64_t dilation, const Interval& r) {
  Interval all{w.source, 0};
  for (int64_t i = r.begin; i < r.end; ++i)
    for (int64_t s = 0; s < w.source; ++s)
      for (int64_t t = 0; t < w.reach; t += dilation)
        if (w.transposed ? s * w.stride - w.low + t == i : i * w.stride - w.low + t == s)
          all = {std::min(all.begin, s), std::max(all.end, s + 1)};
  return all;
}

TEST_CASE("windows: every device reads what its share needs, and its padding fits") {
  for (const int64_t kernel : {1, 2, 3, 5})
    for (const int64_t stride : {1, 2, 3})
      for (const int64_t dilation : {1, 2})
        for (const int64_t low : {0, 1, 2})
          for (const int64_t x : {9, 12, 16})
            for (const int64_t ways : {2, 3, 4})
              for (const bool transposed : {false, true}) {
                const int64_t reach = dilation * (kernel - 1) + 1, high = 1;
                const int64_t y = (x + low + high - reach) / stride + 1;
                if (x + low + high < reach) continue;
                const WindowRead w{.result = transposed ? x : y,
                                   .source = transposed ? y : x,
                                   .stride = stride,
                                   .reach = reach,
                                   .low = low,
                                   .transposed = transposed};
                CAPTURE(kernel);
                CAPTURE(stride);
                CAPTURE(dilation);
                CAPTURE(low);
                CAPTURE(x);
                CAPTURE(ways);
                CAPTURE(transposed);
                if (!window_fits(w, axis_of(ways))) continue;
                for (int64_t k = 0; k < ways; ++k) {
                  const Interval share = cut_of(axis_of(ways), false, w.result, k), read = read_through(w, share);
                  const Interval need = touched(w, dilation, share);
                  CHECK((need.begin >= need.end || (read.begin <= need.begin && read.end >= need.end)));
                  const WindowPadding p = padding_of(w, share);
                  CHECK(p.low >= 0);
                  CHECK(p.high >= 0);
                  const int64_t image = transposed ? share.size() : read.size();
                  const int64_t outputs = transposed ? read.size() : share.size();
                  CHECK((image + p.low + p.high - reach) / stride + 1 == outputs);
                  if (transposed) CHECK((p.more >= 0 && p.more < stride));
                }
              }
}

// ---- training ---------------------------------------------------------------------------------------------------
struct Net {
  Ints image;
  int64_t kernel = 3, stride = 1, dilation = 1, batch = 2;
};

Ints repeated(size_t n, int64_t value) { return Ints(n, value); }

// conv, relu, max pool, conv with stride and dilation, transposed conv, average pool, global mean, classes.
small::Model network(const Net& n) {
  small::Model m;
  m.g.name = "image";
  const size_t rank = n.image.size();
  Ints dims{n.batch};
  dims.insert(dims.end(), n.image.begin(), n.image.end());
  dims.push_back(2);
  const TensorId x = m.input("x", dims), labels = m.input("labels", {n.batch}, DType::kI32);
  const auto filters = [&](const char* name, int64_t o, int64_t k, int64_t c) {
    Ints d{o};
    for (size_t i = 0; i < rank; ++i) d.push_back(k);
    d.push_back(c);
    return m.variable(name, d);
  };
  const int64_t pad = n.dilation * (n.kernel - 1) / 2;
  TensorId h = m.op(k_conv, {x, filters("w1", 4, n.kernel, 2), m.variable("b1", {4})},
                    {{"padding", repeated(2 * rank, pad)}, {"dilation", repeated(rank, n.dilation)}}, "conv1");
  h = m.op(k_relu, {h}, {}, "relu1");
  h = m.op(k_max_pool, {h},
           {{"window", repeated(rank, 3)}, {"strides", repeated(rank, 1)}, {"padding", repeated(2 * rank, 1)}}, "max");
  h = m.op(k_conv, {h, filters("w2", 4, n.kernel, 4)},
           {{"strides", repeated(rank, n.stride)},
            {"padding", repeated(2 * rank, pad)},
            {"dilation", repeated(rank, n.dilation)}},
           "conv2");
  h = m.op(k_conv_transpose, {h, filters("w3", 4, 2, 3), m.variable("b3", {3})}, {{"strides", repeated(rank, 2)}},
           "up");
  h = m.op(k_avg_pool, {h}, {{"window", repeated(rank, 2)}, {"strides", repeated(rank, 2)}}, "average");
  h = m.op(k_conv, {h, filters("w4", 5, 1, 3)}, {}, "pointwise");
  Ints axes;
  for (size_t i = 0; i < rank; ++i) axes.push_back(static_cast<int64_t>(i) + 1);
  h = m.op(k_reduce_mean, {m.op(k_tanh, {h})}, {{"axes", axes}}, "mean");
  const TensorId logits = m.op(k_matmul, {h, m.variable("head", {5, 3})}, {}, "head.logits");
  m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, labels}, {}, "ce")}, {}, "loss"), OptimizerKind::kSgd);
  m.g.outputs = {{"logits", logits}};
  return m;
}

Plan planned(const small::Model& m, int64_t devices, const std::string& strategy, int64_t accumulation = 1) {
  CompileOptions options;
  options.strategy = strategy;
  options.accumulation = accumulation;
  options.precision = Precision::kFloat64;
  return compile(m.g, parse_devices("ref:" + std::to_string(devices), {0, 1, 2, 3}), options);
}

std::vector<double> trained(const Plan& plan) {
  Session session(std::make_shared<const Plan>(plan), std::make_shared<Backends>(), {});
  std::vector<double> out;
  for (int step = 0; step < 2; ++step) {
    const Entry& entry = plan.entries[0];
    std::vector<std::vector<double>> reals(entry.inputs.size());
    std::vector<std::vector<int32_t>> ints(entry.inputs.size());
    std::vector<NamedHost> inputs;
    for (size_t i = 0; i < entry.inputs.size(); ++i) {
      const PlanInput& input = entry.inputs[i];
      for (int64_t k = 0; k < element_count(input.dims); ++k) {
        if (input.dtype == DType::kI32)
          ints[i].push_back(static_cast<int32_t>((k * 7 + step) % 3));
        else
          reals[i].push_back(std::sin(static_cast<double>(k * k % 101 + 11 * step)));
      }
      const void* data = input.dtype == DType::kI32 ? static_cast<const void*>(ints[i].data()) : reals[i].data();
      inputs.push_back({input.name, {input.dtype, input.dims, const_cast<void*>(data)}});
    }
    double loss = -1;
    session.step(inputs, {{"loss", {DType::kF64, {}, &loss}}}).wait();
    out.push_back(loss);
  }
  for (const VariableInfo& v : session.variables()) {
    const TensorType type = session.variable_type(v.name);
    std::vector<double> values(static_cast<size_t>(element_count(type.dims)));
    session.read(v.name, {type.dtype, type.dims, values.data()});
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

// Halos are the links of a plan of one stage.
std::set<std::string> halos(const Plan& plan) {
  std::set<std::string> names;
  for (const Link& l : plan.entries[0].links) names.insert(l.name);
  return names;
}

void check_equal(const Net& net, int64_t devices, const std::string& strategy, bool with_halos = true,
                 int64_t accumulation = 1) {
  CAPTURE(strategy);
  CAPTURE(devices);
  CAPTURE(net.stride);
  CAPTURE(net.kernel);
  CAPTURE(net.dilation);
  CAPTURE(net.image.size());
  CAPTURE(net.image[0]);
  const small::Model m = network(net);
  const Plan plan = planned(m, devices, strategy, accumulation);
  if (with_halos) CHECK(!halos(plan).empty());
  const std::vector<double> many = trained(plan), one = trained(planned(m, 1, "local"));
  REQUIRE(many.size() == one.size());
  double worst = 0;
  for (size_t i = 0; i < one.size(); ++i) worst = std::max(worst, std::abs(many[i] - one[i]) / (1 + std::abs(one[i])));
  CHECK(worst < 1e-11);
}

TEST_CASE("windows: cut images train as whole ones") {
  for (const int64_t devices : {2, 3, 4}) {
    const std::string split = "split(" + std::to_string(devices) + ", factor=spatial)";
    check_equal({.image = {17}}, devices, split);
    check_equal({.image = {16}, .stride = 2}, devices, split);
    check_equal({.image = {23}, .kernel = 5, .stride = 2, .dilation = 2}, devices, split);
    check_equal({.image = {13, 6}, .dilation = 2}, devices, split);
    check_equal({.image = {16, 5}, .stride = 2}, devices, split);
  }
  check_equal({.image = {8, 5, 4}}, 2, "split(2, factor=spatial)");
  check_equal({.image = {9, 6, 6}, .stride = 2}, 2, "split(2, factor=depth)");
  check_equal({.image = {6, 6, 11}, .stride = 2}, 3, "split(3, factor=width)");
  check_equal({.image = {9, 12}}, 2, "split(2, factor=width)");
}

TEST_CASE("windows: beside replicas, micro-batches and other cuts") {
  check_equal({.image = {12, 6}, .batch = 4}, 4, "replica(2) > split(2, factor=spatial)");
  check_equal({.image = {12, 6}, .batch = 4}, 2, "split(2, factor=height)", true, 2);
  check_equal({.image = {12, 6}, .batch = 6}, 4, "replica(2) > split(2, factor=spatial)", true, 3);
  check_equal({.image = {12, 8}}, 4, "split(2, factor=height) > split(2, factor=width)");
  check_equal({.image = {12, 8}}, 4, "split(2, factor=height) > split(2, factor=channels)");
  check_equal({.image = {16}}, 4, "split(2, factor=spatial) > split(2, factor=spatial)", false);
  check_equal({.image = {16, 8}, .batch = 4}, 2, "split(2)", false);
}

TEST_CASE("windows: neighbours exchange 2 C H W floor(k / 2) elements a cut") {
  for (const int64_t kernel : {1, 3, 5, 7}) {
    small::Model m;
    const int64_t batch = 2, depth = 16, height = 6, width = 5, channels = 3;
    const TensorId x = m.input("x", {batch, depth, height, width, channels});
    const TensorId h = m.op(k_tanh, {m.op(k_conv, {x, m.variable("w0", {channels, 1, 1, 1, channels})}, {}, "first")});
    const TensorId y = m.op(k_conv, {h, m.variable("w", {4, kernel, kernel, kernel, channels})},
                            {{"padding", Ints(6, kernel / 2)}}, "second");
    m.g.outputs = {{"y", m.op(k_reduce_sum, {y}, {{"axes", Ints{1, 2, 3, 4}}})}};
    const Plan plan = planned(m, 2, "split(2, factor=depth)");
    int64_t elements = 0;
    for (const Link& l : plan.entries[0].links)
      for (const Transfer& t : l.transfers) {
        int64_t n = t.from != t.to;
        for (const Interval& i : t.source) n *= i.size();
        elements += n;
      }
    CAPTURE(kernel);
    CHECK(elements == batch * 2 * channels * height * width * (kernel / 2));
  }
}

TEST_CASE("windows: where nothing overlaps nothing is sent") {
  small::Model m;
  const TensorId x = m.input("x", {2, 16, 16, 3});
  const TensorId h = m.op(k_conv, {x, m.variable("w0", {3, 2, 2, 3})}, {{"strides", Ints{2, 2}}}, "patches");
  const TensorId y = m.op(k_max_pool, {h}, {{"window", Ints{2, 2}}}, "pool");
  m.g.outputs = {{"y", m.op(k_reduce_sum, {y}, {{"axes", Ints{1, 2, 3}}})}};
  CHECK(halos(planned(m, 2, "split(2, factor=height)")).empty());
}

}  // namespace
}  // namespace whale
