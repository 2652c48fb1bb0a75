// The table of CPU kernels: one row an op and family of types. A family's file defines its rows as a span; table.cc
// lists the spans.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "device/device.h"

namespace whale::cpu {

class CpuDevice;

struct KernelEntry {
  OpCode op;
  // The choice of algorithm is fixed here, from shapes and types only.
  std::unique_ptr<Kernel> (*bind)(const KernelSpec& spec, CpuDevice& device);
  // Types of the operands that are present, in order. Null: anything but f64 and f16.
  bool (*supports)(const std::vector<DType>& in, const std::vector<DType>& out) = nullptr;
};

// One function a family file.
std::span<const KernelEntry> matmul_kernels();
std::span<const KernelEntry> conv_kernels();
std::span<const KernelEntry> pool_kernels();
std::span<const KernelEntry> batch_norm_kernels();
std::span<const KernelEntry> wide_kernels();
std::span<const KernelEntry> elementwise_kernels();
std::span<const KernelEntry> reduce_kernels();
std::span<const KernelEntry> movement_kernels();
std::span<const KernelEntry> indexing_kernels();
std::span<const KernelEntry> softmax_kernels();
std::span<const KernelEntry> optimizer_kernels();
std::span<const KernelEntry> attention_kernels();
std::span<const KernelEntry> norm_kernels();
std::span<const KernelEntry> embedding_bag_kernels();
std::span<const KernelEntry> pairwise_dot_kernels();
std::span<const KernelEntry> row_update_kernels();
std::span<const KernelEntry> moe_kernels();

// The row for these types; null: none.
const KernelEntry* find_kernel(OpCode op, const std::vector<DType>& in, const std::vector<DType>& out);

}  // namespace whale::cpu
