// Elementwise ops with numpy broadcasting.
#include <array>
#include <cstring>

#include "device/ref/scalar.h"
#include "device/ref/table.h"
#include "device/ref/walk.h"

namespace whale::ref {
namespace {

Body bind_copy(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  const size_t bytes = static_cast<size_t>(y.count * size_of(y.dtype));
  return [=] {
    if (bytes != 0 && x.data != y.data) std::memcpy(y.data, x.data, bytes);
  };
}

Body bind_scalar(const KernelSpec& spec) {
  constexpr size_t kMost = 3;
  const Out y = out(spec, 0);
  const Dims& dims = spec.out[0].dims;
  const size_t operands = spec.in.size();
  std::array<In, kMost> x;
  std::array<Strides, kMost> strides;
  strides.fill(Strides(dims.size(), 0));
  for (size_t n = 0; n < operands; ++n) x.at(n) = in(spec, n), strides[n] = broadcast_strides(spec.in[n].dims, dims);
  const Walk<kMost> walk(dims, strides);
  const Scalar f = scalar(spec.op, x[0].dtype, y.dtype);
  if (!f)
    throw unimplemented("the ref device has no kernel for {} of {} elements; use other types", def(spec.op).name,
                        name_of(x[0].dtype));
  return [=] {
    walk.each([&](int64_t i, const auto& at) {
      Number values[kMost];
      for (size_t n = 0; n < operands; ++n) values[n] = x[n].number(at[n]);
      y.set(i, f(values));
    });
  };
}

Body bind_cast(const KernelSpec& spec) {
  return spec.in[0].dtype == spec.out[0].dtype ? bind_copy(spec) : bind_scalar(spec);
}

constexpr Row kRows[] = {
    {OpCode::k_add, bind_scalar},
    {OpCode::k_sub, bind_scalar},
    {OpCode::k_mul, bind_scalar},
    {OpCode::k_div, bind_scalar},
    {OpCode::k_pow, bind_scalar},
    {OpCode::k_maximum, bind_scalar},
    {OpCode::k_minimum, bind_scalar},
    {OpCode::k_equal, bind_scalar},
    {OpCode::k_not_equal, bind_scalar},
    {OpCode::k_less, bind_scalar},
    {OpCode::k_less_equal, bind_scalar},
    {OpCode::k_greater, bind_scalar},
    {OpCode::k_greater_equal, bind_scalar},
    {OpCode::k_logical_and, bind_scalar},
    {OpCode::k_logical_or, bind_scalar},
    {OpCode::k_logical_not, bind_scalar},
    {OpCode::k_where, bind_scalar},
    {OpCode::k_cast, bind_cast},
    {OpCode::k_stop_gradient, bind_copy},
    {OpCode::k_neg, bind_scalar},
    {OpCode::k_abs, bind_scalar},
    {OpCode::k_sign, bind_scalar},
    {OpCode::k_floor, bind_scalar},
    {OpCode::k_exp, bind_scalar},
    {OpCode::k_log, bind_scalar},
    {OpCode::k_log1p, bind_scalar},
    {OpCode::k_sqrt, bind_scalar},
    {OpCode::k_rsqrt, bind_scalar},
    {OpCode::k_square, bind_scalar},
    {OpCode::k_reciprocal, bind_scalar},
    {OpCode::k_sin, bind_scalar},
    {OpCode::k_cos, bind_scalar},
    {OpCode::k_erf, bind_scalar},
    {OpCode::k_tanh, bind_scalar},
    {OpCode::k_sigmoid, bind_scalar},
    {OpCode::k_softplus, bind_scalar},
    {OpCode::k_relu, bind_scalar},
    {OpCode::k_gelu, bind_scalar},
    {OpCode::k_gelu_erf, bind_scalar},
    {OpCode::k_silu, bind_scalar},
    {OpCode::k_relu_grad, bind_scalar},
    {OpCode::k_gelu_grad, bind_scalar},
    {OpCode::k_gelu_erf_grad, bind_scalar},
    {OpCode::k_silu_grad, bind_scalar},
    {OpCode::k_bce_with_logits, bind_scalar},
    {OpCode::k_squared_difference, bind_scalar},
};

}  // namespace

Rows elementwise_rows() { return kRows; }

}  // namespace whale::ref
