// Ops that only move elements, whatever their type, and the two sources, fill and iota.
#include <cstring>

#include "base/saturate.h"
#include "device/cpu/operands.h"
#include "device/cpu/parallel.h"
#include "device/cpu/strided_copy.h"
#include "device/cpu/tile.h"
#include "device/global_index.h"

namespace whale::cpu {
namespace {

char* at(const Operand& x, int64_t element = 0) { return static_cast<char*>(x.data) + element * size_of(x.dtype); }

// One copy with fixed ends.
std::unique_ptr<Kernel> copy_kernel(CpuDevice& device, const Operand& element, const Dims& extent,
                                    const Dims& from_strides, const Dims& to_strides, const void* from, void* to) {
  const StridedCopy copy(size_of(element.dtype), extent, from_strides, to_strides);
  return make_kernel(0, [=, threads = device.threads()](char*) { copy.run(threads, from, to); });
}

// A value of any type, written to a whole tensor. Zero takes the short way.
std::unique_ptr<Kernel> fill_kernel(CpuDevice& device, const Operand& y, double value) {
  char cell[8] = {};
  const auto f = static_cast<float>(value);
  const auto i = saturated<int64_t>(value);
  if (y.dtype == DType::kF64)
    std::memcpy(cell, &value, 8);
  else if (is_integer(y.dtype))
    store_tile(y.dtype, &i, cell, 0, 1);
  else
    store_tile(y.dtype, &f, cell, 0, 1);
  uint64_t bits;
  std::memcpy(&bits, cell, 8);
  const int64_t bytes = size_of(y.dtype), n = count(y);
  if (bits == 0) {
    return make_kernel(0, [=, to = at(y), threads = device.threads()](char*) {
      parallel_for(threads, n * bytes, 1 << 17,
                   [=](int64_t b, int64_t e) { std::memset(to + b, 0, static_cast<size_t>(e - b)); });
    });
  }
  const StridedCopy copy(bytes, {n}, {0}, {1});
  return make_kernel(0, [=, to = at(y), threads = device.threads()](char*) { copy.run(threads, &bits, to); });
}

std::unique_ptr<Kernel> two(std::unique_ptr<Kernel> a, std::unique_ptr<Kernel> b) {
  auto both = std::make_unique<SequenceKernel>();
  both->add(std::move(a));
  both->add(std::move(b));
  return both;
}

std::unique_ptr<Kernel> bind_reshape(const KernelSpec& spec, CpuDevice& device) {
  if (spec.in[0].data == spec.out[0].data) return nothing_to_do();
  return copy_kernel(device, spec.in[0], {count(spec.in[0])}, {1}, {1}, at(spec.in[0]), at(spec.out[0]));
}

std::unique_ptr<Kernel> bind_transpose(const KernelSpec& spec, CpuDevice& device) {
  const Ints& perm = attr_ints(*spec.attrs, "perm");
  const Dims from = row_major_strides(spec.in[0].dims);
  Dims strides;
  for (const int64_t p : perm)
    strides.push_back(from.at(static_cast<size_t>(p < 0 ? p + static_cast<int64_t>(perm.size()) : p)));
  return copy_kernel(device, spec.in[0], spec.out[0].dims, strides, row_major_strides(spec.out[0].dims), at(spec.in[0]),
                     at(spec.out[0]));
}

// Where the block of starts and strides lies in a tensor of these dimensions.
struct Block {
  int64_t begin = 0;
  Dims strides;
  Block(const Attrs& attrs, const Dims& dims) : strides(row_major_strides(dims)) {
    const Ints& starts = attr_ints(attrs, "starts");
    const Ints& steps = attr_ints(attrs, "strides");
    for (size_t d = 0; d < dims.size(); ++d) {
      if (d < starts.size()) begin += starts[d] * strides[d];
      if (d < steps.size()) strides[d] *= steps[d];
    }
  }
};

std::unique_ptr<Kernel> bind_slice(const KernelSpec& spec, CpuDevice& device) {
  const Operand &x = spec.in[0], &y = spec.out[0];
  const Block block(*spec.attrs, x.dims);
  return copy_kernel(device, x, y.dims, block.strides, row_major_strides(y.dims), at(x, block.begin), at(y));
}

std::unique_ptr<Kernel> bind_slice_grad(const KernelSpec& spec, CpuDevice& device) {
  const Operand &dy = spec.in[0], &dx = spec.out[0];
  const Block block(*spec.attrs, dx.dims);
  return two(fill_kernel(device, dx, 0),
             copy_kernel(device, dy, dy.dims, row_major_strides(dy.dims), block.strides, at(dy), at(dx, block.begin)));
}

std::unique_ptr<Kernel> bind_pad(const KernelSpec& spec, CpuDevice& device) {
  const Operand &x = spec.in[0], &y = spec.out[0];
  const Ints& low = attr_ints(*spec.attrs, "low");
  const Dims strides = row_major_strides(y.dims);
  int64_t begin = 0;
  for (size_t d = 0; d < strides.size() && d < low.size(); ++d) begin += low[d] * strides[d];
  return two(fill_kernel(device, y, attr_float(*spec.attrs, "value")),
             copy_kernel(device, x, x.dims, row_major_strides(x.dims), strides, at(x), at(y, begin)));
}

std::unique_ptr<Kernel> bind_concat(const KernelSpec& spec, CpuDevice& device) {
  const Operand& y = spec.out[0];
  const AxisView whole = view_axis(y.dims, attr_int(*spec.attrs, "axis"));
  const int64_t run = whole.extent * whole.inner;
  auto parts = std::make_unique<SequenceKernel>();
  int64_t begin = 0;
  for (const Operand& x : spec.in) {
    const AxisView v = view_axis(x.dims, attr_int(*spec.attrs, "axis"));
    const int64_t part = v.extent * v.inner;
    if (count(x) > 0) parts->add(copy_kernel(device, x, {v.outer, part}, {part, 1}, {run, 1}, at(x), at(y, begin)));
    begin += part;
  }
  return parts;
}

std::unique_ptr<Kernel> bind_broadcast_to(const KernelSpec& spec, CpuDevice& device) {
  const Operand &x = spec.in[0], &y = spec.out[0];
  const Dims from = row_major_strides(x.dims);
  Dims strides(y.dims.size(), 0);
  const size_t lead = y.dims.size() - x.dims.size();
  for (size_t d = 0; d < x.dims.size(); ++d)
    if (x.dims[d] != 1) strides[lead + d] = from[d];
  return copy_kernel(device, x, y.dims, strides, row_major_strides(y.dims), at(x), at(y));
}

std::unique_ptr<Kernel> bind_local_slice(const KernelSpec& spec, CpuDevice& device) {
  const Operand &x = spec.in[0], &y = spec.out[0];
  const Ints& sub_axis = attr_ints(*spec.attrs, "sub_axis");  // dim, outer, inner
  const AxisView v = view_axis(x.dims, sub_axis.at(0));
  const int64_t begin = attr_int(*spec.attrs, "begin"), end = attr_int(*spec.attrs, "end");
  const int64_t outer = v.outer * sub_axis.at(1), inner = v.inner * sub_axis.at(2),
                extent = v.extent / (sub_axis.at(1) * sub_axis.at(2));
  const int64_t run = (end - begin) * inner;
  return copy_kernel(device, x, {outer, run}, {extent * inner, 1}, {run, 1}, at(x, begin * inner), at(y));
}

std::unique_ptr<Kernel> bind_fill(const KernelSpec& spec, CpuDevice& device) {
  return fill_kernel(device, spec.out[0], attr_float(*spec.attrs, "value"));
}

std::unique_ptr<Kernel> bind_iota(const KernelSpec& spec, CpuDevice&) {
  const Operand y = spec.out[0];
  auto dim = attr_int(*spec.attrs, "dim");
  if (dim < 0) dim += static_cast<int64_t>(y.dims.size());
  const AxisView v = view_axis(y.dims, dim);
  const GlobalIndex global(spec.box, y.dims);
  return make_kernel(0, [=, row = spec.row](char*) {
    const int64_t batch = row ? row->batch_begin : 0;
    for (int64_t i = 0, n = count(y); i < n; ++i) {
      const int64_t value = global.coordinate(static_cast<int>(dim), i / v.inner % v.extent, batch);
      const auto f = static_cast<float>(value);
      if (is_integer(y.dtype))
        store_tile(y.dtype, &value, y.data, i, 1);
      else
        store_tile(y.dtype, &f, y.data, i, 1);
    }
  });
}

// The f64 statistics of batch norm too, which a split hands on in parts and exact mode gathers.
bool but_f16(const std::vector<DType>& in, const std::vector<DType>& out) {
  const auto is_f16 = [](DType dtype) { return dtype == DType::kF16; };
  return std::ranges::none_of(in, is_f16) && std::ranges::none_of(out, is_f16);
}

constexpr KernelEntry kTable[] = {
    {OpCode::k_reshape, bind_reshape, but_f16},
    {OpCode::k_transpose, bind_transpose, but_f16},
    {OpCode::k_slice, bind_slice, but_f16},
    {OpCode::k_slice_grad, bind_slice_grad, but_f16},
    {OpCode::k_concat, bind_concat, but_f16},
    {OpCode::k_pad, bind_pad, but_f16},
    {OpCode::k_broadcast_to, bind_broadcast_to, but_f16},
    {OpCode::k_local_slice, bind_local_slice, but_f16},
    {OpCode::k_fill, bind_fill, but_f16},
    {OpCode::k_iota, bind_iota, nullptr},
};

}  // namespace

std::span<const KernelEntry> movement_kernels() { return kTable; }

}  // namespace whale::cpu
