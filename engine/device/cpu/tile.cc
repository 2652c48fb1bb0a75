#include "device/cpu/tile.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/tile.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

HWY_INLINE V truth(hn::Mask<F32> m) { return hn::IfThenElseZero(m, splat(1)); }
HWY_INLINE hn::Mask<F32> is(V x) { return differ(x, zero()); }

// gelu(x) = x sigmoid(2 u), u = sqrt(2/pi) (x + 0.044715 x^3)
HWY_INLINE V gelu_sigmoid(V x) {
  const V x2 = hn::Mul(x, x);
  const V minus_2u = hn::Mul(x, hn::MulAdd(x2, splat(-0.0713548162726f), splat(-1.59576912160573f)));
  return hn::Div(splat(1), hn::Add(splat(1), exp(minus_2u)));
}
HWY_INLINE V gelu_slope(V x) {
  const V s = gelu_sigmoid(x);
  const V slope_2u = hn::MulAdd(hn::Mul(x, x), splat(0.2140644488178f), splat(1.59576912160573f));
  const V inner = hn::Mul(hn::Mul(s, hn::Sub(splat(1), s)), hn::Mul(x, slope_2u));
  return hn::Add(
      s, hn::IfThenElse(hn::Gt(hn::Abs(x), splat(20)), hn::Mul(x, zero()), inner));  // past 20: 0 times infinity
}
HWY_INLINE V normal_cdf(V x) {
  return hn::MulAdd(splat(0.5f), erf(hn::Mul(x, splat(0.70710678118654752f))), splat(0.5f));
}
HWY_INLINE V gelu_erf_slope(V x) {
  const V pdf = hn::Mul(splat(0.39894228040143268f), exp_fast(hn::Mul(splat(-0.5f), hn::Mul(x, x))));
  return hn::MulAdd(x, pdf, normal_cdf(x));
}
HWY_INLINE V silu_slope(V x) {
  const V s = sigmoid(x);
  const V inner = hn::Mul(x, hn::Sub(splat(1), s));
  return hn::MulAdd(s, inner, s);
}
HWY_INLINE V sign(V x) {
  const V one = hn::IfThenElseZero(hn::Ne(x, zero()), hn::CopySign(splat(1), x));
  return hn::IfThenElse(hn::IsNaN(x), x, one);
}
HWY_INLINE V bce(V x, V t) { return hn::NegMulAdd(x, t, softplus(x)); }

#define WHALE_TILE_OP(name, expression)     \
  struct Op_##name {                        \
    static HWY_INLINE V of(V a, V b, V c) { \
      (void)a, (void)b, (void)c;            \
      return expression;                    \
    }                                       \
  };
WHALE_TILE_OP(add, hn::Add(a, b))
WHALE_TILE_OP(sub, hn::Sub(a, b))
WHALE_TILE_OP(mul, hn::Mul(a, b))
WHALE_TILE_OP(div, hn::Div(a, b))
WHALE_TILE_OP(maximum, max_nan(a, b))
WHALE_TILE_OP(minimum, min_nan(a, b))
WHALE_TILE_OP(equal, truth(hn::Eq(a, b)))
WHALE_TILE_OP(not_equal, truth(differ(a, b)))
WHALE_TILE_OP(less, truth(hn::Lt(a, b)))
WHALE_TILE_OP(less_equal, truth(hn::Le(a, b)))
WHALE_TILE_OP(greater, truth(hn::Gt(a, b)))
WHALE_TILE_OP(greater_equal, truth(hn::Ge(a, b)))
WHALE_TILE_OP(logical_and, truth(hn::And(is(a), is(b))))
WHALE_TILE_OP(logical_or, truth(hn::Or(is(a), is(b))))
WHALE_TILE_OP(logical_not, truth(hn::Eq(a, zero())))
WHALE_TILE_OP(where, hn::IfThenElse(is(a), b, c))
WHALE_TILE_OP(cast, a)
WHALE_TILE_OP(neg, hn::Neg(a))
WHALE_TILE_OP(abs, hn::Abs(a))
WHALE_TILE_OP(sign, sign(a))
WHALE_TILE_OP(floor, hn::Floor(a))
WHALE_TILE_OP(exp, exp(a))
WHALE_TILE_OP(log, log(a))
WHALE_TILE_OP(log1p, log1p(a))
WHALE_TILE_OP(sqrt, hn::Sqrt(a))
WHALE_TILE_OP(rsqrt, hn::Div(splat(1), hn::Sqrt(a)))
WHALE_TILE_OP(square, hn::Mul(a, a))
WHALE_TILE_OP(reciprocal, hn::Div(splat(1), a))
WHALE_TILE_OP(erf, erf(a))
WHALE_TILE_OP(tanh, tanh(a))
WHALE_TILE_OP(sigmoid, sigmoid(a))
WHALE_TILE_OP(softplus, softplus(a))
WHALE_TILE_OP(relu, max_of(zero(), a))
WHALE_TILE_OP(gelu, hn::Mul(a, gelu_sigmoid(a)))
WHALE_TILE_OP(gelu_erf, hn::Mul(a, normal_cdf(a)))
WHALE_TILE_OP(silu, hn::Mul(a, sigmoid(a)))
WHALE_TILE_OP(relu_grad, hn::IfThenZeroElse(hn::Le(a, zero()), b))
WHALE_TILE_OP(gelu_grad, hn::Mul(b, gelu_slope(a)))
WHALE_TILE_OP(gelu_erf_grad, hn::Mul(b, gelu_erf_slope(a)))
WHALE_TILE_OP(silu_grad, hn::Mul(b, silu_slope(a)))
WHALE_TILE_OP(bce_with_logits, bce(a, b))
WHALE_TILE_OP(squared_difference, hn::Mul(hn::Sub(a, b), hn::Sub(a, b)))
#undef WHALE_TILE_OP

// Tails go through the same vector arithmetic on a padded copy.
template <class Op, int kOperands>
void map_tile(const float* a, const float* b, const float* c, float* y, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const V u = load(a + i);
    const V v = kOperands > 1 ? load(b + i) : u;
    const V w = kOperands > 2 ? load(c + i) : u;
    store(Op::of(u, v, w), y + i);
  }
  if (i < n) {
    const V u = load_n(a + i, n - i, 1);
    const V v = kOperands > 1 ? load_n(b + i, n - i, 1) : u;
    const V w = kOperands > 2 ? load_n(c + i, n - i, 1) : u;
    store_n(Op::of(u, v, w), y + i, n - i);
  }
}

TileFunction tile_function(OpCode op) {
  switch (op) {
// clang-format off
#define WHALE_ROW(name, operands) \
  case OpCode::k_##name:          \
    return map_tile<Op_##name, operands>;
    WHALE_ROW(add, 2) WHALE_ROW(sub, 2) WHALE_ROW(mul, 2) WHALE_ROW(div, 2) WHALE_ROW(maximum, 2) WHALE_ROW(minimum, 2)
    WHALE_ROW(equal, 2) WHALE_ROW(not_equal, 2) WHALE_ROW(less, 2) WHALE_ROW(less_equal, 2) WHALE_ROW(greater, 2)
    WHALE_ROW(greater_equal, 2) WHALE_ROW(logical_and, 2) WHALE_ROW(logical_or, 2) WHALE_ROW(logical_not, 1)
    WHALE_ROW(where, 3) WHALE_ROW(cast, 1) WHALE_ROW(neg, 1) WHALE_ROW(abs, 1) WHALE_ROW(sign, 1) WHALE_ROW(floor, 1)
    WHALE_ROW(exp, 1) WHALE_ROW(log, 1) WHALE_ROW(log1p, 1) WHALE_ROW(sqrt, 1) WHALE_ROW(rsqrt, 1) WHALE_ROW(square, 1)
    WHALE_ROW(reciprocal, 1) WHALE_ROW(erf, 1) WHALE_ROW(tanh, 1) WHALE_ROW(sigmoid, 1) WHALE_ROW(softplus, 1)
    WHALE_ROW(relu, 1) WHALE_ROW(gelu, 1) WHALE_ROW(gelu_erf, 1) WHALE_ROW(silu, 1) WHALE_ROW(relu_grad, 2)
    WHALE_ROW(gelu_grad, 2) WHALE_ROW(gelu_erf_grad, 2) WHALE_ROW(silu_grad, 2) WHALE_ROW(bce_with_logits, 2)
    WHALE_ROW(squared_difference, 2)
#undef WHALE_ROW
        // clang-format on
        default : return nullptr;
  }
}

template <class From, class To>
void convert(const From* from, To* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(load(from + i), to + i);
  if (i < n) store_n(load_n(from + i, n - i), to + i, n - i);
}
void from_bf16(const uint16_t* from, float* to, int64_t n) { convert(from, to, n); }
void to_bf16(const float* from, uint16_t* to, int64_t n) { convert(from, to, n); }
void round_all(const float* from, float* to, int64_t n) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const int64_t m = n - i;
    if (m >= kLanes)
      store(round_bf16(load(from + i)), to + i);
    else
      store_n(round_bf16(load_n(from + i, m)), to + i, m);
  }
}

// As integers, -infinity and what is less, down to -0, lie below the negative NaNs: one comparison keeps those.
template <class T>
void relu_typed(T* y, int64_t n, T least) {
  const hn::ScalableTag<T> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto bound = hn::Set(d, least);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto v = hn::LoadU(d, y + i);
    hn::StoreU(hn::IfThenElseZero(hn::Gt(v, bound), v), d, y + i);
  }
  for (; i < n; ++i) y[i] = y[i] > least ? y[i] : T{0};
}
void run_relu(DType dtype, void* y, int64_t begin, int64_t end) {
  if (dtype == DType::kBF16)
    relu_typed(static_cast<int16_t*>(y) + begin, end - begin, static_cast<int16_t>(0xFF80 - 0x10000));
  else
    relu_typed(static_cast<int32_t*>(y) + begin, end - begin, static_cast<int32_t>(0xFF800000u));
}

// Philox on 64-bit lanes: one block a lane, each counter word in the low half (the high halves hold rubbish until the
// end). Returns how many blocks were written.
int64_t philox_blocks(uint32_t key0, uint32_t key1, uint64_t iteration, uint64_t block, uint32_t* words,
                      int64_t blocks) {
#if HWY_TARGET == HWY_SCALAR
  (void)key0, (void)key1, (void)iteration, (void)block, (void)words, (void)blocks;
  return 0;
#else
  const hn::ScalableTag<uint64_t> d;
  const hn::Repartition<uint32_t, decltype(d)> d32;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto low = hn::Set(d, 0xFFFFFFFFull);
  const auto m0 = hn::BitCast(d32, hn::Set(d, 0xD2511F53ull)), m1 = hn::BitCast(d32, hn::Set(d, 0xCD9E8D57ull));
  int64_t done = 0;
  for (; done + lanes <= blocks; done += lanes) {
    auto c0 = hn::Iota(d, block + static_cast<uint64_t>(done));
    auto c1 = hn::ShiftRight<32>(c0);
    auto c2 = hn::Set(d, iteration);
    auto c3 = hn::Set(d, iteration >> 32);
    uint32_t k0 = key0, k1 = key1;
    for (int round = 0; round < 10; ++round) {
      const auto a = hn::MulEven(hn::BitCast(d32, c0), m0);
      const auto b = hn::MulEven(hn::BitCast(d32, c2), m1);
      c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(b), c1), hn::Set(d, k0));
      c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(a), c3), hn::Set(d, k1));
      c1 = b;
      c3 = a;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    const auto w01 = hn::Or(hn::And(c0, low), hn::ShiftLeft<32>(c1));
    const auto w23 = hn::Or(hn::And(c2, low), hn::ShiftLeft<32>(c3));
    hn::StoreInterleaved2(w01, w23, d, reinterpret_cast<uint64_t*>(words) + 2 * done);
  }
  return done;
#endif
}

// y = word >= threshold ? x * scale : 0
void keep_words(const float* x, const uint32_t* words, uint32_t threshold, float scale, float* y, int64_t n) {
  // Unsigned order from the signed comparison: both sides with the top bit flipped.
  const auto flip = hn::Set(I32(), static_cast<int32_t>(0x80000000u));
  const auto least = hn::Xor(hn::Set(I32(), static_cast<int32_t>(threshold)), flip);
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const auto word = hn::Xor(hn::BitCast(I32(), hn::LoadU(U32(), words + i)), flip);
    const auto dropped = hn::RebindMask(F32(), hn::Lt(word, least));
    store(hn::IfThenZeroElse(dropped, hn::Mul(load(x + i), splat(scale))), y + i);
  }
  for (; i < n; ++i) y[i] = words[i] >= threshold ? x[i] * scale : 0.0f;
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <cmath>

#include "base/error.h"
#include "base/saturate.h"

namespace whale::cpu {

HWY_EXPORT(tile_function);
HWY_EXPORT(from_bf16);
HWY_EXPORT(to_bf16);
HWY_EXPORT(round_all);
HWY_EXPORT(philox_blocks);
HWY_EXPORT(keep_words);
HWY_EXPORT(run_relu);

namespace {

template <float (*f)(float)>
void each(const float* a, const float*, const float*, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = f(a[i]);
}
float sine(float x) { return std::sin(x); }
float cosine(float x) { return std::cos(x); }
void power(const float* a, const float* b, const float*, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = b[i] == 2.0f ? a[i] * a[i] : std::pow(a[i], b[i]);
}

// Integers: two's complement, division truncates, by zero it gives 0.
int64_t wrap(uint64_t x) { return static_cast<int64_t>(x); }
uint64_t bits(int64_t x) { return static_cast<uint64_t>(x); }
int64_t int_pow(int64_t a, int64_t b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 ? -1 : 1) : 0;
  uint64_t y = 1, x = bits(a);
  for (; b > 0; b >>= 1, x *= x)
    if (b & 1) y *= x;
  return wrap(y);
}
struct Add {
  static int64_t of(int64_t a, int64_t b) { return wrap(bits(a) + bits(b)); }
};
struct Sub {
  static int64_t of(int64_t a, int64_t b) { return wrap(bits(a) - bits(b)); }
};
struct Mul {
  static int64_t of(int64_t a, int64_t b) { return wrap(bits(a) * bits(b)); }
};
struct Div {
  static int64_t of(int64_t a, int64_t b) { return b == 0 ? 0 : b == -1 ? wrap(0 - bits(a)) : a / b; }
};
struct Pow {
  static int64_t of(int64_t a, int64_t b) { return int_pow(a, b); }
};
struct Max {
  static int64_t of(int64_t a, int64_t b) { return a > b ? a : b; }
};
struct Min {
  static int64_t of(int64_t a, int64_t b) { return a < b ? a : b; }
};
struct Copy {
  static int64_t of(int64_t a, int64_t) { return a; }
};
struct Neg {
  static int64_t of(int64_t a, int64_t) { return wrap(0 - bits(a)); }
};
struct Abs {
  static int64_t of(int64_t a, int64_t) { return a < 0 ? wrap(0 - bits(a)) : a; }
};
struct Sign {
  static int64_t of(int64_t a, int64_t) { return (a > 0) - (a < 0); }
};
struct Square {
  static int64_t of(int64_t a, int64_t) { return wrap(bits(a) * bits(a)); }
};
struct Relu {
  static int64_t of(int64_t a, int64_t) { return a > 0 ? a : 0; }
};
struct ReluGrad {
  static int64_t of(int64_t a, int64_t b) { return a > 0 ? b : 0; }
};
struct SquaredDifference {
  static int64_t of(int64_t a, int64_t b) { return Mul::of(Sub::of(a, b), Sub::of(a, b)); }
};

template <class Op>
void int_map(const int64_t* a, const int64_t* b, int64_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = Op::of(a[i], b ? b[i] : 0);
}

template <class Op>
void compare(const int64_t* a, const int64_t* b, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = Op()(a[i], b[i]) ? 1.0f : 0.0f;
}

template <class From, class To>
void load_plain(const void* from, int64_t at, To* to, int64_t n) {
  const From* p = static_cast<const From*>(from) + at;
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<To>(p[i]);  // NOLINT(bugprone-signed-char-misuse): an i8
}
template <class From>
void load_bool(const void* from, int64_t at, From* to, int64_t n) {
  const auto* p = static_cast<const uint8_t*>(from) + at;
  for (int64_t i = 0; i < n; ++i) to[i] = p[i] ? From{1} : From{0};
}
template <class To>
void store_float(const float* from, void* to, int64_t at, int64_t n) {
  To* p = static_cast<To*>(to) + at;
  for (int64_t i = 0; i < n; ++i) p[i] = saturated<To>(from[i]);
}
template <class To>
void store_int(const int64_t* from, void* to, int64_t at, int64_t n) {
  To* p = static_cast<To*>(to) + at;
  for (int64_t i = 0; i < n; ++i) p[i] = static_cast<To>(from[i]);
}

[[noreturn]] void no_type(DType dtype) { throw unimplemented("element type {} on the cpu device", name_of(dtype)); }

}  // namespace

TileFunction tile_function(OpCode op) {
  switch (op) {
    case OpCode::k_sin: return each<sine>;
    case OpCode::k_cos: return each<cosine>;
    case OpCode::k_pow: return power;
    case OpCode::k_stop_gradient: op = OpCode::k_cast; break;
    default: break;
  }
  return HWY_DYNAMIC_DISPATCH(tile_function)(op);
}

IntTileFunction int_tile_function(OpCode op) {
  switch (op) {
    case OpCode::k_add: return int_map<Add>;
    case OpCode::k_sub: return int_map<Sub>;
    case OpCode::k_mul: return int_map<Mul>;
    case OpCode::k_div: return int_map<Div>;
    case OpCode::k_pow: return int_map<Pow>;
    case OpCode::k_maximum: return int_map<Max>;
    case OpCode::k_minimum: return int_map<Min>;
    case OpCode::k_cast:
    case OpCode::k_floor:
    case OpCode::k_stop_gradient: return int_map<Copy>;
    case OpCode::k_neg: return int_map<Neg>;
    case OpCode::k_abs: return int_map<Abs>;
    case OpCode::k_sign: return int_map<Sign>;
    case OpCode::k_square: return int_map<Square>;
    case OpCode::k_relu: return int_map<Relu>;
    case OpCode::k_relu_grad: return int_map<ReluGrad>;
    case OpCode::k_squared_difference: return int_map<SquaredDifference>;
    default: return nullptr;
  }
}

CompareFunction compare_function(OpCode op) {
  switch (op) {
    case OpCode::k_equal: return compare<std::equal_to<int64_t>>;
    case OpCode::k_not_equal: return compare<std::not_equal_to<int64_t>>;
    case OpCode::k_less: return compare<std::less<int64_t>>;
    case OpCode::k_less_equal: return compare<std::less_equal<int64_t>>;
    case OpCode::k_greater: return compare<std::greater<int64_t>>;
    case OpCode::k_greater_equal: return compare<std::greater_equal<int64_t>>;
    default: return nullptr;
  }
}

void relu_in_place(DType dtype, void* y, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(run_relu)(dtype, y, begin, end);
}

void load_tile(DType dtype, const void* from, int64_t at, float* to, int64_t n) {
  switch (dtype) {
    case DType::kF32: std::memcpy(to, static_cast<const float*>(from) + at, static_cast<size_t>(n) * 4); return;
    case DType::kBF16: return HWY_DYNAMIC_DISPATCH(from_bf16)(static_cast<const uint16_t*>(from) + at, to, n);
    case DType::kI32: return load_plain<int32_t>(from, at, to, n);
    case DType::kI64: return load_plain<int64_t>(from, at, to, n);
    case DType::kU8: return load_plain<uint8_t>(from, at, to, n);
    case DType::kI8: return load_plain<int8_t>(from, at, to, n);
    case DType::kU16: return load_plain<uint16_t>(from, at, to, n);
    case DType::kBool: return load_bool(from, at, to, n);
    default: no_type(dtype);
  }
}

void store_tile(DType dtype, const float* from, void* to, int64_t at, int64_t n) {
  switch (dtype) {
    case DType::kF32: std::memmove(static_cast<float*>(to) + at, from, static_cast<size_t>(n) * 4); return;
    case DType::kBF16: return HWY_DYNAMIC_DISPATCH(to_bf16)(from, static_cast<uint16_t*>(to) + at, n);
    case DType::kI32: return store_float<int32_t>(from, to, at, n);
    case DType::kI64: return store_float<int64_t>(from, to, at, n);
    case DType::kU8: return store_float<uint8_t>(from, to, at, n);
    case DType::kI8: return store_float<int8_t>(from, to, at, n);
    case DType::kU16: return store_float<uint16_t>(from, to, at, n);
    case DType::kBool:
      for (int64_t i = 0; i < n; ++i) static_cast<uint8_t*>(to)[at + i] = from[i] != 0;
      return;
    default: no_type(dtype);
  }
}

void load_tile(DType dtype, const void* from, int64_t at, int64_t* to, int64_t n) {
  switch (dtype) {
    case DType::kI32: return load_plain<int32_t>(from, at, to, n);
    case DType::kI64: return load_plain<int64_t>(from, at, to, n);
    case DType::kU8: return load_plain<uint8_t>(from, at, to, n);
    case DType::kI8: return load_plain<int8_t>(from, at, to, n);
    case DType::kU16: return load_plain<uint16_t>(from, at, to, n);
    case DType::kBool: return load_bool(from, at, to, n);
    default: no_type(dtype);
  }
}

void store_tile(DType dtype, const int64_t* from, void* to, int64_t at, int64_t n) {
  switch (dtype) {
    case DType::kI32: return store_int<int32_t>(from, to, at, n);
    case DType::kI64: return store_int<int64_t>(from, to, at, n);
    case DType::kU8: return store_int<uint8_t>(from, to, at, n);
    case DType::kI8: return store_int<int8_t>(from, to, at, n);
    case DType::kU16: return store_int<uint16_t>(from, to, at, n);
    case DType::kBool:
      for (int64_t i = 0; i < n; ++i) static_cast<uint8_t*>(to)[at + i] = from[i] != 0;
      return;
    default: no_type(dtype);
  }
}

void round_tile_bf16(const float* from, float* to, int64_t n) { HWY_DYNAMIC_DISPATCH(round_all)(from, to, n); }

void keep_tile(const float* x, const uint32_t* words, uint32_t threshold, float scale, float* y, int64_t n) {
  HWY_DYNAMIC_DISPATCH(keep_words)(x, words, threshold, scale, y, n);
}

void random_words(const RandomStream& stream, uint64_t first, uint32_t* words, int64_t n) {
  int64_t i = 0;
  for (; i < n && (first + static_cast<uint64_t>(i)) % 4 != 0; ++i)
    words[i] = stream.word(first + static_cast<uint64_t>(i));
  const int64_t blocks = (n - i) / 4;
  const uint64_t block = (first + static_cast<uint64_t>(i)) / 4;
  const int64_t done =
      HWY_DYNAMIC_DISPATCH(philox_blocks)(stream.key0, stream.key1, stream.iteration, block, words + i, blocks);
  i += 4 * done;
  for (int64_t k = done; i < n; ++k) {
    const PhiloxBlock four = stream.block(block + static_cast<uint64_t>(k));
    for (int j = 0; j < 4 && i < n; ++j) words[i++] = four[j];
  }
}

}  // namespace whale::cpu
#endif
