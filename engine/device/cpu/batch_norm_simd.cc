#include "device/cpu/batch_norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/batch_norm_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

using F64 = hn::ScalableTag<double>;
using V64 = hn::Vec<F64>;

template <class T>
HWY_INLINE V masked_gradient(const ChannelPass& p, int64_t i, int64_t n) {
  const V g = get<T>(p.dy, i, n);
  return p.y ? hn::IfThenZeroElse(hn::Le(get<T>(p.y, i, n), zero()), g) : g;
}

// f(i, j, n): element i, coefficient j, n elements of a vector.
template <class F>
HWY_INLINE void each_vector(const ChannelPass& p, int64_t begin, int64_t end, F f) {
  for (int64_t base = begin; base < end; base += p.period) {
    const int64_t m = end - base < p.period ? end - base : p.period;
    int64_t j = 0;
    for (; j + kLanes <= m; j += kLanes) f(base + j, j, kLanes);
    if (j < m) f(base + j, j, m - j);
  }
}

template <class T>
void normalize_typed(const ChannelPass& p, int64_t begin, int64_t end) {
  const V least = p.relu ? zero() : splat(-HUGE_VALF);
  const auto run = [&](auto with_residual) HWY_ATTR {
    each_vector(p, begin, end, [&](int64_t i, int64_t j, int64_t n) HWY_ATTR {
      V v = hn::MulAdd(hn::Sub(get<T>(p.x, i, n), load(p.mean + j)), load(p.scale + j), load(p.shift + j));
      if constexpr (decltype(with_residual)::value) v = hn::Add(v, get<T>(p.residual, i, n));
      put<T>(max_of(least, v), p.out, i, n);
    });
  };
  if (p.residual)
    run(std::true_type());
  else
    run(std::false_type());
}

template <class T>
void normalize_grad_typed(const ChannelPass& p, int64_t begin, int64_t end) {
  each_vector(p, begin, end, [&](int64_t i, int64_t j, int64_t n) HWY_ATTR {
    const V g = masked_gradient<T>(p, i, n);
    const V centred = hn::Sub(get<T>(p.x, i, n), load(p.mean + j));
    if (p.second) put<T>(g, p.second, i, n);
    put<T>(hn::MulAdd(load(p.scale + j), g, hn::MulAdd(load(p.slope + j), centred, load(p.shift + j))), p.out, i, n);
  });
}

#if HWY_TARGET == HWY_SCALAR
HWY_INLINE V64 lower(V v) { return hn::PromoteTo(F64(), v); }
HWY_INLINE V64 upper(V) { return hn::Zero(F64()); }
#else
HWY_INLINE V64 lower(V v) { return hn::PromoteTo(F64(), hn::LowerHalf(v)); }
HWY_INLINE V64 upper(V v) { return hn::PromoteTo(F64(), hn::UpperHalf(hn::Half<F32>(), v)); }
#endif

// Two sums, of a and of a b, for one vector of the period.
struct Pairs {
  V64 a0, a1, b0, b1;
};
HWY_INLINE void start(Pairs& s) { s.a0 = s.a1 = s.b0 = s.b1 = hn::Zero(F64()); }
HWY_INLINE void add(Pairs& s, V a, V b) {
  const V64 al = lower(a), ah = upper(a);
  s.a0 = hn::Add(s.a0, al);
  s.a1 = hn::Add(s.a1, ah);
  s.b0 = hn::MulAdd(al, lower(b), s.b0);
  s.b1 = hn::MulAdd(ah, upper(b), s.b1);
}
HWY_INLINE void finish(const Pairs& s, double* sums, int64_t j, int64_t period) {
  constexpr int64_t half = kLanes / 2;
  if constexpr (half != 0) {
    hn::StoreU(s.a1, F64(), sums + j + half);
    hn::StoreU(s.b1, F64(), sums + period + j + half);
  }
  hn::StoreU(s.a0, F64(), sums + j);
  hn::StoreU(s.b0, F64(), sums + period + j);
}

// pair(i, j, n, a, b) reads the two factors. The sums stay in registers over all periods; the part of a period at the
// end is added last.
template <class F>
HWY_INLINE void sum_pairs(const ChannelPass& p, int64_t begin, int64_t end, double* sums, F pair) {
  const int64_t whole = begin + (end - begin) / p.period * p.period;
  int64_t j = 0;
  V a, b;
  for (; j + 4 * kLanes <= p.period; j += 4 * kLanes) {
    Pairs s0, s1, s2, s3;
    start(s0), start(s1), start(s2), start(s3);
    for (int64_t i = begin + j; i < whole; i += p.period) {
      pair(i, j, kLanes, a, b), add(s0, a, b);
      pair(i + kLanes, j + kLanes, kLanes, a, b), add(s1, a, b);
      pair(i + 2 * kLanes, j + 2 * kLanes, kLanes, a, b), add(s2, a, b);
      pair(i + 3 * kLanes, j + 3 * kLanes, kLanes, a, b), add(s3, a, b);
    }
    finish(s0, sums, j, p.period), finish(s1, sums, j + kLanes, p.period);
    finish(s2, sums, j + 2 * kLanes, p.period), finish(s3, sums, j + 3 * kLanes, p.period);
  }
  for (; j < p.period; j += kLanes) {
    Pairs s;
    start(s);
    for (int64_t i = begin + j; i < whole; i += p.period) pair(i, j, kLanes, a, b), add(s, a, b);
    finish(s, sums, j, p.period);
  }
  alignas(64) float as[kLanes], bs[kLanes];
  for (int64_t i = whole; i < end; i += kLanes) {
    const int64_t n = end - i < kLanes ? end - i : kLanes;
    pair(i, i - whole, n, a, b);
    store(a, as), store(b, bs);
    for (int64_t l = 0; l < n; ++l) {
      sums[i - whole + l] += static_cast<double>(as[l]);
      sums[p.period + i - whole + l] += static_cast<double>(as[l]) * static_cast<double>(bs[l]);
    }
  }
}

template <class T>
void sum_squares_typed(const ChannelPass& p, int64_t begin, int64_t end, double* sums) {
  sum_pairs(p, begin, end, sums,
            [&](int64_t i, int64_t, int64_t n, V& a, V& b) HWY_ATTR { a = b = get<T>(p.x, i, n); });
}
template <class T>
void sum_grad_typed(const ChannelPass& p, int64_t begin, int64_t end, double* sums) {
  sum_pairs(p, begin, end, sums, [&](int64_t i, int64_t j, int64_t n, V& a, V& b) HWY_ATTR {
    a = masked_gradient<T>(p, i, n);
    b = hn::Sub(get<T>(p.x, i, n), load(p.mean + j));
  });
}

void run_normalize(const ChannelPass& p, int64_t begin, int64_t end) {
  p.dtype == DType::kBF16 ? normalize_typed<uint16_t>(p, begin, end) : normalize_typed<float>(p, begin, end);
}
void run_normalize_grad(const ChannelPass& p, int64_t begin, int64_t end) {
  p.dtype == DType::kBF16 ? normalize_grad_typed<uint16_t>(p, begin, end) : normalize_grad_typed<float>(p, begin, end);
}
void run_sum_squares(const ChannelPass& p, int64_t begin, int64_t end, double* sums) {
  p.dtype == DType::kBF16 ? sum_squares_typed<uint16_t>(p, begin, end, sums)
                          : sum_squares_typed<float>(p, begin, end, sums);
}
void run_sum_grad(const ChannelPass& p, int64_t begin, int64_t end, double* sums) {
  p.dtype == DType::kBF16 ? sum_grad_typed<uint16_t>(p, begin, end, sums) : sum_grad_typed<float>(p, begin, end, sums);
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <numeric>

namespace whale::cpu {

HWY_EXPORT(run_normalize);
HWY_EXPORT(run_normalize_grad);
HWY_EXPORT(run_sum_squares);
HWY_EXPORT(run_sum_grad);

int64_t channel_period(int64_t c) {
  const int64_t period = std::lcm(c, kVector);
  return period * ((4 * kVector + period - 1) / period);
}
void normalize(const ChannelPass& pass, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(run_normalize)(pass, begin, end);
}
void normalize_grad(const ChannelPass& pass, int64_t begin, int64_t end) {
  HWY_DYNAMIC_DISPATCH(run_normalize_grad)(pass, begin, end);
}
void sum_squares(const ChannelPass& pass, int64_t begin, int64_t end, double* sums) {
  HWY_DYNAMIC_DISPATCH(run_sum_squares)(pass, begin, end, sums);
}
void sum_grad(const ChannelPass& pass, int64_t begin, int64_t end, double* sums) {
  HWY_DYNAMIC_DISPATCH(run_sum_grad)(pass, begin, end, sums);
}

}  // namespace whale::cpu
#endif
