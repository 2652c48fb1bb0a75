// The kernels of batch norm: statistics in f64, in chunks fixed by the shape and added in order; two streaming passes a
// direction.
#include "device/cpu/batch_norm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#include "device/batch_norm_groups.h"
#include "device/cpu/bf16.h"
#include "device/cpu/device.h"
#include "device/cpu/function_kernel.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {
namespace {

constexpr int64_t kLeast = 8192;  // elements a thread is worth waking for

struct Shape {
  int64_t c, period, elements;
  int64_t periods() const { return (elements + period - 1) / period; }
};
Shape shape_of(const Operand& x) {
  const int64_t c = x.dims.back();
  return {c, c == 0 ? 1 : channel_period(c), element_count(x.dims)};
}

float value(const Operand& operand, int64_t i) {
  return operand.dtype == DType::kBF16 ? to_float(static_cast<const Bf16*>(operand.data)[i])
                                       : static_cast<const float*>(operand.data)[i];
}
void set(const Operand& operand, int64_t i, double x) {
  if (operand.dtype == DType::kBF16)
    static_cast<Bf16*>(operand.data)[i] = to_bf16(static_cast<float>(x));
  else
    static_cast<float*>(operand.data)[i] = static_cast<float>(x);
}
Operand operand_at(const std::vector<Operand>& operands, size_t i) {
  return i < operands.size() ? operands[i] : Operand();
}

// Mean and reciprocal standard deviation of a channel, from the sums.
struct Statistics {
  const double* sums;
  int64_t c;
  double count, epsilon;
  Statistics(const KernelSpec& spec, size_t operand)
      : sums(static_cast<const double*>(spec.in[operand].data)),
        c(spec.in[operand].dims.back()),
        count(static_cast<double>(attr_int(*spec.attrs, "count"))),
        epsilon(attr_float(*spec.attrs, "epsilon", 1e-5)) {}
  double mean(int64_t i) const { return sums[i] / count; }
  double variance(int64_t i) const { return std::max(sums[c + i] / count - mean(i) * mean(i), 0.0); }
  double rstd(int64_t i) const { return 1 / std::sqrt(variance(i) + epsilon); }
};

// `arrays` arrays of one period, of which the first c entries are given; the rest repeats them.
size_t coefficient_bytes(const Shape& s, int arrays) { return static_cast<size_t>(s.period * arrays) * sizeof(float); }
void repeat(const Shape& s, float* coefficients, int arrays) {
  for (int a = 0; a < arrays; ++a)
    for (int64_t i = s.c; i < s.period; ++i) coefficients[a * s.period + i] = coefficients[a * s.period + i - s.c];
}

// pass(begin, end) over all elements, cut at periods.
template <class F>
void stream(int threads, const Shape& s, F pass) {
  parallel_for(threads, s.periods(), std::max<int64_t>(1, kLeast / s.period),
               [&](int64_t first, int64_t last) { pass(first * s.period, std::min(last * s.period, s.elements)); });
}

// The sums of every chunk, then their total in order: to[2, c].
struct ChunkedSums {
  Shape shape;
  int threads;
  int64_t chunks;
  ChunkedSums(const Shape& s, const CpuDevice& device)
      : shape(s), threads(device.threads()), chunks(std::clamp<int64_t>(s.elements / 16384, 1, 64)) {
    chunks = std::max<int64_t>(1, std::min(chunks, s.periods()));
  }
  size_t scratch_bytes() const { return static_cast<size_t>(2 * shape.period * chunks) * sizeof(double); }
  template <class F>
  void run(double* partial, double* to, F sum) const {
    const int64_t periods = shape.periods(), size = 2 * shape.period;
    parallel_for(shape.elements < 2 * kLeast ? 1 : threads, chunks, 1, [&](int64_t first, int64_t last) {
      for (int64_t k = first; k < last; ++k)
        sum(periods * k / chunks * shape.period, std::min(periods * (k + 1) / chunks * shape.period, shape.elements),
            partial + k * size);
    });
    for (int64_t k = 1; k < chunks; ++k)
      for (int64_t i = 0; i < size; ++i) partial[i] += partial[k * size + i];
    for (int64_t half = 0; half < 2; ++half)
      for (int64_t i = 0; i < shape.c; ++i) {
        double total = 0;
        for (int64_t j = i; j < shape.period; j += shape.c) total += partial[half * shape.period + j];
        to[half * shape.c + i] = total;
      }
  }
};

std::unique_ptr<Kernel> bind_stats(const KernelSpec& spec, CpuDevice& device) {
  const Shape s = shape_of(spec.in[0]);
  if (s.c == 0) return nothing_to_do();
  auto* to = static_cast<double*>(spec.out[0].data);
  const ChunkedSums sums(s, device);
  const ChannelPass pass{.dtype = spec.in[0].dtype, .period = s.period, .x = spec.in[0].data};
  return make_kernel(sums.scratch_bytes(), [=](char* scratch) {
    sums.run(reinterpret_cast<double*>(scratch), to,
             [&](int64_t begin, int64_t end, double* partial) { sum_squares(pass, begin, end, partial); });
  });
}

// coefficient(i) fills mean, scale, shift of channel i.
template <class F>
std::unique_ptr<Kernel> bind_normalize(const KernelSpec& spec, const CpuDevice& device, const Operand& residual,
                                       F coefficient) {
  const Shape s = shape_of(spec.in[0]);
  if (s.elements == 0) return nothing_to_do();
  const ChannelPass shared{.dtype = spec.in[0].dtype,
                           .period = s.period,
                           .x = spec.in[0].data,
                           .residual = residual.data,
                           .out = spec.out[0].data,
                           .relu = attr_bool(*spec.attrs, "relu")};
  return make_kernel(coefficient_bytes(s, 3), [=, threads = device.threads()](char* scratch) {
    auto* f = reinterpret_cast<float*>(scratch);
    for (int64_t i = 0; i < s.c; ++i) coefficient(i, f[i], f[s.period + i], f[2 * s.period + i]);
    repeat(s, f, 3);
    ChannelPass pass = shared;
    pass.mean = f, pass.scale = f + s.period, pass.shift = f + 2 * s.period;
    stream(threads, s, [&](int64_t begin, int64_t end) { normalize(pass, begin, end); });
  });
}

std::unique_ptr<Kernel> bind_apply(const KernelSpec& spec, CpuDevice& device) {
  const Statistics statistics(spec, 1);
  return bind_normalize(spec, device, operand_at(spec.in, 4),
                        [=, gamma = spec.in[2], beta = spec.in[3]](int64_t i, float& mean, float& scale, float& shift) {
                          mean = static_cast<float>(statistics.mean(i));
                          scale = static_cast<float>(statistics.rstd(i) * value(gamma, i));
                          shift = value(beta, i);
                        });
}

std::unique_ptr<Kernel> bind_inference(const KernelSpec& spec, CpuDevice& device) {
  const double epsilon = attr_float(*spec.attrs, "epsilon", 1e-5);
  return bind_normalize(spec, device, Operand(),
                        [=, gamma = spec.in[1], beta = spec.in[2], running_mean = spec.in[3], running_var = spec.in[4]](
                            int64_t i, float& mean, float& scale, float& shift) {
                          mean = value(running_mean, i);
                          scale =
                              static_cast<float>(value(gamma, i) / std::sqrt(double{value(running_var, i)} + epsilon));
                          shift = value(beta, i);
                        });
}

ChannelPass gradient_pass(const KernelSpec& spec, const Shape& s, size_t mask) {
  const bool relu = attr_bool(*spec.attrs, "relu");
  return {.dtype = spec.in[1].dtype,
          .period = s.period,
          .x = spec.in[1].data,
          .dy = spec.in[0].data,
          .y = relu ? operand_at(spec.in, mask).data : nullptr};
}

std::unique_ptr<Kernel> bind_grad_stats(const KernelSpec& spec, CpuDevice& device) {
  const Shape s = shape_of(spec.in[1]);
  if (s.c == 0) return nothing_to_do();
  const Statistics statistics(spec, 2);
  auto* to = static_cast<double*>(spec.out[0].data);
  const ChunkedSums sums(s, device);
  const ChannelPass shared = gradient_pass(spec, s, 3);
  return make_kernel(sums.scratch_bytes() + coefficient_bytes(s, 1), [=](char* scratch) {
    auto* mean = reinterpret_cast<float*>(scratch + sums.scratch_bytes());
    for (int64_t i = 0; i < s.c; ++i) mean[i] = static_cast<float>(statistics.mean(i));
    repeat(s, mean, 1);
    ChannelPass pass = shared;
    pass.mean = mean;
    sums.run(reinterpret_cast<double*>(scratch), to,
             [&](int64_t begin, int64_t end, double* partial) { sum_grad(pass, begin, end, partial); });
    for (int64_t i = 0; i < s.c; ++i) to[s.c + i] *= statistics.rstd(i);
  });
}

std::unique_ptr<Kernel> bind_grad(const KernelSpec& spec, CpuDevice& device) {
  const Shape s = shape_of(spec.in[1]);
  if (s.elements == 0) return nothing_to_do();
  const Statistics statistics(spec, 2);
  const auto* sums = static_cast<const double*>(spec.in[4].data);
  ChannelPass shared = gradient_pass(spec, s, 5);
  shared.out = spec.out[0].data;
  if (attr_bool(*spec.attrs, "residual")) shared.second = spec.out[1].data;
  return make_kernel(coefficient_bytes(s, 4), [=, gamma = spec.in[3], threads = device.threads()](char* scratch) {
    auto* f = reinterpret_cast<float*>(scratch);
    for (int64_t i = 0; i < s.c; ++i) {
      const double rstd = statistics.rstd(i), scale = rstd * value(gamma, i);
      f[i] = static_cast<float>(statistics.mean(i));
      f[s.period + i] = static_cast<float>(scale);
      f[2 * s.period + i] = static_cast<float>(-scale * sums[i] / statistics.count);
      f[3 * s.period + i] = static_cast<float>(-scale * rstd * sums[s.c + i] / statistics.count);
    }
    repeat(s, f, 4);
    ChannelPass pass = shared;
    pass.mean = f, pass.scale = f + s.period, pass.shift = f + 2 * s.period, pass.slope = f + 3 * s.period;
    stream(threads, s, [&](int64_t begin, int64_t end) { normalize_grad(pass, begin, end); });
  });
}

std::unique_ptr<Kernel> bind_moments(const KernelSpec& spec, CpuDevice&) {
  const Statistics first(spec, 0);
  const int64_t here = spec.in[0].dims[0];
  const auto groups = static_cast<double>(attr_int(*spec.attrs, "groups", 1));
  return make_kernel(0, [=, to = spec.out[0]](char*) {
    for (int64_t i = 0; i < first.c; ++i) {
      double mean = 0, variance = 0;
      Statistics s = first;
      for (int64_t g = 0; g < here; ++g, s.sums += 2 * s.c)
        mean += s.mean(i), variance += s.variance(i) * s.count / std::max(s.count - 1, 1.0);
      set(to, i, mean / groups);
      set(to, s.c + i, variance / groups);
    }
  });
}

std::unique_ptr<Kernel> bind_running(const KernelSpec& spec, CpuDevice&) {
  const int64_t c = spec.in[2].dims.back();
  const double momentum = attr_float(*spec.attrs, "momentum", 0.1);
  return make_kernel(0, [=, means = spec.in[0], variances = spec.in[1], moments = spec.in[2], new_means = spec.out[0],
                         new_variances = spec.out[1], scale = spec.in.size() > 3 ? spec.in[3] : Operand{}](char*) {
    if (scale.present() && std::isnan(value(scale, 0))) return;  // in place: nothing changes
    for (int64_t i = 0; i < c; ++i) {
      set(new_means, i, (1 - momentum) * double{value(means, i)} + momentum * value(moments, i));
      set(new_variances, i, (1 - momentum) * double{value(variances, i)} + momentum * value(moments, c + i));
    }
  });
}

// A kernel for each group; they share their scratch.
class GroupKernels final : public Kernel {
 public:
  explicit GroupKernels(std::vector<std::unique_ptr<Kernel>> kernels) : kernels_(std::move(kernels)) {}
  void run() override {
    for (const auto& kernel : kernels_) kernel->run();
  }
  size_t scratch_bytes() const override {
    size_t most = 0;
    for (const auto& kernel : kernels_) most = std::max(most, kernel->scratch_bytes());
    return most;
  }
  void set_scratch(void* scratch) override {
    for (const auto& kernel : kernels_) kernel->set_scratch(scratch);
  }

 private:
  std::vector<std::unique_ptr<Kernel>> kernels_;
};

template <std::unique_ptr<Kernel> (*bind)(const KernelSpec&, CpuDevice&), const GroupOperands& operands>
std::unique_ptr<Kernel> each_group(const KernelSpec& spec, CpuDevice& device) {
  std::vector<std::unique_ptr<Kernel>> kernels;
  for (const KernelSpec& group : by_group(spec, operands)) kernels.push_back(bind(group, device));
  if (kernels.size() == 1) return std::move(kernels[0]);
  return std::make_unique<GroupKernels>(std::move(kernels));
}

// f32 or bf16, with the statistics in f64.
bool supports(const std::vector<DType>& in, const std::vector<DType>& out) {
  for (const auto* list : {&in, &out})
    for (const DType dtype : *list)
      if (dtype != DType::kF32 && dtype != DType::kBF16 && dtype != DType::kF64) return false;
  return !in.empty() && in[0] != DType::kF64;
}

bool supports_moments(const std::vector<DType>& in, const std::vector<DType>& out) {
  return in.size() == 1 && in[0] == DType::kF64 && out.size() == 1 && (out[0] == DType::kF32 || out[0] == DType::kBF16);
}

constexpr KernelEntry kEntries[] = {
    {OpCode::k_batch_stats, each_group<bind_stats, kStatsGroups>, supports},
    {OpCode::k_batch_norm_apply, each_group<bind_apply, kApplyGroups>, supports},
    {OpCode::k_batch_norm_grad_stats, each_group<bind_grad_stats, kGradStatsGroups>, supports},
    {OpCode::k_batch_norm_grad, each_group<bind_grad, kGradGroups>, supports},
    {OpCode::k_batch_norm_moments, bind_moments, supports_moments},
    {OpCode::k_batch_norm_running, bind_running, supports},
    {OpCode::k_batch_norm_inference, bind_inference, supports},
};

}  // namespace

std::span<const KernelEntry> batch_norm_kernels() { return kEntries; }

}  // namespace whale::cpu
