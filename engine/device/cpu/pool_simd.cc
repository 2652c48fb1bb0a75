#include "device/cpu/pool.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/pool_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

HWY_INLINE hn::Vec<I32> get_index(const int32_t* p, int64_t n) {
  if (n >= kLanes) return hn::LoadU(I32(), p);
  alignas(64) int32_t buffer[kLanes] = {};
  std::memcpy(buffer, p, static_cast<size_t>(n) * sizeof(int32_t));
  return hn::Load(I32(), buffer);
}
HWY_INLINE void put_index(hn::Vec<I32> v, int32_t* p, int64_t n) {
  if (n >= kLanes) return hn::StoreU(v, I32(), p);
  alignas(64) int32_t buffer[kLanes];
  hn::Store(v, I32(), buffer);
  std::memcpy(p, buffer, static_cast<size_t>(n) * sizeof(int32_t));
}

template <class T>
void max_typed(const void* const* taps, const int32_t* numbers, int64_t count, int64_t channels, void* y,
               int32_t* index) {
  for (int64_t i = 0; i < channels; i += kLanes) {
    const int64_t n = channels - i < kLanes ? channels - i : kLanes;
    V best = count > 0 ? get<T>(taps[0], i, n) : splat(-HUGE_VALF);
    auto winner = hn::Set(I32(), count > 0 ? numbers[0] : 0);
    for (int64_t t = 1; t < count; ++t) {
      const V v = get<T>(taps[t], i, n);
      const auto better = hn::AndNot(hn::IsNaN(best), hn::Not(hn::Le(v, best)));  // a NaN wins
      best = hn::IfThenElse(better, v, best);
      winner = hn::IfThenElse(hn::RebindMask(I32(), better), hn::Set(I32(), numbers[t]), winner);
    }
    put<T>(best, y, i, n);
    if (index) put_index(winner, index + i, n);
  }
}

template <class T>
void sum_typed(const void* const* taps, const float* scales, int64_t count, int64_t channels, void* y) {
  for (int64_t i = 0; i < channels; i += kLanes) {
    const int64_t n = channels - i < kLanes ? channels - i : kLanes;
    V sum = zero();
    for (int64_t t = 0; t < count; ++t) sum = hn::MulAdd(get<T>(taps[t], i, n), splat(scales[t]), sum);
    put<T>(sum, y, i, n);
  }
}

template <class T>
void max_grad_typed(const void* const* taps, const int32_t* const* index, const int32_t* numbers, int64_t count,
                    int64_t channels, void* dx) {
  for (int64_t i = 0; i < channels; i += kLanes) {
    const int64_t n = channels - i < kLanes ? channels - i : kLanes;
    V sum = zero();
    for (int64_t t = 0; t < count; ++t) {
      const auto chosen = hn::RebindMask(F32(), hn::Eq(get_index(index[t] + i, n), hn::Set(I32(), numbers[t])));
      sum = hn::Add(sum, hn::IfThenElseZero(chosen, get<T>(taps[t], i, n)));
    }
    put<T>(sum, dx, i, n);
  }
}

void run_max(DType dtype, const void* const* taps, const int32_t* numbers, int64_t count, int64_t channels, void* y,
             int32_t* index) {
  (dtype == DType::kBF16 ? max_typed<uint16_t> : max_typed<float>)(taps, numbers, count, channels, y, index);
}
void run_sum(DType dtype, const void* const* taps, const float* scales, int64_t count, int64_t channels, void* y) {
  (dtype == DType::kBF16 ? sum_typed<uint16_t> : sum_typed<float>)(taps, scales, count, channels, y);
}
void run_max_grad(DType dtype, const void* const* taps, const int32_t* const* index, const int32_t* numbers,
                  int64_t count, int64_t channels, void* dx) {
  (dtype == DType::kBF16 ? max_grad_typed<uint16_t> : max_grad_typed<float>)(taps, index, numbers, count, channels, dx);
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace whale::cpu {

HWY_EXPORT(run_max);
HWY_EXPORT(run_sum);
HWY_EXPORT(run_max_grad);

void pool_max(DType dtype, const void* const* taps, const int32_t* numbers, int64_t count, int64_t channels, void* y,
              int32_t* index) {
  HWY_DYNAMIC_DISPATCH(run_max)(dtype, taps, numbers, count, channels, y, index);
}
void pool_sum(DType dtype, const void* const* taps, const float* scales, int64_t count, int64_t channels, void* y) {
  HWY_DYNAMIC_DISPATCH(run_sum)(dtype, taps, scales, count, channels, y);
}
void pool_max_grad(DType dtype, const void* const* taps, const int32_t* const* index, const int32_t* numbers,
                   int64_t count, int64_t channels, void* dx) {
  HWY_DYNAMIC_DISPATCH(run_max_grad)(dtype, taps, index, numbers, count, channels, dx);
}

}  // namespace whale::cpu
#endif
