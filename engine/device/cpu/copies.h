// Types that the processor has no arithmetic for, run in f32 on copies: float16 always, bfloat16 where the instructions
// for it are missing.
#pragma once

#include "device/cpu/device.h"

namespace whale::cpu {

bool has(const KernelSpec& spec, DType dtype);  // an operand of that type
void round_f16(float* x, int64_t n);            // to the nearest f16, as float
// The types with f32 in the place of f16.
std::vector<DType> without_f16(std::vector<DType> types);
// Binds the spec on f32 copies of its operands of type `narrow`; a fused op rounds after each step, so that fusing
// changes no number.
std::unique_ptr<Kernel> bind_on_copies(const KernelSpec& spec, CpuDevice& device, DType narrow);

using Bind = std::unique_ptr<Kernel> (*)(const KernelSpec& spec, CpuDevice& device);
// Binds with `bind`; on copies where an operand is bf16 and the processor is without it, or oneDNN has no such
// primitive.
std::unique_ptr<Kernel> bind_narrow(const KernelSpec& spec, CpuDevice& device, Bind bind);

// Types of a family that oneDNN runs: f32 and bf16, in any mixture.
bool f32_or_bf16(const std::vector<DType>& in, const std::vector<DType>& out);

}  // namespace whale::cpu
