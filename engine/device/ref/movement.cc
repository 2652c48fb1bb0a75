// Ops that only move elements: bytes are copied, whatever the type. Extents come from the operands, which are local;
// attributes speak of the logical tensor.
#include <cstring>

#include "device/ref/table.h"
#include "device/ref/walk.h"

namespace whale::ref {
namespace {

struct Bytes {
  char* data;
  int64_t size;  // of one element
  explicit Bytes(const Operand& x) : data(static_cast<char*>(x.data)), size(size_of(x.dtype)) {}
  void copy(int64_t to, const Bytes& source, int64_t from, int64_t count = 1) const {
    if (count > 0) std::memmove(data + to * size, source.data + from * size, static_cast<size_t>(count * size));
  }
  void zero(int64_t count) const {
    if (count > 0) std::memset(data, 0, static_cast<size_t>(count * size));
  }
};

Body bind_reshape(const KernelSpec& spec) {
  const Bytes x(spec.in[0]), y(spec.out[0]);
  const int64_t count = element_count(spec.out[0].dims);
  return [=] {
    if (x.data != y.data) y.copy(0, x, 0, count);
  };
}

Body bind_transpose(const KernelSpec& spec) {
  const Bytes x(spec.in[0]), y(spec.out[0]);
  const Ints& perm = attr_ints(*spec.attrs, "perm");
  const Strides from = row_major_strides(spec.in[0].dims);
  Strides strides(perm.size());
  for (size_t d = 0; d < perm.size(); ++d) strides[d] = from.at(axis_of(perm[d], perm.size()));
  const Walk<1> walk(spec.out[0].dims, {strides});
  return [=] { walk.each([&](int64_t i, const auto& at) { y.copy(i, x, at[0]); }); };
}

// Where a strided block starts inside `dims`, and its strides.
struct Block {
  int64_t begin = 0;
  Strides strides;
  Block(const KernelSpec& spec, const Dims& dims) : strides(row_major_strides(dims)) {
    const Ints& starts = attr_ints(*spec.attrs, "starts");
    const Ints& steps = attr_ints(*spec.attrs, "strides");
    for (size_t d = 0; d < dims.size(); ++d) {
      if (d < starts.size()) begin += starts[d] * strides[d];
      if (d < steps.size()) strides[d] *= steps[d];
    }
  }
};

Body bind_slice(const KernelSpec& spec) {
  const Bytes x(spec.in[0]), y(spec.out[0]);
  const Block block(spec, spec.in[0].dims);
  const Walk<1> walk(spec.out[0].dims, {block.strides});
  const int64_t begin = block.begin;
  return [=] { walk.each([&](int64_t i, const auto& at) { y.copy(i, x, begin + at[0]); }); };
}

Body bind_slice_grad(const KernelSpec& spec) {
  const Bytes dy(spec.in[0]), dx(spec.out[0]);
  const Block block(spec, spec.out[0].dims);
  const Walk<1> walk(spec.in[0].dims, {block.strides});
  const int64_t begin = block.begin, count = element_count(spec.out[0].dims);
  return [=] {
    dx.zero(count);
    walk.each([&](int64_t i, const auto& at) { dx.copy(begin + at[0], dy, i); });
  };
}

Body bind_concat(const KernelSpec& spec) {
  const Bytes y(spec.out[0]);
  const size_t axis = axis_of(attr_int(*spec.attrs, "axis"), spec.out[0].dims.size());
  struct Part {
    Bytes x;
    int64_t run, begin;
  };
  std::vector<Part> parts;
  int64_t begin = 0;
  for (const Operand& x : spec.in) {
    const AxisShape shape(x.dims, axis);
    parts.push_back({Bytes(x), shape.extent * shape.inner, begin});
    begin += shape.extent * shape.inner;
  }
  const int64_t outer = AxisShape(spec.out[0].dims, axis).outer, run = begin;
  return [=] {
    for (const Part& part : parts)
      for (int64_t o = 0; o < outer; ++o) y.copy(o * run + part.begin, part.x, o * part.run, part.run);
  };
}

Body bind_pad(const KernelSpec& spec) {
  const Out y = out(spec, 0);
  const Bytes from(spec.in[0]), to(spec.out[0]);
  const double value = attr_float(*spec.attrs, "value");
  const Ints& low = attr_ints(*spec.attrs, "low");
  const Strides strides = row_major_strides(spec.out[0].dims);
  int64_t begin = 0;
  for (size_t d = 0; d < strides.size() && d < low.size(); ++d) begin += low[d] * strides[d];
  const Walk<1> walk(spec.in[0].dims, {strides});
  return [=] {
    for (int64_t i = 0; i < y.count; ++i) y.set(i, value);
    walk.each([&](int64_t i, const auto& at) { to.copy(begin + at[0], from, i); });
  };
}

Body bind_broadcast_to(const KernelSpec& spec) {
  const Bytes x(spec.in[0]), y(spec.out[0]);
  const Walk<1> walk(spec.out[0].dims, {broadcast_strides(spec.in[0].dims, spec.out[0].dims)});
  return [=] { walk.each([&](int64_t i, const auto& at) { y.copy(i, x, at[0]); }); };
}

constexpr Row kRows[] = {
    {OpCode::k_reshape, bind_reshape},           {OpCode::k_transpose, bind_transpose}, {OpCode::k_slice, bind_slice},
    {OpCode::k_slice_grad, bind_slice_grad},     {OpCode::k_concat, bind_concat},       {OpCode::k_pad, bind_pad},
    {OpCode::k_broadcast_to, bind_broadcast_to},
};

}  // namespace

Rows movement_rows() { return kRows; }

}  // namespace whale::ref
