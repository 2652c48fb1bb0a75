// Layer norm and RMS norm over the last dimension. The gradient makes dx, dgamma and dbeta in one pass over x; dgamma
// and dbeta are partial sums over chunks of rows that the shape fixes, added in order.
#include <cstdint>

#include "ir/dtype.h"

#ifndef WHALE_CPU_NORM_H_
#define WHALE_CPU_NORM_H_
namespace whale::cpu {
struct NormForward {
  const void* x;
  void* y;
  const float *gamma, *beta;  // null: absent
  float *mean, *rstd;         // mean null: RMS norm
  int64_t width;
  float epsilon;
  DType dtype;
  bool rms;
};
struct NormGrad {
  const void *dy, *x;
  void* dx;
  const float *mean, *rstd, *gamma;
  float* partial;  // [chunks, 2, width]
  int64_t rows, width, chunks;
  DType dtype;
};
}  // namespace whale::cpu
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/norm.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

// Zero past the end, so that a shifted tail does not count.
HWY_INLINE V head(V v, int64_t n) {
  return n >= kLanes ? v : hn::IfThenElseZero(hn::FirstN(F32(), static_cast<size_t>(n)), v);
}

template <class T>
void forward(const NormForward& a, int64_t first, int64_t last) {
  const int64_t d = a.width;
  const float inverse = 1.0f / static_cast<float>(d);
  for (int64_t r = first; r < last; ++r) {
    const T* x = static_cast<const T*>(a.x) + r * d;
    T* y = static_cast<T*>(a.y) + r * d;
    float mean = 0;
    if (!a.rms) {
      V s = zero(), t = zero();
      int64_t j = 0;
      for (; j + 2 * kLanes <= d; j += 2 * kLanes) s = hn::Add(s, load(x + j)), t = hn::Add(t, load(x + j + kLanes));
      for (; j < d; j += kLanes) s = hn::Add(s, get(x, j, d - j));
      mean = sum_lanes(hn::Add(s, t)) * inverse;
    }
    const V m = splat(mean);
    V s = zero(), t = zero();
    int64_t j = 0;
    for (; j + 2 * kLanes <= d; j += 2 * kLanes) {
      const V u = hn::Sub(load(x + j), m), v = hn::Sub(load(x + j + kLanes), m);
      s = hn::MulAdd(u, u, s);
      t = hn::MulAdd(v, v, t);
    }
    for (; j < d; j += kLanes) {
      const V u = head(hn::Sub(get(x, j, d - j), m), d - j);
      s = hn::MulAdd(u, u, s);
    }
    const float rstd = 1.0f / std::sqrt(sum_lanes(hn::Add(s, t)) * inverse + a.epsilon);
    const V scale = splat(rstd);
    for (j = 0; j < d; j += kLanes) {
      V v = hn::Mul(hn::Sub(get(x, j, d - j), m), scale);
      if (a.gamma) v = hn::Mul(v, get(a.gamma, j, d - j));
      if (a.beta) v = hn::Add(v, get(a.beta, j, d - j));
      put(v, y, j, d - j);
    }
    if (a.mean) a.mean[r] = mean;
    if (a.rstd) a.rstd[r] = rstd;
  }
}

// g = dy gamma; dx = rstd (g - mean(g) - xhat mean(g xhat)), without mean(g) for RMS norm.
template <class T>
void backward(const NormGrad& a, int64_t first_chunk, int64_t last_chunk) {
  const int64_t d = a.width;
  const float inverse = 1.0f / static_cast<float>(d);
  for (int64_t chunk = first_chunk; chunk < last_chunk; ++chunk) {
    float* dgamma = a.partial + chunk * 2 * d;
    float* dbeta = dgamma + d;
    std::memset(dgamma, 0, static_cast<size_t>(2 * d) * 4);
    for (int64_t r = a.rows * chunk / a.chunks; r < a.rows * (chunk + 1) / a.chunks; ++r) {
      const T* x = static_cast<const T*>(a.x) + r * d;
      const T* dy = static_cast<const T*>(a.dy) + r * d;
      T* dx = static_cast<T*>(a.dx) + r * d;
      const V mean = splat(a.mean ? a.mean[r] : 0.0f), rstd = splat(a.rstd[r]);
      V sum = zero(), dot = zero();
      for (int64_t j = 0; j < d; j += kLanes) {
        const int64_t n = d - j;
        const V xhat = hn::Mul(hn::Sub(get(x, j, n), mean), rstd);
        const V g0 = get(dy, j, n);  // 0 past the end
        const V gx = hn::Mul(g0, xhat);
        put(hn::Add(get(dgamma, j, n), gx), dgamma, j, n);
        put(hn::Add(get(dbeta, j, n), g0), dbeta, j, n);
        if (a.gamma) {
          const V w = get(a.gamma, j, n);
          sum = hn::MulAdd(g0, w, sum);
          dot = hn::MulAdd(gx, w, dot);
        } else {
          sum = hn::Add(sum, g0);
          dot = hn::Add(dot, gx);
        }
      }
      const V c = splat(a.mean ? sum_lanes(sum) * inverse : 0.0f), b = splat(sum_lanes(dot) * inverse);
      for (int64_t j = 0; j < d; j += kLanes) {
        const int64_t n = d - j;
        const V xhat = hn::Mul(hn::Sub(get(x, j, n), mean), rstd);
        V g = get(dy, j, n);
        if (a.gamma) g = hn::Mul(g, get(a.gamma, j, n));
        put(hn::Mul(rstd, hn::NegMulAdd(xhat, b, hn::Sub(g, c))), dx, j, n);
      }
    }
  }
}

void norm_forward(const NormForward& a, int64_t first, int64_t last) {
  if (a.dtype == DType::kBF16)
    forward<uint16_t>(a, first, last);
  else
    forward<float>(a, first, last);
}
void norm_backward(const NormGrad& a, int64_t first, int64_t last) {
  if (a.dtype == DType::kBF16)
    backward<uint16_t>(a, first, last);
  else
    backward<float>(a, first, last);
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/reduce.h"
#include "device/cpu/tile.h"

namespace whale::cpu {

HWY_EXPORT(norm_forward);
HWY_EXPORT(norm_backward);

namespace {

// A vector as float: in place, or widened into scratch.
struct Widened {
  Operand from;
  size_t offset = 0;
  const float* get(char* scratch) const {
    if (!from.present()) return nullptr;
    if (from.dtype == DType::kF32) return static_cast<const float*>(from.data);
    auto* to = reinterpret_cast<float*>(scratch + offset);
    load_tile(from.dtype, from.data, 0, to, count(from));
    return to;
  }
};

Operand operand(const std::vector<Operand>& list, size_t i) { return has(list, i) ? list[i] : Operand{}; }
float* floats(const Operand& x) {
  if (x.present() && x.dtype != DType::kF32)
    throw unimplemented("statistics of type {} on the cpu device", name_of(x.dtype));
  return x.present() ? static_cast<float*>(x.data) : nullptr;
}

std::unique_ptr<Kernel> bind_norm(const KernelSpec& spec, CpuDevice& device) {
  const bool rms = spec.op == OpCode::k_rms_norm;
  const int64_t d = last_dim(spec.in[0]), n = rows(spec.in[0]);
  const auto part = static_cast<size_t>(round_up(d * 4, 64));
  const Widened gamma{operand(spec.in, 1), 0}, beta{rms ? Operand{} : operand(spec.in, 2), part};
  NormForward a{};
  a.x = spec.in[0].data, a.y = spec.out[0].data, a.width = d, a.dtype = spec.in[0].dtype, a.rms = rms;
  a.mean = rms ? nullptr : floats(operand(spec.out, 1));
  a.rstd = floats(operand(spec.out, rms ? 1 : 2));
  a.epsilon = static_cast<float>(attr_float(*spec.attrs, "epsilon", rms ? 1e-6 : 1e-5));
  return make_kernel(2 * part, [=, threads = device.threads()](char* scratch) {
    NormForward args = a;
    args.gamma = gamma.get(scratch);
    args.beta = beta.get(scratch);
    const auto f = HWY_DYNAMIC_DISPATCH(norm_forward);
    parallel_for(threads, n, std::max<int64_t>(1, 8192 / std::max<int64_t>(d, 1)),
                 [&](int64_t b, int64_t e) { f(args, b, e); });
  });
}

std::unique_ptr<Kernel> bind_norm_grad(const KernelSpec& spec, CpuDevice& device) {
  const bool rms = spec.op == OpCode::k_rms_norm_grad;
  NormGrad a{};
  a.dy = spec.in[0].data, a.x = spec.in[1].data, a.dtype = spec.in[1].dtype;
  a.mean = rms ? nullptr : floats(spec.in[2]);
  a.rstd = floats(spec.in[rms ? 2 : 3]);
  a.width = last_dim(spec.in[1]), a.rows = rows(spec.in[1]);
  a.chunks = std::clamp<int64_t>(a.rows * a.width / 4096, 1, 32);
  const Widened gamma{operand(spec.in, rms ? 3 : 4), 0};
  Results results(spec);
  a.dx = results.take().data;
  const Operand dgamma = results.take(gamma.from.present()),
                dbeta = results.take(!rms && attr_bool(*spec.attrs, "bias"));
  const auto vector = static_cast<size_t>(round_up(a.width * 4, 64)), sum = 2 * vector;
  const auto partial = static_cast<size_t>(a.chunks * 2 * a.width * 4);
  return make_kernel(vector + sum + partial, [=, threads = device.threads()](char* scratch) {
    NormGrad args = a;
    args.gamma = gamma.get(scratch);
    args.partial = reinterpret_cast<float*>(scratch + vector + sum);
    const auto f = HWY_DYNAMIC_DISPATCH(norm_backward);
    parallel_for(threads, a.chunks, 2, [&](int64_t b, int64_t e) { f(args, b, e); });
    if (!dgamma.present() && !dbeta.present()) return;
    auto* total = reinterpret_cast<float*>(scratch + vector);
    FoldStep fold;
    fold.from = args.partial, fold.dtype = DType::kF32, fold.to = total, fold.extent = a.chunks,
    fold.inner = 2 * a.width;
    run_fold(fold, 0, fold.tasks());
    if (dgamma.present()) store_tile(dgamma.dtype, total, dgamma.data, 0, a.width);
    if (dbeta.present()) store_tile(dbeta.dtype, total + a.width, dbeta.data, 0, a.width);
  });
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_layer_norm, bind_norm, nullptr},
    {OpCode::k_layer_norm_grad, bind_norm_grad, nullptr},
    {OpCode::k_rms_norm, bind_norm, nullptr},
    {OpCode::k_rms_norm_grad, bind_norm_grad, nullptr},
};

}  // namespace

std::span<const KernelEntry> norm_kernels() { return kTable; }

}  // namespace whale::cpu
#endif
