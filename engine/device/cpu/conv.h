// Convolutions in oneDNN's words: what conv, its gradients and its transpose share.
#pragma once

#include "device/cpu/device.h"

namespace whale::cpu {

// The attributes.
struct Geometry {
  size_t spatial;  // number of spatial dimensions
  int64_t groups;
  dnnl::memory::dims strides, dilates, low, high;
};
Geometry geometry_of(const Attrs& attrs, size_t rank);

// [n, s..., c] as n, c, s... with the strides it has.
dnnl::memory::desc image_desc(const Dims& dims, DType dtype);

// [o, k..., c / groups] as (g,) o, c, k...
struct Filter {
  dnnl::memory::dims dims, strides;
};
Filter filter_of(const Dims& dims, int64_t groups);
dnnl::memory::desc plain_filter(const Filter& f, DType dtype);
dnnl::memory::desc any_filter(const Filter& f, DType dtype);

std::unique_ptr<Kernel> zeros(const Operand& operand);

std::unique_ptr<Kernel> bind_conv_transpose(const KernelSpec& spec, CpuDevice& device);

}  // namespace whale::cpu
