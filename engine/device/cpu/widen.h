// Where this machine has no bf16 arithmetic for an op: run it in f32 on copies.
#pragma once

#include "device/cpu/device.h"

namespace whale::cpu {

using Bind = std::unique_ptr<Kernel> (*)(const KernelSpec& spec, CpuDevice& device);

// Binds with `bind`; when oneDNN has no such primitive and an operand is bf16, binds it again on f32 copies of the bf16
// operands.
std::unique_ptr<Kernel> bind_or_widen(const KernelSpec& spec, CpuDevice& device, Bind bind);

// Types of a family that oneDNN runs: f32 and bf16, in any mixture.
bool f32_or_bf16(const std::vector<DType>& in, const std::vector<DType>& out);

}  // namespace whale::cpu
