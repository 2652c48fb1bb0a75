// Products and transposes of small blocks that lie in the first-level cache, for attention.
#if defined(WHALE_CPU_BLOCK_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WHALE_CPU_BLOCK_GEMM_INL_H_
#undef WHALE_CPU_BLOCK_GEMM_INL_H_
#else
#define WHALE_CPU_BLOCK_GEMM_INL_H_
#endif

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

// Registers: kRows x kVectors accumulators, kVectors of b, one of a.
inline constexpr int kRows = kLanes == 1 ? 4 : 6;
inline constexpr int kVectors = kLanes == 16 ? 4 : kLanes == 8 ? 2 : 1;

// a(i, k) = a[i * row + k * column]
struct Left {
  const float* a;
  int64_t row, column;
};
struct Right {
  const float* b;  // rows along k
  int64_t stride;
};

// Which part of a causal product matters: of row i only columns (or depth) from skew + i on.
enum class Skip { kNothing, kColumns, kDepth };

template <int R, int N>
HWY_INLINE void micro(const Left& a, const Right& b, float* c, int64_t c_stride, int64_t depth, bool add) {
  V sum[R][N];
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[i][j] = add ? load(c + i * c_stride + j * kLanes) : zero();
  const float* pa = a.a;
  const float* pb = b.b;
  for (int64_t k = 0; k < depth; ++k, pa += a.column, pb += b.stride) {
    V right[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) right[j] = load(pb + j * kLanes);
#pragma GCC unroll 8
    for (int i = 0; i < R; ++i) {
      const V left = splat(pa[i * a.row]);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = hn::MulAdd(left, right[j], sum[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < R; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store(sum[i][j], c + i * c_stride + j * kLanes);
}

template <int N>
void row_panel(int64_t rows, const Left& a, const Right& b, float* c, int64_t c_stride, int64_t depth, bool add) {
  switch (rows) {
    case 1: return micro<1, N>(a, b, c, c_stride, depth, add);
    case 2: return micro<2, N>(a, b, c, c_stride, depth, add);
    case 3: return micro<3, N>(a, b, c, c_stride, depth, add);
    case 4: return micro<4, N>(a, b, c, c_stride, depth, add);
    case 5: return micro<5, N>(a, b, c, c_stride, depth, add);
    default: return micro<kRows, N>(a, b, c, c_stride, depth, add);
  }
}

// c[i, j] (+)= sum over k of a(i, k) b[k, j] for i < m, j < n, k < depth; n is a multiple of kLanes. Columns that
// `skip` leaves out are not written.
inline void block_gemm(int64_t m, int64_t n, int64_t depth, const Left& a, const Right& b, float* c, int64_t c_stride,
                       bool add, Skip skip = Skip::kNothing, int64_t skew = 0) {
  for (int64_t i = 0; i < m; i += kRows) {
    const int64_t rows = m - i < kRows ? m - i : kRows;
    const int64_t start = skip == Skip::kNothing || skew + i < 0 ? 0 : skew + i;
    const int64_t k0 = skip == Skip::kDepth ? (start < depth ? start : depth) : 0;
    int64_t j = skip == Skip::kColumns ? start / kLanes * kLanes : 0;
    const Left left{a.a + i * a.row + k0 * a.column, a.row, a.column};
    const auto panel = [&](int64_t at) { return Right{b.b + k0 * b.stride + at, b.stride}; };
    float* row = c + i * c_stride;
    for (; j + kVectors * kLanes <= n; j += kVectors * kLanes)
      row_panel<kVectors>(rows, left, panel(j), row + j, c_stride, depth - k0, add);
    if (kVectors > 2 && j + 2 * kLanes <= n) {
      row_panel < kVectors<2 ? 1 : 2>(rows, left, panel(j), row + j, c_stride, depth - k0, add);
      j += 2 * kLanes;
    }
    for (; j < n; j += kLanes) row_panel<1>(rows, left, panel(j), row + j, c_stride, depth - k0, add);
  }
}

// Four floats of rows r, r + 4, ... in one vector: its 128-bit parts are 4 x 4 blocks' rows.
HWY_INLINE V load_quarters(const float* p, int64_t stride) {
#if HWY_TARGET == HWY_SCALAR
  (void)stride;
  return load(p);
#else
  const hn::Full128<float> d4;
  const auto a0 = hn::LoadU(d4, p);
#if HWY_MAX_BYTES == 16
  (void)stride;
  return a0;
#else
  const auto a1 = hn::LoadU(d4, p + 4 * stride);
  const hn::Full256<float> d8;
  const auto low = hn::Combine(d8, a1, a0);
#if HWY_MAX_BYTES == 32
  return low;
#else
  const auto high = hn::Combine(d8, hn::LoadU(d4, p + 12 * stride), hn::LoadU(d4, p + 8 * stride));
  return hn::Combine(F32(), high, low);
#endif
#endif
#endif
}

// to[c, r] = scale * from[r, c]
inline void transpose_block(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                            int64_t to_stride, float scale) {
  int64_t r = 0;
#if HWY_TARGET != HWY_SCALAR
  const F32 d;
  const V factor = splat(scale);
  for (; r + kLanes <= rows; r += kLanes) {
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4) {
      const float* p = from + r * from_stride + c;
      const V a0 = load_quarters(p, from_stride), a1 = load_quarters(p + from_stride, from_stride);
      const V a2 = load_quarters(p + 2 * from_stride, from_stride),
              a3 = load_quarters(p + 3 * from_stride, from_stride);
      // 4 x 4 in each 128-bit part
      const V b0 = hn::InterleaveLower(d, a0, a2), b1 = hn::InterleaveUpper(d, a0, a2);
      const V b2 = hn::InterleaveLower(d, a1, a3), b3 = hn::InterleaveUpper(d, a1, a3);
      float* q = to + c * to_stride + r;
      store(hn::Mul(factor, hn::InterleaveLower(d, b0, b2)), q);
      store(hn::Mul(factor, hn::InterleaveUpper(d, b0, b2)), q + to_stride);
      store(hn::Mul(factor, hn::InterleaveLower(d, b1, b3)), q + 2 * to_stride);
      store(hn::Mul(factor, hn::InterleaveUpper(d, b1, b3)), q + 3 * to_stride);
    }
    for (; c < columns; ++c)
      for (int64_t i = 0; i < kLanes; ++i) to[c * to_stride + r + i] = scale * from[(r + i) * from_stride + c];
  }
#endif
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = scale * from[r * from_stride + c];
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
