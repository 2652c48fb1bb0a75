#include "device/cpu/kernels.h"

namespace whale::cpu {
namespace {

using Family = std::span<const KernelEntry> (*)();
constexpr Family kFamilies[] = {
    attention_kernels, indexing_kernels,      optimizer_kernels,    softmax_kernels,    movement_kernels, norm_kernels,
    reduce_kernels,    elementwise_kernels,   batch_norm_kernels,   matmul_kernels,     wide_kernels,     pool_kernels,
    conv_kernels,      embedding_bag_kernels, pairwise_dot_kernels, row_update_kernels, moe_kernels,
};

bool usual_types(const std::vector<DType>& in, const std::vector<DType>& out) {
  for (const auto* list : {&in, &out})
    for (const DType dtype : *list)
      if (dtype == DType::kF64 || dtype == DType::kF16) return false;
  return true;
}

}  // namespace

const KernelEntry* find_kernel(OpCode op, const std::vector<DType>& in, const std::vector<DType>& out) {
  for (const Family family : kFamilies)
    for (const KernelEntry& entry : family())
      if (entry.op == op && (entry.supports ? entry.supports(in, out) : usual_types(in, out))) return &entry;
  return nullptr;
}

}  // namespace whale::cpu
