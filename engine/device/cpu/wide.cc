// The f64 statistics of batch norm on their way to parameters: the few ops that compute with them; movement.cc has
// those that move them. Their tensors are as small as a row of channels, so plain loops do; other f64 arithmetic stays
// with the reference device. And what reshards put together with the arithmetic of reductions.
#include <algorithm>
#include <cstring>

#include "device/cpu/bf16.h"
#include "device/cpu/device.h"
#include "device/cpu/function_kernel.h"
#include "ops/fused.h"

namespace whale::cpu {
namespace {

bool wide_only(const std::vector<DType>& in, const std::vector<DType>& out) {
  for (const auto* list : {&in, &out})
    for (const DType dtype : *list)
      if (dtype != DType::kF64) return false;
  return true;
}
bool from_or_to_wide(const std::vector<DType>& in, const std::vector<DType>& out) {
  const auto known = [](DType d) { return d == DType::kF64 || d == DType::kF32 || d == DType::kBF16; };
  return in.size() == 1 && out.size() == 1 && known(in[0]) && known(out[0]) &&
         (in[0] == DType::kF64 || out[0] == DType::kF64);
}

std::unique_ptr<Kernel> bind_copy(const KernelSpec& spec, CpuDevice&) {
  const size_t bytes = static_cast<size_t>(element_count(spec.out[0].dims)) * sizeof(double);
  return make_kernel(0, [from = spec.in[0].data, to = spec.out[0].data, bytes](char*) {
    if (from != to && bytes != 0) std::memmove(to, from, bytes);
  });
}

double read(const Operand& x, int64_t i) {
  switch (x.dtype) {
    case DType::kF64: return static_cast<const double*>(x.data)[i];
    case DType::kBF16: return double{to_float(static_cast<const Bf16*>(x.data)[i])};
    default: return double{static_cast<const float*>(x.data)[i]};
  }
}
void write(const Operand& x, int64_t i, double value) {
  switch (x.dtype) {
    case DType::kF64: static_cast<double*>(x.data)[i] = value; break;
    case DType::kBF16: static_cast<Bf16*>(x.data)[i] = to_bf16(static_cast<float>(value)); break;
    default: static_cast<float*>(x.data)[i] = static_cast<float>(value);
  }
}

std::unique_ptr<Kernel> bind_cast(const KernelSpec& spec, CpuDevice&) {
  return make_kernel(0, [x = spec.in[0], y = spec.out[0], n = element_count(spec.out[0].dims)](char*) {
    for (int64_t i = 0; i < n; ++i) write(y, i, read(x, i));
  });
}

std::unique_ptr<Kernel> bind_sum(const KernelSpec& spec, CpuDevice& device) {
  if (spec.in[0].dims != spec.out[0].dims || spec.in[1].dims != spec.out[0].dims)
    throw unimplemented("device cpu adds f64 tensors of equal shape only, found {} and {}", to_string(spec.in[0].dims),
                        to_string(spec.in[1].dims));
  const auto n = static_cast<size_t>(element_count(spec.out[0].dims));
  const std::string& given = attr_string(*spec.attrs, "combine");
  const Combine combine = given == "max" ? Combine::kMax : given == "min" ? Combine::kMin : Combine::kSum;
  return make_kernel(0, [&device, combine, a = spec.in[0].data, b = spec.in[1].data, to = spec.out[0].data, n](char*) {
    device.combine(combine, DType::kF64, to, a, b, n);
  });
}

Combine combine_of(OpCode code) {
  switch (code) {
    case OpCode::k_add: return Combine::kSum;
    case OpCode::k_maximum: return Combine::kMax;
    case OpCode::k_minimum: return Combine::kMin;
    default:
      throw unimplemented(
          "device cpu has no kernel for {} of f64 elements; use float32 for these values and the parameters behind "
          "them, or ref devices, which compute in any type",
          def(code).name);
  }
}

// What several groups of devices have is put together by a chain of these ops, which may have been made one.
std::unique_ptr<Kernel> bind_chain(const KernelSpec& spec, CpuDevice& device, const FusedBody& body) {
  struct Step {
    Combine combine;
    int a, b;  // numbered as in FusedStep
  };
  std::vector<Step> steps;
  for (const Operand& x : spec.in)
    if (x.dims != spec.out[0].dims)
      throw unimplemented("device cpu combines f64 tensors of equal shape only, found {} and {}", to_string(x.dims),
                          to_string(spec.out[0].dims));
  for (const FusedStep& step : body.steps)
    steps.push_back({combine_of(step.code), step.operands.at(0), step.operands.at(1)});
  const auto n = static_cast<size_t>(element_count(spec.out[0].dims));
  const size_t inputs = spec.in.size();
  // Every step has a place of its own: a result may lie where an operand of a later step does.
  return make_kernel(
      steps.size() * n * sizeof(double), [=, &device, in = spec.in, out = spec.out, to = body.results](char* scratch) {
        auto* const made = reinterpret_cast<double*>(scratch);
        const auto place = [&](int i) -> const void* {
          const auto at = static_cast<size_t>(i);
          return at < inputs ? in[at].data : made + (at - inputs) * n;
        };
        for (size_t s = 0; s < steps.size(); ++s)
          device.combine(steps[s].combine, DType::kF64, made + s * n, place(steps[s].a), place(steps[s].b), n);
        for (size_t r = 0; r < out.size(); ++r)
          if (n != 0) std::memcpy(out[r].data, place(to[r]), n * sizeof(double));
      });
}

std::unique_ptr<Kernel> bind_fused(const KernelSpec& spec, CpuDevice& device) {
  return bind_chain(spec, device, decode(*spec.attrs, static_cast<int>(spec.in.size())));
}
std::unique_ptr<Kernel> bind_extremum(const KernelSpec& spec, CpuDevice& device) {
  const FusedStep step{.code = spec.op, .dtype = DType::kF64, .operands = {0, 1}};
  return bind_chain(spec, device, {{step}, {2}});
}

std::unique_ptr<Kernel> bind_logaddexp(const KernelSpec& spec, CpuDevice& device) {
  const auto n = static_cast<size_t>(element_count(spec.out[0].dims));
  return make_kernel(0, [&device, a = spec.in[0], b = spec.in[1], to = spec.out[0], n](char*) {
    device.combine(Combine::kLogSumExp, to.dtype, to.data, a.data, b.data, n);
  });
}

constexpr KernelEntry kEntries[] = {
    {OpCode::k_cast, bind_cast, from_or_to_wide},  {OpCode::k_stop_gradient, bind_copy, wide_only},
    {OpCode::k_add, bind_sum, wide_only},          {OpCode::k_accumulate, bind_sum, wide_only},
    {OpCode::k_maximum, bind_extremum, wide_only}, {OpCode::k_minimum, bind_extremum, wide_only},
    {OpCode::k_fused, bind_fused, wide_only},      {OpCode::k_logaddexp, bind_logaddexp, nullptr},
};

}  // namespace

std::span<const KernelEntry> wide_kernels() { return kEntries; }

}  // namespace whale::cpu
