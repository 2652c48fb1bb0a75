// Ops that read indices or order elements. An index outside its axis reads zeros, and its gradient goes nowhere.
// Scattered sums follow the order of the indices, whatever the number of threads: threads share columns or tables,
// never one element.
#include <cmath>
#include <cstring>

#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"
#include "device/global_index.h"

namespace whale::cpu {
namespace {

inline int64_t index_at(const void* data, DType dtype, int64_t i) {
  return dtype == DType::kI64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
}

// y[o, i, :] = x[o, index[i], :]
std::unique_ptr<Kernel> gather(CpuDevice& device, const Operand& x, const Operand& index, const Operand& y, AxisView v,
                               int64_t begin) {
  const int64_t n = count(index), run = v.inner * size_of(x.dtype);
  const auto* from = static_cast<const char*>(x.data);
  auto* to = static_cast<char*>(y.data);
  return make_kernel(0, [=, ids = index.data, type = index.dtype, threads = device.threads()](char*) {
    parallel_for(threads, v.outer * n, std::max<int64_t>(1, 65536 / std::max<int64_t>(run, 1)),
                 [&](int64_t b, int64_t e) {
                   for (int64_t i = b; i < e; ++i) {
                     const int64_t at = index_at(ids, type, i % n) - begin;
                     if (at >= 0 && at < v.extent)
                       std::memcpy(to + i * run, from + (i / n * v.extent + at) * run, static_cast<size_t>(run));
                     else
                       std::memset(to + i * run, 0, static_cast<size_t>(run));
                   }
                 });
  });
}

// to[o, index[i], columns] += dy[o, i, columns]
template <class T>
void scatter(const T* dy, const void* ids, DType type, int64_t n, AxisView v, int64_t begin, float* to, int64_t o,
             int64_t c0, int64_t c1) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t at = index_at(ids, type, i) - begin;
    if (at < 0 || at >= v.extent) continue;
    float* y = to + (o * v.extent + at) * v.inner;
    const T* x = dy + (o * n + i) * v.inner;
    if constexpr (sizeof(T) == 4) {
      for (int64_t c = c0; c < c1; ++c) y[c] += x[c];
    } else {
      float row[256];
      for (int64_t c = c0; c < c1; c += 256) {
        const int64_t m = std::min<int64_t>(256, c1 - c);
        load_tile(DType::kBF16, x, c, row, m);
        for (int64_t k = 0; k < m; ++k) y[c + k] += row[k];
      }
    }
  }
}

// Sums in float: in dx itself or, when it is of another type, in scratch.
std::unique_ptr<Kernel> scatter_sum(CpuDevice& device, const Operand& dy, const Operand& index, const Operand& dx,
                                    AxisView v, int64_t begin) {
  const int64_t n = count(index), elements = count(dx);
  const bool direct = dx.dtype == DType::kF32;
  // A task is one table and a block of columns: whole cache lines, and as few as the threads need, since each walks all
  // indices.
  const int64_t wanted = v.outer >= 2 * device.threads() ? 1 : device.threads();
  const int64_t width = std::max<int64_t>(16, round_up((v.inner + wanted - 1) / wanted, 16));
  const int64_t blocks = (v.inner + width - 1) / std::max<int64_t>(width, 1);
  return make_kernel(
      direct ? 0 : static_cast<size_t>(elements * 4), [=, ids = index.data, threads = device.threads()](char* scratch) {
        auto* to = direct ? static_cast<float*>(dx.data) : reinterpret_cast<float*>(scratch);
        parallel_for(threads, elements, 1 << 15,
                     [&](int64_t b, int64_t e) { std::memset(to + b, 0, static_cast<size_t>(e - b) * 4); });
        const int workers = n * v.outer * v.inner < 32768 ? 1 : threads;
        parallel_for(workers, v.outer * blocks, 1, [&](int64_t b, int64_t e) {
          for (int64_t task = b; task < e; ++task) {
            const int64_t o = task / blocks, c0 = task % blocks * width, c1 = std::min(v.inner, c0 + width);
            if (dy.dtype == DType::kBF16)
              scatter(static_cast<const uint16_t*>(dy.data), ids, index.dtype, n, v, begin, to, o, c0, c1);
            else
              scatter(static_cast<const float*>(dy.data), ids, index.dtype, n, v, begin, to, o, c0, c1);
          }
        });
        if (!direct)
          parallel_for(threads, elements, 1 << 14,
                       [&](int64_t b, int64_t e) { store_tile(dx.dtype, to + b, dx.data, b, e - b); });
      });
}

std::unique_ptr<Kernel> bind_gather(const KernelSpec& spec, CpuDevice& device) {
  return gather(device, spec.in[0], spec.in[1], spec.out[0], view_axis(spec.in[0].dims, attr_int(*spec.attrs, "axis")),
                attr_int(*spec.attrs, "begin"));
}
std::unique_ptr<Kernel> bind_gather_grad(const KernelSpec& spec, CpuDevice& device) {
  return scatter_sum(device, spec.in[0], spec.in[1], spec.out[0],
                     view_axis(spec.out[0].dims, attr_int(*spec.attrs, "axis")), attr_int(*spec.attrs, "begin"));
}
std::unique_ptr<Kernel> bind_embedding(const KernelSpec& spec, CpuDevice& device) {
  return gather(device, spec.in[0], spec.in[1], spec.out[0], view_axis(spec.in[0].dims, 0),
                attr_int(*spec.attrs, "row_begin"));
}
std::unique_ptr<Kernel> bind_embedding_grad(const KernelSpec& spec, CpuDevice& device) {
  return scatter_sum(device, spec.in[0], spec.in[1], spec.out[0], view_axis(spec.out[0].dims, 0),
                     attr_int(*spec.attrs, "row_begin"));
}

std::unique_ptr<Kernel> bind_one_hot(const KernelSpec& spec, CpuDevice& device) {
  const Operand index = spec.in[0], y = spec.out[0];
  const int64_t depth = last_dim(y), bytes = size_of(y.dtype), begin = attr_int(*spec.attrs, "begin");
  const float one = 1;
  const int64_t whole = 1;
  uint64_t cell = 0;
  if (is_integer(y.dtype))
    store_tile(y.dtype, &whole, &cell, 0, 1);
  else
    store_tile(y.dtype, &one, &cell, 0, 1);
  return make_kernel(0, [=, threads = device.threads()](char*) {
    parallel_for(threads, count(index), std::max<int64_t>(1, 65536 / std::max<int64_t>(1, depth * bytes)),
                 [&](int64_t b, int64_t e) {
                   char* to = static_cast<char*>(y.data);
                   std::memset(to + b * depth * bytes, 0, static_cast<size_t>((e - b) * depth * bytes));
                   for (int64_t i = b; i < e; ++i) {
                     const int64_t at = is_integer(index.dtype) ? index_at(index.data, index.dtype, i) - begin : -1;
                     if (at >= 0 && at < depth)
                       std::memcpy(to + (i * depth + at) * bytes, &cell, static_cast<size_t>(bytes));
                   }
                 });
  });
}

// Sum: wide for floats; unsigned for integers, whose sums wrap.
template <class T, class Sum>
void cumsum_lines(const Operand& x, const Operand& y, AxisView v, bool reverse, bool exclusive, int64_t first,
                  int64_t last) {
  for (int64_t line = first; line < last; ++line) {
    const int64_t base = line / v.inner * v.extent * v.inner + line % v.inner;
    Sum sum{};
    for (int64_t step = 0; step < v.extent; ++step) {
      const int64_t at = base + (reverse ? v.extent - 1 - step : step) * v.inner;
      T value;
      load_tile(x.dtype, x.data, at, &value, 1);
      const Sum next = sum + static_cast<Sum>(value);
      const T result = static_cast<T>(exclusive ? sum : next);
      store_tile(y.dtype, &result, y.data, at, 1);
      sum = next;
    }
  }
}

std::unique_ptr<Kernel> bind_cumsum(const KernelSpec& spec, CpuDevice& device) {
  const Operand x = spec.in[0], y = spec.out[0];
  const AxisView v = view_axis(x.dims, attr_int(*spec.attrs, "axis"));
  const bool reverse = attr_bool(*spec.attrs, "reverse"), exclusive = attr_bool(*spec.attrs, "exclusive");
  const auto f = is_float(x.dtype) ? cumsum_lines<float, double> : cumsum_lines<int64_t, uint64_t>;
  return make_kernel(0, [=, threads = device.threads()](char*) {
    parallel_for(threads, v.outer * v.inner, std::max<int64_t>(1, 8192 / std::max<int64_t>(v.extent, 1)),
                 [&](int64_t b, int64_t e) { f(x, y, v, reverse, exclusive, b, e); });
  });
}

// The k largest of a row, by insertion into a sorted list. NaN counts as the largest; ties go to the lowest index.
template <class T>
void top_k_rows(const Operand& x, const Operand& values, const Operand& indices, int64_t k, int64_t first,
                int64_t last) {
  const int64_t width = last_dim(x);
  const auto greater = [](T a, T b) { return a > b || (a != a && b == b); };
  for (int64_t r = first; r < last; ++r) {
    int32_t* index = static_cast<int32_t*>(indices.data) + r * k;
    const auto value = [&](int64_t i) {
      T v;
      load_tile(x.dtype, x.data, r * width + i, &v, 1);
      return v;
    };
    int64_t held = 0;
    T least{};
    for (int64_t i = 0; i < width && k > 0; ++i) {
      const T v = value(i);
      if (held == k && !greater(v, least)) continue;
      int64_t at = held < k ? held++ : k - 1;
      for (; at > 0 && greater(v, value(index[at - 1])); --at) index[at] = index[at - 1];
      index[at] = static_cast<int32_t>(i);
      least = value(index[held - 1]);
    }
    for (int64_t i = 0; i < k; ++i) {
      const T v = value(index[i]);
      store_tile(values.dtype, &v, values.data, r * k + i, 1);
    }
  }
}

std::unique_ptr<Kernel> bind_top_k(const KernelSpec& spec, CpuDevice& device) {
  const Operand x = spec.in[0], values = spec.out[0], indices = spec.out[1];
  const int64_t k = last_dim(values), width = last_dim(x);
  const auto f = is_float(x.dtype) ? top_k_rows<float> : top_k_rows<int64_t>;
  return make_kernel(0, [=, threads = device.threads()](char*) {
    parallel_for(threads, rows(x), std::max<int64_t>(1, 8192 / std::max<int64_t>(width, 1)),
                 [&](int64_t b, int64_t e) { f(x, values, indices, k, b, e); });
  });
}

std::unique_ptr<Kernel> bind_top_k_grad(const KernelSpec& spec, CpuDevice& device) {
  const Operand dvalues = spec.in[0], indices = spec.in[1], dx = spec.out[0];
  const int64_t k = last_dim(dvalues), width = last_dim(dx), bytes = size_of(dx.dtype);
  return make_kernel(0, [=, threads = device.threads()](char*) {
    parallel_for(
        threads, rows(dx), std::max<int64_t>(1, 16384 / std::max<int64_t>(width, 1)), [&](int64_t b, int64_t e) {
          std::memset(static_cast<char*>(dx.data) + b * width * bytes, 0, static_cast<size_t>((e - b) * width * bytes));
          for (int64_t i = b * k; i < e * k; ++i) {
            float v;
            load_tile(dvalues.dtype, dvalues.data, i, &v, 1);
            const int64_t at = index_at(indices.data, indices.dtype, i);
            if (at >= 0 && at < width) store_tile(dx.dtype, &v, dx.data, i / k * width + at, 1);
          }
        });
  });
}

// x [b, t, h, d]. Pair p of a head turns by position * base^(-2 p / d): halves (p, p + d/2), or neighbours when
// interleaved.
std::unique_ptr<Kernel> bind_rotary(const KernelSpec& spec, CpuDevice& device) {
  const Operand x = spec.in[0], y = spec.out[0];
  const int64_t time = x.dims[1], heads = x.dims[2], d = x.dims[3], half = d / 2;
  const double base = attr_float(*spec.attrs, "base", 10000), direction = attr_bool(*spec.attrs, "inverse") ? -1 : 1;
  const int64_t limit = attr_int(*spec.attrs, "heads", -1);
  const bool interleaved = attr_bool(*spec.attrs, "interleaved");
  const GlobalIndex global(spec.box, x.dims);
  // Made once: of the positions that are here, or of all where the batch moves them.
  const bool moves = spec.box.batch.present() && spec.box.batch.dim == 1;
  const int64_t positions = moves ? global.global(1) : time;
  std::vector<float> turn(static_cast<size_t>(2 * positions * half));
  for (int64_t t = 0; t < positions; ++t) {
    for (int64_t p = 0; p < half; ++p) {
      const double angle = direction * static_cast<double>(moves ? t : global.coordinate(1, t, 0)) *
                           std::pow(base, -2.0 * static_cast<double>(p) / static_cast<double>(d));
      turn[2 * t * half + p] = static_cast<float>(std::cos(angle));
      turn[(2 * t + 1) * half + p] = static_cast<float>(std::sin(angle));
    }
  }
  const int64_t n = rows(x);
  const size_t bytes = static_cast<size_t>(device.threads()) * static_cast<size_t>(round_up(d, 16)) * 4 * 2;
  return make_kernel(bytes, [=, turn = std::move(turn), row = spec.row, threads = device.threads()](char* scratch) {
    const int64_t begin = row != nullptr ? row->batch_begin : 0;
    parallel_for(threads, n, std::max<int64_t>(1, 16384 / std::max<int64_t>(d, 1)), [&](int64_t b, int64_t e) {
      float* in = reinterpret_cast<float*>(scratch) + omp_get_thread_num() * round_up(d, 16) * 2;
      float* out = in + round_up(d, 16);
      for (int64_t i = b; i < e; ++i) {
        load_tile(x.dtype, x.data, i * d, in, d);
        std::memcpy(out, in, static_cast<size_t>(d) * 4);
        if (limit < 0 || global.coordinate(2, i % heads, begin) < limit) {
          const int64_t t = i / heads % time;
          const float* cosine = turn.data() + 2 * (moves ? global.coordinate(1, t, begin) : t) * half;
          const float* sine = cosine + half;
          const int64_t step = interleaved ? 2 : 1, other = interleaved ? 1 : half;
          for (int64_t p = 0; p < half; ++p) {
            const float u = in[p * step], v = in[p * step + other];
            out[p * step] = u * cosine[p] - v * sine[p];
            out[p * step + other] = v * cosine[p] + u * sine[p];
          }
        }
        store_tile(y.dtype, out, y.data, i * d, d);
      }
    });
  });
}

bool float_first(const std::vector<DType>& in, const std::vector<DType>& out) {
  for (const auto* list : {&in, &out})
    for (const DType dtype : *list)
      if (dtype == DType::kF64 || dtype == DType::kF16) return false;
  return in.empty() || is_float(in[0]);
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_gather, bind_gather, nullptr},       {OpCode::k_gather_grad, bind_gather_grad, float_first},
    {OpCode::k_one_hot, bind_one_hot, nullptr},     {OpCode::k_cumsum, bind_cumsum, nullptr},
    {OpCode::k_top_k, bind_top_k, nullptr},         {OpCode::k_top_k_grad, bind_top_k_grad, float_first},
    {OpCode::k_embedding, bind_embedding, nullptr}, {OpCode::k_embedding_grad, bind_embedding_grad, float_first},
    {OpCode::k_rotary, bind_rotary, float_first},
};

}  // namespace

std::span<const KernelEntry> indexing_kernels() { return kTable; }

}  // namespace whale::cpu
