// Vectors of float for the kernels: loads and stores of f32 and bf16, and the elementary functions, within 2 units in
// the last place. Included once for every instruction set (Highway's foreach_target); everything is inlined.
#if defined(WHALE_CPU_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHALE_CPU_SIMD_INL_H_
#undef WHALE_CPU_SIMD_INL_H_
#else
#define WHALE_CPU_SIMD_INL_H_
#endif

#include <cmath>
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using V = hn::Vec<F32>;
inline constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(F32()));

HWY_INLINE V splat(float x) { return hn::Set(F32(), x); }
HWY_INLINE V zero() { return hn::Zero(F32()); }

// bf16 is uint16_t.
HWY_INLINE V load(const float* p) { return hn::LoadU(F32(), p); }
HWY_INLINE V load(const uint16_t* p) {
  const hn::Rebind<uint16_t, F32> half;
  return hn::BitCast(F32(), hn::ShiftLeft<16>(hn::PromoteTo(U32(), hn::LoadU(half, p))));
}
// The nearest bf16, ties to even, as a float; NaN stays NaN.
HWY_INLINE V round_bf16(V x) {
  const auto bits = hn::BitCast(U32(), x);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U32(), 1));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(U32(), 0x7FFF)));
  const auto kept =
      hn::IfThenElse(hn::RebindMask(U32(), hn::IsNaN(x)), hn::Or(bits, hn::Set(U32(), 0x400000)), rounded);
  return hn::BitCast(F32(), hn::And(kept, hn::Set(U32(), 0xFFFF0000u)));
}
HWY_INLINE void store(V x, float* p) { hn::StoreU(x, F32(), p); }
HWY_INLINE void store(V x, uint16_t* p) {
  const hn::Rebind<uint16_t, F32> half;
  const auto bits = hn::ShiftRight<16>(hn::BitCast(U32(), round_bf16(x)));
  hn::StoreU(hn::TruncateTo(half, bits), half, p);
}
// The first n < kLanes elements; the rest reads as `fill`.
template <class T>
HWY_INLINE V load_n(const T* p, int64_t n, float fill = 0) {
  alignas(64) T buffer[kLanes];
  if constexpr (sizeof(T) == 4) {
    for (int64_t i = 0; i < kLanes; ++i) buffer[i] = i < n ? p[i] : static_cast<T>(fill);
    return load(buffer);
  } else {
    for (int64_t i = 0; i < kLanes; ++i) buffer[i] = i < n ? p[i] : T{0};
    return hn::IfThenElse(hn::FirstN(F32(), static_cast<size_t>(n)), load(buffer), splat(fill));
  }
}
template <class T>
HWY_INLINE void store_n(V x, T* p, int64_t n) {
  alignas(64) T buffer[kLanes];
  store(x, buffer);
  std::memcpy(p, buffer, static_cast<size_t>(n) * sizeof(T));
}

// A vector at element i when n is no less than its lanes, else n elements: of a row of n that are left.
template <class T>
HWY_INLINE V get(const T* p, int64_t i, int64_t n) {
  return n >= kLanes ? load(p + i) : load_n(p + i, n);
}
template <class T>
HWY_INLINE V get(const void* p, int64_t i, int64_t n) {
  return get(static_cast<const T*>(p), i, n);
}
template <class T>
HWY_INLINE void put(V v, T* p, int64_t i, int64_t n) {
  if (n >= kLanes)
    store(v, p + i);
  else
    store_n(v, p + i, n);
}
template <class T>
HWY_INLINE void put(V v, void* p, int64_t i, int64_t n) {
  put(v, static_cast<T*>(p), i, n);
}

HWY_INLINE float sum_lanes(V x) { return hn::GetLane(hn::SumOfLanes(F32(), x)); }
HWY_INLINE float max_lanes(V x) { return hn::GetLane(hn::MaxOfLanes(F32(), x)); }
// A NaN in b comes through: what x86's instructions do.
HWY_INLINE V max_of(V a, V b) {
#if HWY_TARGET == HWY_SCALAR
  return hn::IfThenElse(hn::Gt(a, b), a, b);
#else
  return hn::Max(a, b);
#endif
}
HWY_INLINE V min_of(V a, V b) {
#if HWY_TARGET == HWY_SCALAR
  return hn::IfThenElse(hn::Lt(a, b), a, b);
#else
  return hn::Min(a, b);
#endif
}
// A NaN in either comes through.
// NaN differs from everything; Highway's Ne says so on some instruction sets only.
HWY_INLINE hn::Mask<F32> differ(V a, V b) { return hn::Not(hn::Eq(a, b)); }
HWY_INLINE V max_nan(V a, V b) { return hn::IfThenElse(hn::IsNaN(a), a, max_of(a, b)); }
HWY_INLINE V min_nan(V a, V b) { return hn::IfThenElse(hn::IsNaN(a), a, min_of(a, b)); }

HWY_INLINE V horner(V x, const float* c, int degree) {
  V y = splat(c[degree]);
  for (int i = degree - 1; i >= 0; --i) y = hn::MulAdd(y, x, splat(c[i]));
  return y;
}

HWY_INLINE V power_of_two(hn::Vec<I32> n) {
  return hn::BitCast(F32(), hn::ShiftLeft<23>(hn::Add(n, hn::Set(I32(), 127))));
}

// exp(x) = 2^n exp(r), |r| <= log(2)/2. Returns exp(r) and n.
HWY_INLINE V exp_reduced(V x, hn::Vec<I32>& n) {
  static constexpr float c[] = {0.5f,
                                0.1666666716337204f,
                                0.04166625440120697f,
                                0.008333261124789715f,
                                0.0013947212137281895f,
                                0.00019919921760447323f};
  const V round = splat(12582912.0f);  // 1.5 * 2^23: the sum's low bits are the nearest integer
  const V shifted = hn::MulAdd(x, splat(1.44269504088896341f), round);
  n = hn::Sub(hn::BitCast(I32(), shifted), hn::Set(I32(), 0x4B400000));
  const V k = hn::Sub(shifted, round);
  V r = hn::NegMulAdd(k, splat(0.693145751953125f), x);
  r = hn::NegMulAdd(k, splat(1.428606765330187e-06f), r);
  const V p = hn::MulAdd(r, splat(c[5]), splat(c[4]));
  const V q = hn::MulAdd(r, splat(c[3]), splat(c[2]));
  const V s = hn::MulAdd(r, splat(c[1]), splat(c[0]));
  const V r2 = hn::Mul(r, r);
  const V tail = hn::MulAdd(hn::MulAdd(p, r2, q), r2, s);
  return hn::Add(hn::MulAdd(r2, tail, r), splat(1));
}

HWY_INLINE V exp(V x) {
  hn::Vec<I32> n;
  const V y = exp_reduced(min_of(splat(90), max_of(splat(-105), x)), n);
  const auto half = hn::ShiftRight<1>(n);
  return hn::Mul(hn::Mul(y, power_of_two(half)), power_of_two(hn::Sub(n, half)));
}

// For x <= 88; below the normal numbers it is 0.
HWY_INLINE V exp_fast(V x) {
  hn::Vec<I32> n;
  const V y = exp_reduced(x, n);
  return hn::IfThenZeroElse(hn::Lt(x, splat(-87.3f)), hn::Mul(y, power_of_two(n)));
}

HWY_INLINE V log(V x) {
  static constexpr float c[] = {0.3333331048488617f,   -0.24999985098838806f, 0.20002269744873047f,
                                -0.16669364273548126f, 0.1421777307987213f,   -0.1238170713186264f,
                                0.11877446621656418f,  -0.11808240413665771f, 0.06927268952131271f};
  const auto tiny = hn::Lt(x, splat(1.17549435e-38f));
  const V scaled = hn::IfThenElse(tiny, hn::Mul(x, splat(8388608.0f)), x);
  const auto bits = hn::BitCast(I32(), scaled);
  const auto n = hn::ShiftRight<23>(hn::Sub(bits, hn::Set(I32(), 0x3F3504F3)));
  const V f = hn::Sub(hn::BitCast(F32(), hn::Sub(bits, hn::ShiftLeft<23>(n))), splat(1));
  const V k = hn::Sub(hn::ConvertTo(F32(), n), hn::IfThenElseZero(tiny, splat(23)));
  const V f2 = hn::Mul(f, f);
  V y = hn::Mul(hn::Mul(f2, f), horner(f, c, 8));
  y = hn::MulAdd(k, splat(1.428606765330187e-06f), y);
  y = hn::NegMulAdd(splat(0.5f), f2, y);
  y = hn::MulAdd(k, splat(0.693145751953125f), hn::Add(f, y));
  const V infinity = splat(HUGE_VALF);
  y = hn::IfThenElse(hn::Eq(x, infinity), infinity, y);
  y = hn::IfThenElse(hn::Eq(x, zero()), hn::Neg(infinity), y);
  return hn::IfThenElse(hn::Ge(x, zero()), y, splat(NAN));
}

HWY_INLINE V log1p(V x) {
  const V u = hn::Add(x, splat(1));
  const V d = hn::Sub(u, splat(1));
  const V y = hn::Add(log(u), hn::Div(hn::Sub(x, d), u));  // u is x + 1 rounded: what was lost, to first order
  const auto small = hn::Eq(d, zero());
  return hn::IfThenElse(hn::Or(small, hn::Eq(x, splat(HUGE_VALF))), x, hn::IfThenElse(hn::Eq(u, zero()), log(u), y));
}

HWY_INLINE V tanh(V x) {
  static constexpr float c[] = {-0.3333333134651184f,  0.13333210349082947f,   -0.05394720286130905f,
                                0.021702969446778297f, -0.008182677440345287f, 0.002147539984434843f};
  const V a = hn::Abs(x);
  const V s = hn::Mul(x, x);
  const V small = hn::MulAdd(hn::Mul(x, s), horner(s, c, 5), x);
  const V b = min_of(splat(10), a);
  const V e = exp_fast(hn::Add(b, b));
  const V large = hn::Sub(splat(1), hn::Div(splat(2), hn::Add(e, splat(1))));
  return hn::IfThenElse(hn::Lt(a, splat(0.625f)), small, hn::CopySign(large, x));
}

HWY_INLINE V erf(V x) {
  static constexpr float c[] = {0.12837916612625122f,   -0.37612631916999817f, 0.11283686012029648f,
                                -0.026858851313591003f, 0.005199600011110306f, -0.0008125806925818324f,
                                8.296612941194326e-05f};
  static constexpr float q[] = {-1.1286410093307495f,    -0.6351814866065979f,    -0.1061876118183136f,
                                0.023720184341073036f,   -0.0036229179240763187f, 0.00031805949402041733f,
                                -1.0763152204162907e-05f};
  const V a = hn::Abs(x);
  const V small = hn::MulAdd(x, horner(hn::Mul(x, x), c, 6), x);
  const V t = min_of(splat(4), a);  // erf(4) rounds to 1
  const V large = hn::Sub(splat(1), exp_fast(hn::Mul(t, horner(t, q, 6))));
  return hn::IfThenElse(hn::Lt(a, splat(0.9375f)), small, hn::CopySign(large, x));
}

HWY_INLINE V sigmoid(V x) { return hn::Div(splat(1), hn::Add(splat(1), exp(hn::Neg(x)))); }
HWY_INLINE V softplus(V x) { return hn::Add(max_of(zero(), x), log1p(exp_fast(hn::Neg(hn::Abs(x))))); }

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
