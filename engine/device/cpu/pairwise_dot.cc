// Dot products between all pairs of a sample's vectors, and their gradient: small matrix products in the first-level
// cache, one sample after the other.
#include "device/cpu/pairwise_dot.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/pairwise_dot.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

constexpr int64_t kRows = 6;  // of a block: with two vectors of columns, 12 sums stay in registers
inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

// y[r, c] = sum over k of a[r, k] b[k, c] for R rows and C vectors of columns.
template <int R, int C>
void multiply_block(const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* y, int64_t ldy) {
  V sum[R][C];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) sum[r][c] = zero();
  for (int64_t k = 0; k < depth; ++k) {
    V row[C];
    for (int c = 0; c < C; ++c) row[c] = load(b + k * ldb + c * kLanes);
    for (int r = 0; r < R; ++r) {
      const V x = splat(a[r * lda + k]);
      for (int c = 0; c < C; ++c) sum[r][c] = hn::MulAdd(x, row[c], sum[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(sum[r][c], y + r * ldy + c * kLanes);
}

template <int C>
void multiply_rows(int64_t rows, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth, float* y,
                   int64_t ldy) {
  switch (rows) {
    case 1: return multiply_block<1, C>(a, lda, b, ldb, depth, y, ldy);
    case 2: return multiply_block<2, C>(a, lda, b, ldb, depth, y, ldy);
    case 3: return multiply_block<3, C>(a, lda, b, ldb, depth, y, ldy);
    case 4: return multiply_block<4, C>(a, lda, b, ldb, depth, y, ldy);
    case 5: return multiply_block<5, C>(a, lda, b, ldb, depth, y, ldy);
    default: return multiply_block<6, C>(a, lda, b, ldb, depth, y, ldy);
  }
}

void multiply(int64_t rows, int64_t columns, const float* a, int64_t lda, const float* b, int64_t ldb, int64_t depth,
              float* y, int64_t ldy) {
  int64_t c = 0;
  for (; c + kLanes < columns; c += 2 * kLanes) multiply_rows<2>(rows, a, lda, b + c, ldb, depth, y + c, ldy);
  if (c < columns) multiply_rows<1>(rows, a, lda, b + c, ldb, depth, y + c, ldy);
}

template <class T>
void widen_run(const T* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(load(from + i), to + i);
  if (i < n) store_n(load_n(from + i, n - i), to + i, n - i);
}
template <class T>
void narrow_run(const float* from, T* to, int64_t n) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) store(load(from + i), to + i);
  if (i < n) store_n(load_n(from + i, n - i), to + i, n - i);
}

// x[i, :] of one sample, rows padded with zeros.
template <class T>
void gather_vectors(const PairwiseArgs& p, int64_t sample, float* x, int64_t ld) {
  for (int64_t i = 0; i < p.vectors; ++i) {
    widen_run(static_cast<const T*>(p.x[i]) + sample * p.width, x + i * ld, p.width);
    std::fill(x + i * ld + p.width, x + (i + 1) * ld, 0.0f);
  }
}

template <class T>
void forward(const PairwiseArgs& p, int64_t begin, int64_t end, float* room) {
  const int64_t n = p.vectors, ldx = padded(p.width), ldt = padded(n), pairs = n * (n - 1) / 2;
  float *x = room, *t = x + n * ldx, *block = t + p.width * ldt, *result = block + kRows * ldt;
  std::fill(t, t + p.width * ldt, 0.0f);
  for (int64_t s = begin; s < end; ++s) {
    gather_vectors<T>(p, s, x, ldx);
    for (int64_t i = 0; i < n; ++i)
      for (int64_t k = 0; k < p.width; ++k) t[k * ldt + i] = x[i * ldx + k];
    float* y = result;
    for (int64_t i = 0; i < n; i += kRows) {
      const int64_t rows = std::min(kRows, n - i), columns = i + rows - 1;
      multiply(rows, columns, x + i * ldx, ldx, t, ldt, p.width, block, ldt);
      for (int64_t r = 0; r < rows; y += i + r, ++r) std::copy_n(block + r * ldt, i + r, y);
    }
    narrow_run(result, static_cast<T*>(p.y) + s * pairs, pairs);
  }
}

template <class T>
void backward(const PairwiseArgs& p, int64_t begin, int64_t end, float* room) {
  const int64_t n = p.vectors, ldx = padded(p.width), ldt = padded(n), pairs = n * (n - 1) / 2;
  float *x = room, *weights = x + n * ldx, *block = weights + n * ldt, *dy = block + kRows * ldx;
  for (int64_t s = begin; s < end; ++s) {
    gather_vectors<T>(p, s, x, ldx);
    widen_run(static_cast<const T*>(p.y) + s * pairs, dy, pairs);
    const float* pair = dy;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) weights[i * ldt + j] = weights[j * ldt + i] = *pair++;
      weights[i * ldt + i] = 0;
    }
    for (int64_t i = 0; i < n; i += kRows) {
      const int64_t rows = std::min(kRows, n - i);
      multiply(rows, p.width, weights + i * ldt, ldt, x, ldx, n, block, ldx);
      for (int64_t r = 0; r < rows; ++r)
        narrow_run(block + r * ldx, static_cast<T*>(p.dx[i + r]) + s * p.width, p.width);
    }
  }
}

void run_pairwise(const PairwiseArgs& p, int64_t begin, int64_t end, float* room) {
  if (p.dx != nullptr) return p.low ? backward<uint16_t>(p, begin, end, room) : backward<float>(p, begin, end, room);
  return p.low ? forward<uint16_t>(p, begin, end, room) : forward<float>(p, begin, end, room);
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {

HWY_EXPORT(run_pairwise);

namespace {

std::unique_ptr<Kernel> bind_pairwise(CpuDevice& device, const Operand& y, const std::vector<Operand>& x,
                                      const std::vector<Operand>& dx) {
  struct Pointers {
    std::vector<const void*> x;
    std::vector<void*> dx;
  };
  auto pointers = std::make_shared<Pointers>();
  for (const Operand& each : x) pointers->x.push_back(each.data);
  for (const Operand& each : dx) pointers->dx.push_back(each.data);
  PairwiseArgs p{};
  p.x = pointers->x.data(), p.y = y.data, p.dx = dx.empty() ? nullptr : pointers->dx.data();
  p.vectors = static_cast<int64_t>(x.size()), p.width = last_dim(x[0]), p.low = x[0].dtype == DType::kBF16;
  // Room of a thread, in floats: vectors, their transpose or the pairs as a matrix, a block, the pairs.
  const int64_t n = round_up(p.vectors, 64), d = round_up(p.width, 64);
  const int64_t room = round_up(2 * n * d + 2 * n * n + 8 * std::max(n, d), 16), samples = rows(x[0]);
  const auto threads = device.threads();
  return make_kernel(static_cast<size_t>(threads * room * 4), [=](char* scratch) {
    parallel_for(threads, samples, 16, [&](int64_t b, int64_t e) {
      HWY_DYNAMIC_DISPATCH(run_pairwise)(p, b, e, reinterpret_cast<float*>(scratch) + omp_get_thread_num() * room);
    });
    (void)pointers;
  });
}

std::unique_ptr<Kernel> bind_pairwise_dot(const KernelSpec& spec, CpuDevice& device) {
  return bind_pairwise(device, spec.out[0], spec.in, {});
}
std::unique_ptr<Kernel> bind_pairwise_dot_grad(const KernelSpec& spec, CpuDevice& device) {
  return bind_pairwise(device, spec.in[0], {spec.in.begin() + 1, spec.in.end()}, spec.out);
}

bool one_float(const std::vector<DType>& in, const std::vector<DType>&) {
  return !in.empty() && (in[0] == DType::kF32 || in[0] == DType::kBF16);
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_pairwise_dot, bind_pairwise_dot, one_float},
    {OpCode::k_pairwise_dot_grad, bind_pairwise_dot_grad, one_float},
};

}  // namespace

std::span<const KernelEntry> pairwise_dot_kernels() { return kTable; }

}  // namespace whale::cpu
#endif
