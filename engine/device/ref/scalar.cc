#include "device/ref/scalar.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

namespace whale::ref {
namespace {

constexpr double kGeluScale = 0.79788456080286535588;  // sqrt(2 / pi)
constexpr double kGeluCubic = 0.044715;

double sigmoid(double x) {
  if (x >= 0) return 1 / (1 + std::exp(-x));
  const double e = std::exp(x);
  return e / (1 + e);
}
double softplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }
double gelu(double x) { return 0.5 * x * (1 + std::tanh(kGeluScale * (x + kGeluCubic * x * x * x))); }
double normal_cdf(double x) { return 0.5 * std::erfc(-x / std::numbers::sqrt2); }
double sign(double x) { return x > 0 ? 1 : x < 0 ? -1 : x; }  // keeps NaN and zero

double gelu_grad(double x, double dy) {
  const double t = std::tanh(kGeluScale * (x + kGeluCubic * x * x * x));
  return dy * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * kGeluScale * (1 + 3 * kGeluCubic * x * x));
}
double gelu_erf_grad(double x, double dy) {
  const double density = std::exp(-0.5 * x * x) / std::sqrt(2 * std::numbers::pi);
  return dy * (normal_cdf(x) + x * density);
}
double silu_grad(double x, double dy) {
  const double s = sigmoid(x);
  return dy * (s + x * s * (1 - s));
}
double bce_with_logits(double x, double target) {
  return std::fmax(x, 0.0) - x * target + std::log1p(std::exp(-std::abs(x)));
}

struct UnaryRow {
  OpCode op;
  Unary function;
};
constexpr UnaryRow kUnary[] = {
    {OpCode::k_cast, [](double x) { return x; }},
    {OpCode::k_stop_gradient, [](double x) { return x; }},
    {OpCode::k_logical_not, [](double x) { return x == 0 ? 1.0 : 0.0; }},
    {OpCode::k_neg, [](double x) { return -x; }},
    {OpCode::k_abs, [](double x) { return std::abs(x); }},
    {OpCode::k_sign, sign},
    {OpCode::k_floor, [](double x) { return std::floor(x); }},
    {OpCode::k_exp, [](double x) { return std::exp(x); }},
    {OpCode::k_log, [](double x) { return std::log(x); }},
    {OpCode::k_log1p, [](double x) { return std::log1p(x); }},
    {OpCode::k_sqrt, [](double x) { return std::sqrt(x); }},
    {OpCode::k_rsqrt, [](double x) { return 1 / std::sqrt(x); }},
    {OpCode::k_square, [](double x) { return x * x; }},
    {OpCode::k_reciprocal, [](double x) { return 1 / x; }},
    {OpCode::k_sin, [](double x) { return std::sin(x); }},
    {OpCode::k_cos, [](double x) { return std::cos(x); }},
    {OpCode::k_erf, [](double x) { return std::erf(x); }},
    {OpCode::k_tanh, [](double x) { return std::tanh(x); }},
    {OpCode::k_sigmoid, sigmoid},
    {OpCode::k_softplus, softplus},
    {OpCode::k_relu, [](double x) { return x > 0 || std::isnan(x) ? x : 0.0; }},
    {OpCode::k_gelu, gelu},
    {OpCode::k_gelu_erf, [](double x) { return x * normal_cdf(x); }},
    {OpCode::k_silu, [](double x) { return x * sigmoid(x); }},
};

struct BinaryRow {
  OpCode op;
  Binary function;
};
constexpr BinaryRow kBinary[] = {
    {OpCode::k_add, [](double a, double b) { return a + b; }},
    {OpCode::k_sub, [](double a, double b) { return a - b; }},
    {OpCode::k_mul, [](double a, double b) { return a * b; }},
    {OpCode::k_div, [](double a, double b) { return a / b; }},
    {OpCode::k_pow, [](double a, double b) { return std::pow(a, b); }},
    {OpCode::k_maximum, [](double a, double b) { return a > b || std::isnan(a) ? a : b; }},
    {OpCode::k_minimum, [](double a, double b) { return a < b || std::isnan(a) ? a : b; }},
    {OpCode::k_equal, [](double a, double b) { return a == b ? 1.0 : 0.0; }},
    {OpCode::k_not_equal, [](double a, double b) { return a != b ? 1.0 : 0.0; }},
    {OpCode::k_less, [](double a, double b) { return a < b ? 1.0 : 0.0; }},
    {OpCode::k_less_equal, [](double a, double b) { return a <= b ? 1.0 : 0.0; }},
    {OpCode::k_greater, [](double a, double b) { return a > b ? 1.0 : 0.0; }},
    {OpCode::k_greater_equal, [](double a, double b) { return a >= b ? 1.0 : 0.0; }},
    {OpCode::k_logical_and, [](double a, double b) { return a != 0 && b != 0 ? 1.0 : 0.0; }},
    {OpCode::k_logical_or, [](double a, double b) { return a != 0 || b != 0 ? 1.0 : 0.0; }},
    {OpCode::k_relu_grad, [](double y, double dy) { return y <= 0 ? 0.0 : dy; }},
    {OpCode::k_gelu_grad, gelu_grad},
    {OpCode::k_gelu_erf_grad, gelu_erf_grad},
    {OpCode::k_silu_grad, silu_grad},
    {OpCode::k_bce_with_logits, bce_with_logits},
    {OpCode::k_squared_difference, [](double a, double b) { return (a - b) * (a - b); }},
};

struct ActivationRow {
  std::string_view name;
  OpCode op;
};
constexpr ActivationRow kActivations[] = {
    {"relu", OpCode::k_relu}, {"gelu", OpCode::k_gelu},       {"gelu_erf", OpCode::k_gelu_erf},
    {"silu", OpCode::k_silu}, {"sigmoid", OpCode::k_sigmoid}, {"tanh", OpCode::k_tanh},
};

struct IntegerRange {
  DType dtype;
  double lowest, highest;
};
template <class Int>
constexpr IntegerRange range_of(DType dtype) {
  using Limits = std::numeric_limits<Int>;
  return {dtype, static_cast<double>(Limits::min()), static_cast<double>(Limits::max())};
}
constexpr IntegerRange kRanges[] = {range_of<int32_t>(DType::kI32), range_of<int64_t>(DType::kI64),
                                    range_of<int8_t>(DType::kI8), range_of<uint8_t>(DType::kU8),
                                    range_of<uint16_t>(DType::kU16)};

}  // namespace

Unary unary(OpCode op) {
  for (const UnaryRow& row : kUnary)
    if (row.op == op) return row.function;
  return nullptr;
}

Binary binary(OpCode op) {
  for (const BinaryRow& row : kBinary)
    if (row.op == op) return row.function;
  return nullptr;
}

double cast(DType from, DType to, double x) {
  if (!is_float(from) || !is_integer(to)) return x;
  const IntegerRange& range =
      *std::find_if(std::begin(kRanges), std::end(kRanges), [to](const IntegerRange& r) { return r.dtype == to; });
  return x > range.lowest ? std::fmin(x, range.highest) : range.lowest;  // NaN is not more than anything
}

double where(double condition, double a, double b) { return condition != 0 ? a : b; }

Unary activation(std::string_view name) {
  if (name.empty() || name == "none") return nullptr;
  for (const ActivationRow& row : kActivations)
    if (row.name == name) return unary(row.op);
  throw unimplemented("activation '{}' inside a matmul: the ref device knows relu, gelu, gelu_erf, silu, sigmoid, tanh",
                      name);
}

}  // namespace whale::ref
