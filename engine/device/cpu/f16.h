// float16 on the CPU: no kernel has arithmetic of its own for it; all of them run in f32 on copies.
#pragma once

#include "device/cpu/device.h"

namespace whale::cpu {

bool has_f16(const KernelSpec& spec);
void round_f16(float* x, int64_t n);  // to the nearest f16, as float
// The types with f32 in the place of f16.
std::vector<DType> without_f16(std::vector<DType> types);
// Binds the spec on f32 copies of its f16 operands; a fused op rounds after each step, so that fusing changes
// no number.
std::unique_ptr<Kernel> bind_on_copies(const KernelSpec& spec, CpuDevice& device);

}  // namespace whale::cpu
