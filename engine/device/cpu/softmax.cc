// Softmax over the last dimension, and cross entropy, which never stores a probability.
#include <cstdint>

#include "ir/dtype.h"

#ifndef WHALE_CPU_SOFTMAX_ROWS_
#define WHALE_CPU_SOFTMAX_ROWS_
namespace whale::cpu {
// Rows of `width` elements. Softmax: x -> y. Gradients: (x = y, dy) -> y.
struct SoftmaxRows {
  const void *x, *dy;
  void* y;
  int64_t width;
  DType dtype;
  bool logarithm;
};
struct CrossEntropyRows {
  const void* logits;
  void* dlogits;
  const void* labels;
  const float* dloss;
  float *loss, *lse, *picked;
  int64_t width, ignore;
  int64_t begin, all;  // the columns [begin, begin + width) of all
  float smoothing;
  DType dtype, label_dtype;
};
}  // namespace whale::cpu
#endif

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/softmax.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

inline constexpr int64_t kBlock = 1024;  // of a row: it stays in the first-level cache between maximum and sum

struct RowSums {
  float top;    // maximum
  float sum;    // of exp(x - top)
  float below;  // of (top - x) * weight
};

// One pass: a block's maximum first, then its exponentials; the running sum is rescaled when the maximum grows.
template <class T, bool kBelow>
RowSums scan_row(const T* x, int64_t n, float weight = 0) {
  float top = -HUGE_VALF;
  V sum = zero(), below = zero();
  const V w = splat(weight);
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t m = n - begin < kBlock ? n - begin : kBlock;
    const T* p = x + begin;
    V a = splat(-HUGE_VALF), b = a;
    int64_t j = 0;
    for (; j + 2 * kLanes <= m; j += 2 * kLanes) a = hn::Max(a, load(p + j)), b = hn::Max(b, load(p + j + kLanes));
    for (; j < m; j += kLanes) a = hn::Max(a, m - j >= kLanes ? load(p + j) : load_n(p + j, m - j, -HUGE_VALF));
    const float block = max_lanes(hn::Max(a, b));  // may miss a NaN: the sum does not
    if (!(block <= top)) {
      if (top > -HUGE_VALF) sum = hn::Mul(sum, exp(splat(top - block)));
      if (kBelow && begin > 0)  // shared by the lanes, of which each has seen as many
        below = hn::Add(below, splat((block - top) * (static_cast<float>(begin) / kLanes * weight)));
      top = block;
    }
    if (top == -HUGE_VALF) {  // nothing but -inf so far, and NaN
      for (j = 0; j < m; j += kLanes) {
        const V u = m - j >= kLanes ? load(p + j) : load_n(p + j, m - j);
        sum = hn::Add(sum, hn::IfThenElseZero(hn::IsNaN(u), u));
        if (kBelow) below = hn::Sub(below, u);
      }
      continue;
    }
    const V t = splat(top);
    V s = zero();
    for (j = 0; j + 2 * kLanes <= m; j += 2 * kLanes) {
      const V u = load(p + j), v = load(p + j + kLanes);
      sum = hn::Add(sum, exp_fast(hn::Sub(u, t)));
      s = hn::Add(s, exp_fast(hn::Sub(v, t)));
      if (kBelow) below = hn::MulAdd(hn::Sub(t, u), w, hn::MulAdd(hn::Sub(t, v), w, below));
    }
    for (; j < m; j += kLanes) {
      const V u = m - j >= kLanes ? load(p + j) : load_n(p + j, m - j, -HUGE_VALF);
      sum = hn::Add(sum, exp_fast(hn::Sub(u, t)));
      if (kBelow) below = hn::MulAdd(hn::Sub(t, m - j >= kLanes ? u : load_n(p + j, m - j, top)), w, below);
    }
    sum = hn::Add(sum, s);
  }
  return {top, sum_lanes(sum), kBelow ? sum_lanes(below) : 0.0f};
}

template <class T>
void softmax_typed(const SoftmaxRows& a, int64_t first, int64_t last) {
  const int64_t d = a.width;
  for (int64_t r = first; r < last; ++r) {
    const T* x = static_cast<const T*>(a.x) + r * d;
    T* y = static_cast<T*>(a.y) + r * d;
    const RowSums s = scan_row<T, false>(x, d);
    const V top = splat(s.top), scale = splat(1.0f / s.sum), shift = splat(a.logarithm ? std::log(s.sum) : 0.0f);
    for (int64_t j = 0; j < d; j += kLanes) {
      V v = hn::Sub(d - j >= kLanes ? load(x + j) : load_n(x + j, d - j), top);
      v = a.logarithm ? hn::Sub(v, shift) : hn::Mul(exp_fast(v), scale);
      if (d - j >= kLanes)
        store(v, y + j);
      else
        store_n(v, y + j, d - j);
    }
  }
}

// softmax: dx = y (dy - sum(y dy)); log_softmax: dx = dy - exp(y) sum(dy)
template <class T>
void softmax_grad_typed(const SoftmaxRows& a, int64_t first, int64_t last) {
  const int64_t d = a.width;
  for (int64_t r = first; r < last; ++r) {
    const T* y = static_cast<const T*>(a.x) + r * d;
    const T* dy = static_cast<const T*>(a.dy) + r * d;
    T* dx = static_cast<T*>(a.y) + r * d;
    V sum = zero();
    for (int64_t j = 0; j < d; j += kLanes) {
      const V g = d - j >= kLanes ? load(dy + j) : load_n(dy + j, d - j);
      if (a.logarithm)
        sum = hn::Add(sum, g);
      else
        sum = hn::MulAdd(d - j >= kLanes ? load(y + j) : load_n(y + j, d - j), g, sum);
    }
    const V dot = splat(sum_lanes(sum));
    for (int64_t j = 0; j < d; j += kLanes) {
      const bool whole = d - j >= kLanes;
      const V g = whole ? load(dy + j) : load_n(dy + j, d - j), v = whole ? load(y + j) : load_n(y + j, d - j);
      const V result = a.logarithm ? hn::NegMulAdd(exp_fast(v), dot, g) : hn::Mul(v, hn::Sub(g, dot));
      if (whole)
        store(result, dx + j);
      else
        store_n(result, dx + j, d - j);
    }
  }
}

HWY_INLINE int64_t label_at(const CrossEntropyRows& a, int64_t r) {
  return a.label_dtype == DType::kI64 ? static_cast<const int64_t*>(a.labels)[r]
                                      : static_cast<const int32_t*>(a.labels)[r];
}
HWY_INLINE float one(const float* p) { return *p; }
HWY_INLINE float one(const uint16_t* p) {
  const uint32_t bits = static_cast<uint32_t>(*p) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

template <class T>
void cross_entropy_typed(const CrossEntropyRows& a, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const T* x = static_cast<const T*>(a.logits) + r * a.width;
    const int64_t label = label_at(a, r);
    const RowSums s = a.smoothing > 0 ? scan_row<T, true>(x, a.width, 1 / static_cast<float>(a.width))
                                      : scan_row<T, false>(x, a.width);
    const float log_sum = std::log(s.sum);
    if (a.lse) a.lse[r] = s.top + log_sum;
    float loss = NAN;  // a label outside the vocabulary cannot pass unseen
    if (label == a.ignore) {
      loss = 0;
    } else if (label >= 0 && label < a.width) {
      loss = (1 - a.smoothing) * (log_sum + (s.top - one(x + label)));
      if (a.smoothing > 0) loss += a.smoothing * (log_sum + s.below);
    }
    a.loss[r] = loss;
  }
}

template <class T>
void cross_entropy_stats_typed(const CrossEntropyRows& a, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; ++r) {
    const T* x = static_cast<const T*>(a.logits) + r * a.width;
    const int64_t label = label_at(a, r), at = label - a.begin;
    const float part = static_cast<float>(a.width) / static_cast<float>(a.all);
    const RowSums s =
        a.smoothing > 0 ? scan_row<T, true>(x, a.width, 1 / static_cast<float>(a.all)) : scan_row<T, false>(x, a.width);
    a.lse[r] = s.top + std::log(s.sum);  // -inf when nothing is here: another part has the sum
    float picked = NAN;                  // a label outside the vocabulary cannot pass unseen
    if (label == a.ignore) {
      picked = 0;
    } else if (label >= 0 && label < a.all) {
      picked = at >= 0 && at < a.width ? (1 - a.smoothing) * one(x + at) : 0;
      if (a.smoothing > 0 && a.width > 0) picked += a.smoothing * (s.top * part - s.below);
    }
    a.picked[r] = picked;
  }
}

// What lse has lost by rounding, up to 2^-24 of it, is what exp(x - lse) is wrong by: from this size on a whole row is
// summed again.
inline constexpr float kExactLse = 64;

template <class T>
void cross_entropy_grad_typed(const CrossEntropyRows& a, int64_t first, int64_t last) {
  const float uniform = a.smoothing / static_cast<float>(a.all);
  for (int64_t r = first; r < last; ++r) {
    const T* x = static_cast<const T*>(a.logits) + r * a.width;
    T* y = static_cast<T*>(a.dlogits) + r * a.width;
    const int64_t label = label_at(a, r);
    if (label == a.ignore) {
      std::memset(y, 0, static_cast<size_t>(a.width) * sizeof(T));
      continue;
    }
    const bool valid = label >= 0 && label < a.all;
    const float g = valid ? a.dloss[r] : NAN;
    const int64_t at = label - a.begin;
    const bool here = valid && at >= 0 && at < a.width;
    float top = a.lse[r], part = 1;  // a probability is exp(x - top) * part
    if (a.width == a.all && std::abs(top) >= kExactLse) {
      const RowSums s = scan_row<T, false>(x, a.width);
      top = s.top, part = 1 / s.sum;
    }
    const float at_label = here ? g * (std::exp(one(x + at) - top) * part - (1 - a.smoothing) - uniform) : 0;
    const V base = splat(top), scale = splat(g * part), shift = splat(-g * uniform);
    for (int64_t j = 0; j < a.width; j += kLanes) {
      const bool whole = a.width - j >= kLanes;
      const V p = exp_fast(hn::Sub(whole ? load(x + j) : load_n(x + j, a.width - j), base));
      const V v = hn::MulAdd(p, scale, shift);
      if (whole)
        store(v, y + j);
      else
        store_n(v, y + j, a.width - j);
    }
    if (here) store_n(splat(at_label), y + at, 1);
  }
}

// Few classes (the voxels of a segmentation): kLanes rows at once, turned so that a vector holds one class of each.
inline constexpr int64_t kFew = 16;

template <class T>
struct FewRows {
  V x[kFew];
  alignas(64) T at[kFew][kLanes];
  FewRows(const T* from, int64_t width, int64_t n) {
    x[0] = zero();
    for (int64_t j = 0; j < width; ++j) {
      for (int64_t l = 0; l < kLanes; ++l) at[j][l] = l < n ? from[l * width + j] : T{0};
      x[j] = load(at[j]);
    }
  }
  V top(int64_t width) const {
    V top = x[0];
    for (int64_t j = 1; j < width; ++j) top = hn::Max(top, x[j]);
    return top;
  }
  // Of exp(x - top); 0 of nothing but -inf.
  V sum(int64_t width, V top) const {
    const V least = hn::Max(top, splat(-3.0e38f));
    V sum = zero();
    for (int64_t j = 0; j < width; ++j) sum = hn::Add(sum, exp_fast(hn::Sub(x[j], least)));
    return sum;
  }
};

template <class T>
void cross_entropy_few(const CrossEntropyRows& a, int64_t first, int64_t last) {
  for (int64_t r = first; r < last; r += kLanes) {
    const int64_t n = last - r < kLanes ? last - r : kLanes;
    const FewRows<T> rows(static_cast<const T*>(a.logits) + r * a.width, a.width, n);
    const V top = rows.top(a.width), weight = splat(1 / static_cast<float>(a.width));
    V below = zero();
    for (int64_t j = 0; j < a.width; ++j) below = hn::MulAdd(hn::Sub(top, rows.x[j]), weight, below);
    alignas(64) float tops[kLanes], logs[kLanes], belows[kLanes];
    store(top, tops), store(log(rows.sum(a.width, top)), logs), store(below, belows);
    for (int64_t l = 0; l < n; ++l) {
      const int64_t label = label_at(a, r + l);
      if (a.lse) a.lse[r + l] = tops[l] + logs[l];
      float loss = NAN;
      if (label == a.ignore) {
        loss = 0;
      } else if (label >= 0 && label < a.width) {
        loss = (1 - a.smoothing) * (logs[l] + (tops[l] - one(&rows.at[label][l])));
        if (a.smoothing > 0) loss += a.smoothing * (logs[l] + belows[l]);
      }
      a.loss[r + l] = loss;
    }
  }
}

template <class T>
void cross_entropy_grad_few(const CrossEntropyRows& a, int64_t first, int64_t last) {
  const float uniform = a.smoothing / static_cast<float>(a.width), certain = 1 - a.smoothing;
  for (int64_t r = first; r < last; r += kLanes) {
    const int64_t n = last - r < kLanes ? last - r : kLanes;
    const FewRows<T> rows(static_cast<const T*>(a.logits) + r * a.width, a.width, n);
    alignas(64) float scales[kLanes] = {}, targets[kFew][kLanes] = {};
    for (int64_t l = 0; l < n; ++l) {
      const int64_t label = label_at(a, r + l);
      if (label == a.ignore) continue;
      const bool valid = label >= 0 && label < a.width;
      scales[l] = valid ? a.dloss[r + l] : NAN;
      if (valid) targets[label][l] = certain;
    }
    V base = n == kLanes ? load(a.lse + r) : load_n(a.lse + r, n), part = splat(1);
    const auto large = hn::Ge(hn::Abs(base), splat(kExactLse));
    if (!hn::AllFalse(F32(), large)) {
      const V top = rows.top(a.width);
      part = hn::IfThenElse(large, hn::Div(part, rows.sum(a.width, top)), part);
      base = hn::IfThenElse(large, top, base);
    }
    const V scale = load(scales);
    const auto counted = differ(scale, zero());  // an ignored row is 0 whatever its logits are
    T* y = static_cast<T*>(a.dlogits) + r * a.width;
    for (int64_t j = 0; j < a.width; ++j) {
      const V p = hn::Mul(exp_fast(hn::Sub(rows.x[j], base)), part);
      const V v = hn::Mul(hn::Sub(hn::Sub(p, load(targets[j])), splat(uniform)), scale);
      alignas(64) T out[kLanes];
      store(hn::IfThenElseZero(counted, v), out);
      for (int64_t l = 0; l < n; ++l) y[l * a.width + j] = out[l];
    }
  }
}

void softmax_rows(const SoftmaxRows& a, int64_t first, int64_t last) {
  if (a.dtype == DType::kBF16)
    softmax_typed<uint16_t>(a, first, last);
  else
    softmax_typed<float>(a, first, last);
}
void softmax_grad_rows(const SoftmaxRows& a, int64_t first, int64_t last) {
  if (a.dtype == DType::kBF16)
    softmax_grad_typed<uint16_t>(a, first, last);
  else
    softmax_grad_typed<float>(a, first, last);
}
void cross_entropy_rows(const CrossEntropyRows& a, int64_t first, int64_t last) {
  const bool few = a.width <= kFew, half = a.dtype == DType::kBF16;
  const auto run = few    ? (half ? cross_entropy_few<uint16_t> : cross_entropy_few<float>)
                   : half ? cross_entropy_typed<uint16_t>
                          : cross_entropy_typed<float>;
  run(a, first, last);
}
void cross_entropy_stats_rows(const CrossEntropyRows& a, int64_t first, int64_t last) {
  if (a.dtype == DType::kBF16)
    cross_entropy_stats_typed<uint16_t>(a, first, last);
  else
    cross_entropy_stats_typed<float>(a, first, last);
}
void cross_entropy_grad_rows(const CrossEntropyRows& a, int64_t first, int64_t last) {
  const bool few = a.width <= kFew && a.width == a.all, half = a.dtype == DType::kBF16;
  const auto run = few    ? (half ? cross_entropy_grad_few<uint16_t> : cross_entropy_grad_few<float>)
                   : half ? cross_entropy_grad_typed<uint16_t>
                          : cross_entropy_grad_typed<float>;
  run(a, first, last);
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {

HWY_EXPORT(softmax_rows);
HWY_EXPORT(softmax_grad_rows);
HWY_EXPORT(cross_entropy_rows);
HWY_EXPORT(cross_entropy_stats_rows);
HWY_EXPORT(cross_entropy_grad_rows);

namespace {

// f(args, first row, last row) over all rows.
template <class Args>
std::unique_ptr<Kernel> row_kernel(CpuDevice& device, const Args& args, int64_t rows,
                                   void (*f)(const Args&, int64_t, int64_t)) {
  const int64_t least = std::max<int64_t>(1, 4096 / std::max<int64_t>(args.width, 1));
  return make_kernel(0, [=, threads = device.threads()](char*) {
    parallel_for(threads, args.width == 0 ? 0 : rows, least, [&](int64_t b, int64_t e) { f(args, b, e); });
  });
}

std::unique_ptr<Kernel> bind_softmax(const KernelSpec& spec, CpuDevice& device) {
  const SoftmaxRows args{spec.in[0].data,      nullptr,          spec.out[0].data,
                         last_dim(spec.in[0]), spec.in[0].dtype, spec.op == OpCode::k_log_softmax};
  return row_kernel(device, args, rows(spec.in[0]), HWY_DYNAMIC_DISPATCH(softmax_rows));
}

std::unique_ptr<Kernel> bind_softmax_grad(const KernelSpec& spec, CpuDevice& device) {
  const SoftmaxRows args{spec.in[0].data,      spec.in[1].data,  spec.out[0].data,
                         last_dim(spec.in[0]), spec.in[0].dtype, spec.op == OpCode::k_log_softmax_grad};
  return row_kernel(device, args, rows(spec.in[0]), HWY_DYNAMIC_DISPATCH(softmax_grad_rows));
}

CrossEntropyRows cross_entropy_args(const KernelSpec& spec, const Operand& logits, const Operand& labels) {
  CrossEntropyRows a{};
  a.logits = logits.data, a.dtype = logits.dtype, a.width = last_dim(logits);
  a.labels = labels.data, a.label_dtype = labels.dtype;
  a.ignore = attr_int(*spec.attrs, "ignore_index", -100);
  a.begin = attr_int(*spec.attrs, "label_begin");
  a.all = attr_int(*spec.attrs, "vocabulary") != 0 ? attr_int(*spec.attrs, "vocabulary") : a.width;
  a.smoothing = static_cast<float>(attr_float(*spec.attrs, "label_smoothing"));
  return a;
}

std::unique_ptr<Kernel> bind_cross_entropy(const KernelSpec& spec, CpuDevice& device) {
  CrossEntropyRows a = cross_entropy_args(spec, spec.in[0], spec.in[1]);
  a.loss = static_cast<float*>(spec.out[0].data);
  a.lse = has(spec.out, 1) ? static_cast<float*>(spec.out[1].data) : nullptr;
  return row_kernel(device, a, rows(spec.in[0]), HWY_DYNAMIC_DISPATCH(cross_entropy_rows));
}

std::unique_ptr<Kernel> bind_cross_entropy_grad(const KernelSpec& spec, CpuDevice& device) {
  CrossEntropyRows a = cross_entropy_args(spec, spec.in[1], spec.in[2]);
  a.dloss = static_cast<const float*>(spec.in[0].data);
  a.lse = static_cast<float*>(spec.in[3].data);
  a.dlogits = spec.out[0].data;
  return row_kernel(device, a, rows(spec.in[1]), HWY_DYNAMIC_DISPATCH(cross_entropy_grad_rows));
}

std::unique_ptr<Kernel> bind_cross_entropy_stats(const KernelSpec& spec, CpuDevice& device) {
  CrossEntropyRows a = cross_entropy_args(spec, spec.in[0], spec.in[1]);
  a.lse = static_cast<float*>(spec.out[0].data);
  a.picked = static_cast<float*>(spec.out[1].data);
  const int64_t n = rows(spec.out[0]) * last_dim(spec.out[0]);
  if (a.width != 0) return row_kernel(device, a, n, HWY_DYNAMIC_DISPATCH(cross_entropy_stats_rows));
  // No column is here: the sums of nothing.
  return make_kernel(0, [=](char*) { HWY_DYNAMIC_DISPATCH(cross_entropy_stats_rows)(a, 0, n); });
}

std::unique_ptr<Kernel> bind_cross_entropy_finish(const KernelSpec& spec, CpuDevice& device) {
  const auto *lse = static_cast<const float*>(spec.in[0].data), *picked = static_cast<const float*>(spec.in[1].data);
  auto* loss = static_cast<float*>(spec.out[0].data);
  const Operand labels = spec.in[2];
  const int64_t ignore = attr_int(*spec.attrs, "ignore_index", -100);
  return make_kernel(0, [=, n = count(spec.out[0]), threads = device.threads()](char*) {
    parallel_for(threads, n, 1 << 14, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) {
        const int64_t label = labels.dtype == DType::kI64 ? static_cast<const int64_t*>(labels.data)[i]
                                                          : static_cast<const int32_t*>(labels.data)[i];
        loss[i] = label == ignore ? 0 : lse[i] - picked[i];
      }
    });
  });
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_softmax, bind_softmax, nullptr},
    {OpCode::k_softmax_grad, bind_softmax_grad, nullptr},
    {OpCode::k_log_softmax, bind_softmax, nullptr},
    {OpCode::k_log_softmax_grad, bind_softmax_grad, nullptr},
    {OpCode::k_cross_entropy, bind_cross_entropy, nullptr},
    {OpCode::k_cross_entropy_grad, bind_cross_entropy_grad, nullptr},
    {OpCode::k_cross_entropy_stats, bind_cross_entropy_stats, nullptr},
    {OpCode::k_cross_entropy_finish, bind_cross_entropy_finish, nullptr},
};

}  // namespace

std::span<const KernelEntry> softmax_kernels() { return kTable; }

}  // namespace whale::cpu
#endif
