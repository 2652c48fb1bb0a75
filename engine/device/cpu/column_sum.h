// Sums over the rows of a matrix: the gradient of a bias.
#pragma once

#include "device/cpu/device.h"

namespace whale::cpu {

// to[n] = sum over rows of from[rows, n], in f32, in an order that depends on the shape and the thread count only.
std::unique_ptr<Kernel> column_sum(const CpuDevice& device, const Operand& from, const Operand& to, int64_t rows,
                                   int64_t n);

}  // namespace whale::cpu
