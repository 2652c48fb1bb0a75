#include "device/cpu/column_sum.h"

#include <algorithm>
#include <cstring>

#include "device/cpu/bf16.h"
#include "device/cpu/function_kernel.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {
namespace {

constexpr int64_t kRows = 32;  // summed on their own first: shorter chains of rounding, and the sums stay in L1
constexpr int64_t kColumns = 512;

#define WHALE_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define WHALE_ADD_ROWS(NAME, T)                                                                   \
  WHALE_CLONES void NAME(const void* from, int64_t rows, int64_t stride, int64_t n, float* sum) { \
    float part[kColumns];                                                                         \
    for (int64_t r0 = 0; r0 < rows; r0 += kRows) {                                                \
      std::memset(part, 0, sizeof(float) * static_cast<size_t>(n));                               \
      for (int64_t r = r0; r < std::min(rows, r0 + kRows); ++r) {                                 \
        const T* row = static_cast<const T*>(from) + r * stride;                                  \
        _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) part[i] += to_float(row[i]);          \
      }                                                                                           \
      _Pragma("omp simd") for (int64_t i = 0; i < n; ++i) sum[i] += part[i];                      \
    }                                                                                             \
  }
WHALE_ADD_ROWS(add_rows_f32, float)
WHALE_ADD_ROWS(add_rows_bf16, Bf16)

void store(const Operand& to, int64_t at, const float* sum, int64_t n) {
  if (to.dtype == DType::kF32)
    std::memcpy(static_cast<float*>(to.data) + at, sum, sizeof(float) * static_cast<size_t>(n));
  else
    for (int64_t i = 0; i < n; ++i) static_cast<Bf16*>(to.data)[at + i] = to_bf16(sum[i]);
}

}  // namespace

std::unique_ptr<Kernel> column_sum(const CpuDevice& device, const Operand& from, const Operand& to, int64_t rows,
                                   int64_t n) {
  const auto add_rows = from.dtype == DType::kF32 ? add_rows_f32 : add_rows_bf16;
  const int threads = threads_for(device, static_cast<double>(rows * n));
  const int64_t size = size_of(from.dtype);
  // Each task sums a block of rows of a block of columns; the blocks of rows are added in order at the end.
  const int64_t columns = (n + kColumns - 1) / kColumns;
  const int64_t row_parts = columns >= threads ? 1 : threads;
  const int64_t part_rows = (rows + row_parts - 1) / row_parts;
  const size_t scratch = static_cast<size_t>(row_parts * n) * sizeof(float);
  return make_kernel(scratch, [=](char* memory) {
    auto* sums = reinterpret_cast<float*>(memory);
    parallel_tasks(threads, columns * row_parts, [&](int64_t task, int) {
      const int64_t c = task % columns * kColumns, width = std::min(kColumns, n - c);
      const int64_t part = task / columns, r = std::min(rows, part * part_rows), count = std::min(part_rows, rows - r);
      float* sum = sums + part * n + c;
      std::memset(sum, 0, sizeof(float) * static_cast<size_t>(width));
      add_rows(static_cast<const char*>(from.data) + (r * n + c) * size, count, n, width, sum);
    });
    for (int64_t part = 1; part < row_parts; ++part)
      for (int64_t i = 0; i < n; ++i) sums[i] += sums[part * n + i];
    store(to, 0, sums, n);
  });
}

}  // namespace whale::cpu
