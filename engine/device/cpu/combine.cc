#include "device/cpu/combine.h"

#include <cmath>
#include <cstdint>

#include "base/error.h"
#include "base/f16.h"
#include "device/cpu/bf16.h"

namespace whale::cpu {
namespace {

#define WHALE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))

// One function a type and combination, so that each is cloned for the instruction sets.
#define WHALE_COMBINE(NAME, TYPE, EXPRESSION)                                \
  WHALE_CLONES void NAME(void* to, const void* a, const void* b, size_t n) { \
    auto* t = static_cast<TYPE*>(to);                                        \
    const auto* p = static_cast<const TYPE*>(a);                             \
    const auto* q = static_cast<const TYPE*>(b);                             \
    _Pragma("omp simd") for (size_t i = 0; i < n; ++i) {                     \
      const TYPE x = p[i], y = q[i];                                         \
      t[i] = EXPRESSION;                                                     \
    }                                                                        \
  }
#define WHALE_COMBINE_ALL(TYPE, SUM_TYPE, SUFFIX)            \
  WHALE_COMBINE(sum_##SUFFIX, SUM_TYPE, x + y)               \
  WHALE_COMBINE(max_##SUFFIX, TYPE, x < y || y != y ? y : x) \
  WHALE_COMBINE(min_##SUFFIX, TYPE, y < x || y != y ? y : x)

// log(exp(a) + exp(b)) of statistics of rows: few, so a plain loop. -inf is nothing, NaN stays.
template <class T>
void log_sum_exp(void* to, const void* a, const void* b, size_t n) {
  for (size_t i = 0; i < n; ++i) {
    const T x = static_cast<const T*>(a)[i], y = static_cast<const T*>(b)[i], top = x < y || y != y ? y : x;
    static_cast<T*>(to)[i] = !std::isfinite(top) ? top : top + std::log1p(std::exp(-std::fabs(x - y)));
  }
}

// Sums of integers wrap, which only unsigned types do.
WHALE_COMBINE_ALL(float, float, f32)
WHALE_COMBINE_ALL(double, double, f64)
WHALE_COMBINE_ALL(int32_t, uint32_t, i32)
WHALE_COMBINE_ALL(int64_t, uint64_t, i64)
WHALE_COMBINE_ALL(uint8_t, uint8_t, u8)
WHALE_COMBINE_ALL(int8_t, uint8_t, i8)
WHALE_COMBINE_ALL(uint16_t, uint16_t, u16)
WHALE_COMBINE(sum_bf16, Bf16, to_bf16(to_float(x) + to_float(y)))
WHALE_COMBINE(max_bf16, Bf16, to_float(x) < to_float(y) || to_float(y) != to_float(y) ? y : x)
WHALE_COMBINE(min_bf16, Bf16, to_float(y) < to_float(x) || to_float(y) != to_float(y) ? y : x)

WHALE_COMBINE(sum_f16, uint16_t, float_to_f16(f16_to_float(x) + f16_to_float(y)))
WHALE_COMBINE(max_f16, uint16_t, f16_to_float(x) < f16_to_float(y) || f16_to_float(y) != f16_to_float(y) ? y : x)
WHALE_COMBINE(min_f16, uint16_t, f16_to_float(y) < f16_to_float(x) || f16_to_float(y) != f16_to_float(y) ? y : x)

using Function = void (*)(void*, const void*, const void*, size_t);
struct Row {
  DType dtype;
  Function sum, max, min;
  Function log_sum_exp = nullptr;
};
constexpr Row kRows[] = {
    {DType::kF32, sum_f32, max_f32, min_f32, log_sum_exp<float>},
    {DType::kF64, sum_f64, max_f64, min_f64, log_sum_exp<double>},
    {DType::kBF16, sum_bf16, max_bf16, min_bf16},
    {DType::kF16, sum_f16, max_f16, min_f16},
    {DType::kI32, sum_i32, max_i32, min_i32},
    {DType::kI64, sum_i64, max_i64, min_i64},
    {DType::kU8, sum_u8, max_u8, min_u8},
    {DType::kI8, sum_i8, max_i8, min_i8},
    {DType::kU16, sum_u16, max_u16, min_u16},
    {DType::kBool, max_u8, max_u8, min_u8},
};

}  // namespace

void combine_arrays(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t elements) {
  for (const Row& row : kRows) {
    if (row.dtype != dtype) continue;
    const Function functions[] = {row.sum, row.max, row.min, row.log_sum_exp};  // in the order of Combine
    if (const Function f = functions[static_cast<size_t>(combine)]) return f(to, a, b, elements);
  }
  throw unimplemented("device cpu cannot combine {} between devices", name_of(dtype));
}

}  // namespace whale::cpu
