// The CPU back end's matmul, convolution, pooling and batch norm against the reference device.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>

#include "base/error.h"
#include "cpu_compare.h"
#include "device/batch_norm_groups.h"
#include "ops/fused.h"
#include "trained.h"

namespace whale::test {
namespace {

using Type = Input (*)(Dims);
constexpr Type kTypes[] = {f32, bf16};

TEST_CASE("cpu matmul: plain, transposed, batched, shared weights") {
  for (const Type t : kTypes) {
    for (const auto& [m, k, n] :
         {std::array<int64_t, 3>{1, 1, 1}, {7, 13, 5}, {64, 33, 96}, {3, 1, 130}, {17, 1024, 1}, {5, 40, 1024}}) {
      compare(OpCode::k_matmul, {}, {t({m, k}), t({k, n})});
      compare(OpCode::k_matmul, {{"transpose_b", true}}, {t({m, k}), t({n, k})});
      compare(OpCode::k_matmul, {{"transpose_a", true}}, {t({k, m}), t({k, n})});
      compare(OpCode::k_matmul, {{"transpose_a", true}, {"transpose_b", true}}, {t({k, m}), t({n, k})});
    }
    compare(OpCode::k_matmul, {}, {t({2, 3, 4, 5}), t({5, 6})});
    compare(OpCode::k_matmul, {}, {t({2, 3, 4, 5}), t({2, 3, 5, 6})});
    compare(OpCode::k_matmul, {{"transpose_b", true}}, {t({2, 3, 4, 5}), t({2, 3, 6, 5})});
    compare(OpCode::k_matmul, {{"transpose_a", true}}, {t({3, 5, 4}), t({3, 5, 6})});
  }
}

TEST_CASE("cpu matmul: bias, activation, result type") {
  for (const Type t : kTypes)
    for (const char* activation : {"none", "relu", "gelu", "gelu_erf", "silu", "sigmoid", "tanh"})
      compare(OpCode::k_matmul, {{"activation", std::string(activation)}}, {t({9, 20}), t({20, 33}), t({33})});
  compare(OpCode::k_matmul, {}, {f32({3, 8}), f32({8, 2048}), f32({2048})});
  compare(OpCode::k_matmul, {}, {f32({2, 3, 8}), f32({2, 8, 7}), f32({7})});
  compare(OpCode::k_matmul, {{"out_dtype", std::string("f32")}}, {bf16({19, 64}), bf16({64, 48})}, 2e-5);
}

TEST_CASE("cpu matmul: dimensions of size 0") {
  for (const Type t : kTypes) {
    compare(OpCode::k_matmul, {}, {t({0, 4}), t({4, 3}), t({3})});
    compare(OpCode::k_matmul, {}, {t({2, 4}), t({4, 0})});
    compare(OpCode::k_matmul, {{"activation", std::string("relu")}}, {t({2, 0}), t({0, 3}), t({3})});
    compare(OpCode::k_matmul, {}, {t({2, 0}), t({0, 3})});
    compare(OpCode::k_matmul_weight_grad, {{"bias", true}}, {t({0, 4}), t({0, 3})});
  }
}

TEST_CASE("cpu matmul_weight_grad: both orientations, bias") {
  for (const Type t : kTypes)
    for (const bool transpose : {false, true})
      for (const bool bias : {false, true}) {
        const Attrs attrs{{"transpose", transpose}, {"bias", bias}};
        compare(OpCode::k_matmul_weight_grad, attrs, {t({11, 7}), t({11, 5})});
        compare(OpCode::k_matmul_weight_grad, attrs, {t({2, 3, 16}), t({2, 3, 33})});
        compare(OpCode::k_matmul_weight_grad, attrs, {t({40, 1024}), t({40, 1024})});
        compare(OpCode::k_matmul_weight_grad, attrs, {t({1, 1}), t({1, 1})});
      }
  compare(OpCode::k_matmul_weight_grad, {{"out_dtype", std::string("f32")}, {"bias", true}},
          {bf16({70, 31}), bf16({70, 600})}, 2e-5);
  compare(OpCode::k_matmul_weight_grad, {{"bias", true}}, {f32({3000, 3}), f32({3000, 10})}, 1e-4);
}

struct Convolution {
  Dims x, w;  // w [o, k..., c / groups]
  Ints strides, padding, dilation;
  int64_t groups;
};

Dims output_dims(const Convolution& c) {
  const Attrs attrs =
      complete_attrs(def(OpCode::k_conv),
                     {{"strides", c.strides}, {"padding", c.padding}, {"dilation", c.dilation}, {"groups", c.groups}});
  return infer(OpCode::k_conv, attrs, {{DType::kF32, c.x}, {DType::kF32, c.w}}, {true, true})[0].dims;
}

TEST_CASE("cpu conv and its gradients") {
  const Convolution cases[] = {
      {{2, 8, 8, 16}, {16, 3, 3, 16}, {}, {1, 1, 1, 1}, {}, 1},
      {{2, 7, 9, 3}, {5, 3, 2, 3}, {2, 1}, {1, 0, 0, 2}, {}, 1},      // odd sizes, asymmetric padding
      {{1, 9, 9, 4}, {6, 3, 3, 4}, {1, 1}, {2, 2, 2, 2}, {2, 2}, 1},  // dilation
      {{2, 6, 6, 8}, {8, 3, 3, 2}, {1, 1}, {1, 1, 1, 1}, {}, 4},      // groups
      {{2, 6, 6, 8}, {8, 3, 3, 1}, {2, 2}, {1, 1, 1, 1}, {}, 8},      // depthwise
      {{2, 5, 5, 17}, {33, 1, 1, 17}, {}, {}, {}, 1},
      {{2, 8, 8, 17}, {7, 1, 1, 17}, {2, 2}, {}, {}, 1},
      {{6, 8, 8, 4}, {8, 1, 1, 4}, {2, 2}, {}, {}, 1},  // strided points of less than a block of channels
      {{6, 8, 8, 1}, {20, 1, 1, 1}, {2, 2}, {}, {}, 1},
      {{4, 9, 9, 6}, {4, 1, 1, 3}, {3, 3}, {}, {}, 2},
      // Enough for the threads of a gradient of the filter; again strided points of less than a block of channels.
      {{4, 16, 16, 16}, {16, 3, 3, 16}, {}, {1, 1, 1, 1}, {}, 1},
      {{16, 64, 64, 7}, {20, 1, 1, 7}, {2, 2}, {}, {}, 1},
      {{3, 20, 5}, {7, 4, 5}, {3}, {2, 1}, {}, 1},  // one spatial dimension
      {{1, 4, 5, 6, 3}, {4, 2, 3, 3, 3}, {1, 2, 1}, {1, 0, 1, 1, 1, 1}, {}, 1},
      {{1, 1, 1, 1}, {1, 1, 1, 1}, {}, {}, {}, 1},
      {{0, 4, 4, 2}, {3, 3, 3, 2}, {}, {}, {}, 1},  // an empty share of the batch
  };
  for (const Type t : kTypes)
    for (const Convolution& c : cases) {
      const Attrs attrs{{"strides", c.strides}, {"padding", c.padding}, {"dilation", c.dilation}, {"groups", c.groups}};
      const Dims y = output_dims(c);
      compare(OpCode::k_conv, attrs, {t(c.x), t(c.w)});
      compare(OpCode::k_conv, attrs, {t(c.x), t(c.w), t({c.w[0]})});
      Attrs input = attrs;
      input["spatial"] = Ints(c.x.begin() + 1, c.x.end() - 1);
      compare(OpCode::k_conv_grad_input, input, {t(y), t(c.w)});
      Attrs weight = attrs;
      weight["kernel"] = Ints(c.w.begin() + 1, c.w.end() - 1);
      compare(OpCode::k_conv_grad_weight, weight, {t(c.x), t(y)});
      weight["bias"] = true;
      compare(OpCode::k_conv_grad_weight, weight, {t(c.x), t(y)});
    }
}

TEST_CASE("cpu pooling: values, first maximum, gradients") {
  struct Pooling {
    Dims x;
    Ints window, strides, padding;
  };
  const Pooling cases[] = {
      {{2, 8, 8, 16}, {2, 2}, {}, {}},
      {{2, 9, 7, 5}, {3, 3}, {2, 2}, {1, 1, 1, 1}},
      {{1, 6, 6, 33}, {3, 2}, {1, 2}, {0, 1, 1, 0}},
      {{3, 11, 4}, {3}, {2}, {1, 1}},
      {{1, 4, 4, 4, 3}, {2, 2, 2}, {1, 1, 2}, {}},
      {{2, 8, 8, 64}, {8, 8}, {}, {}},
      {{0, 8, 8, 4}, {2, 2}, {}, {}},
      {{1, 5, 5, 1}, {2, 2}, {3, 3}, {}},
      {{64, 8, 8, 20}, {3, 3}, {1, 1}, {1, 1, 1, 1}},
  };
  for (const Type t : kTypes)
    for (const Pooling& c : cases) {
      Attrs attrs{{"window", c.window}, {"strides", c.strides}, {"padding", c.padding}};
      const Ints spatial(c.x.begin() + 1, c.x.end() - 1);
      Input x = t(c.x);
      // Few distinct values, so that maxima tie.
      for (int64_t i = 0; i < element_count(c.x); ++i) x.values.push_back(static_cast<double>(i * 7919 % 13 % 5) - 2);
      compare(OpCode::k_max_pool, attrs, {x}, 0);
      const auto pooled = run_op(DeviceKind::kRef, 1, OpCode::k_max_pool, attrs, {x});
      const Dims y =
          infer(OpCode::k_max_pool, complete_attrs(def(OpCode::k_max_pool), attrs), {{DType::kF32, c.x}}, {true})[0]
              .dims;
      Attrs gradient = attrs;
      gradient["spatial"] = spatial;
      compare(OpCode::k_max_pool_grad, gradient, {t(y), {DType::kI32, y, pooled[1]}});
      for (const bool include_pad : {false, true}) {
        attrs["include_pad"] = gradient["include_pad"] = include_pad;
        compare(OpCode::k_avg_pool, attrs, {t(c.x)});
        compare(OpCode::k_avg_pool_grad, gradient, {t(y)});
      }
    }
}

TEST_CASE("cpu batch norm: statistics, both directions, running values") {
  for (const Type t : kTypes)
    for (const Dims& dims : {Dims{4, 3, 3, 16}, Dims{2, 5, 7, 3}, Dims{6, 10}, Dims{32, 16, 16, 33}, Dims{64, 8, 8, 64},
                             Dims{1, 1}, Dims{0, 4}, Dims{9, 2048}}) {
      const int64_t c = dims.back(), count = std::max<int64_t>(element_count(dims) / c, 1);
      const bool wide = t({1}).dtype == DType::kF32;
      compare(OpCode::k_batch_stats, {}, {t(dims)}, 1e-6);
      auto stats = run_op(DeviceKind::kRef, 1, OpCode::k_batch_stats, {}, {t(dims)})[0];
      if (element_count(dims) == 0) std::fill(stats.begin(), stats.end(), 1.0);
      const Input sums{DType::kF64, {1, 2, c}, stats}, gamma = f32({c}), beta = f32({c});
      const double tolerance = wide ? 1e-5 : 1.6e-2;
      for (const bool relu : {false, true}) {
        const Attrs attrs{{"count", count}, {"relu", relu}};
        compare(OpCode::k_batch_norm_apply, attrs, {t(dims), sums, gamma, beta}, tolerance);
        compare(OpCode::k_batch_norm_apply, attrs, {t(dims), sums, gamma, beta, t(dims)}, tolerance);
        Input dy = t(dims), y = t(dims);
        dy.seed = 5, y.seed = 6;
        const Input mask = relu ? y : absent();
        compare(OpCode::k_batch_norm_grad_stats, attrs, {dy, t(dims), sums, mask}, tolerance);
        const auto grads =
            run_op(DeviceKind::kRef, 1, OpCode::k_batch_norm_grad_stats, attrs, {dy, t(dims), sums, mask})[0];
        const Input grad_sums{DType::kF64, {1, 2, c}, grads};
        Attrs gradient = attrs;
        compare(OpCode::k_batch_norm_grad, gradient, {dy, t(dims), sums, gamma, grad_sums, mask}, tolerance);
        gradient["residual"] = true;
        compare(OpCode::k_batch_norm_grad, gradient, {dy, t(dims), sums, gamma, grad_sums, mask}, tolerance);
      }
      Input variance = f32({c});
      for (int64_t i = 0; i < c; ++i) variance.values.push_back(0.5 + static_cast<double>(i % 3));
      compare(OpCode::k_batch_norm_moments,
              {{"count", count}, {"groups", int64_t{1}}, {"out_dtype", std::string("f32")}}, {sums}, 1e-6);
      compare(OpCode::k_batch_norm_running, {{"momentum", 0.3}}, {f32({c}), variance, {DType::kF32, {2, c}, stats}},
              tolerance);
      compare(OpCode::k_batch_norm_inference, {}, {t(dims), gamma, beta, f32({c}), variance}, tolerance);
    }
}

TEST_CASE("cpu batch norm of groups") {
  const Input x = f32({12, 5, 3}), gamma = f32({3}), beta = f32({3});
  const Attrs attrs{{"count", int64_t{20}}, {"group", int64_t{4}}};
  Attrs gradient = attrs;
  gradient["residual"] = true;
  Input sums{DType::kF64, {3, 2, 3}, {}};
  for (int64_t i = 0; i < 18; ++i) sums.values.push_back(static_cast<double>(i / 3 % 2 ? 40 + i : i));
  compare(OpCode::k_batch_stats, {{"group", int64_t{4}}}, {x}, 1e-6);
  compare(OpCode::k_batch_norm_apply, attrs, {x, sums, gamma, beta}, 1e-5);
  compare(OpCode::k_batch_norm_grad_stats, attrs, {x, x, sums, absent()}, 1e-5);
  compare(OpCode::k_batch_norm_grad, gradient, {x, x, sums, gamma, sums, absent()}, 1e-5);
  compare(OpCode::k_batch_norm_moments,
          {{"count", int64_t{20}}, {"groups", int64_t{4}}, {"out_dtype", std::string("f32")}}, {sums}, 1e-6);
}

TEST_CASE("cpu: parts of a logsumexp, also of nothing") {
  const double none = -std::numeric_limits<double>::infinity();
  const std::vector<double> a{0, 1, none, none, -80, 700}, b{0, -3, 2, none, 90, 710};
  compare(OpCode::k_logaddexp, {}, {{DType::kF32, {2, 3}, a}, {DType::kF32, {2, 3}, b}}, 1e-6);
}

TEST_CASE("groups of samples: a device has rows from anywhere within them") {
  std::vector<float> x(30), y(30);
  std::vector<double> stats(12);
  KernelSpec spec;
  const Attrs attrs{{"group", int64_t{6}}, {"begin", int64_t{4}}};
  spec.attrs = &attrs;
  spec.in = {{x.data(), DType::kF32, {10, 3}}, {stats.data(), DType::kF64, {3, 2, 2}}};
  spec.out = {{y.data(), DType::kF32, {10, 3}}};
  const std::vector<KernelSpec> groups = by_group(spec, kApplyGroups);
  REQUIRE(groups.size() == 3);
  const int64_t begins[] = {0, 2, 8, 10};
  for (size_t g = 0; g < 3; ++g) {
    CHECK(groups[g].in[0].data == x.data() + 3 * begins[g]);
    CHECK(groups[g].out[0].data == y.data() + 3 * begins[g]);
    CHECK(groups[g].in[0].dims == Dims{begins[g + 1] - begins[g], 3});
    CHECK(groups[g].in[1].data == stats.data() + 4 * g);
    CHECK(groups[g].in[1].dims == Dims{1, 2, 2});
  }
}

TEST_CASE("cpu: f64 statistics reach the parameters") {
  const Input sums{DType::kF64, {2, 37}, {}};
  compare(OpCode::k_slice, {{"starts", Ints{1, 0}}, {"limits", Ints{2, 37}}}, {sums}, 0);
  compare(OpCode::k_slice, {{"starts", Ints{0, 3}}, {"limits", Ints{2, 30}}, {"strides", Ints{1, 4}}}, {sums}, 0);
  compare(OpCode::k_local_slice, {{"sub_axis", Ints{1, 1, 1}}, {"begin", int64_t{5}}, {"end", int64_t{30}}}, {sums}, 0);
  compare(OpCode::k_reshape, {{"shape", Ints{37, 2}}}, {sums}, 0);
  for (const int64_t axis : {0, 1}) compare(OpCode::k_concat, {{"axis", axis}}, {sums, sums, sums}, 0);
  compare(OpCode::k_transpose, {{"perm", Ints{1, 0}}}, {sums}, 0);
  compare(OpCode::k_broadcast_to, {{"shape", Ints{3, 2, 37}}}, {sums}, 0);
  compare(OpCode::k_slice_grad, {{"dims", Ints{5, 80}}, {"starts", Ints{1, 2}}, {"strides", Ints{2, 2}}}, {sums}, 0);
  compare(OpCode::k_pad, {{"low", Ints{1, 0}}, {"high", Ints{0, 3}}, {"value", 0.1}}, {sums}, 0);
  for (const double value : {0.0, 0.1})
    compare(OpCode::k_fill, {{"shape", Ints{5, 70}}, {"value", value}, {"dtype", std::string("f64")}}, {}, 0);
  compare(OpCode::k_cast, {{"dtype", std::string("f32")}}, {sums}, 1e-7);
  compare(OpCode::k_cast, {{"dtype", std::string("bf16")}}, {sums}, 1e-2);
  compare(OpCode::k_stop_gradient, {}, {sums}, 0);
  compare(OpCode::k_accumulate, {}, {sums, sums}, 0);
  compare(OpCode::k_accumulate, {{"combine", std::string("max")}}, {sums, sums}, 0);
  compare(OpCode::k_maximum, {}, {sums, sums}, 0);
  compare(OpCode::k_minimum, {}, {sums, sums}, 0);
}

TEST_CASE("cpu: f64 statistics of several groups are put together by one op") {
  const Input sums{DType::kF64, {2, 37}, {}};
  const auto step = [](OpCode code, std::vector<int> operands) {
    return FusedStep{.code = code, .dtype = DType::kF64, .operands = std::move(operands)};
  };
  const auto body = [&](OpCode code) {
    return encode({{step(code, {0, 1}), step(code, {3, 2}), step(code, {4, 3})}, {5}}, 3);
  };
  for (const OpCode code : {OpCode::k_add, OpCode::k_maximum, OpCode::k_minimum})
    compare(OpCode::k_fused, body(code), {sums, sums, sums}, 0);
  CHECK_THROWS_WITH_AS(run_op(DeviceKind::kCpu, 1, OpCode::k_fused, body(OpCode::k_pow), {sums, sums, sums}),
                       doctest::Contains("device cpu has no kernel for pow of f64 elements"), Error);
}

TEST_CASE("cpu device: what it cannot do names op, types and device") {
  try {
    run_op(DeviceKind::kCpu, 1, OpCode::k_matmul, {}, {{DType::kF64, {2, 2}, {}}, {DType::kF64, {2, 2}, {}}});
    FAIL("f64 matmul was accepted");
  } catch (const Error& e) {
    CHECK(e.code() == Code::kUnimplemented);
    CHECK(std::string(e.what()).find("cpu") != std::string::npos);
    CHECK(std::string(e.what()).find("matmul") != std::string::npos);
    CHECK(std::string(e.what()).find("f64") != std::string::npos);
  }
}

TEST_CASE("cpu: what is copied in and out is what was there, of any size and wherever it lies, and nothing beside it") {
  Backends backends(small::backends_folder());
  const auto device = backends.get(DeviceKind::kCpu).open({DeviceKind::kCpu, {0}, 0});
  constexpr size_t kMost = 3 << 20, kAround = 128;
  std::vector<unsigned char> from(kMost + kAround), to(kMost + 2 * kAround);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(1 + i * 2654435761u % 251);
  for (const size_t bytes : {0ul, 1ul, 63ul, (1ul << 20) - 1, 1ul << 20, (1ul << 20) + 1, (1ul << 20) + 63, kMost - 17})
    for (const size_t source : {0ul, 1ul, 31ul})
      for (const size_t target : {0ul, 1ul, 16ul, 63ul}) {
        CAPTURE(bytes);
        std::fill(to.begin(), to.end(), static_cast<unsigned char>(0));
        unsigned char* begin = to.data() + kAround + target;
        device->copy_in(begin, from.data() + source, bytes);
        CHECK(std::memcmp(begin, from.data() + source, bytes) == 0);
        CHECK(std::count(to.begin(), to.end(), 0) == static_cast<std::ptrdiff_t>(to.size() - bytes));
      }
}

}  // namespace
}  // namespace whale::test
