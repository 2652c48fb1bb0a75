// matmul and the gradient of its weights, on plain layouts: oneDNN's blocked kernel reads strided operands within a few
// percent of packed ones, so that no second copy of the weights is kept. The exceptions are chosen by shape here, at
// bind.
#include <cstring>
#include <functional>
#include <numeric>

#include "base/error.h"
#include "device/cpu/activation.h"
#include "device/cpu/column_sum.h"
#include "device/cpu/copies.h"
#include "device/cpu/device.h"
#include "device/cpu/function_kernel.h"
#include "device/cpu/parallel.h"
#include "device/cpu/tile.h"

namespace whale::cpu {
namespace {

using dnnl::memory;

int64_t product(const Dims& dims, size_t first, size_t last) {
  return std::accumulate(dims.begin() + static_cast<ptrdiff_t>(first), dims.begin() + static_cast<ptrdiff_t>(last),
                         int64_t{1}, std::multiplies<>());
}

// [..., rows, columns] as [batch, rows, columns].
struct Matrix {
  int64_t batch, rows, columns;
};
Matrix matrix_of(const Dims& dims) {
  const size_t r = dims.size();
  return {product(dims, 0, r - 2), dims[r - 2], dims[r - 1]};
}

// A matrix as oneDNN sees it, after the optional swap of its last two dimensions.
memory::desc matrix_desc(const Matrix& m, DType dtype, bool transpose, bool batched) {
  const int64_t rows = transpose ? m.columns : m.rows, columns = transpose ? m.rows : m.columns;
  const int64_t row_stride = transpose ? 1 : m.columns, column_stride = transpose ? m.columns : 1;
  if (!batched) return strided_desc({rows, columns}, dtype, {row_stride, column_stride});
  return strided_desc({m.batch, rows, columns}, dtype, {m.rows * m.columns, row_stride, column_stride});
}

dnnl::primitive_attr attributes(const Attrs& attrs) {
  dnnl::primitive_attr attr = user_scratchpad();
  if (const Activation activation = activation_of(attr_string(attrs, "activation")); activation.fused) {
    dnnl::post_ops ops;
    ops.append_eltwise(1.0f, activation.algorithm, activation.alpha, 0.0f);
    attr.set_post_ops(ops);
  }
  return attr;
}

// oneDNN's blocked matmul copies B by columns; rows a multiple of 4 KiB apart fall into the same cache sets and halve
// its speed. The jit gemm behind inner product does not care.
bool prefers_gemm(DType dtype, int64_t row_elements) { return dtype == DType::kF32 && row_elements % 1024 == 0; }

// No products to add: the result is activation(bias), in f32 on one row, spread over the rest.
std::unique_ptr<Kernel> bind_bias_only(const KernelSpec& spec, CpuDevice& device, int64_t n) {
  const Operand& y = spec.out[0];
  const int64_t rows = n == 0 ? 0 : element_count(y.dims) / n;
  if (rows == 0) return nothing_to_do();
  auto kernel = std::make_unique<DnnlKernel>(device.onednn());
  const auto to = plain_desc({rows, n}, y.dtype);
  if (spec.in.size() <= 2 || !spec.in[2].present()) {
    const size_t bytes = static_cast<size_t>(element_count(y.dims) * size_of(y.dtype));
    return make_kernel(0, [data = y.data, bytes](char*) { std::memset(data, 0, bytes); });
  }
  // 0 + bias, broadcast over the rows.
  auto sequence = std::make_unique<SequenceKernel>();
  const size_t bytes = static_cast<size_t>(element_count(y.dims) * size_of(y.dtype));
  sequence->add(make_kernel(0, [data = y.data, bytes](char*) { std::memset(data, 0, bytes); }));
  const auto bias = plain_desc({1, n}, spec.in[2].dtype);
  const dnnl::binary::primitive_desc pd(dnnl::binary::desc(dnnl::algorithm::binary_add, to, bias, to),
                                        attributes(*spec.attrs), device.onednn().engine);
  kernel->call(pd, dnnl::binary(pd),
               {{DNNL_ARG_SRC_0, kernel->operand(to, y)},
                {DNNL_ARG_SRC_1, kernel->operand(bias, spec.in[2])},
                {DNNL_ARG_DST, kernel->operand(to, y)}});
  sequence->add(std::move(kernel));
  return sequence;
}

std::unique_ptr<Kernel> bind_products(const KernelSpec& spec, CpuDevice& device) {
  const Operand &a = spec.in[0], &b = spec.in[1], &y = spec.out[0];
  const bool has_bias = spec.in.size() > 2 && spec.in[2].present();
  const bool transpose_a = attr_bool(*spec.attrs, "transpose_a"), transpose_b = attr_bool(*spec.attrs, "transpose_b");
  Matrix ma = matrix_of(a.dims), mb = matrix_of(b.dims), my = matrix_of(y.dims);
  const bool shared = b.dims.size() == 2;
  if (shared && !transpose_a) {  // the leading dimensions are just more rows
    ma = {1, ma.batch * ma.rows, ma.columns};
    my = {1, my.batch * my.rows, my.columns};
  }
  const bool batched = my.batch != 1;
  const int64_t k = transpose_a ? ma.rows : ma.columns;
  if (my.batch * my.rows * my.columns == 0 || k == 0) return bind_bias_only(spec, device, my.columns);

  const auto ad = matrix_desc(ma, a.dtype, transpose_a, batched), yd = matrix_desc(my, y.dtype, false, batched);
  const auto bd = matrix_desc(mb, b.dtype, transpose_b, batched);
  const auto& engine = device.onednn().engine;
  auto kernel = std::make_unique<DnnlKernel>(device.onednn());
  if (!batched && !transpose_a && !transpose_b && prefers_gemm(a.dtype, my.columns)) {
    const auto wd = matrix_desc(mb, b.dtype, true, false);  // inner product wants [n, k]
    const auto bias = has_bias ? plain_desc({my.columns}, spec.in[2].dtype) : memory::desc();
    const auto forward = dnnl::prop_kind::forward_inference;
    const auto desc = has_bias ? dnnl::inner_product_forward::desc(forward, ad, wd, bias, yd)
                               : dnnl::inner_product_forward::desc(forward, ad, wd, yd);
    const dnnl::inner_product_forward::primitive_desc pd(desc, attributes(*spec.attrs), engine);
    if (has_bias)
      kernel->call(pd, dnnl::inner_product_forward(pd),
                   {{DNNL_ARG_SRC, kernel->operand(ad, a)},
                    {DNNL_ARG_WEIGHTS, kernel->operand(wd, b)},
                    {DNNL_ARG_BIAS, kernel->operand(bias, spec.in[2])},
                    {DNNL_ARG_DST, kernel->operand(yd, y)}});
    else
      kernel->call(pd, dnnl::inner_product_forward(pd),
                   {{DNNL_ARG_SRC, kernel->operand(ad, a)},
                    {DNNL_ARG_WEIGHTS, kernel->operand(wd, b)},
                    {DNNL_ARG_DST, kernel->operand(yd, y)}});
    return kernel;
  }
  if (has_bias) {
    const auto bias = plain_desc(batched ? Dims{1, 1, my.columns} : Dims{1, my.columns}, spec.in[2].dtype);
    const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(ad, bd, bias, yd), attributes(*spec.attrs), engine);
    kernel->call(pd, dnnl::matmul(pd),
                 {{DNNL_ARG_SRC, kernel->operand(ad, a)},
                  {DNNL_ARG_WEIGHTS, kernel->operand(bd, b)},
                  {DNNL_ARG_BIAS, kernel->operand(bias, spec.in[2])},
                  {DNNL_ARG_DST, kernel->operand(yd, y)}});
  } else {
    const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(ad, bd, yd), attributes(*spec.attrs), engine);
    kernel->call(pd, dnnl::matmul(pd),
                 {{DNNL_ARG_SRC, kernel->operand(ad, a)},
                  {DNNL_ARG_WEIGHTS, kernel->operand(bd, b)},
                  {DNNL_ARG_DST, kernel->operand(yd, y)}});
  }
  return kernel;
}

std::unique_ptr<Kernel> bind_matmul_plain(const KernelSpec& spec, CpuDevice& device) {
  auto product = bind_products(spec, device);
  if (attr_string(*spec.attrs, "activation") != "relu") return product;
  auto sequence = std::make_unique<SequenceKernel>();
  sequence->add(std::move(product));
  sequence->add(make_kernel(0, [y = spec.out[0], threads = device.threads()](char*) {
    parallel_for(threads, element_count(y.dims), 16384,
                 [&](int64_t b, int64_t e) { relu_in_place(y.dtype, y.data, b, e); });
  }));
  return sequence;
}

std::unique_ptr<Kernel> bind_weight_products(const KernelSpec& spec, CpuDevice& device, int64_t rows, int64_t k,
                                             int64_t n) {
  const Operand &a = spec.in[0], &dy = spec.in[1], &dw = spec.out[0];
  const bool transpose = attr_bool(*spec.attrs, "transpose");
  const auto& engine = device.onednn().engine;
  auto kernel = std::make_unique<DnnlKernel>(device.onednn());
  const auto ad = plain_desc({rows, k}, a.dtype), dyd = plain_desc({rows, n}, dy.dtype);
  // The jit gemm is ahead unless the result's columns run along an operand whose rows are a multiple of 4 KiB apart.
  if (a.dtype == DType::kBF16 || (transpose ? n : k) % 1024 != 0) {
    const auto wd = transpose ? plain_desc({n, k}, dw.dtype) : strided_desc({n, k}, dw.dtype, {1, n});
    const auto hint_type = a.dtype;  // the forward hint only decides shapes
    const auto hint_wd = transpose ? plain_desc({n, k}, hint_type) : strided_desc({n, k}, hint_type, {1, n});
    const dnnl::inner_product_forward::primitive_desc hint(
        dnnl::inner_product_forward::desc(dnnl::prop_kind::forward_training, ad, hint_wd, dyd), engine);
    const dnnl::inner_product_backward_weights::primitive_desc pd(
        dnnl::inner_product_backward_weights::desc(ad, wd, dyd), user_scratchpad(), engine, hint);
    kernel->call(pd, dnnl::inner_product_backward_weights(pd),
                 {{DNNL_ARG_SRC, kernel->operand(ad, a)},
                  {DNNL_ARG_DIFF_DST, kernel->operand(dyd, dy)},
                  {DNNL_ARG_DIFF_WEIGHTS, kernel->operand(wd, dw)}});
    return kernel;
  }
  const Operand &left = transpose ? dy : a, &right = transpose ? a : dy;
  const int64_t columns = transpose ? n : k, width = transpose ? k : n;
  const auto ld = strided_desc({columns, rows}, left.dtype, {1, columns}), rd = plain_desc({rows, width}, right.dtype);
  const auto wd = plain_desc({columns, width}, dw.dtype);
  const dnnl::matmul::primitive_desc pd(dnnl::matmul::desc(ld, rd, wd), user_scratchpad(), engine);
  kernel->call(pd, dnnl::matmul(pd),
               {{DNNL_ARG_SRC, kernel->operand(ld, left)},
                {DNNL_ARG_WEIGHTS, kernel->operand(rd, right)},
                {DNNL_ARG_DST, kernel->operand(wd, dw)}});
  return kernel;
}

std::unique_ptr<Kernel> bind_weight_grad_plain(const KernelSpec& spec, CpuDevice& device) {
  const Operand &a = spec.in[0], &dy = spec.in[1];
  const int64_t k = a.dims.back(), n = dy.dims.back();
  const int64_t rows = product(a.dims, 0, a.dims.size() - 1);
  if (k == 0 && n == 0) return nothing_to_do();
  auto sequence = std::make_unique<SequenceKernel>();
  if (rows == 0 || k == 0 || n == 0) {
    const size_t bytes = static_cast<size_t>(k * n * size_of(spec.out[0].dtype));
    sequence->add(make_kernel(0, [data = spec.out[0].data, bytes](char*) {
      if (bytes != 0) std::memset(data, 0, bytes);
    }));
  } else {
    sequence->add(bind_weight_products(spec, device, rows, k, n));
  }
  if (spec.out.size() > 1 && spec.out[1].present() && n != 0)
    sequence->add(column_sum(device, dy, spec.out[1], rows, n));
  return sequence;
}

std::unique_ptr<Kernel> bind_matmul(const KernelSpec& spec, CpuDevice& device) {
  return bind_narrow(spec, device, bind_matmul_plain);
}
std::unique_ptr<Kernel> bind_weight_grad(const KernelSpec& spec, CpuDevice& device) {
  return bind_narrow(spec, device, bind_weight_grad_plain);
}

constexpr KernelEntry kEntries[] = {
    {OpCode::k_matmul, bind_matmul, f32_or_bf16},
    {OpCode::k_matmul_weight_grad, bind_weight_grad, f32_or_bf16},
};

}  // namespace

std::span<const KernelEntry> matmul_kernels() { return kEntries; }

}  // namespace whale::cpu
