// The reference kernels against closed forms and against other formulations of the same op.
#include <doctest/doctest.h>

#include <cmath>
#include <functional>
#include <numeric>

#include "base/philox.h"
#include "device/global_index.h"
#include "device/null/null.h"
#include "device/ref/access.h"
#include "device/ref/ref.h"
#include "ops/fused.h"
#include "ops/op.h"

namespace whale {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Value {
  DType dtype = DType::kF64;
  Dims dims;
  std::vector<double> data;
  double operator[](size_t i) const { return data.at(i); }
};

Value f64(Dims dims, std::vector<double> data) { return {DType::kF64, std::move(dims), std::move(data)}; }
Value i32(Dims dims, std::vector<double> data) { return {DType::kI32, std::move(dims), std::move(data)}; }
Value absent() { return {DType{}, {}, {}}; }
// Numbers without structure, the same on every run.
Value noise(Dims dims, uint64_t seed) {
  Value v{DType::kF64, dims, {}};
  for (int64_t i = 0; i < element_count(dims); ++i)
    v.data.push_back(static_cast<double>(mix64(seed * 1000 + static_cast<uint64_t>(i)) % 2000) / 1000 - 1);
  return v;
}

struct Setting {
  Box box;
  uint64_t key = 0;
  StepParameters step;
  RowContext row;
};

std::vector<Value> run(OpCode op, std::vector<Value> inputs, Attrs attrs = {}, Setting setting = {}) {
  const auto device = make_ref_backend()->open({});
  attrs = complete_attrs(def(op), attrs);
  std::vector<TensorType> types;
  std::vector<bool> present;
  for (const Value& v : inputs) {
    present.push_back(v.dtype != DType{});
    types.push_back({present.back() ? v.dtype : DType::kF32, v.dims});
  }
  const std::vector<TensorType> results = infer(op, attrs, types, present);
  KernelSpec spec;
  spec.op = op, spec.name = def(op).name, spec.attrs = &attrs;
  spec.box = setting.box, spec.key = setting.key, spec.step = &setting.step, spec.row = &setting.row;
  std::vector<std::pair<void*, size_t>> owned;
  const auto operand = [&](DType dtype, const Dims& dims) {
    Operand x;
    x.dtype = dtype, x.dims = dims;
    const auto bytes = static_cast<size_t>(element_count(dims) * size_of(dtype));
    x.data = device->allocate(bytes);
    owned.emplace_back(x.data, bytes);
    return x;
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    spec.in.push_back(present[i] ? operand(inputs[i].dtype, inputs[i].dims) : Operand{});
    for (size_t k = 0; k < inputs[i].data.size(); ++k)
      ref::store(inputs[i].dtype, spec.in[i].data, static_cast<int64_t>(k), inputs[i].data[k]);
  }
  for (const TensorType& t : results) spec.out.push_back(operand(t.dtype, t.dims));
  const auto kernel = device->bind(spec);
  kernel->run();
  kernel->run();  // a kernel keeps nothing from run to run
  std::vector<Value> values;
  for (const Operand& x : spec.out) {
    Value v{x.dtype, x.dims, {}};
    for (int64_t i = 0; i < element_count(x.dims); ++i) v.data.push_back(ref::load(x.dtype, x.data, i));
    values.push_back(std::move(v));
  }
  for (const auto& [memory, bytes] : owned) device->release(memory, bytes);
  return values;
}

void check_near(const Value& got, const std::vector<double>& want, double tolerance = 1e-12) {
  REQUIRE(got.data.size() == want.size());
  for (size_t i = 0; i < want.size(); ++i) {
    CAPTURE(i);
    CHECK(std::abs(got.data[i] - want[i]) <= tolerance * (1 + std::abs(want[i])));
  }
}

double dot(const Value& a, const Value& b) {
  REQUIRE(a.data.size() == b.data.size());
  return std::inner_product(a.data.begin(), a.data.end(), b.data.begin(), 0.0);
}

// Derivative of sum(weights * f(x)) by central differences.
std::vector<double> numeric_gradient(const Value& x, const Value& weights,
                                     const std::function<Value(const Value&)>& f) {
  std::vector<double> gradient;
  const double h = 1e-5;
  for (size_t i = 0; i < x.data.size(); ++i) {
    Value up = x, down = x;
    up.data[i] += h, down.data[i] -= h;
    gradient.push_back((dot(weights, f(up)) - dot(weights, f(down))) / (2 * h));
  }
  return gradient;
}

TEST_CASE("ref: every op but the true collectives has a kernel") {
  const auto backend = make_ref_backend();
  for (const OpCode op : all_ops()) {
    CAPTURE(std::string(def(op).name));
    CHECK(backend->supports(op, {DType::kF32}, {DType::kBF16}) ==
          !(has_flag(op, kCollective) || has_flag(op, kMemoryCopy) || op == OpCode::k_transfer ||
            op == OpCode::k_part_view));
  }
}

TEST_CASE("ref: types are stored with rounding to nearest, ties to even") {
  CHECK(float_to_bf16(1.0f) == 0x3F80);
  CHECK(float_to_bf16(1.00390625f) == 0x3F80);  // half way between 1 and 1.0078125: to the even one
  CHECK(float_to_bf16(1.01171875f) == 0x3F82);  // half way, the even one is above
  CHECK(float_to_bf16(1.0040f) == 0x3F81);
  CHECK(std::isnan(bf16_to_float(float_to_bf16(std::nanf("")))));
  CHECK(bf16_to_float(float_to_bf16(3.4e38f)) == std::numeric_limits<float>::infinity());
  const Value x = f64({5}, {-1.5, 0, 2.7, 300, std::nan("")});
  CHECK(run(OpCode::k_cast, {x}, {{"dtype", std::string("i32")}})[0].data ==
        std::vector<double>{-1, 0, 2, 300, std::numeric_limits<int32_t>::lowest()});
  CHECK(run(OpCode::k_cast, {x}, {{"dtype", std::string("bool")}})[0].data == std::vector<double>{1, 0, 1, 1, 1});
}

TEST_CASE("ref: elementwise ops broadcast as numpy does") {
  const Value a = f64({2, 1}, {1, 2}), b = f64({3}, {10, 20, 30});
  CHECK(run(OpCode::k_add, {a, b})[0].data == std::vector<double>{11, 21, 31, 12, 22, 32});
  const Value condition{DType::kBool, {2, 1}, {1, 0}};
  CHECK(run(OpCode::k_where, {condition, b, a})[0].data == std::vector<double>{10, 20, 30, 2, 2, 2});
  const Value x = f64({3}, {-100, 0, 2});
  check_near(run(OpCode::k_softplus, {x})[0], {std::exp(-100.0), std::log(2.0), std::log(1 + std::exp(2.0))});
  check_near(run(OpCode::k_bce_with_logits, {x, f64({3}, {1, 0.5, 0})})[0],
             {100, std::log(2.0), std::log(1 + std::exp(2.0))});
}

TEST_CASE("ref: gradients of activations are their derivatives") {
  const Value x = noise({7}, 1), dy = noise({7}, 2);
  const std::pair<OpCode, OpCode> pairs[] = {{OpCode::k_gelu, OpCode::k_gelu_grad},
                                             {OpCode::k_gelu_erf, OpCode::k_gelu_erf_grad},
                                             {OpCode::k_silu, OpCode::k_silu_grad}};
  for (const auto& [forward, backward] : pairs) {
    const OpCode op = forward;
    const auto want = numeric_gradient(x, dy, [&](const Value& v) { return run(op, {v})[0]; });
    check_near(run(backward, {x, dy})[0], want, 1e-8);
  }
}

TEST_CASE("ref: a fused chain gives what its ops give, types of the steps included") {
  const Value x{DType::kBF16, {2, 3}, {1, -2, 3, 0.5, 0.25, -8}}, b{DType::kBF16, {3}, {0.1015625, 1, 2}};
  FusedBody body;
  body.steps.push_back({OpCode::k_add, DType::kBF16, {0, 1}, 0, 0});
  body.steps.push_back({OpCode::k_gelu, DType::kBF16, {2}, 0, 0});
  body.steps.push_back({OpCode::k_dropout, DType::kBF16, {3}, 0.5, 42});
  body.results = {3, 4};
  Setting setting;
  setting.step.seed = 5;
  const auto fused = run(OpCode::k_fused, {x, b}, encode(body, 2), setting);
  const Value gelu = run(OpCode::k_gelu, {run(OpCode::k_add, {x, b})[0]})[0];
  setting.key = 42;
  const Value dropped = run(OpCode::k_dropout, {gelu}, {{"rate", 0.5}}, setting)[0];
  REQUIRE(fused.size() == 2);
  CHECK(fused[0].data == gelu.data);
  CHECK(fused[1].data == dropped.data);
}

TEST_CASE("philox: the known answers of the Random123 distribution") {
  CHECK(philox4x32({0, 0, 0, 0}, 0, 0) == PhiloxBlock{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  CHECK(philox4x32({~0u, ~0u, ~0u, ~0u}, ~0u, ~0u) == PhiloxBlock{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0xa4093822, 0x299f31d0) ==
        PhiloxBlock{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("global index: any cut of any sub-axis finds its place") {
  // A dimension of 2 x 6 samples x 3 elements, the samples cut to [4, 6), inside [2, 36, 5].
  const SubAxis batch{1, 2, 3};
  const GlobalIndex cut(Box{{0, 0, 0}, {2, 36, 5}, batch}, {2, 12, 5});
  CHECK_FALSE(cut.contiguous());
  int64_t local = 0;
  for (int64_t a = 0; a < 2; ++a)
    for (int64_t outer = 0; outer < 2; ++outer)
      for (int64_t sample = 4; sample < 6; ++sample)
        for (int64_t inner = 0; inner < 3; ++inner)
          for (int64_t e = 0; e < 5; ++e)
            CHECK(cut(local++, 4) == ((a * 36) + (outer * 6 + sample) * 3 + inner) * 5 + e);

  const GlobalIndex rows(Box{{0, 0}, {8, 5}, SubAxis{0, 1, 2}}, {4, 5});  // two samples of two rows
  CHECK(rows.contiguous());
  CHECK(rows(7, 1) == 2 * 5 + 7);
  const GlobalIndex columns(Box{{0, 3}, {4, 8}, SubAxis{}}, {4, 2});
  CHECK_FALSE(columns.contiguous());
  CHECK(columns(3, 0) == 8 + 3 + 1);
  const GlobalIndex whole(Box{}, {4, 2});
  CHECK(whole.contiguous());
  CHECK(whole(7, 3) == 7);
  const GlobalIndex scalar(Box{}, {});
  CHECK(scalar(0, 0) == 0);
}

TEST_CASE("ref: dropout's mask does not depend on the cut") {
  const int64_t rows = 8, width = 6;
  const Value ones = f64({rows, width}, std::vector<double>(static_cast<size_t>(rows * width), 1));
  Setting whole;
  whole.key = 7, whole.step = {.seed = 3, .iteration = 11};
  const Attrs attrs{{"rate", 0.25}};
  const Value all = run(OpCode::k_dropout, {ones}, attrs, whole)[0];
  const double kept = std::accumulate(all.data.begin(), all.data.end(), 0.0) / (4.0 / 3);
  CHECK(kept > 24);
  CHECK(kept < 46);

  std::vector<double> joined;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 3}, {3, 8}}) {
    Setting cut = whole;
    cut.box = {{0, 0}, {rows, width}, SubAxis{0, 1, 1}};
    cut.row.batch_begin = begin;
    const Value part = f64({end - begin, width}, std::vector<double>(static_cast<size_t>((end - begin) * width), 1));
    const Value got = run(OpCode::k_dropout, {part}, attrs, cut)[0];
    joined.insert(joined.end(), got.data.begin(), got.data.end());
  }
  CHECK(joined == all.data);

  for (const int64_t begin : {0, 4}) {  // columns: not contiguous
    Setting cut = whole;
    cut.box = {{0, begin}, {rows, width}, SubAxis{}};
    const Value part = f64({rows, 2}, std::vector<double>(static_cast<size_t>(rows * 2), 1));
    const Value got = run(OpCode::k_dropout, {part}, attrs, cut)[0];
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t c = 0; c < 2; ++c) CHECK(got[r * 2 + c] == all[r * width + begin + c]);
  }
  Setting later = whole;
  later.step.iteration = 12;
  CHECK(run(OpCode::k_dropout, {ones}, attrs, later)[0].data != all.data);
}

TEST_CASE("ref: matmul with transposes, shared operand, bias and activation") {
  const Value a = f64({2, 2}, {1, 2, 3, 4}), b = f64({2, 2}, {5, 6, 7, 8});
  CHECK(run(OpCode::k_matmul, {a, b, absent()})[0].data == std::vector<double>{19, 22, 43, 50});
  CHECK(run(OpCode::k_matmul, {a, b, absent()}, {{"transpose_a", true}})[0].data ==
        std::vector<double>{26, 30, 38, 44});
  CHECK(run(OpCode::k_matmul, {a, b, absent()}, {{"transpose_b", true}})[0].data ==
        std::vector<double>{17, 23, 39, 53});
  const Value stack = f64({2, 1, 2}, {1, 2, 3, 4}), bias = f64({2}, {-20, -22.5});
  CHECK(run(OpCode::k_matmul, {stack, b, bias}, {{"activation", std::string("relu")}})[0].data ==
        std::vector<double>{0, 0, 23, 27.5});
  const Value matrices = f64({2, 2, 1}, {5, 7, 6, 8});
  CHECK(run(OpCode::k_matmul, {stack, matrices, absent()})[0].data == std::vector<double>{19, 50});
  const auto dw =
      run(OpCode::k_matmul_weight_grad, {f64({2, 1, 2}, {1, 2, 3, 4}), f64({2, 1, 1}, {10, 100})}, {{"bias", true}});
  CHECK(dw[0].data == std::vector<double>{310, 420});
  CHECK(dw[1].data == std::vector<double>{110});
}

TEST_CASE("ref: reductions") {
  const Value x = f64({2, 3}, {1, 5, 5, -2, 0, 3});
  CHECK(run(OpCode::k_reduce_sum, {x}, {{"axes", Ints{-1}}})[0].data == std::vector<double>{11, 1});
  CHECK(run(OpCode::k_reduce_mean, {x}, {{"axes", Ints{0}}})[0].data == std::vector<double>{-0.5, 2.5, 4});
  CHECK(run(OpCode::k_reduce_max, {x})[0].data == std::vector<double>{5});
  CHECK(run(OpCode::k_reduce_min, {x}, {{"axes", Ints{1}}, {"keep_dims", true}})[0].dims == Dims{2, 1});
  CHECK(run(OpCode::k_argmax, {x})[0].data == std::vector<double>{1, 2});
  CHECK(run(OpCode::k_argmax, {x}, {{"axis", int64_t{0}}})[0].data == std::vector<double>{0, 0, 0});
  CHECK(run(OpCode::k_sum_of_squares, {x, f64({}, {2})})[0].data == std::vector<double>{68});
}

TEST_CASE("ref: movement") {
  const Value x = f64({2, 3}, {0, 1, 2, 3, 4, 5});
  CHECK(run(OpCode::k_transpose, {x}, {{"perm", Ints{1, 0}}})[0].data == std::vector<double>{0, 3, 1, 4, 2, 5});
  const Attrs cut{{"starts", Ints{0, 0}}, {"limits", Ints{2, 3}}, {"strides", Ints{1, 2}}};
  CHECK(run(OpCode::k_slice, {x}, cut)[0].data == std::vector<double>{0, 2, 3, 5});
  const Attrs placed{{"dims", Ints{2, 3}}, {"starts", Ints{0, 0}}, {"strides", Ints{1, 2}}};
  CHECK(run(OpCode::k_slice_grad, {f64({2, 2}, {1, 2, 3, 4})}, placed)[0].data ==
        std::vector<double>{1, 0, 2, 3, 0, 4});
  CHECK(run(OpCode::k_concat, {x, f64({2, 1}, {8, 9})}, {{"axis", int64_t{1}}})[0].data ==
        std::vector<double>{0, 1, 2, 8, 3, 4, 5, 9});
  CHECK(
      run(OpCode::k_pad, {f64({1, 2}, {1, 2})}, {{"low", Ints{1, 0}}, {"high", Ints{0, 1}}, {"value", 7.0}})[0].data ==
      std::vector<double>{7, 7, 7, 1, 2, 7});
  CHECK(run(OpCode::k_broadcast_to, {f64({2, 1}, {1, 2})}, {{"shape", Ints{2, 2}}})[0].data ==
        std::vector<double>{1, 1, 2, 2});
  CHECK(run(OpCode::k_cumsum, {x}, {{"axis", int64_t{1}}, {"reverse", true}, {"exclusive", true}})[0].data ==
        std::vector<double>{3, 2, 0, 9, 5, 0});
  CHECK(run(OpCode::k_local_slice, {x}, {{"sub_axis", Ints{1, 1, 1}}, {"begin", int64_t{1}}, {"end", int64_t{3}}})[0]
            .data == std::vector<double>{1, 2, 4, 5});
}

TEST_CASE("ref: indices") {
  const Value x = f64({3, 2}, {0, 1, 2, 3, 4, 5}), ids = i32({4}, {2, 0, 2, 9});
  CHECK(run(OpCode::k_embedding, {x, ids})[0].data == std::vector<double>{4, 5, 0, 1, 4, 5, 0, 0});
  const Value dy = f64({4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
  CHECK(run(OpCode::k_embedding_grad, {dy, ids}, {{"rows", int64_t{3}}})[0].data ==
        std::vector<double>{3, 4, 0, 0, 6, 8});
  CHECK(run(OpCode::k_gather, {x, i32({2}, {1, 0})}, {{"axis", int64_t{1}}})[0].data ==
        std::vector<double>{1, 0, 3, 2, 5, 4});
  CHECK(run(OpCode::k_one_hot, {i32({2}, {1, 5})}, {{"depth", int64_t{3}}})[0].data ==
        std::vector<double>{0, 1, 0, 0, 0, 0});
  const auto top = run(OpCode::k_top_k, {f64({1, 5}, {1, 7, 3, 7, 3})}, {{"k", int64_t{3}}});
  CHECK(top[0].data == std::vector<double>{7, 7, 3});
  CHECK(top[1].data == std::vector<double>{1, 3, 2});
  CHECK(
      run(OpCode::k_top_k_grad, {f64({1, 3}, {10, 20, 30}), i32({1, 3}, {1, 3, 2})}, {{"size", int64_t{5}}})[0].data ==
      std::vector<double>{0, 10, 30, 20, 0});
  // Indices beyond it are nobody's.
  CHECK(
      run(OpCode::k_top_k_grad, {f64({1, 3}, {10, 20, 30}), i32({1, 3}, {1, 7, -1})}, {{"size", int64_t{5}}})[0].data ==
      std::vector<double>{0, 10, 0, 0, 0});
}

TEST_CASE("ref: rotary turns pairs by their position, and its inverse turns back") {
  const Value x = noise({1, 3, 2, 4}, 5);
  const Value y = run(OpCode::k_rotary, {x})[0];
  for (const size_t t : {0u, 1u, 2u}) {  // head 1, pair 1: elements 1 and 3, frequency 10000^(-1/2) = 0.01
    const size_t row = (t * 2 + 1) * 4;
    const double angle = static_cast<double>(t) * 0.01;
    CHECK(y[row + 1] == doctest::Approx(x[row + 1] * std::cos(angle) - x[row + 3] * std::sin(angle)));
    CHECK(y[row + 3] == doctest::Approx(x[row + 3] * std::cos(angle) + x[row + 1] * std::sin(angle)));
  }
  check_near(run(OpCode::k_rotary, {y}, {{"inverse", true}})[0], x.data);
  const Value one = run(OpCode::k_rotary, {x}, {{"heads", int64_t{1}}, {"interleaved", true}})[0];
  CHECK(one[4 + 8] == x[4 + 8]);  // the second head of position 1 stays
  CHECK(one[8] == doctest::Approx(x[8] * std::cos(1.0) - x[9] * std::sin(1.0)));
}

TEST_CASE("ref: norms and their gradients") {
  const Value x = noise({3, 5}, 1), gamma = noise({5}, 2), beta = noise({5}, 3), dy = noise({3, 5}, 4);
  const auto ln = [&](const Value& x_, const Value& g, const Value& b) {
    return run(OpCode::k_layer_norm, {x_, g, b});
  };
  const auto y = ln(x, gamma, beta);
  for (size_t r = 0; r < 3; ++r) {
    double mean = 0, square = 0;
    for (size_t j = 0; j < 5; ++j) {
      const double xhat = (y[0][r * 5 + j] - beta[j]) / gamma[j];
      mean += xhat / 5, square += xhat * xhat / 5;
    }
    CHECK(std::abs(mean) < 1e-12);
    CHECK(square == doctest::Approx(1).epsilon(1e-3));
  }
  const auto d = run(OpCode::k_layer_norm_grad, {dy, x, y[1], y[2], gamma}, {{"bias", true}});
  check_near(d[0], numeric_gradient(x, dy, [&](const Value& v) { return ln(v, gamma, beta)[0]; }), 1e-7);
  check_near(d[1], numeric_gradient(gamma, dy, [&](const Value& v) { return ln(x, v, beta)[0]; }), 1e-7);
  check_near(d[2], numeric_gradient(beta, dy, [&](const Value& v) { return ln(x, gamma, v)[0]; }), 1e-7);
  const auto bias_only = run(OpCode::k_layer_norm_grad, {dy, x, y[1], y[2], absent()}, {{"bias", true}});
  REQUIRE(bias_only.size() == 2);
  check_near(bias_only[1], d[2].data);

  const auto rms = run(OpCode::k_rms_norm, {x, gamma});
  const auto dr = run(OpCode::k_rms_norm_grad, {dy, x, rms[1], gamma});
  check_near(dr[0],
             numeric_gradient(x, dy,
                              [&](const Value& v) {
                                return run(OpCode::k_rms_norm, {v, gamma})[0];
                              }),
             1e-7);
  check_near(dr[1],
             numeric_gradient(gamma, dy,
                              [&](const Value& v) {
                                return run(OpCode::k_rms_norm, {x, v})[0];
                              }),
             1e-7);
}

TEST_CASE("ref: the pieces of batch norm make batch norm and its gradient") {
  const Value x = noise({4, 3, 2}, 1), gamma = noise({2}, 2), beta = noise({2}, 3), dy = noise({4, 3, 2}, 4),
              residual = noise({4, 3, 2}, 5);
  const Attrs attrs{{"count", int64_t{12}}, {"relu", true}};
  const auto forward = [&](const Value& v, const Value& r) {
    return run(OpCode::k_batch_norm_apply, {v, run(OpCode::k_batch_stats, {v})[0], gamma, beta, r}, attrs)[0];
  };
  const Value plain = run(OpCode::k_batch_norm, {x, gamma, beta, f64({2}, {0, 0}), f64({2}, {1, 1})})[0];
  Value want = plain;
  for (size_t i = 0; i < want.data.size(); ++i) want.data[i] = std::fmax(plain[i] + residual[i], 0);
  const Value y = forward(x, residual);
  check_near(y, want.data);

  const Value stats = run(OpCode::k_batch_stats, {x})[0];
  const Value sums = run(OpCode::k_batch_norm_grad_stats, {dy, x, stats, y}, attrs)[0];
  Attrs with = attrs;
  with["residual"] = true;
  const auto d = run(OpCode::k_batch_norm_grad, {dy, x, stats, gamma, sums, y}, with);
  check_near(d[0], numeric_gradient(x, dy, [&](const Value& v) { return forward(v, residual); }), 1e-6);
  check_near(d[1], numeric_gradient(residual, dy, [&](const Value& v) { return forward(x, v); }), 1e-6);

  const Value moments = run(OpCode::k_batch_norm_moments, {f64({2, 2, 2}, {4, 0, 20, 4, 8, 4, 16, 8})},
                            {{"count", int64_t{4}}, {"groups", int64_t{2}}})[0];
  check_near(moments, {(1 + 2) / 2.0, (0 + 1) / 2.0, (4 + 0) * 4 / 3.0 / 2, (1 + 1) * 4 / 3.0 / 2});
  const auto running =
      run(OpCode::k_batch_norm_running, {f64({2}, {1, 1}), f64({2}, {1, 1}), f64({2, 2}, {1, 0, 16 / 3.0, 4 / 3.0})});
  check_near(running[0], {0.9 + 0.1, 0.9});
  check_near(running[1], {0.9 + 0.1 * 4 * 4 / 3, 0.9 + 0.1 * 4 / 3});
}

TEST_CASE("ref: batch norm of groups is batch norm of each group alone, whoever has its rows") {
  const Dims dims{6, 2, 3}, half{3, 2, 3};
  const Value x = noise(dims, 1), gamma = noise({3}, 2), beta = noise({3}, 3), dy = noise(dims, 4);
  const Attrs attrs{{"count", int64_t{6}}, {"group", int64_t{3}}}, alone{{"count", int64_t{6}}};
  const auto rows = [&](const Value& v, size_t from, size_t to) {
    return f64({static_cast<int64_t>(to - from), 2, 3},
               std::vector<double>(v.data.begin() + static_cast<std::ptrdiff_t>(6 * from),
                                   v.data.begin() + static_cast<std::ptrdiff_t>(6 * to)));
  };
  const auto joined = [](const Value& a, const Value& b) {
    std::vector<double> all = a.data;
    all.insert(all.end(), b.data.begin(), b.data.end());
    return all;
  };
  const Value stats = run(OpCode::k_batch_stats, {x}, {{"group", int64_t{3}}})[0];
  const Value a = run(OpCode::k_batch_stats, {rows(x, 0, 3)})[0], b = run(OpCode::k_batch_stats, {rows(x, 3, 6)})[0];
  check_near(stats, joined(a, b));
  check_near(run(OpCode::k_batch_norm_apply, {x, stats, gamma, beta, absent()}, attrs)[0],
             joined(run(OpCode::k_batch_norm_apply, {rows(x, 0, 3), a, gamma, beta, absent()}, alone)[0],
                    run(OpCode::k_batch_norm_apply, {rows(x, 3, 6), b, gamma, beta, absent()}, alone)[0]));
  const Value sums = run(OpCode::k_batch_norm_grad_stats, {dy, x, stats, absent()}, attrs)[0];
  const Value sa = run(OpCode::k_batch_norm_grad_stats, {rows(dy, 0, 3), rows(x, 0, 3), a, absent()}, alone)[0],
              sb = run(OpCode::k_batch_norm_grad_stats, {rows(dy, 3, 6), rows(x, 3, 6), b, absent()}, alone)[0];
  check_near(sums, joined(sa, sb));
  check_near(run(OpCode::k_batch_norm_grad, {dy, x, stats, gamma, sums, absent()}, attrs)[0],
             joined(run(OpCode::k_batch_norm_grad, {rows(dy, 0, 3), rows(x, 0, 3), a, gamma, sa, absent()}, alone)[0],
                    run(OpCode::k_batch_norm_grad, {rows(dy, 3, 6), rows(x, 3, 6), b, gamma, sb, absent()}, alone)[0]));
}

TEST_CASE("ref: softmax and cross entropy") {
  const Value x = f64({2, 3}, {0, std::log(2.0), std::log(5.0), 1000, 1000, -kInfinity}), dy = noise({2, 3}, 1);
  const Value y = run(OpCode::k_softmax, {x})[0];
  check_near(y, {0.125, 0.25, 0.625, 0.5, 0.5, 0});
  check_near(run(OpCode::k_log_softmax, {f64({1, 2}, {0, 0})})[0], {-std::log(2.0), -std::log(2.0)});
  const Value z = noise({2, 3}, 2);
  for (const auto& [forward, backward] :
       {std::pair{OpCode::k_softmax, OpCode::k_softmax_grad}, {OpCode::k_log_softmax, OpCode::k_log_softmax_grad}}) {
    const OpCode op = forward;
    check_near(run(backward, {run(op, {z})[0], dy})[0],
               numeric_gradient(z, dy, [&](const Value& v) { return run(op, {v})[0]; }), 1e-8);
  }

  const double e = 0.1;
  const Attrs attrs{{"label_smoothing", e}, {"ignore_index", int64_t{-1}}};
  const Value logits = noise({4, 3}, 3), labels = i32({4}, {2, -1, 0, 3});
  const auto loss = run(OpCode::k_cross_entropy, {logits, labels}, attrs);
  for (const size_t r : {0u, 2u}) {
    double total = 0, want = 0;
    for (size_t j = 0; j < 3; ++j) total += std::exp(logits[r * 3 + j]);
    for (size_t j = 0; j < 3; ++j) {
      const double target = (static_cast<double>(j) == labels[r] ? 1 - e : 0) + e / 3;
      want -= target * std::log(std::exp(logits[r * 3 + j]) / total);
    }
    CHECK(loss[0][r] == doctest::Approx(want));
    CHECK(loss[1][r] == doctest::Approx(std::log(total)));
  }
  CHECK(loss[0][1] == 0);
  CHECK(std::isnan(loss[0][3]));
  // The mean of what smoothing adds is one of differences.
  const auto large = run(OpCode::k_cross_entropy, {f64({1, 3}, {1e17, 1e17, 1e17}), i32({1}, {2})}, attrs);
  CHECK(large[0][0] == doctest::Approx(std::log(3.0)));
  const Value good = i32({4}, {2, -1, 0, 1}), dloss = noise({4}, 4);
  const auto fine = run(OpCode::k_cross_entropy, {logits, good}, attrs);
  const Value d = run(OpCode::k_cross_entropy_grad, {dloss, logits, good, fine[1]}, attrs)[0];
  check_near(d,
             numeric_gradient(logits, dloss,
                              [&](const Value& v) {
                                return run(OpCode::k_cross_entropy, {v, good}, attrs)[0];
                              }),
             1e-8);
}

// Attention written with whole score matrices, for one batch and head at a time.
Value explicit_attention(const Value& q, const Value& k, const Value& v, bool causal, const Value* bias) {
  const auto b = static_cast<size_t>(q.dims[0]), tq = static_cast<size_t>(q.dims[1]),
             h = static_cast<size_t>(q.dims[2]);
  const auto d = static_cast<size_t>(q.dims[3]), tk = static_cast<size_t>(k.dims[1]),
             hk = static_cast<size_t>(k.dims[2]);
  const auto dv = static_cast<size_t>(v.dims[3]);
  Value y = f64({q.dims[0], q.dims[1], q.dims[2], v.dims[3]}, std::vector<double>(b * tq * h * dv, 0));
  for (size_t n = 0; n < b; ++n)
    for (size_t head = 0; head < h; ++head)
      for (size_t i = 0; i < tq; ++i) {
        std::vector<double> weights(tk, 0);
        double total = 0;
        for (size_t j = 0; j < tk; ++j) {
          if (causal && j + tq > i + tk) continue;
          double s = 0;
          for (size_t e = 0; e < d; ++e)
            s += q[((n * tq + i) * h + head) * d + e] * k[((n * tk + j) * hk + head * hk / h) * d + e];
          s /= std::sqrt(static_cast<double>(d));
          if (bias) s += (*bias)[(head * tq + i) * tk + j];
          total += weights[j] = std::exp(s);
        }
        for (size_t j = 0; j < tk && total > 0; ++j)
          for (size_t e = 0; e < dv; ++e)
            y.data[((n * tq + i) * h + head) * dv + e] +=
                weights[j] / total * v[((n * tk + j) * hk + head * hk / h) * dv + e];
      }
  return y;
}

TEST_CASE("ref: attention against explicit softmax: causal, grouped heads, bias, masked rows") {
  const Value q = noise({2, 3, 4, 2}, 1), k = noise({2, 5, 2, 2}, 2), v = noise({2, 5, 2, 3}, 3);
  Value bias = noise({1, 4, 3, 5}, 4);
  bias.data[0] = bias.data[7] = -kInfinity;
  for (size_t j = 0; j < 5; ++j) bias.data[10 + j] = -kInfinity;  // head 0, query 2 sees nothing
  for (const bool causal : {false, true}) {
    CAPTURE(causal);
    const Attrs attrs{{"causal", causal}};
    check_near(run(OpCode::k_attention, {q, k, v, absent()}, attrs)[0],
               explicit_attention(q, k, v, causal, nullptr).data);
    const auto y = run(OpCode::k_attention, {q, k, v, bias}, attrs);
    check_near(y[0], explicit_attention(q, k, v, causal, &bias).data);
    CHECK(y[0][2 * 4 * 3] == 0);
    CHECK(y[1][2] == -kInfinity);

    Attrs with = attrs;
    with["bias_grad"] = true;
    Value finite = noise({1, 4, 3, 5}, 5);
    const auto f = run(OpCode::k_attention, {q, k, v, finite}, attrs);
    const Value dout = noise({2, 3, 4, 3}, 6);
    const auto d = run(OpCode::k_attention_grad, {dout, q, k, v, f[0], f[1], finite}, with);
    const auto of = [&](const Value& q_, const Value& k_, const Value& v_, const Value& b_) {
      return explicit_attention(q_, k_, v_, causal, &b_);
    };
    check_near(d[0], numeric_gradient(q, dout, [&](const Value& x) { return of(x, k, v, finite); }), 1e-7);
    check_near(d[1], numeric_gradient(k, dout, [&](const Value& x) { return of(q, x, v, finite); }), 1e-7);
    check_near(d[2], numeric_gradient(v, dout, [&](const Value& x) { return of(q, k, x, finite); }), 1e-7);
    check_near(d[3], numeric_gradient(finite, dout, [&](const Value& x) { return of(q, k, v, x); }), 1e-7);
  }
}

TEST_CASE("ref: attention and its gradient where lse has rounded to the largest score") {
  const Value q = f64({1, 1, 1, 1}, {1e9}), k = f64({1, 2, 1, 1}, {1e9, 1e9}), v = f64({1, 2, 1, 1}, {1, 3});
  const auto y = run(OpCode::k_attention, {q, k, v, absent()});
  check_near(y[0], {2});
  const auto d = run(OpCode::k_attention_grad, {f64({1, 1, 1, 1}, {1}), q, k, v, y[0], y[1], absent()});
  check_near(d[2], {0.5, 0.5});
  check_near(d[1], {-0.5e9, 0.5e9});
}

Value heads(const Value& packed, int64_t first, int64_t count) {
  return run(OpCode::k_slice, {packed},
             {{"starts", Ints{0, 0, first, 0}},
              {"limits", Ints{packed.dims[0], packed.dims[1], first + count, packed.dims[3]}}})[0];
}

TEST_CASE("ref: packed attention equals unpacked, dropout and gradient included, and does not depend on the cut") {
  const Value packed = noise({3, 4, 4 + 2 * 2, 2}, 1), dout = noise({3, 4, 4, 2}, 2);
  const Value q = heads(packed, 0, 4), k = heads(packed, 4, 2), v = heads(packed, 6, 2);
  Setting setting;
  setting.key = 9, setting.step.seed = 1;
  const Attrs attrs{{"causal", true}, {"kv_heads", int64_t{2}}, {"dropout", 0.5}};
  const auto y = run(OpCode::k_attention, {packed, absent(), absent(), absent()}, attrs, setting);
  const auto plain = run(OpCode::k_attention, {q, k, v, absent()}, attrs, setting);
  CHECK(y[0].data == plain[0].data);
  CHECK(y[1].data == plain[1].data);
  CHECK(y[0].data != run(OpCode::k_attention, {q, k, v, absent()}, {{"causal", true}}, setting)[0].data);

  const auto d =
      run(OpCode::k_attention_grad, {dout, packed, absent(), absent(), y[0], y[1], absent()}, attrs, setting);
  const auto parts = run(OpCode::k_attention_grad, {dout, q, k, v, y[0], y[1], absent()}, attrs, setting);
  REQUIRE(d.size() == 1);
  CHECK(heads(d[0], 0, 4).data == parts[0].data);
  CHECK(heads(d[0], 4, 2).data == parts[1].data);
  CHECK(heads(d[0], 6, 2).data == parts[2].data);
  check_near(parts[0],
             numeric_gradient(q, dout,
                              [&](const Value& x) {
                                return run(OpCode::k_attention, {x, k, v, absent()}, attrs, setting)[0];
                              }),
             1e-7);

  const auto sample = [](const Value& x, int64_t i) {
    const int64_t n = element_count(x.dims) / x.dims[0];
    Value s{x.dtype, x.dims, {x.data.begin() + i * n, x.data.begin() + (i + 1) * n}};
    s.dims[0] = 1;
    return s;
  };
  setting.row.batch_begin = 2;  // only the last sample is here
  setting.box = {{0, 0, 0, 0}, {3, 4, 4, 2}, SubAxis{0, 1, 1}};
  const auto last = run(OpCode::k_attention, {sample(packed, 2), absent(), absent(), absent()}, attrs, setting);
  CHECK(last[0].data == sample(y[0], 2).data);
  setting.box = {{0, 0, 0, 0}, {3, 4, 8, 2}, SubAxis{0, 1, 1}};  // of the packed gradient
  const auto dlast =
      run(OpCode::k_attention_grad,
          {sample(dout, 2), sample(packed, 2), absent(), absent(), last[0], last[1], absent()}, attrs, setting);
  CHECK(dlast[0].data == sample(d[0], 2).data);
}

TEST_CASE("ref: convolution against padding the input and gathering") {
  const Value x = noise({2, 5, 4, 4}, 1), w = noise({6, 3, 2, 2}, 2), bias = noise({6}, 3);
  const Attrs attrs{
      {"strides", Ints{2, 1}}, {"padding", Ints{1, 2, 0, 1}}, {"dilation", Ints{1, 2}}, {"groups", int64_t{2}}};
  const Value y = run(OpCode::k_conv, {x, w, bias}, attrs)[0];
  REQUIRE(y.dims == Dims{2, 3, 3, 6});
  const Value padded =
      run(OpCode::k_pad, {x}, {{"low", Ints{0, 1, 0, 0}}, {"high", Ints{0, 2, 1, 0}}})[0];  // [2, 8, 5, 4]
  std::vector<double> want;
  for (size_t n = 0; n < 2; ++n)
    for (size_t r = 0; r < 3; ++r)
      for (size_t c = 0; c < 3; ++c)
        for (size_t o = 0; o < 6; ++o) {
          double sum = bias[o];
          for (size_t i = 0; i < 3; ++i)
            for (size_t j = 0; j < 2; ++j)
              for (size_t e = 0; e < 2; ++e)
                sum += padded[((n * 8 + r * 2 + i) * 5 + c + 2 * j) * 4 + o / 3 * 2 + e] *
                       w[((o * 3 + i) * 2 + j) * 2 + e];
          want.push_back(sum);
        }
  check_near(y, want);

  const Value dy = noise(y.dims, 4);
  Attrs input = attrs, weight = attrs;
  input["spatial"] = Ints{5, 4};
  weight["kernel"] = Ints{3, 2};
  weight["bias"] = true;
  check_near(run(OpCode::k_conv_grad_input, {dy, w}, input)[0],
             numeric_gradient(x, dy,
                              [&](const Value& v) {
                                return run(OpCode::k_conv, {v, w, bias}, attrs)[0];
                              }),
             1e-7);
  const auto d = run(OpCode::k_conv_grad_weight, {x, dy}, weight);
  check_near(d[0],
             numeric_gradient(w, dy,
                              [&](const Value& v) {
                                return run(OpCode::k_conv, {x, v, bias}, attrs)[0];
                              }),
             1e-7);
  check_near(d[1],
             numeric_gradient(bias, dy,
                              [&](const Value& v) {
                                return run(OpCode::k_conv, {x, w, v}, attrs)[0];
                              }),
             1e-7);
}

TEST_CASE("ref: one and three spatial dimensions") {
  const Value line = f64({1, 4, 1}, {1, 2, 3, 4}), pair = f64({1, 2, 1}, {1, 10});
  CHECK(run(OpCode::k_conv, {line, pair, absent()})[0].data == std::vector<double>{21, 32, 43});
  const Value cube = f64({1, 2, 2, 2, 1}, {1, 2, 3, 4, 5, 6, 7, 8}),
              ones = f64({1, 2, 2, 2, 1}, std::vector<double>(8, 1));
  CHECK(run(OpCode::k_conv, {cube, ones, absent()})[0].data == std::vector<double>{36});
}

TEST_CASE("ref: pooling: the first of equal maxima wins, padding never does") {
  const Attrs attrs{{"window", Ints{2, 2}}, {"strides", Ints{2, 2}}, {"padding", Ints{1, 1, 1, 1}}};
  const Value x = f64({1, 2, 2, 1}, {-1, -1, -1, -5});
  const auto y = run(OpCode::k_max_pool, {x}, attrs);  // four windows, each with one element
  CHECK(y[0].data == std::vector<double>{-1, -1, -1, -5});
  CHECK(y[1].data == std::vector<double>{3, 2, 1, 0});
  const Attrs whole{{"window", Ints{2, 2}}, {"strides", Ints{1, 1}}};
  const auto tie = run(OpCode::k_max_pool, {f64({1, 2, 2, 1}, {0, 7, 7, 7})}, whole);
  CHECK(tie[1].data == std::vector<double>{1});
  Attrs back = whole;
  back["spatial"] = Ints{2, 2};
  CHECK(run(OpCode::k_max_pool_grad, {f64({1, 1, 1, 1}, {3}), tie[1]}, back)[0].data ==
        std::vector<double>{0, 3, 0, 0});

  check_near(run(OpCode::k_avg_pool, {x}, attrs)[0], {-1, -1, -1, -5});
  Attrs counted = attrs;
  counted["include_pad"] = true;
  check_near(run(OpCode::k_avg_pool, {x}, counted)[0], {-0.25, -0.25, -0.25, -1.25});
  const Value z = noise({2, 5, 4, 3}, 1), dy = noise({2, 3, 3, 3}, 2);
  for (const Attrs& a : {attrs, counted}) {
    Attrs grad = a;
    grad["spatial"] = Ints{5, 4};
    check_near(run(OpCode::k_avg_pool_grad, {dy}, grad)[0],
               numeric_gradient(z, dy, [&](const Value& v) { return run(OpCode::k_avg_pool, {v}, a)[0]; }), 1e-7);
  }
}

TEST_CASE("ref: adam, two steps by hand") {
  Value p = f64({2}, {1, -2}), m = f64({2}, {0, 0}), v = f64({2}, {0, 0});
  const Value lr{DType::kF32, {}, {0.5}};
  const Attrs attrs{{"beta1", 0.5}, {"beta2", 0.75}, {"epsilon", 0.0}, {"weight_decay", 0.1}, {"decoupled", true}};
  // Step 1: m = 0.5 g, v = 0.25 g^2; corrected: g and g^2; direction sign(g).
  auto r = run(OpCode::k_adam, {lr, {DType::kI64, {}, {0}}, absent(), p, f64({2}, {3, -4}), m, v}, attrs);
  check_near(r[0], {1 - 0.5 * (1 + 0.1), -2 - 0.5 * (-1 - 0.2)});
  check_near(r[1], {1.5, -2});
  check_near(r[2], {2.25, 4});
  // Step 2 with g = (1, 0): m = 0.5 m + 0.5 g over 0.75; v = 0.75 v + 0.25 g^2 over 0.4375.
  const auto s = run(OpCode::k_adam, {lr, {DType::kI64, {}, {1}}, absent(), r[0], f64({2}, {1, 0}), r[1], r[2]}, attrs);
  check_near(s[0], {0.45 - 0.5 * (1.25 / 0.75 / std::sqrt(1.9375 / 0.4375) + 0.045),
                    -1.4 - 0.5 * (-1 / 0.75 / std::sqrt(3 / 0.4375) - 0.14)});
  // Not decoupled, clipped to half: g = 0.5 * 3 + 0.1 * 1; no decay where decays says so.
  Attrs plain = attrs;
  plain["decoupled"] = false;
  plain["decays"] = Ints{1, 0};
  const auto two =
      run(OpCode::k_adam,
          {lr, {DType::kI64, {}, {0}}, f64({}, {0.5}), p, f64({2}, {3, -4}), m, v, p, f64({2}, {3, -4}), m, v}, plain);
  check_near(two[1], {0.5 * 1.6, 0.5 * (-2 - 0.2)});
  check_near(two[4], {0.5 * 1.5, 0.5 * -2});
}

TEST_CASE("ref: sgd, adagrad, lamb and clipping") {
  const Value lr{DType::kF32, {}, {0.5}}, p = f64({2}, {1, 2}), g = f64({2}, {4, -2}), m = f64({2}, {1, 1});
  check_near(run(OpCode::k_sgd, {lr, absent(), p, g})[0], {-1, 3});
  const auto nesterov = run(OpCode::k_sgd, {lr, absent(), p, g, m}, {{"momentum", 0.5}, {"nesterov", true}});
  check_near(nesterov[1], {4.5, -1.5});
  check_near(nesterov[0], {1 - 0.5 * (4 + 2.25), 2 - 0.5 * (-2 - 0.75)});
  const auto ada = run(OpCode::k_adagrad, {lr, absent(), p, g, f64({2}, {9, 0})}, {{"epsilon", 0.0}});
  check_near(ada[0], {1 - 0.5 * 4 / 5, 2 + 0.5});
  check_near(ada[1], {25, 4});
  const Attrs lamb{{"beta1", 0.5}, {"beta2", 0.5}, {"epsilon", 0.0}, {"weight_decay", 0.1}};
  const auto direction =
      run(OpCode::k_lamb_direction, {{DType::kI64, {}, {0}}, absent(), p, g, f64({2}, {0, 0}), f64({2}, {0, 0})}, lamb);
  check_near(direction[0], {1 + 0.1, -1 + 0.2});
  const auto applied = run(OpCode::k_lamb_apply, {lr, p, direction[0], f64({}, {16}), f64({}, {4})});
  check_near(applied[0], {1 - 0.5 * 2 * 1.1, 2 + 0.5 * 2 * 0.8});
  check_near(run(OpCode::k_clip_factor, {f64({}, {9}), f64({}, {16})}, {{"max_norm", 1.0}})[0], {0.2}, 1e-6);
  check_near(run(OpCode::k_clip_factor, {f64({}, {0.25})}, {{"max_norm", 1.0}})[0], {1});
}

TEST_CASE("ref: combine between devices, exact for integers, rounded for bf16") {
  const auto device = make_ref_backend()->open({});
  const int64_t big[] = {int64_t{1} << 60, -5};
  const int64_t one[] = {1, 7};
  int64_t sum[2];
  device->combine(Combine::kSum, DType::kI64, sum, big, one, 2);
  CHECK(sum[0] == (int64_t{1} << 60) + 1);
  device->combine(Combine::kMax, DType::kI64, sum, big, one, 2);
  CHECK(sum[1] == 7);
  const uint16_t a[] = {float_to_bf16(256)}, b[] = {float_to_bf16(1)};
  uint16_t c[1];
  device->combine(Combine::kSum, DType::kBF16, c, a, b, 1);
  CHECK(bf16_to_float(c[0]) == 256);  // 257 lies half way: to the even one
  device->combine(Combine::kMin, DType::kBF16, c, a, b, 1);
  CHECK(bf16_to_float(c[0]) == 1);
  CHECK_THROWS_AS(device->combine(Combine::kSum, DType::kBool, c, a, b, 1), Error);
}

TEST_CASE("null: runs nothing, fetches zeros, counts kernels") {
  const auto device = make_null_backend()->open({});
  constexpr size_t kHuge = size_t{1} << 40;  // more than any machine that runs this has
  void* memory = device->allocate(kHuge);
  const auto kernel = device->bind({});
  kernel->run();
  kernel->run();
  CHECK(null_kernels_run(*device) == 2);
  double host = 3;
  device->copy_out(&host, memory, sizeof host);
  CHECK(host == 0);
  device->release(memory, kHuge);
  CHECK(null_kernels_run(*make_ref_backend()->open({})) == -1);
}

TEST_CASE("back ends: built in ones open, others say what to install") {
  Backends backends("/nonexistent");
  CHECK(std::string(backends.get(DeviceKind::kRef).name()) == "ref");
  CHECK(&backends.get(DeviceKind::kNull) == &backends.get(DeviceKind::kNull));
  try {
    backends.get(DeviceKind::kCpu);
    FAIL("opened a library that is not there");
  } catch (const Error& e) {
    CHECK(e.code() == Code::kUnavailable);
    CHECK(e.message().find("/nonexistent/libwhale_cpu.so") != std::string::npos);
    CHECK(e.message().find("Install") != std::string::npos);
  }
  CHECK_THROWS_AS(backends.get(DeviceKind::kCuda), Error);
}

}  // namespace
}  // namespace whale
