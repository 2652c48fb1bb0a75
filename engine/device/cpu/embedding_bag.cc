// Bags of rows of a table. Rows are fetched ahead: they lie anywhere in tables far larger than the caches.
#include <cstring>

#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"

namespace whale::cpu {
namespace {

constexpr int64_t kAhead = 12;   // rows
constexpr int64_t kTile = 1024;  // columns at a time

struct Bags {
  const void* ids;
  DType dtype;
  int64_t bag, total, rows, width, begin;
  float scale;
  int64_t id(int64_t i) const {  // -1: outside the table
    const int64_t at = dtype == DType::kI64 ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
    return at >= begin && at - begin < rows ? at - begin : -1;
  }
};

Bags bags_of(const KernelSpec& spec, const Operand& table) {
  const Operand& ids = spec.in[1];
  Bags b{};
  b.ids = ids.data, b.dtype = ids.dtype, b.bag = last_dim(ids), b.total = count(ids);
  b.rows = table.dims[0], b.width = table.dims[1];
  b.begin = attr_int(*spec.attrs, "row_begin");
  b.scale = attr_string(*spec.attrs, "mode") == "mean" ? 1 / static_cast<float>(std::max<int64_t>(b.bag, 1)) : 1;
  return b;
}

inline void fetch(const Bags& b, const char* table, int64_t row_bytes, int64_t i) {
  if (i >= b.total) return;
  const int64_t id = b.id(i);
  if (id < 0) return;
  const char* at = table + id * row_bytes;
  for (int64_t k = 0; k < row_bytes; k += 64) __builtin_prefetch(at + k);
}

// Bags of one row are copied.
void copy_rows(const Bags& b, const char* table, char* y, int64_t row_bytes, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < std::min(begin + kAhead, end); ++i) fetch(b, table, row_bytes, i);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) fetch(b, table, row_bytes, i + kAhead);
    const int64_t id = b.id(i);
    if (id >= 0)
      std::memcpy(y + i * row_bytes, table + id * row_bytes, static_cast<size_t>(row_bytes));
    else
      std::memset(y + i * row_bytes, 0, static_cast<size_t>(row_bytes));
  }
}

void pool_rows(const Bags& b, const Operand& table, const Operand& y, int64_t begin, int64_t end) {
  const auto* data = static_cast<const char*>(table.data);
  const int64_t row_bytes = b.width * size_of(table.dtype);
  alignas(64) float sum[kTile], row[kTile];
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t k = 0; k < b.bag; ++k) fetch(b, data, row_bytes, (i + 1) * b.bag + k);
    for (int64_t c = 0; c < b.width; c += kTile) {
      const int64_t n = std::min(kTile, b.width - c);
      std::fill_n(sum, n, 0.0f);
      for (int64_t k = 0; k < b.bag; ++k) {
        const int64_t id = b.id(i * b.bag + k);
        if (id < 0) continue;
        const float* x = row;
        if (table.dtype == DType::kF32)
          x = static_cast<const float*>(table.data) + id * b.width + c;
        else
          load_tile(table.dtype, table.data, id * b.width + c, row, n);
        for (int64_t e = 0; e < n; ++e) sum[e] += x[e];
      }
      for (int64_t e = 0; e < n; ++e) sum[e] *= b.scale;
      store_tile(y.dtype, sum, y.data, i * b.width + c, n);
    }
  }
}

std::unique_ptr<Kernel> bind_embedding_bag(const KernelSpec& spec, CpuDevice& device) {
  const Operand table = spec.in[0], y = spec.out[0];
  const Bags bags = bags_of(spec, table);
  const int64_t n = rows(y), row_bytes = bags.width * size_of(table.dtype);
  const int64_t least = std::max<int64_t>(1, 65536 / std::max<int64_t>(1, row_bytes * std::max<int64_t>(1, bags.bag)));
  return make_kernel(0, [=, threads = device.threads()](char*) {
    parallel_for(threads, n, least, [&](int64_t b, int64_t e) {
      if (bags.bag == 1)
        copy_rows(bags, static_cast<const char*>(table.data), static_cast<char*>(y.data), row_bytes, b, e);
      else
        pool_rows(bags, table, y, b, e);
    });
  });
}

// The dense gradient: sums in float, in the order of the ids; threads share columns, never one element.
void scatter(const Bags& b, const Operand& dy, float* to, int64_t c0, int64_t c1) {
  alignas(64) float row[kTile];
  for (int64_t i = 0; i < b.total; ++i) {
    const int64_t id = b.id(i);
    if (id < 0) continue;
    for (int64_t c = c0; c < c1; c += kTile) {
      const int64_t n = std::min(kTile, c1 - c), at = i / b.bag * b.width + c;
      const float* x = row;
      if (dy.dtype == DType::kF32)
        x = static_cast<const float*>(dy.data) + at;
      else
        load_tile(dy.dtype, dy.data, at, row, n);
      float* sum = to + id * b.width + c;
      for (int64_t e = 0; e < n; ++e) sum[e] += b.scale * x[e];
    }
  }
}

std::unique_ptr<Kernel> bind_embedding_bag_grad(const KernelSpec& spec, CpuDevice& device) {
  const Operand dy = spec.in[0], dtable = spec.out[0];
  const Bags bags = bags_of(spec, dtable);
  const int64_t elements = count(dtable);
  const bool direct = dtable.dtype == DType::kF32;
  const int threads = bags.total * bags.width < 32768 ? 1 : device.threads();
  const int64_t width = std::max<int64_t>(16, round_up((bags.width + threads - 1) / threads, 16));
  return make_kernel(direct ? 0 : static_cast<size_t>(elements * 4), [=](char* scratch) {
    auto* to = direct ? static_cast<float*>(dtable.data) : reinterpret_cast<float*>(scratch);
    parallel_for(threads, elements, 1 << 15,
                 [&](int64_t b, int64_t e) { std::memset(to + b, 0, static_cast<size_t>(e - b) * 4); });
    parallel_for(threads, (bags.width + width - 1) / width, 1,
                 [&](int64_t b, int64_t e) { scatter(bags, dy, to, b * width, std::min(bags.width, e * width)); });
    if (!direct)
      parallel_for(threads, elements, 1 << 14,
                   [&](int64_t b, int64_t e) { store_tile(dtable.dtype, to + b, dtable.data, b, e - b); });
  });
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_embedding_bag, bind_embedding_bag, nullptr},
    {OpCode::k_embedding_bag_grad, bind_embedding_bag_grad, nullptr},
};

}  // namespace

std::span<const KernelEntry> embedding_bag_kernels() { return kTable; }

}  // namespace whale::cpu
