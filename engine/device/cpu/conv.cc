// Convolution and its two gradients by oneDNN: activations stay channels-last, weights are reordered
// into the layout that the primitive asks for on their way through the scratch area (they change every step; a kept
// copy would only cost memory).
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "device/cpu/column_sum.h"
#include "device/cpu/conv.h"
#include "device/cpu/copies.h"
#include "device/cpu/function_kernel.h"
#include "device/cpu/parallel.h"

namespace whale::cpu {

using dnnl::memory;

Geometry geometry_of(const Attrs& attrs, size_t rank) {
  Geometry g{rank - 2, std::max<int64_t>(1, attr_int(attrs, "groups", 1)), {}, {}, {}, {}};
  if (g.spatial < 1 || g.spatial > 3)
    throw unimplemented("device cpu convolves 1 to 3 spatial dimensions, found {}", g.spatial);
  const auto &strides = attr_ints(attrs, "strides"), &dilation = attr_ints(attrs, "dilation"),
             &padding = attr_ints(attrs, "padding");
  for (size_t i = 0; i < g.spatial; ++i) {
    g.strides.push_back(strides.empty() ? 1 : strides[i]);
    g.dilates.push_back(dilation.empty() ? 0 : dilation[i] - 1);  // oneDNN counts the gaps
    g.low.push_back(padding.empty() ? 0 : padding[2 * i]);
    g.high.push_back(padding.empty() ? 0 : padding[2 * i + 1]);
  }
  return g;
}

memory::desc image_desc(const Dims& dims, DType dtype) {
  const Dims strides = row_major_strides(dims);
  Dims to{dims.front(), dims.back()}, to_strides{strides.front(), strides.back()};
  to.insert(to.end(), dims.begin() + 1, dims.end() - 1);
  to_strides.insert(to_strides.end(), strides.begin() + 1, strides.end() - 1);
  return strided_desc(to, dtype, to_strides);
}

Filter filter_of(const Dims& dims, int64_t groups) {
  const Dims strides = row_major_strides(dims);
  Filter f{{dims.front(), dims.back()}, {strides.front(), strides.back()}};
  f.dims.insert(f.dims.end(), dims.begin() + 1, dims.end() - 1);
  f.strides.insert(f.strides.end(), strides.begin() + 1, strides.end() - 1);
  if (groups > 1) {
    f.dims.front() /= groups;
    f.dims.insert(f.dims.begin(), groups);
    f.strides.insert(f.strides.begin(), f.dims[1] * f.strides.front());
  }
  return f;
}
memory::desc plain_filter(const Filter& f, DType dtype) { return strided_desc(f.dims, dtype, f.strides); }
memory::desc any_filter(const Filter& f, DType dtype) { return {f.dims, onednn_type(dtype), memory::format_tag::any}; }

std::unique_ptr<Kernel> zeros(const Operand& operand) {
  const size_t bytes = static_cast<size_t>(element_count(operand.dims) * size_of(operand.dtype));
  return make_kernel(0, [data = operand.data, bytes](char*) {
    if (bytes != 0) std::memset(data, 0, bytes);
  });
}
namespace {

constexpr int64_t kChannelBlock = 8;
// The threads of a gradient of a filter meet at barriers of oneDNN's own, which spin for a whole slice of the scheduler
// when somebody else has the core of one: worth it for some 100 us of work, not for less.
constexpr double kFewProducts = 0x1p20;

bool empty(const Operand& operand) { return element_count(operand.dims) == 0; }

dnnl::convolution_forward::primitive_desc forward(const Geometry& g, const memory::desc& x, const memory::desc& w,
                                                  const memory::desc* bias, const memory::desc& y,
                                                  const dnnl::engine& engine) {
  const auto kind = dnnl::prop_kind::forward_training;
  const auto direct = dnnl::algorithm::convolution_direct;
  const auto desc =
      bias ? dnnl::convolution_forward::desc(kind, direct, x, w, *bias, y, g.strides, g.dilates, g.low, g.high)
           : dnnl::convolution_forward::desc(kind, direct, x, w, y, g.strides, g.dilates, g.low, g.high);
  return {desc, user_scratchpad(), engine};
}

std::unique_ptr<Kernel> bind_conv_plain(const KernelSpec& spec, CpuDevice& device) {
  const Operand &x = spec.in[0], &w = spec.in[1], &y = spec.out[0];
  const bool has_bias = spec.in.size() > 2 && spec.in[2].present();
  const Geometry g = geometry_of(*spec.attrs, x.dims.size());
  if (empty(y)) return nothing_to_do();
  if (empty(x) || empty(w)) return zeros(y);
  const Filter f = filter_of(w.dims, g.groups);
  const auto xd = image_desc(x.dims, x.dtype), yd = image_desc(y.dims, y.dtype);
  const auto bias = has_bias ? plain_desc(spec.in[2].dims, spec.in[2].dtype) : memory::desc();
  const auto pd = forward(g, xd, any_filter(f, w.dtype), has_bias ? &bias : nullptr, yd, device.onednn().engine);
  auto kernel = std::make_unique<DnnlKernel>(device.onednn());
  const auto packed = kernel->reordered(kernel->operand(plain_filter(f, w.dtype), w), pd.weights_desc());
  if (has_bias)
    kernel->call(pd, dnnl::convolution_forward(pd),
                 {{DNNL_ARG_SRC, kernel->operand(xd, x)},
                  {DNNL_ARG_WEIGHTS, packed},
                  {DNNL_ARG_BIAS, kernel->operand(bias, spec.in[2])},
                  {DNNL_ARG_DST, kernel->operand(yd, y)}});
  else
    kernel->call(
        pd, dnnl::convolution_forward(pd),
        {{DNNL_ARG_SRC, kernel->operand(xd, x)}, {DNNL_ARG_WEIGHTS, packed}, {DNNL_ARG_DST, kernel->operand(yd, y)}});
  return kernel;
}

template <class List>
bool all_are(const List& list, int64_t value) {
  return std::all_of(list.begin(), list.end(), [=](int64_t x) { return x == value; });
}

// A kernel of one element at every position: a matrix product.
bool pointwise(const Geometry& g, const Dims& w) {
  return g.groups == 1 && all_are(Dims(w.begin() + 1, w.end() - 1), 1) && all_are(g.strides, 1) && all_are(g.low, 0) &&
         all_are(g.high, 0);
}

std::unique_ptr<Kernel> pointwise_grad_input(const KernelSpec& spec, CpuDevice& device) {
  const Operand &dy = spec.in[0], &w = spec.in[1], &dx = spec.out[0];
  const int64_t o = dy.dims.back(), c = dx.dims.back(), rows = element_count(dx.dims) / c;
  const auto dyd = plain_desc({rows, o}, dy.dtype), wd = plain_desc({o, c}, w.dtype),
             dxd = plain_desc({rows, c}, dx.dtype);
  const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(dyd, wd, dxd), user_scratchpad(), device.onednn().engine);
  auto kernel = std::make_unique<DnnlKernel>(device.onednn());
  kernel->call(pd, dnnl::matmul(pd),
               {{DNNL_ARG_SRC, kernel->operand(dyd, dy)},
                {DNNL_ARG_WEIGHTS, kernel->operand(wd, w)},
                {DNNL_ARG_DST, kernel->operand(dxd, dx)}});
  return kernel;
}

std::unique_ptr<Kernel> bind_grad_input_plain(const KernelSpec& spec, CpuDevice& device) {
  const Operand &dy = spec.in[0], &w = spec.in[1], &dx = spec.out[0];
  const Geometry g = geometry_of(*spec.attrs, dx.dims.size());
  if (empty(dx)) return nothing_to_do();
  if (empty(dy) || empty(w)) return zeros(dx);
  // oneDNN 2.6 reads past an odd last channel of bf16.
  if (dy.dims.back() % 2 != 0 && pointwise(g, w.dims)) return pointwise_grad_input(spec, device);
  const Filter f = filter_of(w.dims, g.groups);
  const auto dxd = image_desc(dx.dims, dx.dtype), dyd = image_desc(dy.dims, dy.dtype), wd = any_filter(f, w.dtype);
  const auto& engine = device.onednn().engine;
  // The forward primitive is only a hint: it needs the usual types.
  const auto hint = forward(g, image_desc(dx.dims, dy.dtype), wd, nullptr, dyd, engine);
  const dnnl::convolution_backward_data::primitive_desc pd(
      dnnl::convolution_backward_data::desc(dnnl::algorithm::convolution_direct, dxd, wd, dyd, g.strides, g.dilates,
                                            g.low, g.high),
      user_scratchpad(), engine, hint);
  auto kernel = std::make_unique<DnnlKernel>(device.onednn());
  const auto packed = kernel->reordered(kernel->operand(plain_filter(f, w.dtype), w), pd.weights_desc());
  kernel->call(pd, dnnl::convolution_backward_data(pd),
               {{DNNL_ARG_DIFF_DST, kernel->operand(dyd, dy)},
                {DNNL_ARG_WEIGHTS, packed},
                {DNNL_ARG_DIFF_SRC, kernel->operand(dxd, dx)}});
  return kernel;
}

std::unique_ptr<Kernel> bind_grad_filter(const KernelSpec& spec, CpuDevice& device, const Geometry& g) {
  const Operand &x = spec.in[0], &dy = spec.in[1], &dw = spec.out[0];
  const Filter f = filter_of(dw.dims, g.groups);
  const auto xd = image_desc(x.dims, x.dtype), dyd = image_desc(dy.dims, dy.dtype);
  const auto& engine = device.onednn().engine;
  const auto hint = forward(g, xd, any_filter(f, x.dtype), nullptr, dyd, engine);
  // oneDNN 2.6 without AVX-512: threads write over each other's rows of a strided pointwise filter with less than a
  // block of channels, and what comes out is anything.
  const bool races = !all_are(g.strides, 1) && all_are(Dims(dw.dims.begin() + 1, dw.dims.end() - 1), 1) &&
                     dw.dims.back() < kChannelBlock;
  const double products = static_cast<double>(element_count(dy.dims)) * static_cast<double>(element_count(dw.dims)) /
                          static_cast<double>(dy.dims.back());
  const ThreadCount threads(races ? 1 : threads_for(device, products, kFewProducts));
  const dnnl::convolution_backward_weights::primitive_desc pd(
      dnnl::convolution_backward_weights::desc(dnnl::algorithm::convolution_direct, xd, any_filter(f, dw.dtype), dyd,
                                               g.strides, g.dilates, g.low, g.high),
      user_scratchpad(), engine, hint);
  auto kernel = std::make_unique<DnnlKernel>(device.onednn());
  const auto plain = kernel->operand(plain_filter(f, dw.dtype), dw);
  const bool direct = pd.diff_weights_desc() == plain.get_desc();
  const auto result = direct ? plain : kernel->temporary(pd.diff_weights_desc());
  kernel->call(pd, dnnl::convolution_backward_weights(pd),
               {{DNNL_ARG_SRC, kernel->operand(xd, x)},
                {DNNL_ARG_DIFF_DST, kernel->operand(dyd, dy)},
                {DNNL_ARG_DIFF_WEIGHTS, result}});
  if (!direct) kernel->reorder(result, plain);
  return kernel;
}

std::unique_ptr<Kernel> bind_grad_weight_plain(const KernelSpec& spec, CpuDevice& device) {
  const Operand &x = spec.in[0], &dy = spec.in[1], &dw = spec.out[0];
  const Geometry g = geometry_of(*spec.attrs, x.dims.size());
  auto sequence = std::make_unique<SequenceKernel>();
  if (empty(x) || empty(dy) || empty(dw))
    sequence->add(zeros(dw));
  else
    sequence->add(bind_grad_filter(spec, device, g));
  if (spec.out.size() > 1 && spec.out[1].present() && !empty(spec.out[1]))
    sequence->add(column_sum(device, dy, spec.out[1], element_count(dy.dims) / dy.dims.back(), dy.dims.back()));
  return sequence;
}

std::unique_ptr<Kernel> bind_conv(const KernelSpec& spec, CpuDevice& device) {
  return bind_narrow(spec, device, bind_conv_plain);
}
std::unique_ptr<Kernel> bind_grad_input(const KernelSpec& spec, CpuDevice& device) {
  return bind_narrow(spec, device, bind_grad_input_plain);
}
std::unique_ptr<Kernel> bind_grad_weight(const KernelSpec& spec, CpuDevice& device) {
  return bind_narrow(spec, device, bind_grad_weight_plain);
}

constexpr KernelEntry kEntries[] = {
    {OpCode::k_conv, bind_conv, f32_or_bf16},
    {OpCode::k_conv_grad_input, bind_grad_input, f32_or_bf16},
    {OpCode::k_conv_grad_weight, bind_grad_weight, f32_or_bf16},
    {OpCode::k_conv_transpose, bind_conv_transpose, f32_or_bf16},
};

}  // namespace

std::span<const KernelEntry> conv_kernels() { return kEntries; }

}  // namespace whale::cpu
