// Elementwise ops with numpy broadcasting.
#include <cstring>

#include "device/ref/scalar.h"
#include "device/ref/table.h"
#include "device/ref/walk.h"

namespace whale::ref {
namespace {

Body bind_unary(const KernelSpec& spec) {
  const In x = in(spec, 0);
  const Out y = out(spec, 0);
  if (x.dtype == y.dtype && (spec.op == OpCode::k_cast || spec.op == OpCode::k_stop_gradient)) {
    const size_t bytes = static_cast<size_t>(y.count * size_of(y.dtype));
    return [=] {
      if (bytes != 0 && x.data != y.data) std::memcpy(y.data, x.data, bytes);
    };
  }
  if (spec.op == OpCode::k_cast)
    return [=] {
      for (int64_t i = 0; i < y.count; ++i) y.set(i, cast(x.dtype, y.dtype, x[i]));
    };
  const Unary f = unary(spec.op);
  return [=] {
    for (int64_t i = 0; i < y.count; ++i) y.set(i, f(x[i]));
  };
}

Body bind_binary(const KernelSpec& spec) {
  const In a = in(spec, 0), b = in(spec, 1);
  const Out y = out(spec, 0);
  const Dims& dims = spec.out[0].dims;
  const Walk<2> walk(dims, {broadcast_strides(spec.in[0].dims, dims), broadcast_strides(spec.in[1].dims, dims)});
  const Binary f = binary(spec.op);
  return [=] { walk.each([&](int64_t i, const auto& at) { y.set(i, f(a[at[0]], b[at[1]])); }); };
}

Body bind_where(const KernelSpec& spec) {
  const In condition = in(spec, 0), a = in(spec, 1), b = in(spec, 2);
  const Out y = out(spec, 0);
  const Dims& dims = spec.out[0].dims;
  const Walk<3> walk(dims, {broadcast_strides(spec.in[0].dims, dims), broadcast_strides(spec.in[1].dims, dims),
                            broadcast_strides(spec.in[2].dims, dims)});
  return [=] { walk.each([&](int64_t i, const auto& at) { y.set(i, where(condition[at[0]], a[at[1]], b[at[2]])); }); };
}

constexpr Row kRows[] = {
    {OpCode::k_add, bind_binary},
    {OpCode::k_sub, bind_binary},
    {OpCode::k_mul, bind_binary},
    {OpCode::k_div, bind_binary},
    {OpCode::k_pow, bind_binary},
    {OpCode::k_maximum, bind_binary},
    {OpCode::k_minimum, bind_binary},
    {OpCode::k_equal, bind_binary},
    {OpCode::k_not_equal, bind_binary},
    {OpCode::k_less, bind_binary},
    {OpCode::k_less_equal, bind_binary},
    {OpCode::k_greater, bind_binary},
    {OpCode::k_greater_equal, bind_binary},
    {OpCode::k_logical_and, bind_binary},
    {OpCode::k_logical_or, bind_binary},
    {OpCode::k_logical_not, bind_unary},
    {OpCode::k_where, bind_where},
    {OpCode::k_cast, bind_unary},
    {OpCode::k_stop_gradient, bind_unary},
    {OpCode::k_neg, bind_unary},
    {OpCode::k_abs, bind_unary},
    {OpCode::k_sign, bind_unary},
    {OpCode::k_floor, bind_unary},
    {OpCode::k_exp, bind_unary},
    {OpCode::k_log, bind_unary},
    {OpCode::k_log1p, bind_unary},
    {OpCode::k_sqrt, bind_unary},
    {OpCode::k_rsqrt, bind_unary},
    {OpCode::k_square, bind_unary},
    {OpCode::k_reciprocal, bind_unary},
    {OpCode::k_sin, bind_unary},
    {OpCode::k_cos, bind_unary},
    {OpCode::k_erf, bind_unary},
    {OpCode::k_tanh, bind_unary},
    {OpCode::k_sigmoid, bind_unary},
    {OpCode::k_softplus, bind_unary},
    {OpCode::k_relu, bind_unary},
    {OpCode::k_gelu, bind_unary},
    {OpCode::k_gelu_erf, bind_unary},
    {OpCode::k_silu, bind_unary},
    {OpCode::k_relu_grad, bind_binary},
    {OpCode::k_gelu_grad, bind_binary},
    {OpCode::k_gelu_erf_grad, bind_binary},
    {OpCode::k_silu_grad, bind_binary},
    {OpCode::k_bce_with_logits, bind_binary},
    {OpCode::k_squared_difference, bind_binary},
};

}  // namespace

Rows elementwise_rows() { return kRows; }

}  // namespace whale::ref
