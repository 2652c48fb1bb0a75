#include "device/ref/scalar.h"

#include <cmath>
#include <numbers>

#include "base/saturate.h"

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

template <class Function>
struct Row {
  OpCode op;
  Function function;
};
constexpr Row<Unary> kUnary[] = {
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

using Binary = double (*)(double a, double b);
constexpr Row<Binary> kBinary[] = {
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

// Integers: modulo 2^64.
int64_t wrap(uint64_t x) { return static_cast<int64_t>(x); }
uint64_t bits(int64_t x) { return static_cast<uint64_t>(x); }

using WholeUnary = int64_t (*)(int64_t x);
constexpr Row<WholeUnary> kWholeUnary[] = {
    {OpCode::k_stop_gradient, [](int64_t x) { return x; }},
    {OpCode::k_neg, [](int64_t x) { return wrap(0 - bits(x)); }},
    {OpCode::k_abs, [](int64_t x) { return x < 0 ? wrap(0 - bits(x)) : x; }},
    {OpCode::k_sign, [](int64_t x) { return int64_t{x > 0} - int64_t{x < 0}; }},
    {OpCode::k_square, [](int64_t x) { return wrap(bits(x) * bits(x)); }},
};
using WholeBinary = int64_t (*)(int64_t a, int64_t b);
constexpr Row<WholeBinary> kWholeBinary[] = {
    {OpCode::k_add, plus},
    {OpCode::k_sub, [](int64_t a, int64_t b) { return wrap(bits(a) - bits(b)); }},
    {OpCode::k_mul, [](int64_t a, int64_t b) { return wrap(bits(a) * bits(b)); }},
    {OpCode::k_maximum, [](int64_t a, int64_t b) { return a > b ? a : b; }},
    {OpCode::k_minimum, [](int64_t a, int64_t b) { return a < b ? a : b; }},
};
using Comparison = bool (*)(int64_t a, int64_t b);
constexpr Row<Comparison> kComparisons[] = {
    {OpCode::k_equal, [](int64_t a, int64_t b) { return a == b; }},
    {OpCode::k_not_equal, [](int64_t a, int64_t b) { return a != b; }},
    {OpCode::k_less, [](int64_t a, int64_t b) { return a < b; }},
    {OpCode::k_less_equal, [](int64_t a, int64_t b) { return a <= b; }},
    {OpCode::k_greater, [](int64_t a, int64_t b) { return a > b; }},
    {OpCode::k_greater_equal, [](int64_t a, int64_t b) { return a >= b; }},
};

template <class Function, size_t N>
Function find(const Row<Function> (&rows)[N], OpCode op) {
  for (const Row<Function>& row : rows)
    if (row.op == op) return row.function;
  return nullptr;
}

Number cast(DType from, DType to, const Number& x) {
  if (is_integer(from)) {
    if (is_integer(to)) return x;
    if (to == DType::kBool) return {.real = x.whole != 0 ? 1.0 : 0.0};
    // Once: a double between them would round an i64 twice.
    return {.real = to == DType::kF64 ? static_cast<double>(x.whole) : double{static_cast<float>(x.whole)}};
  }
  switch (to) {
    case DType::kI32: return {.whole = saturated<int32_t>(x.real)};
    case DType::kI64: return {.whole = saturated<int64_t>(x.real)};
    case DType::kI8: return {.whole = saturated<int8_t>(x.real)};
    case DType::kU8: return {.whole = saturated<uint8_t>(x.real)};
    case DType::kU16: return {.whole = saturated<uint16_t>(x.real)};
    default: return x;
  }
}

}  // namespace

Scalar scalar(OpCode op, DType from, DType to) {
  if (op == OpCode::k_cast) return [=](const Number* x) { return cast(from, to, x[0]); };
  if (op == OpCode::k_where) return [](const Number* x) { return x[0].real != 0 ? x[1] : x[2]; };
  if (is_integer(from)) {
    if (const auto f = find(kWholeUnary, op)) return [f](const Number* x) { return Number{.whole = f(x[0].whole)}; };
    if (const auto f = find(kWholeBinary, op))
      return [f](const Number* x) { return Number{.whole = f(x[0].whole, x[1].whole)}; };
    if (const auto f = find(kComparisons, op))
      return [f](const Number* x) { return Number{.real = f(x[0].whole, x[1].whole) ? 1.0 : 0.0}; };
    return nullptr;
  }
  if (const auto f = find(kUnary, op)) return [f](const Number* x) { return Number{.real = f(x[0].real)}; };
  if (const auto f = find(kBinary, op)) return [f](const Number* x) { return Number{.real = f(x[0].real, x[1].real)}; };
  return nullptr;
}

Unary activation(std::string_view name) {
  if (name.empty() || name == "none") return nullptr;
  for (const ActivationRow& row : kActivations)
    if (row.name == name) return find(kUnary, row.op);
  throw unimplemented("activation '{}' inside a matmul: the ref device knows relu, gelu, gelu_erf, silu, sigmoid, tanh",
                      name);
}

}  // namespace whale::ref
