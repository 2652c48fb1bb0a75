#include "device/cpu/reduce.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "device/cpu/reduce.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "device/cpu/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace whale::cpu::HWY_NAMESPACE {

struct SumOp {
  static constexpr float kStart = 0;
  static HWY_INLINE V of(V a, V b) { return hn::Add(a, b); }
};
struct MaxOp {
  static constexpr float kStart = -HUGE_VALF;
  static HWY_INLINE V of(V a, V b) { return max_nan(a, b); }
};
struct MinOp {
  static constexpr float kStart = HUGE_VALF;
  static HWY_INLINE V of(V a, V b) { return min_nan(a, b); }
};

template <class Op>
HWY_INLINE float across(V x) {
  alignas(64) float lane[kLanes];
  store(x, lane);
  V y = splat(lane[0]);
  for (int64_t i = 1; i < kLanes; ++i) y = Op::of(y, splat(lane[i]));
  return hn::GetLane(y);
}

template <class Op, class T>
float fold_run(const T* x, int64_t n) {
  V s0 = splat(Op::kStart), s1 = s0, s2 = s0, s3 = s0;
  int64_t i = 0;
  for (; i + 4 * kLanes <= n; i += 4 * kLanes) {
    s0 = Op::of(s0, load(x + i));
    s1 = Op::of(s1, load(x + i + kLanes));
    s2 = Op::of(s2, load(x + i + 2 * kLanes));
    s3 = Op::of(s3, load(x + i + 3 * kLanes));
  }
  for (; i + kLanes <= n; i += kLanes) s0 = Op::of(s0, load(x + i));
  if (i < n) s0 = Op::of(s0, load_n(x + i, n - i, Op::kStart));
  return across<Op>(Op::of(Op::of(s0, s1), Op::of(s2, s3)));
}

template <class Op, class T>
void fold_columns(const T* x, int64_t rows, int64_t stride, float* y, int64_t n) {
  int64_t j = 0;
  for (; j + 4 * kLanes <= n; j += 4 * kLanes) {
    V s0 = splat(Op::kStart), s1 = s0, s2 = s0, s3 = s0;
    for (int64_t r = 0; r < rows; ++r) {
      const T* p = x + r * stride + j;
      s0 = Op::of(s0, load(p));
      s1 = Op::of(s1, load(p + kLanes));
      s2 = Op::of(s2, load(p + 2 * kLanes));
      s3 = Op::of(s3, load(p + 3 * kLanes));
    }
    store(s0, y + j), store(s1, y + j + kLanes), store(s2, y + j + 2 * kLanes), store(s3, y + j + 3 * kLanes);
  }
  for (; j + kLanes <= n; j += kLanes) {
    V s = splat(Op::kStart);
    for (int64_t r = 0; r < rows; ++r) s = Op::of(s, load(x + r * stride + j));
    store(s, y + j);
  }
  if (j < n) {
    V s = splat(Op::kStart);
    for (int64_t r = 0; r < rows; ++r) s = Op::of(s, load_n(x + r * stride + j, n - j));
    store_n(s, y + j, n - j);
  }
}

template <class Op, class T>
void fold_tasks(const FoldStep& s, int64_t first, int64_t last) {
  const auto* from = static_cast<const T*>(s.from);
  const int64_t blocks = s.blocks();
  for (int64_t task = first; task < last; ++task) {
    const int64_t block = task % blocks, chunk = task / blocks % s.chunks, outer = task / blocks / s.chunks;
    const int64_t r0 = s.extent * chunk / s.chunks, r1 = s.extent * (chunk + 1) / s.chunks;
    const int64_t c0 = block * FoldStep::kColumns;
    const int64_t columns = s.inner - c0 < FoldStep::kColumns ? s.inner - c0 : FoldStep::kColumns;
    const T* x = from + (outer * s.extent + r0) * s.inner + c0;
    float* y = s.to + (outer * s.chunks + chunk) * s.inner + c0;
    if (s.inner == 1)
      *y = fold_run<Op>(x, r1 - r0);
    else
      fold_columns<Op>(x, r1 - r0, s.inner, y, columns);
  }
}

template <class T>
void fold_typed(const FoldStep& s, int64_t first, int64_t last) {
  if (s.fold == Fold::kSum)
    fold_tasks<SumOp, T>(s, first, last);
  else if (s.fold == Fold::kMax)
    fold_tasks<MaxOp, T>(s, first, last);
  else
    fold_tasks<MinOp, T>(s, first, last);
}

void run_fold(const FoldStep& s, int64_t first, int64_t last) {
  if (s.dtype == DType::kBF16)
    fold_typed<uint16_t>(s, first, last);
  else
    fold_typed<float>(s, first, last);
}

// Squares of short runs in float, their sums in double.
template <class T>
double squares(const T* x, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; i += 256) {
    const int64_t m = n - i < 256 ? n - i : 256;
    V a = zero(), b = zero();
    int64_t j = 0;
    for (; j + 2 * kLanes <= m; j += 2 * kLanes) {
      const V u = load(x + i + j), v = load(x + i + j + kLanes);
      a = hn::MulAdd(u, u, a);
      b = hn::MulAdd(v, v, b);
    }
    for (; j < m; j += kLanes) {
      const V u = m - j >= kLanes ? load(x + i + j) : load_n(x + i + j, m - j);
      a = hn::MulAdd(u, u, a);
    }
    total += static_cast<double>(sum_lanes(hn::Add(a, b)));
  }
  return total;
}
double squares_of(DType dtype, const void* from, int64_t at, int64_t n) {
  return dtype == DType::kBF16 ? squares(static_cast<const uint16_t*>(from) + at, n)
                               : squares(static_cast<const float*>(from) + at, n);
}

}  // namespace whale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <limits>

#include "base/bf16.h"
#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"

namespace whale::cpu {

HWY_EXPORT(run_fold);
HWY_EXPORT(squares_of);
void run_fold(const FoldStep& step, int64_t first, int64_t last) { HWY_DYNAMIC_DISPATCH(run_fold)(step, first, last); }
double sum_of_squares(DType dtype, const void* from, int64_t at, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(squares_of)(dtype, from, at, n);
}

namespace {

std::vector<bool> reduced_axes(const KernelSpec& spec) {
  const size_t rank = spec.in[0].dims.size();
  const Ints& axes = attr_ints(*spec.attrs, "axes");
  std::vector<bool> reduced(rank, axes.empty());
  for (const int64_t axis : axes)
    reduced.at(static_cast<size_t>(axis < 0 ? axis + static_cast<int64_t>(rank) : axis)) = true;
  return reduced;
}

// Neighbouring dimensions that are both kept or both reduced are one.
struct Group {
  int64_t extent;
  bool reduced;
};
std::vector<Group> groups_of(const KernelSpec& spec) {
  std::vector<Group> groups;
  const std::vector<bool> reduced = reduced_axes(spec);
  for (size_t d = 0; d < reduced.size(); ++d) {
    const int64_t extent = spec.in[0].dims[d];
    if (extent == 1) continue;
    if (!groups.empty() && groups.back().reduced == reduced[d])
      groups.back().extent *= extent;
    else
      groups.push_back({extent, reduced[d]});
  }
  return groups;
}

// The last reduced group goes first, until none is left.
struct Shape3 {
  int64_t outer = 1, extent = 1, inner = 1;
};
std::vector<Shape3> passes_of(std::vector<Group> groups) {
  std::vector<Shape3> passes;
  for (size_t i = groups.size(); i-- > 0;) {
    if (!groups[i].reduced) continue;
    Shape3 s;
    for (size_t j = 0; j < i; ++j) s.outer *= groups[j].extent;
    s.extent = groups[i].extent;
    for (size_t j = i + 1; j < groups.size(); ++j)
      if (!groups[j].reduced) s.inner *= groups[j].extent;
    passes.push_back(s);
  }
  if (passes.empty()) {
    Shape3 s;
    for (const Group& g : groups) s.outer *= g.extent;
    passes.push_back(s);
  }
  return passes;
}

// How many chunks of the extent: enough for all threads, by shape only.
int64_t chunks_of(const FoldStep& s) {
  const int64_t block = std::min(s.inner, FoldStep::kColumns), units = s.outer * s.blocks();
  if (units >= 16 || s.extent * block < 32768) return 1;
  return std::min<int64_t>(64, s.extent * block / 16384);
}

std::unique_ptr<Kernel> bind_float(const KernelSpec& spec, CpuDevice& device, Fold fold, double scale) {
  const Operand &x = spec.in[0], &y = spec.out[0];
  std::vector<FoldStep> steps;
  std::vector<size_t> offsets;  // of each step's result in scratch
  size_t bytes = 0;
  const auto add = [&](FoldStep s) {
    steps.push_back(s);
    offsets.push_back(bytes);
    bytes += static_cast<size_t>(round_up(s.outer * s.chunks * s.inner * 4, 64));
  };
  for (const Shape3& pass : passes_of(groups_of(spec))) {
    FoldStep s{.from = x.data,
               .dtype = steps.empty() ? x.dtype : DType::kF32,
               .to = nullptr,
               .outer = pass.outer,
               .extent = pass.extent,
               .inner = pass.inner,
               .chunks = 1,
               .fold = fold};
    s.chunks = chunks_of(s);
    add(s);
    if (s.chunks == 1) continue;
    add({.from = nullptr,
         .dtype = DType::kF32,
         .to = nullptr,
         .outer = s.outer,
         .extent = s.chunks,
         .inner = s.inner,
         .chunks = 1,
         .fold = fold});
  }
  const int64_t n = count(y);
  const bool direct = y.dtype == DType::kF32 && scale == 1;
  if (direct) steps.back().to = static_cast<float*>(y.data);
  return make_kernel(bytes, [=, threads = device.threads()](char* scratch) {
    float* to = nullptr;
    for (size_t i = 0; i < steps.size(); ++i) {
      FoldStep s = steps[i];
      if (i > 0) s.from = to;
      if (s.to == nullptr) s.to = reinterpret_cast<float*>(scratch + offsets[i]);
      const int64_t tasks = s.tasks();
      const int64_t work = tasks > 0 ? s.outer * s.extent * s.inner / tasks : 1;
      parallel_for(threads, tasks, std::max<int64_t>(1, 16384 / std::max<int64_t>(work, 1)),
                   [&](int64_t b, int64_t e) { run_fold(s, b, e); });
      to = s.to;
    }
    if (direct) return;
    if (scale != 1)
      for (int64_t i = 0; i < n; ++i) to[i] = static_cast<float>(to[i] * scale);
    store_tile(y.dtype, to, y.data, 0, n);
  });
}

int64_t fold_int(Fold fold, int64_t a, int64_t b) {
  if (fold == Fold::kSum) return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
  return fold == Fold::kMax ? std::max(a, b) : std::min(a, b);
}

// Integers and booleans: one thread, exact.
std::unique_ptr<Kernel> bind_integer(const KernelSpec& spec, Fold fold) {
  const Operand x = spec.in[0], y = spec.out[0];
  const std::vector<Shape3> passes = passes_of(groups_of(spec));
  const int64_t n = count(x), m = count(y);
  const int64_t start = fold == Fold::kSum   ? 0
                        : fold == Fold::kMax ? std::numeric_limits<int64_t>::min()
                                             : std::numeric_limits<int64_t>::max();
  return make_kernel(static_cast<size_t>((n + m) * 8), [=](char* scratch) {
    auto* a = reinterpret_cast<int64_t*>(scratch);
    load_tile(x.dtype, x.data, 0, a, n);
    for (const Shape3& s : passes) {  // the result takes the place of what was read already
      for (int64_t o = 0; o < s.outer; ++o) {
        for (int64_t i = 0; i < s.inner; ++i) {
          int64_t sum = start;
          for (int64_t e = 0; e < s.extent; ++e) sum = fold_int(fold, sum, a[(o * s.extent + e) * s.inner + i]);
          a[o * s.inner + i] = sum;
        }
      }
    }
    store_tile(y.dtype, a, y.data, 0, m);
  });
}

template <Fold fold>
std::unique_ptr<Kernel> bind_reduce(const KernelSpec& spec, CpuDevice& device) {
  const int64_t n = count(spec.in[0]), m = count(spec.out[0]);
  const double scale = spec.op == OpCode::k_reduce_mean && n > 0 ? static_cast<double>(m) / static_cast<double>(n) : 1;
  if (is_float(spec.in[0].dtype)) return bind_float(spec, device, fold, scale);
  return bind_integer(spec, fold);
}

struct AsItIs {
  template <class T>
  T operator()(T x) const {
    return x;
  }
};
struct Widened {
  float operator()(uint16_t x) const { return bf16_to_float(x); }
};

template <class T, class Value = AsItIs>
void argmax_rows(const Operand& x, const Operand& y, AxisView v, int64_t first, int64_t last) {
  constexpr Value value;
  for (int64_t r = first; r < last; ++r) {
    const T* p = static_cast<const T*>(x.data) + r / v.inner * v.extent * v.inner + r % v.inner;
    int64_t best = 0;
    for (int64_t e = 1; e < v.extent; ++e)
      if (value(p[e * v.inner]) > value(p[best * v.inner])) best = e;
    if (y.dtype == DType::kI64)
      static_cast<int64_t*>(y.data)[r] = best;
    else
      static_cast<int32_t*>(y.data)[r] = static_cast<int32_t>(best);
  }
}

std::unique_ptr<Kernel> bind_argmax(const KernelSpec& spec, CpuDevice& device) {
  const Operand x = spec.in[0], y = spec.out[0];
  const AxisView v = view_axis(x.dims, attr_int(*spec.attrs, "axis", -1));
  using Rows = void (*)(const Operand&, const Operand&, AxisView, int64_t, int64_t);
  Rows f = nullptr;
  if (x.dtype == DType::kF32)
    f = argmax_rows<float>;
  else if (x.dtype == DType::kBF16)
    f = argmax_rows<uint16_t, Widened>;
  else if (x.dtype == DType::kI32)
    f = argmax_rows<int32_t>;
  else if (x.dtype == DType::kI64)
    f = argmax_rows<int64_t>;
  else if (x.dtype == DType::kI8)
    f = argmax_rows<int8_t>;
  else if (x.dtype == DType::kU16)
    f = argmax_rows<uint16_t>;
  else
    f = argmax_rows<uint8_t>;
  const int64_t least = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, v.extent));
  return make_kernel(0, [=, threads = device.threads()](char*) {
    parallel_for(threads, v.outer * v.inner, least, [&](int64_t b, int64_t e) { f(x, y, v, b, e); });
  });
}

std::unique_ptr<Kernel> bind_sum_of_squares(const KernelSpec& spec, CpuDevice& device) {
  constexpr int64_t kBlock = 16384;  // fixed: the sum is the same for any number of threads
  struct Block {
    const void* data;
    DType dtype;
    int64_t at, n;
  };
  std::vector<Block> blocks;
  for (const Operand& x : spec.in)
    for (int64_t at = 0; at < count(x); at += kBlock)
      blocks.push_back({x.data, x.dtype, at, std::min(kBlock, count(x) - at)});
  const Operand y = spec.out[0];
  const size_t bytes = (blocks.size() + 1) * sizeof(double);
  return make_kernel(bytes, [=, blocks = std::move(blocks), threads = device.threads()](char* scratch) {
    auto* part = reinterpret_cast<double*>(scratch);
    parallel_for(threads, static_cast<int64_t>(blocks.size()), 2, [&](int64_t b, int64_t e) {
      for (int64_t i = b; i < e; ++i) {
        const Block& block = blocks[i];
        part[i] = sum_of_squares(block.dtype, block.data, block.at, block.n);
      }
    });
    double sum = 0;
    for (size_t i = 0; i < blocks.size(); ++i) sum += part[i];
    const auto total = static_cast<float>(sum);
    store_tile(y.dtype, &total, y.data, 0, 1);
  });
}

bool floats(const std::vector<DType>& in, const std::vector<DType>&) {
  for (const DType dtype : in)
    if (dtype != DType::kF32 && dtype != DType::kBF16) return false;
  return true;
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_reduce_sum, bind_reduce<Fold::kSum>, nullptr},
    {OpCode::k_reduce_mean, bind_reduce<Fold::kSum>, floats},
    {OpCode::k_reduce_max, bind_reduce<Fold::kMax>, nullptr},
    {OpCode::k_reduce_min, bind_reduce<Fold::kMin>, nullptr},
    {OpCode::k_argmax, bind_argmax, nullptr},
    {OpCode::k_sum_of_squares, bind_sum_of_squares, floats},
};

}  // namespace

std::span<const KernelEntry> reduce_kernels() { return kTable; }

}  // namespace whale::cpu
#endif
