// The CPU back end's elementwise, reduction, movement, indexing, norm, softmax, loss, optimizer and attention kernels
// against the reference device: odd tails, broadcasts, bf16, integers, empty tensors.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/error.h"
#include "cpu_compare.h"
#include "ops/fused.h"

namespace whale::test {
namespace {

using Type = Input (*)(Dims);
constexpr Type kTypes[] = {f32, bf16};
constexpr double kOne = 1e-6;  // a few roundings of float

Input positive(Input x) {  // uniform in (0.05, 1.05)
  uint64_t state = 7;
  for (int64_t i = 0; i < element_count(x.dims); ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    x.values.push_back(0.05 + static_cast<double>(state >> 40) / 16777216.0);
  }
  return x;
}
Input integers(DType dtype, Dims dims, int64_t low, int64_t high) {
  Input x{dtype, std::move(dims), {}};
  uint64_t state = 3;
  for (int64_t i = 0; i < element_count(x.dims); ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    x.values.push_back(
        static_cast<double>(low + static_cast<int64_t>((state >> 33) % static_cast<uint64_t>(high - low))));
  }
  return x;
}
Input spread(Type t, double low, double high, int64_t n) {  // an even grid, for functions of one number
  Input x = t({n});
  for (int64_t i = 0; i < n; ++i)
    x.values.push_back(low + (high - low) * static_cast<double>(i) / static_cast<double>(n - 1));
  return x;
}

// |cpu - ref| <= relative * |ref| element by element, which compare() does not ask.
void compare_relative(OpCode op, const Input& x, double relative, double absolute = 1e-37) {
  CAPTURE(std::string(def(op).name));
  const auto want = run_op(DeviceKind::kRef, 1, op, {}, {x})[0], got = run_op(DeviceKind::kCpu, 1, op, {}, {x})[0];
  REQUIRE(want.size() == got.size());
  double worst = 0;
  size_t at = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (want[i] == got[i] || (std::isnan(want[i]) && std::isnan(got[i]))) continue;
    const double error = std::abs(want[i] - got[i]) / (std::abs(want[i]) * relative + absolute);
    if (!(error <= worst)) worst = error, at = i;
  }
  CAPTURE(x.values[at]);
  CAPTURE(want[at]);
  CAPTURE(got[at]);
  CHECK(worst <= 1);
}

constexpr double kUlp = 1.2e-7;

TEST_CASE("cpu elementary functions: within 2 units in the last place") {
  for (const auto& [low, high] : {std::pair{-100.0, 95.0}, {-1.0, 1.0}, {-1e-3, 1e-3}}) {
    const Input x = spread(f32, low, high, 5003);
    compare_relative(OpCode::k_exp, x, 2 * kUlp, 2e-45);
    compare_relative(OpCode::k_tanh, x, 2 * kUlp);
    compare_relative(OpCode::k_erf, x, 2 * kUlp);
    compare_relative(OpCode::k_sigmoid, x, 3 * kUlp, 2e-38);
    compare_relative(OpCode::k_softplus, x, 3 * kUlp, 2e-38);
    compare_relative(OpCode::k_sin, x, 2 * kUlp);
    compare_relative(OpCode::k_cos, x, 2 * kUlp);
  }
  for (const auto& [low, high] : {std::pair{1e-3, 3.0}, {0.9, 1.1}, {1.0, 1e30}, {1e-42, 1e-37}}) {
    const Input x = spread(f32, low, high, 5003);
    compare_relative(OpCode::k_log, x, 2 * kUlp);
    if (high > 1e-36) compare_relative(OpCode::k_log1p, x, 2 * kUlp);
    if (high > 1e-36) compare_relative(OpCode::k_rsqrt, x, 2 * kUlp);
  }
  compare_relative(OpCode::k_log1p, spread(f32, -0.999, 1e-4, 5003), 2 * kUlp);
}

TEST_CASE("cpu elementary functions: infinities, NaN, zeros") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  Input x = f32({9});
  x.values = {inf, -inf, nan, 0, 1, -1, 89, -110, 3e38};
  for (const OpCode op :
       {OpCode::k_exp, OpCode::k_log, OpCode::k_tanh, OpCode::k_erf, OpCode::k_sigmoid, OpCode::k_relu, OpCode::k_sqrt,
        OpCode::k_abs, OpCode::k_sign, OpCode::k_floor, OpCode::k_softplus, OpCode::k_log1p})
    compare_relative(op, x, 1e-6, 2e-38);
}

TEST_CASE("a NaN differs from everything, also from itself") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (const Type t : kTypes) {
    Input x = t({19});
    for (int i = 0; i < 19; ++i) x.values.push_back(i % 3 == 0 ? nan : i % 3 - 1);
    for (const OpCode op : {OpCode::k_equal, OpCode::k_not_equal, OpCode::k_less, OpCode::k_greater_equal})
      compare(op, {}, {x, x}, 0);
  }
}

TEST_CASE("relu keeps NaN and gives 0 for -infinity, alone and behind a product") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const Type t : kTypes) {
    // One row of x a column of numbers to pass through: long enough for vectors and a tail.
    Input x = t({1, 1}), w = t({1, 73});
    x.values = {1};
    for (int i = 0; i < 73; ++i)
      w.values.push_back(std::vector<double>{nan, -nan, inf, -inf, 2, -2, 0, -0.0, -1e-30}[i % 9]);
    for (const DeviceKind kind : {DeviceKind::kRef, DeviceKind::kCpu}) {
      const auto y = run_op(kind, 1, OpCode::k_matmul, {{"activation", std::string("relu")}}, {x, w})[0];
      for (int i = 0; i < 73; ++i) {
        CAPTURE(i % 9);
        if (i % 9 < 2)
          CHECK(std::isnan(y[i]));
        else
          CHECK(y[i] == (i % 9 == 2 ? inf : i % 9 == 4 ? 2 : 0));
      }
    }
  }
}

TEST_CASE("pooling and softmax keep a NaN beside -infinity") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const DeviceKind kind : {DeviceKind::kRef, DeviceKind::kCpu})
    for (const Type t : kTypes)
      for (int at = 0; at < 4; ++at) {
        CAPTURE(at);
        Input x = t({1, 4, 1}), row = t({1, 4});
        x.values = {1, 2, 3, 4}, row.values = {-inf, -inf, -inf, -inf};
        x.values[at] = row.values[at] = nan;
        const auto pooled = run_op(kind, 1, OpCode::k_max_pool, {{"window", Ints{4}}}, {x});
        CHECK(std::isnan(pooled[0][0]));
        CHECK(pooled[1][0] == at);  // the gradient goes where the NaN is
        for (const OpCode op : {OpCode::k_softmax, OpCode::k_log_softmax})
          CHECK(std::isnan(run_op(kind, 1, op, {}, {row})[0][0]));
        Input label{DType::kI32, {1}, {2}};
        CHECK(std::isnan(run_op(kind, 1, OpCode::k_cross_entropy, {}, {row, label})[0][0]));
      }
}

// Equal logits of any magnitude are equally likely, few classes or many, and no NaN or infinity passes unseen.
TEST_CASE("softmax and cross entropy of large logits, alone and behind a block of small ones") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const DeviceKind kind : {DeviceKind::kRef, DeviceKind::kCpu})
    for (const Type t : kTypes)
      for (const int64_t width : {3, 37, 2500})
        for (const double large : {1e5, 1e17, 1e38}) {
          CAPTURE(width);
          CAPTURE(large);
          const auto wide = static_cast<size_t>(width);
          const double p = 1.0 / static_cast<double>(width - 1), near = 1e-2;
          Input x = t({1, width});
          x.values.assign(wide, large), x.values[0] = -large;
          const auto y = run_op(kind, 1, OpCode::k_softmax, {}, {x})[0];
          const auto logs = run_op(kind, 1, OpCode::k_log_softmax, {}, {x})[0];
          CHECK(y[0] == 0);
          CHECK(y[wide - 1] == doctest::Approx(p).epsilon(near));
          CHECK(logs[wide - 1] == doctest::Approx(std::log(p)).epsilon(near));
          const Input label{DType::kI32, {1}, {2}};
          Input one = f32({1});
          one.values = {1};
          for (const double e : {0.0, 0.25}) {
            const Attrs attrs{{"label_smoothing", e}};
            Attrs all = attrs;
            all["vocabulary"] = width;
            const double uniform = e / static_cast<double>(width);
            const auto loss = run_op(kind, 1, OpCode::k_cross_entropy, attrs, {x, label});
            CHECK(loss[0][0] == doctest::Approx(uniform * 2 * large - std::log(p)).epsilon(near));
            Input lse = f32({1});
            lse.values = loss[1];
            const auto d = run_op(kind, 1, OpCode::k_cross_entropy_grad, all, {one, x, label, lse})[0];
            CHECK(d[2] == doctest::Approx(p - (1 - e) - uniform).epsilon(near));
            CHECK(d[wide - 1] == doctest::Approx(width == 3 ? d[2] : p - uniform).epsilon(near));
          }
          Input bad = x;
          for (const double what : {nan, inf}) {
            bad.values[1] = what;
            for (const OpCode op : {OpCode::k_softmax, OpCode::k_log_softmax}) {
              const auto row = run_op(kind, 1, op, {}, {bad})[0];
              CHECK(std::all_of(row.begin(), row.end(), [](double v) { return std::isnan(v); }));
            }
            CHECK(std::isnan(run_op(kind, 1, OpCode::k_cross_entropy, {}, {bad, label})[0][0]));
          }
        }
}

TEST_CASE("cpu elementwise: every op, odd sizes") {
  const OpCode unary[] = {
      OpCode::k_neg,  OpCode::k_abs,  OpCode::k_sign,     OpCode::k_floor, OpCode::k_exp,          OpCode::k_square,
      OpCode::k_sin,  OpCode::k_cos,  OpCode::k_erf,      OpCode::k_tanh,  OpCode::k_sigmoid,      OpCode::k_softplus,
      OpCode::k_relu, OpCode::k_gelu, OpCode::k_gelu_erf, OpCode::k_silu,  OpCode::k_stop_gradient};
  const OpCode positive_only[] = {OpCode::k_log, OpCode::k_log1p, OpCode::k_sqrt, OpCode::k_rsqrt,
                                  OpCode::k_reciprocal};
  const OpCode binary[] = {OpCode::k_add,
                           OpCode::k_sub,
                           OpCode::k_mul,
                           OpCode::k_maximum,
                           OpCode::k_minimum,
                           OpCode::k_relu_grad,
                           OpCode::k_gelu_grad,
                           OpCode::k_gelu_erf_grad,
                           OpCode::k_silu_grad,
                           OpCode::k_bce_with_logits,
                           OpCode::k_squared_difference,
                           OpCode::k_equal,
                           OpCode::k_less,
                           OpCode::k_greater_equal};
  for (const Type t : kTypes) {
    for (const Dims& dims : {Dims{}, Dims{1}, Dims{3, 37}, Dims{70001}, Dims{0, 4}}) {
      const double tolerance = t == bf16 ? 8e-3 : kOne;
      for (const OpCode op : unary) compare(op, {}, {t(dims)}, tolerance);
      for (const OpCode op : positive_only) compare(op, {}, {positive(t(dims))}, tolerance);
      for (const OpCode op : binary) compare(op, {}, {t(dims), t(dims)}, tolerance);
      compare(OpCode::k_div, {}, {t(dims), positive(t(dims))}, tolerance);
      compare(OpCode::k_pow, {}, {positive(t(dims)), t(dims)}, tolerance);
      compare(OpCode::k_accumulate, {}, {t(dims), t(dims)}, tolerance);
      for (const char* combine : {"max", "min"})
        compare(OpCode::k_accumulate, {{"combine", std::string(combine)}}, {t(dims), t(dims)}, tolerance);
    }
  }
}

TEST_CASE("cpu elementwise: broadcasts") {
  for (const Type t : kTypes) {
    const double tolerance = t == bf16 ? 8e-3 : kOne;
    for (const auto& [a, b] : {std::pair<Dims, Dims>{{5, 7, 33}, {33}},
                               {{5, 7, 33}, {}},
                               {{5, 7, 33}, {7, 1}},
                               {{5, 7, 33}, {5, 1, 1}},
                               {{5, 1, 33}, {7, 1}},
                               {{1, 7, 1, 3}, {5, 1, 4, 1}},
                               {{200, 300}, {300}},
                               {{200, 300}, {200, 1}},
                               {{4, 0}, {1, 1}},
                               {{3, 5000}, {5000}}}) {
      compare(OpCode::k_add, {}, {t(a), t(b)}, tolerance);
      compare(OpCode::k_sub, {}, {t(b), t(a)}, tolerance);
      compare(OpCode::k_where, {}, {integers(DType::kBool, b, 0, 2), t(a), t(b)}, tolerance);
    }
  }
}

TEST_CASE("cpu elementwise: integers, booleans, casts") {
  for (const DType dtype : {DType::kI32, DType::kI64, DType::kU8, DType::kI8}) {
    const bool narrow = dtype == DType::kU8 || dtype == DType::kI8;
    const int64_t low = dtype == DType::kU8 ? 1 : narrow ? -11 : -30000, high = narrow ? 11 : 30000;
    const Input a = integers(dtype, {7, 131}, low, high), b = integers(dtype, {131}, 1, high);
    for (const OpCode op : {OpCode::k_add, OpCode::k_sub, OpCode::k_mul, OpCode::k_maximum, OpCode::k_minimum,
                            OpCode::k_equal, OpCode::k_less, OpCode::k_greater})
      if (!(dtype == DType::kU8 && op == OpCode::k_sub)) compare(op, {}, {a, b}, 1e-12);
    compare(OpCode::k_where, {}, {integers(DType::kBool, {7, 1}, 0, 2), a, b}, 1e-12);
    for (const char* to : {"f32", "bf16", "i32", "i64", "u8", "i8", "bool"})
      compare(OpCode::k_cast, {{"dtype", std::string(to)}}, {a}, 1e-12);
  }
  const Input p = integers(DType::kBool, {65}, 0, 2), q = integers(DType::kBool, {3, 65}, 0, 2);
  for (const OpCode op : {OpCode::k_logical_and, OpCode::k_logical_or}) compare(op, {}, {p, q}, 1e-12);
  compare(OpCode::k_logical_not, {}, {q}, 1e-12);
  for (const char* to : {"f32", "i32", "bool"}) compare(OpCode::k_cast, {{"dtype", std::string(to)}}, {q}, 1e-12);
  for (const char* to : {"bf16", "i32", "i64", "u8", "i8", "bool"})
    compare(OpCode::k_cast, {{"dtype", std::string(to)}}, {spread(f32, 0, 120.5, 777)}, 1e-12);
  compare(OpCode::k_cast, {{"dtype", std::string("f32")}}, {bf16({777})}, 1e-12);
}

TEST_CASE("cpu fused bodies: chains, casts inside, several results") {
  using S = FusedStep;
  const auto step = [](OpCode code, std::vector<int> operands, DType dtype = DType::kF32) {
    S s;
    s.code = code, s.dtype = dtype, s.operands = std::move(operands);
    return s;
  };
  // y0 = gelu(a + bias) * b, y1 = a + bias
  FusedBody body{{step(OpCode::k_add, {0, 1}), step(OpCode::k_gelu, {3}), step(OpCode::k_mul, {4, 2})}, {5, 3}};
  compare(OpCode::k_fused, encode(body, 3), {f32({40, 517}), f32({517}), f32({40, 1})}, kOne);
  // bf16 rounds after each step, as the reference does: equal to the bit
  for (S& s : body.steps) s.dtype = DType::kBF16;
  body.steps[1].code = OpCode::k_square;
  compare(OpCode::k_fused, encode(body, 3), {bf16({40, 517}), bf16({517}), bf16({40, 1})}, 1e-12);
  // images: u8 -> float, normalised, to bf16; and an integer comparison
  const FusedBody image{{step(OpCode::k_cast, {0}), step(OpCode::k_sub, {3, 1}), step(OpCode::k_mul, {4, 2}),
                         step(OpCode::k_cast, {5}, DType::kBF16)},
                        {6}};
  compare(OpCode::k_fused, encode(image, 3), {integers(DType::kU8, {3, 9, 3}, 0, 255), f32({3}), f32({3})}, 8e-3);
  const FusedBody mask{{step(OpCode::k_equal, {0, 1}, DType::kBool), step(OpCode::k_where, {4, 2, 3})}, {5}};
  compare(OpCode::k_fused, encode(mask, 4),
          {integers(DType::kI64, {5, 70}, 0, 3), integers(DType::kI64, {70}, 0, 3), f32({5, 70}), f32({})}, kOne);
  FusedBody drop{{step(OpCode::k_dropout, {0}), step(OpCode::k_add, {2, 1})}, {3}};
  drop.steps[0].value = 0.3, drop.steps[0].key = 99;
  compare(OpCode::k_fused, encode(drop, 2), {f32({37, 41}), f32({37, 41})}, kOne);
}

TEST_CASE("cpu dropout draws the reference's words") {
  for (const Type t : kTypes)
    for (const Dims& dims : {Dims{1}, Dims{37, 41}, Dims{100003}})
      compare(OpCode::k_dropout, {{"rate", 0.4}, {"key", int64_t{5}}}, {t(dims)}, t == bf16 ? 8e-3 : kOne);
}

TEST_CASE("cpu reductions: inner, outer, middle, mixed, all") {
  for (const Type t : kTypes) {
    const double tolerance = t == bf16 ? 8e-3 : 3e-6;
    for (const OpCode op : {OpCode::k_reduce_sum, OpCode::k_reduce_mean, OpCode::k_reduce_max, OpCode::k_reduce_min}) {
      for (const Ints& axes :
           {Ints{}, Ints{0}, Ints{-1}, Ints{1}, Ints{0, 2}, Ints{1, 3}, Ints{0, 1}, Ints{2, 3}, Ints{0, 3}})
        for (const bool keep : {false, true})
          compare(op, {{"axes", axes}, {"keep_dims", keep}}, {t({5, 3, 7, 19})}, tolerance);
      compare(op, {{"axes", Ints{0}}}, {t({3000, 50})}, tolerance);
      compare(op, {{"axes", Ints{1}}}, {t({3, 70000})}, tolerance);
      compare(op, {{"axes", Ints{}}}, {t({300, 501})}, 3e-5 + tolerance);
      compare(op, {{"axes", Ints{0}}}, {t({1, 1000})}, tolerance);
      compare(op, {{"axes", Ints{1}}}, {t({4, 1})}, tolerance);
    }
    compare(OpCode::k_argmax, {}, {t({7, 1000})}, 1e-12);
    compare(OpCode::k_argmax, {{"axis", int64_t{0}}}, {t({70, 33})}, 1e-12);
    compare(OpCode::k_sum_of_squares, {}, {t({70001}), t({3}), t({5, 5})}, 1e-6);
    compare(OpCode::k_reduce_sum, {{"axes", Ints{0}}}, {t({0, 5})}, 1e-12);
  }
  for (const DType dtype : {DType::kI32, DType::kI64})
    for (const Ints& axes : {Ints{}, Ints{0}, Ints{1}, Ints{0, 2}})
      for (const OpCode op : {OpCode::k_reduce_sum, OpCode::k_reduce_max, OpCode::k_reduce_min})
        compare(op, {{"axes", axes}}, {integers(dtype, {5, 7, 9}, -50, 50)}, 1e-12);
}

TEST_CASE("cpu movement") {
  const auto all = [](const Dims& dims) {
    return std::vector<Input>{f32(dims), bf16(dims), integers(DType::kI64, dims, -9, 9),
                              integers(DType::kBool, dims, 0, 2)};
  };
  for (const Ints& perm : {Ints{0, 2, 1, 3}, Ints{3, 2, 1, 0}, Ints{0, 1, 3, 2}, Ints{2, 0, 3, 1}, Ints{0, 1, 2, 3}})
    for (const Input& x : all({3, 17, 5, 34})) compare(OpCode::k_transpose, {{"perm", perm}}, {x}, 1e-12);
  for (const Input& x : all({200, 333})) compare(OpCode::k_transpose, {{"perm", Ints{1, 0}}}, {x}, 1e-12);
  for (const Input& x : all({6, 9, 11})) {
    compare(OpCode::k_reshape, {{"shape", Ints{9, -1}}}, {x}, 1e-12);
    compare(OpCode::k_slice, {{"starts", Ints{1, 0, 3}}, {"limits", Ints{5, 9, 11}}}, {x}, 1e-12);
    compare(OpCode::k_slice, {{"starts", Ints{0, 2, 1}}, {"limits", Ints{6, 9, 10}}, {"strides", Ints{2, 1, 3}}}, {x},
            1e-12);
    compare(OpCode::k_slice, {{"starts", Ints{2, 0, 0}}, {"limits", Ints{2, 9, 11}}}, {x}, 1e-12);
    compare(OpCode::k_pad, {{"low", Ints{1, 0, 2}}, {"high", Ints{0, 3, 1}}, {"value", 1.0}}, {x}, 1e-12);
    compare(OpCode::k_broadcast_to, {{"shape", Ints{2, 6, 9, 11}}}, {x}, 1e-12);
    for (const int64_t axis : {0, 1, 2}) compare(OpCode::k_concat, {{"axis", axis}}, {x, x}, 1e-12);
  }
  compare(OpCode::k_broadcast_to, {{"shape", Ints{6, 9, 11}}}, {f32({9, 1})}, 1e-12);
  compare(OpCode::k_broadcast_to, {{"shape", Ints{7}}}, {f32({})}, 1e-12);
  compare(OpCode::k_slice_grad, {{"dims", Ints{9, 20}}, {"starts", Ints{1, 2}}, {"strides", Ints{2, 3}}}, {f32({4, 5})},
          1e-12);
  for (const char* dtype : {"f32", "bf16", "i32"}) {
    compare(OpCode::k_fill, {{"shape", Ints{5, 70}}, {"value", 3.0}, {"dtype", std::string(dtype)}}, {}, 1e-12);
    compare(OpCode::k_iota, {{"shape", Ints{5, 70}}, {"dim", int64_t{1}}, {"dtype", std::string(dtype)}}, {}, 1e-12);
  }
}

TEST_CASE("cpu indexing") {
  for (const Type t : kTypes) {
    const double tolerance = t == bf16 ? 8e-3 : 1e-5;
    for (const DType index : {DType::kI32, DType::kI64}) {
      const Input ids = integers(index, {4, 9}, -1, 12);  // -1 and 11 lie outside
      compare(OpCode::k_embedding, {}, {t({11, 37}), ids}, 1e-12);
      compare(OpCode::k_embedding_grad, {{"rows", int64_t{11}}}, {t({4, 9, 37}), ids}, tolerance);
      compare(OpCode::k_gather, {{"axis", int64_t{1}}}, {t({3, 11, 5}), ids}, 1e-12);
      compare(OpCode::k_gather_grad, {{"axis", int64_t{1}}, {"size", int64_t{11}}}, {t({3, 4, 9, 5}), ids}, tolerance);
      compare(OpCode::k_one_hot, {{"depth", int64_t{11}}}, {ids}, 1e-12);
      // Rows 4 to 8 of a longer table.
      compare(OpCode::k_embedding, {{"row_begin", int64_t{4}}}, {t({4, 37}), ids}, 1e-12);
      compare(OpCode::k_embedding_grad, {{"rows", int64_t{4}}, {"row_begin", int64_t{4}}}, {t({4, 9, 37}), ids},
              tolerance);
      compare(OpCode::k_gather, {{"axis", int64_t{1}}, {"begin", int64_t{4}}}, {t({3, 4, 5}), ids}, 1e-12);
      compare(OpCode::k_gather_grad, {{"axis", int64_t{1}}, {"size", int64_t{4}}, {"begin", int64_t{4}}},
              {t({3, 4, 9, 5}), ids}, tolerance);
      compare(OpCode::k_one_hot, {{"depth", int64_t{4}}, {"begin", int64_t{4}}}, {ids}, 1e-12);
      compare(OpCode::k_embedding_bag, {{"row_begin", int64_t{4}}}, {t({4, 37}), ids}, tolerance);
      compare(OpCode::k_embedding_bag_grad, {{"rows", int64_t{4}}, {"row_begin", int64_t{4}}}, {t({4, 37}), ids},
              tolerance);
      compare(OpCode::k_sgd_rows, {{"row_begin", int64_t{4}}}, {f32({}), absent(), t({4, 37}), ids, t({4, 37})},
              tolerance);
    }
    compare(OpCode::k_embedding_grad, {{"rows", int64_t{300}}}, {t({1000, 130}), integers(DType::kI32, {1000}, 0, 300)},
            tolerance);
    for (const bool reverse : {false, true})
      for (const bool exclusive : {false, true})
        for (const int64_t axis : {0, 1, 2})
          compare(OpCode::k_cumsum, {{"axis", axis}, {"reverse", reverse}, {"exclusive", exclusive}}, {t({3, 29, 5})},
                  tolerance);
    compare(OpCode::k_top_k, {{"k", int64_t{5}}}, {t({9, 200})}, 1e-12);
    compare(OpCode::k_top_k_grad, {{"size", int64_t{30}}},
            {t({2, 3}),
             [] {
               Input x{DType::kI32, {2, 3}, {}};
               x.values = {4, 0, 29, 7, 8, 1};
               return x;
             }()},
            1e-12);
    for (const bool interleaved : {false, true})
      for (const bool inverse : {false, true})
        for (const int64_t heads : {-1, 2})
          compare(OpCode::k_rotary, {{"interleaved", interleaved}, {"inverse", inverse}, {"heads", heads}},
                  {t({2, 17, 3, 10})}, tolerance);
  }
  Input ties{DType::kI32, {1, 8}, {}};
  ties.values = {3, 7, 7, 1, 7, 3, 0, 7};
  compare(OpCode::k_top_k, {{"k", int64_t{6}}}, {ties}, 1e-12);
}

TEST_CASE("cpu norms and their gradients") {
  for (const Type t : kTypes) {
    const double tolerance = t == bf16 ? 1.2e-2 : 5e-6;
    for (const auto& [rows, d] : {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {33, 64}, {300, 37}, {100, 256}, {0, 8}}) {
      const Input x = t({rows, d}), w = t({d}), dy{t({rows, d}).dtype, {rows, d}, {}, 77};
      compare(OpCode::k_layer_norm, {}, {x, w, w}, d == 1 ? 1 : tolerance);
      compare(OpCode::k_layer_norm, {}, {x, absent(), absent()}, d == 1 ? 1 : tolerance);
      compare(OpCode::k_rms_norm, {}, {x, w}, tolerance);
      compare(OpCode::k_rms_norm, {}, {x, absent()}, tolerance);
      if (d == 1) continue;
      const Input mean = f32({rows}), rstd = positive(f32({rows}));
      for (const bool bias : {false, true})
        compare(OpCode::k_layer_norm_grad, {{"bias", bias}}, {dy, x, mean, rstd, w}, tolerance);
      compare(OpCode::k_layer_norm_grad, {{"bias", false}}, {dy, x, mean, rstd, absent()}, tolerance);
      compare(OpCode::k_rms_norm_grad, {}, {dy, x, rstd, w}, tolerance);
      compare(OpCode::k_rms_norm_grad, {}, {dy, x, rstd, absent()}, tolerance);
    }
  }
}

TEST_CASE("cpu softmax and cross entropy") {
  for (const Type t : kTypes) {
    const double tolerance = t == bf16 ? 1e-2 : 3e-6;
    for (const auto& [rows, d] : {std::pair<int64_t, int64_t>{1, 1}, {5, 7}, {33, 64}, {9, 5003}, {200, 37}, {0, 8}}) {
      const Input x{t({rows, d}).dtype, {rows, d}, {}, 76}, dy{x.dtype, x.dims, {}, 77};
      for (const OpCode op : {OpCode::k_softmax, OpCode::k_log_softmax}) compare(op, {}, {x}, tolerance);
      for (const OpCode op : {OpCode::k_softmax_grad, OpCode::k_log_softmax_grad}) compare(op, {}, {x, dy}, tolerance);
      for (const DType index : {DType::kI32, DType::kI64}) {
        for (const double smoothing : {0.0, 0.1}) {
          const Attrs attrs{{"ignore_index", int64_t{0}}, {"label_smoothing", smoothing}};
          const Input labels = integers(index, {rows}, 0, d);
          compare(OpCode::k_cross_entropy, attrs, {x, labels}, tolerance);
          Input lse = f32({rows});
          lse.values = run_op(DeviceKind::kRef, 1, OpCode::k_cross_entropy, attrs, {x, labels})[1];
          compare(OpCode::k_cross_entropy_grad, attrs, {f32({rows}), x, labels, lse}, tolerance);
          // The columns [begin, begin + d) of a wider vocabulary.
          for (const int64_t begin : {int64_t{0}, d / 2, d + 3}) {
            Attrs part = attrs;
            part["vocabulary"] = 2 * d + 5;
            part["label_begin"] = begin;
            const Input anywhere = integers(index, {rows}, 0, 2 * d + 5);
            compare(OpCode::k_cross_entropy_stats, part, {x, anywhere}, tolerance);
            compare(OpCode::k_cross_entropy_grad, part, {f32({rows}), x, anywhere, lse}, tolerance);
          }
          compare(OpCode::k_cross_entropy_finish, {{"ignore_index", int64_t{0}}}, {lse, f32({rows}), labels}, 1e-6);
        }
      }
    }
  }
  Input wide = spread(f32, -300, 300, 4097);  // the maximum grows from block to block; most terms vanish
  compare(OpCode::k_softmax, {}, {wide}, 1e-5);
}

TEST_CASE("cpu optimizers: several parameters in one op") {
  Input lr = f32({}), scale = f32({}), updates{DType::kI64, {}, {}};
  lr.values = {0.01}, scale.values = {0.7}, updates.values = {3};
  const Dims small{5, 7}, large{40001};
  for (const bool clipped : {false, true}) {
    const Input clip = clipped ? scale : absent();
    for (const bool flag : {false, true}) {
      const Attrs decay{{"weight_decay", 0.1}, {"decays", Ints{1, 0}}};
      Attrs sgd = decay, adam = decay;
      sgd["momentum"] = 0.9, sgd["nesterov"] = flag, adam["decoupled"] = flag;
      compare(OpCode::k_sgd, sgd, {lr, clip, f32(small), f32(small), f32(small), f32(large), f32(large), f32(large)},
              kOne);
      compare(OpCode::k_adam, adam,
              {lr, updates, clip, f32(small), f32(small), f32(small), positive(f32(small)), f32(large), bf16(large),
               f32(large), positive(f32(large))},
              3e-6);
    }
    compare(OpCode::k_sgd, {{"weight_decay", 0.1}}, {lr, clip, f32(small), bf16(small)}, kOne);
    compare(OpCode::k_adagrad, {{"weight_decay", 0.1}}, {lr, clip, f32(small), f32(small), positive(f32(small))}, kOne);
    compare(OpCode::k_lamb_direction, {{"weight_decay", 0.1}},
            {updates, clip, f32(large), f32(large), f32(large), positive(f32(large))}, 3e-6);
  }
  compare(OpCode::k_lamb_apply, {}, {lr, f32(small), f32(small), positive(f32({})), positive(f32({}))}, kOne);
  compare(OpCode::k_clip_factor, {{"max_norm", 0.5}}, {positive(f32({})), positive(f32({}))}, kOne);
}

struct Attention {
  int64_t b, tq, tk, h, hk, d, dv;
  bool causal;
  double dropout = 0;
  Dims bias = {};
};

TEST_CASE("the log of a sum of exponentials combines on both devices") {
  const char* folder = std::getenv("WHALE_LIBRARY_DIR");
  Backends backends(folder ? folder : "");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float a[] = {0, 1, -kInfinity, -kInfinity, 300, kInfinity, NAN, -200},
              b[] = {0, 3, 2, -kInfinity, -300, 1, -kInfinity, -201};
  for (const DeviceKind kind : {DeviceKind::kRef, DeviceKind::kCpu}) {
    DeviceSpec spec;
    spec.kind = kind;
    const auto device = backends.get(kind).open(spec);
    for (const bool swapped : {false, true}) {
      float to[8];
      device->combine(Combine::kLogSumExp, DType::kF32, to, swapped ? b : a, swapped ? a : b, 8);
      CHECK(to[0] == doctest::Approx(std::log(2.0)));
      CHECK(to[1] == doctest::Approx(std::log(std::exp(1.0) + std::exp(3.0))));
      CHECK(to[2] == 2);
      CHECK(to[3] == -kInfinity);
      CHECK(to[4] == 300);
      CHECK(to[5] == kInfinity);
      CHECK(std::isnan(to[6]));
      CHECK(to[7] == doctest::Approx(-200 + std::log1p(std::exp(-1.0))));
    }
  }
}

TEST_CASE("cpu attention and its gradient") {
  const Attention cases[] = {
      {2, 5, 5, 2, 2, 8, 8, false},
      {1, 64, 64, 1, 1, 64, 64, true},
      {2, 130, 130, 4, 2, 32, 32, true},
      {1, 7, 150, 2, 1, 20, 12, true},
      {1, 150, 70, 2, 2, 16, 16, true},
      {1, 70, 70, 2, 2, 24, 40, false, 0.3},
      {1, 65, 129, 4, 4, 64, 64, true, 0.2},
      {2, 20, 90, 2, 2, 16, 16, false, 0, {2, 2, 20, 90}},
      {2, 70, 20, 2, 1, 16, 16, true, 0, {1, 1, 70, 20}},
      {2, 1, 33, 2, 2, 128, 128, true},
  };
  for (const Type t : kTypes) {
    for (const Attention& c : cases) {
      const double tolerance = t == bf16 ? 2e-2 : 1e-5;
      const Input q = t({c.b, c.tq, c.h, c.d}), k = t({c.b, c.tk, c.hk, c.d}), v = t({c.b, c.tk, c.hk, c.dv});
      const Input bias = c.bias.empty() ? absent() : f32(c.bias);
      Attrs attrs{{"causal", c.causal}, {"dropout", c.dropout}, {"key", int64_t{11}}};
      compare(OpCode::k_attention, attrs, {q, k, v, bias}, tolerance);
      // The gradient on what the forward gives.
      const auto forward = run_op(DeviceKind::kRef, 1, OpCode::k_attention, attrs, {q, k, v, bias});
      Input out = t({c.b, c.tq, c.h, c.dv}), lse = f32({c.b, c.h, c.tq}), dout = out;
      out.values = forward[0], lse.values = forward[1], dout.seed = 55;
      Input q2 = q, k2 = k, v2 = v, bias2 = bias;  // the same noise at other positions
      q2.seed = 1, k2.seed = 2, v2.seed = 3, bias2.seed = 4;
      if (!c.bias.empty()) attrs["bias_grad"] = true;
      compare(OpCode::k_attention_grad, attrs, {dout, q2, k2, v2, out, lse, bias2}, tolerance);
    }
    // Packed q, k and v, grouped heads; the gradient lands in one packed tensor.
    for (const int64_t kv : {1, 2, 4}) {
      const double tolerance = t == bf16 ? 2e-2 : 1e-5;
      const Attrs attrs{{"causal", true}, {"kv_heads", kv}};
      const Input qkv = t({2, 75, 4 + 2 * kv, 32});
      compare(OpCode::k_attention, attrs, {qkv, absent(), absent(), absent()}, tolerance);
      const auto forward = run_op(DeviceKind::kRef, 1, OpCode::k_attention, attrs, {qkv, absent(), absent(), absent()});
      Input out = t({2, 75, 4, 32}), lse = f32({2, 4, 75}), dout = out, same = qkv;
      out.values = forward[0], lse.values = forward[1], dout.seed = 55, same.seed = 1;
      compare(OpCode::k_attention_grad, attrs, {dout, same, absent(), absent(), out, lse, absent()}, tolerance);
    }
  }
}

}  // namespace
}  // namespace whale::test
