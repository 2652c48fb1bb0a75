// Max and average pooling, forward and backward. Both directions gather: for every position of the result, the list of
// taps (which positions of the operand, in order of the window) is worked out at bind; it is the same for every sample.
#include "device/cpu/pool.h"

#include <algorithm>

#include "base/error.h"
#include "device/cpu/device.h"
#include "device/cpu/function_kernel.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {
namespace {

// The taps of all positions of the result, one after the other.
struct TapList {
  std::vector<int64_t> begin{0};  // per position: its range in the arrays below
  std::vector<int64_t> from;      // position of the operand
  std::vector<int32_t> number;    // of the tap in the window, row-major
  std::vector<float> scale;       // average: 1 / (elements averaged) at the pooled position
  int64_t most = 0;               // taps of one position
};

struct Window {
  Dims x, y;  // spatial
  Dims size, strides, low, high;
  int64_t inputs, outputs;
};

Window window_of(const Attrs& attrs, const Dims& x, const Dims& y) {
  Window w{
      Dims(x.begin() + 1, x.end() - 1), Dims(y.begin() + 1, y.end() - 1), attr_ints(attrs, "window"), {}, {}, {}, 1, 1};
  const auto &strides = attr_ints(attrs, "strides"), &padding = attr_ints(attrs, "padding");
  for (size_t i = 0; i < w.size.size(); ++i) {
    w.strides.push_back(strides.empty() ? w.size[i] : strides[i]);
    w.low.push_back(padding.empty() ? 0 : padding[2 * i]);
    w.high.push_back(padding.empty() ? 0 : padding[2 * i + 1]);
    w.inputs *= w.x[i];
    w.outputs *= w.y[i];
  }
  return w;
}

bool advance(Dims& at, const Dims& extents) {  // odometer, the last dimension fastest
  for (size_t i = at.size(); i-- > 0;) {
    if (++at[i] < extents[i]) return true;
    at[i] = 0;
  }
  return false;
}

// visit(output, input, tap number) for every pair, outputs ascending, taps ascending.
template <class Visit>
void each_pair(const Window& w, Visit visit) {
  if (w.inputs == 0 || w.outputs == 0) return;
  Dims out(w.y.size(), 0);
  int64_t output = 0;
  do {
    Dims tap(w.size.size(), 0);
    int32_t number = 0;
    do {
      int64_t input = 0;
      bool inside = true;
      for (size_t i = 0; i < tap.size() && inside; ++i) {
        const int64_t at = out[i] * w.strides[i] - w.low[i] + tap[i];
        inside = at >= 0 && at < w.x[i];
        input = input * w.x[i] + at;
      }
      if (inside) visit(output, input, number);
      ++number;
    } while (advance(tap, w.size));
    ++output;
  } while (advance(out, w.y));
}

// Gathers by output (forward) or by input (backward: every pooled position that saw it).
TapList taps_of(const Window& w, bool backward, bool include_pad) {
  int64_t whole = 1;
  for (const int64_t s : w.size) whole *= s;
  std::vector<int64_t> inside(static_cast<size_t>(w.outputs), 0);
  std::vector<int64_t> count(static_cast<size_t>(backward ? w.inputs : w.outputs), 0);
  each_pair(w, [&](int64_t output, int64_t input, int32_t) {
    ++inside[output];
    ++count[backward ? input : output];
  });
  TapList list;
  for (const int64_t c : count) {
    list.begin.push_back(list.begin.back() + c);
    list.most = std::max(list.most, c);
  }
  const auto total = static_cast<size_t>(list.begin.back());
  list.from.resize(total), list.number.resize(total), list.scale.resize(total);
  std::vector<int64_t> next(list.begin.begin(), list.begin.end() - 1);
  each_pair(w, [&](int64_t output, int64_t input, int32_t number) {
    const auto at = static_cast<size_t>(next[backward ? input : output]++);
    list.from[at] = backward ? output : input;
    list.number[at] = number;
    list.scale[at] = 1.0f / static_cast<float>(include_pad ? whole : inside[output]);
  });
  return list;
}

// Calls f(position of the result over all samples, taps' addresses, their first index in the list, count).
template <class F>
void each_position(const CpuDevice& device, const TapList& list, const char* from, int64_t samples, int64_t positions,
                   int64_t operand_positions, int64_t row_bytes, char* scratch, F f) {
  const int64_t channels_work =
      std::max<int64_t>(1, 4096 / std::max<int64_t>(1, row_bytes * std::max<int64_t>(1, list.most) / 4));
  parallel_for(device.threads(), samples * positions, channels_work, [&](int64_t first, int64_t last) {
    auto** taps = reinterpret_cast<const void**>(scratch) + list.most * omp_get_thread_num();
    for (int64_t p = first; p < last; ++p) {
      const int64_t sample = p / positions;
      const auto begin = static_cast<size_t>(list.begin[p % positions]);
      const auto end = static_cast<size_t>(list.begin[static_cast<size_t>(p % positions) + 1]);
      for (size_t t = begin; t < end; ++t)
        taps[t - begin] = from + (sample * operand_positions + list.from[t]) * row_bytes;
      f(p, taps, begin, static_cast<int64_t>(end - begin));
    }
  });
}

struct Gather {
  const CpuDevice& device;
  TapList list;
  int64_t samples, positions, operand_positions, channels, row_bytes;
  DType dtype;
  const char* from;
  char* to;
  Gather(const KernelSpec& spec, const CpuDevice& cpu, bool backward)
      : device(cpu),
        samples(spec.out[0].dims.front()),
        channels(spec.out[0].dims.back()),
        row_bytes(channels * size_of(spec.in[0].dtype)),
        dtype(spec.in[0].dtype),
        from(static_cast<const char*>(spec.in[0].data)),
        to(static_cast<char*>(spec.out[0].data)) {
    const Dims &x = backward ? spec.out[0].dims : spec.in[0].dims, &y = backward ? spec.in[0].dims : spec.out[0].dims;
    const Window w = window_of(*spec.attrs, x, y);
    list = taps_of(w, backward, attr_bool(*spec.attrs, "include_pad"));
    positions = backward ? w.inputs : w.outputs;
    operand_positions = backward ? w.outputs : w.inputs;
  }
  size_t scratch_bytes() const {
    return static_cast<size_t>(std::max<int64_t>(1, list.most) * device.threads()) * sizeof(void*);
  }
  template <class F>
  void run(char* scratch, F f) const {
    each_position(device, list, from, samples, positions, operand_positions, row_bytes, scratch, f);
  }
};

std::unique_ptr<Kernel> bind_max(const KernelSpec& spec, CpuDevice& device) {
  auto* index = spec.out.size() > 1 ? static_cast<int32_t*>(spec.out[1].data) : nullptr;
  Gather g(spec, device, false);
  const size_t bytes = g.scratch_bytes();
  return make_kernel(bytes, [index, g = std::move(g)](char* scratch) {
    g.run(scratch, [&](int64_t p, const void* const* taps, size_t begin, int64_t count) {
      pool_max(g.dtype, taps, g.list.number.data() + begin, count, g.channels, g.to + p * g.row_bytes,
               index ? index + p * g.channels : nullptr);
    });
  });
}

std::unique_ptr<Kernel> bind_sum(const KernelSpec& spec, CpuDevice& device, bool backward) {
  Gather g(spec, device, backward);
  const size_t bytes = g.scratch_bytes();
  return make_kernel(bytes, [g = std::move(g)](char* scratch) {
    g.run(scratch, [&](int64_t p, const void* const* taps, size_t begin, int64_t count) {
      pool_sum(g.dtype, taps, g.list.scale.data() + begin, count, g.channels, g.to + p * g.row_bytes);
    });
  });
}
std::unique_ptr<Kernel> bind_average(const KernelSpec& spec, CpuDevice& device) {
  return bind_sum(spec, device, false);
}
std::unique_ptr<Kernel> bind_average_grad(const KernelSpec& spec, CpuDevice& device) {
  return bind_sum(spec, device, true);
}

std::unique_ptr<Kernel> bind_max_grad(const KernelSpec& spec, CpuDevice& device) {
  const auto* index = static_cast<const int32_t*>(spec.in[1].data);
  Gather g(spec, device, true);
  const size_t taps_bytes = g.scratch_bytes();
  return make_kernel(2 * taps_bytes, [index, taps_bytes, g = std::move(g)](char* scratch) {
    auto** rows = reinterpret_cast<const int32_t**>(scratch + taps_bytes);
    g.run(scratch, [&](int64_t p, const void* const* taps, size_t begin, int64_t count) {
      const int32_t** mine = rows + g.list.most * omp_get_thread_num();
      const int64_t sample = p / g.positions;
      for (int64_t t = 0; t < count; ++t)
        mine[t] = index + (sample * g.operand_positions + g.list.from[begin + static_cast<size_t>(t)]) * g.channels;
      pool_max_grad(g.dtype, taps, mine, g.list.number.data() + begin, count, g.channels, g.to + p * g.row_bytes);
    });
  });
}

constexpr KernelEntry kEntries[] = {
    {OpCode::k_max_pool, bind_max},
    {OpCode::k_max_pool_grad, bind_max_grad},
    {OpCode::k_avg_pool, bind_average},
    {OpCode::k_avg_pool_grad, bind_average_grad},
};

}  // namespace

std::span<const KernelEntry> pool_kernels() { return kEntries; }

}  // namespace whale::cpu
