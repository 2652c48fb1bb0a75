// Elementwise ops: numpy broadcasting, operands of one dtype. Each result element depends on one element of every
// operand.
#include <algorithm>
#include <numbers>

#include "ops/family.h"

namespace whale {
namespace {

// ---- shape rules ----------------------------------------------------------------------------------------------------
bool is_number(DType t) { return is_float(t) || is_integer(t); }
bool is_boolean(DType t) { return t == DType::kBool; }
bool is_any(DType) { return true; }

const char* expectation(bool (*accepts)(DType)) {
  if (accepts == is_float) return "a floating point type";
  if (accepts == is_number) return "a number type";
  return "bool";
}

void need_type(const OpView& v, int i, bool (*accepts)(DType)) {
  if (accepts(in(v, i).dtype)) return;
  throw invalid("operand '{}' is {}, expected {}", def(v.code).inputs[i].name, to_string(in(v, i)),
                expectation(accepts));
}

void need_one_dtype(const OpView& v, int i, int j) {
  if (in(v, i).dtype == in(v, j).dtype) return;
  const auto& ports = def(v.code).inputs;
  throw invalid("operands '{}' ({}) and '{}' ({}) must have one dtype; cast one of them", ports[i].name,
                to_string(in(v, i)), ports[j].name, to_string(in(v, j)));
}

template <bool (*kAccepts)(DType)>
std::vector<TensorType> infer_unary(const OpView& v) {
  need_type(v, 0, kAccepts);
  return {in(v, 0)};
}

template <bool (*kAccepts)(DType)>
std::vector<TensorType> infer_binary(const OpView& v) {
  need_type(v, 0, kAccepts);
  need_one_dtype(v, 0, 1);
  return {{in(v, 0).dtype, broadcast_dims(in_dims(v, 0), in_dims(v, 1))}};
}

template <bool (*kAccepts)(DType)>
std::vector<TensorType> infer_comparison(const OpView& v) {
  return {{DType::kBool, infer_binary<kAccepts>(v)[0].dims}};
}

// (x or y, dy) -> dx: no broadcasting.
std::vector<TensorType> infer_activation_grad(const OpView& v) {
  need_type(v, 0, is_float);
  need_one_dtype(v, 0, 1);
  need_dims(v, 1, "dy", in_dims(v, 0));
  return {in(v, 0)};
}

std::vector<TensorType> infer_where(const OpView& v) {
  need_type(v, 0, is_boolean);
  need_one_dtype(v, 1, 2);
  return {{in(v, 1).dtype, broadcast_dims(in_dims(v, 0), broadcast_dims(in_dims(v, 1), in_dims(v, 2)))}};
}

std::vector<TensorType> infer_cast(const OpView& v) {
  return {{parse_dtype(attr_string(*v.attrs, "dtype")), in_dims(v, 0)}};
}

std::vector<TensorType> infer_bce(const OpView& v) {
  std::vector<TensorType> out = infer_binary<is_float>(v);
  out[0].dtype = accumulate_dtype(out[0].dtype);
  return out;
}

// Element by element: any result may lie where any operand of its size does.
std::vector<Alias> aliases_fused(const OpView& v) {
  std::vector<Alias> all;
  const int results = result_count(*v.attrs);
  for (int o = 0; o < results; ++o)
    for (int i = 0; i < static_cast<int>(v.inputs.size()); ++i) all.push_back({o, i});
  return all;
}

std::vector<TensorType> infer_fused(const OpView& v) {
  const FusedBody body = decode(*v.attrs, static_cast<int>(v.inputs.size()));
  std::vector<TensorType> values = v.inputs;
  Dims whole;
  for (const TensorType& t : v.inputs) whole = broadcast_dims(whole, t.dims);
  for (const FusedStep& step : body.steps) {
    std::vector<TensorType> operands;
    for (const int k : step.operands) operands.push_back(values[k]);
    Attrs attrs;
    if (step.code == OpCode::k_cast) attrs["dtype"] = std::string(name_of(step.dtype));
    if (step.code == OpCode::k_dropout) attrs["rate"] = step.value;
    const TensorType type = infer(step.code, attrs, operands, std::vector<bool>(operands.size(), true)).front();
    if (type.dtype != step.dtype)
      throw invalid("step '{}' gives {}, but the body says {}", def(step.code).name, name_of(type.dtype),
                    name_of(step.dtype));
    values.push_back(type);
  }
  std::vector<TensorType> out;
  for (const int k : body.results) {
    out.push_back(values[k]);
    if (out.back().dims != whole)
      throw invalid("a result has shape {}, expected {}: that of all operands broadcast", to_string(out.back().dims),
                    to_string(whole));
  }
  return out;
}

// ---- factors --------------------------------------------------------------------------------------------------------
template <int... kOperands>
Factors linear_in_each(const OpView& v) {
  Factors f = elementwise_factors(v);
  f.linear = {{kOperands}...};
  return f;
}

Factors linear_together(const OpView& v) {  // a + b: both partial, or none
  Factors f = elementwise_factors(v);
  f.linear = {{0, 1}};
  return f;
}

Factors linear_in_branches(const OpView& v) {
  Factors f = elementwise_factors(v);
  f.linear = {{1, 2}};
  return f;
}

Factors linear_if_float(const OpView& v) {  // a cast to integers rounds
  Factors f = elementwise_factors(v);
  const DType from = in(v, 0).dtype, to = v.outputs.at(0).dtype;
  if (from == to || (is_float(from) && is_float(to))) f.linear = {{0}};
  return f;
}

// ---- gradients ------------------------------------------------------------------------------------------------------
using B = GradBuilder;

DType dtype_of(B& b, TensorId id) { return b.type(id).dtype; }
TensorId scaled(B& b, TensorId a, double factor) { return b.mul(a, b.constant(factor, dtype_of(b, a))); }
TensorId sub(B& b, TensorId x, TensorId y) { return b.emit(OpCode::k_sub, {x, y}); }
TensorId div(B& b, TensorId x, TensorId y) { return b.emit(OpCode::k_div, {x, y}); }
TensorId unary(B& b, OpCode code, TensorId x) { return b.emit(code, {x}); }
TensorId one_minus(B& b, TensorId x) { return sub(b, b.constant(1, dtype_of(b, x)), x); }
void set_reduced(B& b, int i, TensorId grad) { b.set(i, b.sum_to(grad, b.dims(b.input(i)))); }

void grad_add(B& b) {
  for (const int i : {0, 1})
    if (b.wants(i)) set_reduced(b, i, b.grad());
}
void grad_sub(B& b) {
  if (b.wants(0)) set_reduced(b, 0, b.grad());
  if (b.wants(1)) b.set(1, b.neg(b.sum_to(b.grad(), b.dims(b.input(1)))));
}
void grad_mul(B& b) {
  for (const int i : {0, 1})
    if (b.wants(i)) set_reduced(b, i, b.mul(b.grad(), b.input(1 - i)));
}
void grad_div(B& b) {
  if (!b.wants(0) && !b.wants(1)) return;
  const TensorId da = div(b, b.grad(), b.input(1));
  if (b.wants(0)) set_reduced(b, 0, da);
  if (b.wants(1)) set_reduced(b, 1, b.neg(b.mul(da, b.output(0))));
}
// The exponent's gradient at x = 0, and the base's at exponent 0, are 0 (not nan), as JAX.
void grad_pow(B& b) {
  const TensorId x = b.input(0), p = b.input(1);
  const DType t = dtype_of(b, x);
  const TensorId zero = b.constant(0, t), one = b.constant(1, t);
  if (b.wants(0)) {
    const TensorId none = b.emit(OpCode::k_equal, {p, zero});
    const TensorId lower = b.emit(OpCode::k_where, {none, one, sub(b, p, one)});
    const TensorId slope = b.mul(p, b.emit(OpCode::k_pow, {x, lower}));
    set_reduced(b, 0, b.mul(b.grad(), slope));
  }
  if (b.wants(1)) {
    const TensorId at_zero = b.emit(OpCode::k_equal, {x, zero});
    const TensorId log = unary(b, OpCode::k_log, b.emit(OpCode::k_where, {at_zero, one, x}));
    set_reduced(b, 1, b.mul(b.grad(), b.mul(b.output(0), log)));
  }
}
template <OpCode kBeats>  // maximum: greater; minimum: less. Ties give half to each
void grad_extremum(B& b) {
  const TensorId dy = b.grad();
  const TensorId zero = b.constant(0, dtype_of(b, dy));
  const TensorId tie =
      b.emit(OpCode::k_where, {b.emit(OpCode::k_equal, {b.input(0), b.input(1)}), scaled(b, dy, 0.5), zero});
  for (const int i : {0, 1})
    if (b.wants(i)) set_reduced(b, i, b.emit(OpCode::k_where, {b.emit(kBeats, {b.input(i), b.input(1 - i)}), dy, tie}));
}
void grad_where(B& b) {
  const TensorId dy = b.grad(), zero = b.constant(0, dtype_of(b, dy));
  if (b.wants(1)) set_reduced(b, 1, b.emit(OpCode::k_where, {b.input(0), dy, zero}));
  if (b.wants(2)) set_reduced(b, 2, b.emit(OpCode::k_where, {b.input(0), zero, dy}));
}
void grad_cast(B& b) { b.set(0, b.grad()); }  // set() casts back
void grad_neg(B& b) { b.set(0, b.neg(b.grad())); }
void grad_abs(B& b) { b.set(0, b.mul(b.grad(), unary(b, OpCode::k_sign, b.input(0)))); }
void grad_exp(B& b) { b.set(0, b.mul(b.grad(), b.output(0))); }
void grad_log(B& b) { b.set(0, div(b, b.grad(), b.input(0))); }
void grad_log1p(B& b) {
  const TensorId x = b.input(0);
  b.set(0, div(b, b.grad(), b.add(x, b.constant(1, dtype_of(b, x)))));
}
void grad_sqrt(B& b) { b.set(0, div(b, scaled(b, b.grad(), 0.5), b.output(0))); }
void grad_rsqrt(B& b) { b.set(0, div(b, b.mul(scaled(b, b.grad(), -0.5), b.output(0)), b.input(0))); }
void grad_square(B& b) { b.set(0, b.mul(b.grad(), scaled(b, b.input(0), 2))); }
void grad_reciprocal(B& b) { b.set(0, b.neg(b.mul(b.grad(), unary(b, OpCode::k_square, b.output(0))))); }
void grad_sin(B& b) { b.set(0, b.mul(b.grad(), unary(b, OpCode::k_cos, b.input(0)))); }
void grad_cos(B& b) { b.set(0, b.neg(b.mul(b.grad(), unary(b, OpCode::k_sin, b.input(0))))); }
void grad_erf(B& b) {
  const TensorId bell = unary(b, OpCode::k_exp, b.neg(unary(b, OpCode::k_square, b.input(0))));
  b.set(0, b.mul(b.grad(), scaled(b, bell, 2 * std::numbers::inv_sqrtpi)));
}
void grad_tanh(B& b) { b.set(0, b.mul(b.grad(), one_minus(b, unary(b, OpCode::k_square, b.output(0))))); }
void grad_sigmoid(B& b) {
  const TensorId y = b.output(0);
  b.set(0, b.mul(b.grad(), b.mul(y, one_minus(b, y))));
}
void grad_softplus(B& b) { b.set(0, b.mul(b.grad(), unary(b, OpCode::k_sigmoid, b.input(0)))); }
void grad_relu(B& b) { b.set(0, b.emit(OpCode::k_relu_grad, {b.output(0), b.grad()})); }
template <OpCode kGrad>
void grad_activation(B& b) {
  b.set(0, b.emit(kGrad, {b.input(0), b.grad()}));
}
void grad_bce(B& b) {
  const DType t = dtype_of(b, b.grad());
  const TensorId x = b.cast(b.input(0), t);
  if (b.wants(0)) {
    const TensorId target = b.cast(b.input(1), t);
    set_reduced(b, 0, b.mul(b.grad(), sub(b, unary(b, OpCode::k_sigmoid, x), target)));
  }
  if (b.wants(1)) set_reduced(b, 1, b.neg(b.mul(b.grad(), x)));
}
void grad_squared_difference(B& b) {
  const TensorId d = b.mul(b.grad(), scaled(b, sub(b, b.input(0), b.input(1)), 2));
  if (b.wants(0)) set_reduced(b, 0, d);
  if (b.wants(1)) b.set(1, b.neg(b.sum_to(d, b.dims(b.input(1)))));
}

// ---- cost -----------------------------------------------------------------------------------------------------------
// A transcendental function is about this many operations of vector code.
constexpr double kTranscendental = 12;
OpCost cost_transcendental(const OpView& v) { return {kTranscendental * output_elements(v), bytes_of(v)}; }
OpCost cost_fused(const OpView& v) {
  const double steps = static_cast<double>(decode(*v.attrs, static_cast<int>(v.inputs.size())).steps.size());
  return {2 * steps * output_elements(v), bytes_of(v)};
}

// A step that drops elements numbers them; all others read their operands alone.
uint32_t placed_dims_fused(const OpView& v) {
  const std::vector<FusedStep> steps = decode(*v.attrs, static_cast<int>(v.inputs.size())).steps;
  const auto draws = [](const FusedStep& step) { return has_flag(step.code, kRandom) && step.value > 0; };
  return std::any_of(steps.begin(), steps.end(), draws) ? ~uint32_t{0} : 0;
}

OpDef unary_def(const char* name, const char* doc, std::vector<TensorType> (*infer)(const OpView&),
                GradientRule gradient, OpCost (*cost)(const OpView&) = nullptr, uint32_t flags = 0) {
  return {.name = name,
          .doc = doc,
          .inputs = {{"x"}},
          .outputs = {{"y"}},
          .attrs = {},
          .infer = infer,
          .gradient = gradient,
          .factors = elementwise_factors,
          .cost = cost,
          .aliases = {{0, 0}},
          .flags = kElementwise | flags};
}

OpDef binary_def(const char* name, const char* doc, std::vector<TensorType> (*infer)(const OpView&),
                 GradientRule gradient, Factors (*factors)(const OpView&) = elementwise_factors,
                 OpCost (*cost)(const OpView&) = nullptr, uint32_t flags = 0) {
  return {.name = name,
          .doc = doc,
          .inputs = {{"a"}, {"b"}},
          .outputs = {{"y"}},
          .attrs = {},
          .infer = infer,
          .gradient = gradient,
          .factors = factors,
          .cost = cost,
          .aliases = {{0, 0}, {0, 1}},
          .flags = kElementwise | flags};
}

OpDef arithmetic_def(OpDef d, double (*of_numbers)(double, double)) {
  d.of_numbers = of_numbers;
  return d;
}

OpDef comparison_def(const char* name, const char* doc, std::vector<TensorType> (*infer)(const OpView&)) {
  OpDef d = binary_def(name, doc, infer, nullptr);
  d.aliases = {};
  d.flags |= kNoGradient;
  return d;
}

OpDef activation_grad_def(const char* name, const char* doc, const char* saved) {
  return {.name = name,
          .doc = doc,
          .inputs = {{saved}, {"dy"}},
          .outputs = {{"dx"}},
          .attrs = {},
          .infer = infer_activation_grad,
          .gradient = nullptr,
          .factors = linear_in_each<1>,
          .cost = cost_transcendental,
          .aliases = {{0, 0}, {0, 1}},
          .flags = kElementwise | kInternal};
}

}  // namespace

#define NUMBERS "\nNumpy broadcasting; number types, operands of one dtype."
#define FLOATS "\nNumpy broadcasting; floating point, operands of one dtype."
#define ANY_TO_BOOL "\nNumpy broadcasting; operands of one dtype -> bool."

const OpDef op_def_add =
    arithmetic_def(binary_def("add", "a + b." NUMBERS, infer_binary<is_number>, grad_add, linear_together),
                   [](double a, double b) { return a + b; });
const OpDef op_def_sub =
    arithmetic_def(binary_def("sub", "a - b." NUMBERS, infer_binary<is_number>, grad_sub, linear_together),
                   [](double a, double b) { return a - b; });
const OpDef op_def_mul =
    arithmetic_def(binary_def("mul", "a * b." NUMBERS, infer_binary<is_number>, grad_mul, linear_in_each<0, 1>),
                   [](double a, double b) { return a * b; });
const OpDef op_def_div =
    arithmetic_def(binary_def("div", "a / b." FLOATS, infer_binary<is_float>, grad_div, linear_in_each<0>),
                   [](double a, double b) { return a / b; });
const OpDef op_def_pow =
    binary_def("pow", "a to the power of b; the gradient of b is 0 where a is 0." FLOATS, infer_binary<is_float>,
               grad_pow, elementwise_factors, cost_transcendental, kComputeWide);
const OpDef op_def_maximum = [] {
  OpDef d = binary_def("maximum", "The larger of a and b; the gradient of a tie is half to each." NUMBERS,
                       infer_binary<is_number>, grad_extremum<OpCode::k_greater>);
  d.of_partial = Combine::kMax;
  return d;
}();
const OpDef op_def_minimum = [] {
  OpDef d = binary_def("minimum", "The smaller of a and b; the gradient of a tie is half to each." NUMBERS,
                       infer_binary<is_number>, grad_extremum<OpCode::k_less>);
  d.of_partial = Combine::kMin;
  return d;
}();
const OpDef op_def_squared_difference = binary_def("squared_difference", "(a - b)^2." FLOATS, infer_binary<is_float>,
                                                   grad_squared_difference, elementwise_factors, nullptr, kComputeWide);

const OpDef op_def_equal = comparison_def("equal", "a == b." ANY_TO_BOOL, infer_comparison<is_any>);
const OpDef op_def_not_equal = comparison_def("not_equal", "a != b." ANY_TO_BOOL, infer_comparison<is_any>);
const OpDef op_def_less = comparison_def("less", "a < b." ANY_TO_BOOL, infer_comparison<is_number>);
const OpDef op_def_less_equal = comparison_def("less_equal", "a <= b." ANY_TO_BOOL, infer_comparison<is_number>);
const OpDef op_def_greater = comparison_def("greater", "a > b." ANY_TO_BOOL, infer_comparison<is_number>);
const OpDef op_def_greater_equal = comparison_def("greater_equal", "a >= b." ANY_TO_BOOL, infer_comparison<is_number>);
const OpDef op_def_logical_and = comparison_def("logical_and", "a and b." ANY_TO_BOOL, infer_comparison<is_boolean>);
const OpDef op_def_logical_or = comparison_def("logical_or", "a or b." ANY_TO_BOOL, infer_comparison<is_boolean>);
const OpDef op_def_logical_not =
    unary_def("logical_not", "not x.\nbool -> bool.", infer_unary<is_boolean>, nullptr, nullptr, kNoGradient);

const OpDef op_def_where = {
    .name = "where",
    .doc =
        "a where the condition holds, else b.\nNumpy broadcasting of all three; condition bool, a and b of one dtype.",
    .inputs = {{"condition"}, {"a"}, {"b"}},
    .outputs = {{"y"}},
    .attrs = {},
    .infer = infer_where,
    .gradient = grad_where,
    .factors = linear_in_branches,
    .cost = nullptr,
    .aliases = {{0, 1}, {0, 2}},
    .flags = kElementwise,
};
const OpDef op_def_cast = {
    .name = "cast",
    .doc =
        "x in another dtype: to nearest even between floats; from floats to integers towards zero, what does not fit "
        "to the nearest end of the range and NaN to its lowest number (of a signed type no index of anything); between "
        "integers the low bits, so an id that does not fit becomes another id; x != 0 to bool, which holds for NaN.\n"
        "Any shape and dtype.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {{"dtype", AttrType::kString, std::string(), true, "of the result: f32, bf16, ..."}},
    .infer = infer_cast,
    .gradient = grad_cast,
    .factors = linear_if_float,
    .cost = nullptr,
    .aliases = {},
    .flags = kElementwise,
};
const OpDef op_def_stop_gradient =
    unary_def("stop_gradient", "x, through which no gradient passes.\nAny shape and dtype.", infer_unary<is_any>,
              nullptr, nullptr, kNoGradient | kRearranges | kView | kTrainingOnly);
const OpDef op_def_neg = [] {
  OpDef d = unary_def("neg", "-x.\nAny shape; number types.", infer_unary<is_number>, grad_neg);
  d.factors = linear_in_each<0>;
  return d;
}();
const OpDef op_def_abs =
    unary_def("abs", "|x|; gradient 0 at 0.\nAny shape; number types.", infer_unary<is_number>, grad_abs);
const OpDef op_def_sign =
    unary_def("sign", "-1, 0 or 1.\nAny shape; number types.", infer_unary<is_number>, nullptr, nullptr, kNoGradient);
const OpDef op_def_floor = unary_def("floor", "The largest integer not above x.\nAny shape; floating point.",
                                     infer_unary<is_float>, nullptr, nullptr, kNoGradient);

#define SHAPE "\nAny shape; floating point."
const OpDef op_def_square = unary_def("square", "x^2.\nAny shape; number types.", infer_unary<is_number>, grad_square);
const OpDef op_def_reciprocal = unary_def("reciprocal", "1 / x." SHAPE, infer_unary<is_float>, grad_reciprocal);
const OpDef op_def_exp =
    unary_def("exp", "e^x." SHAPE, infer_unary<is_float>, grad_exp, cost_transcendental, kComputeWide);
const OpDef op_def_log =
    unary_def("log", "Natural logarithm." SHAPE, infer_unary<is_float>, grad_log, cost_transcendental, kComputeWide);
const OpDef op_def_log1p = unary_def("log1p", "log(1 + x), exact near 0." SHAPE, infer_unary<is_float>, grad_log1p,
                                     cost_transcendental, kComputeWide);
const OpDef op_def_sqrt = unary_def("sqrt", "Square root." SHAPE, infer_unary<is_float>, grad_sqrt);
const OpDef op_def_rsqrt = unary_def("rsqrt", "1 / sqrt(x)." SHAPE, infer_unary<is_float>, grad_rsqrt);
const OpDef op_def_sin = unary_def("sin", "Sine." SHAPE, infer_unary<is_float>, grad_sin, cost_transcendental);
const OpDef op_def_cos = unary_def("cos", "Cosine." SHAPE, infer_unary<is_float>, grad_cos, cost_transcendental);
const OpDef op_def_erf =
    unary_def("erf", "Error function." SHAPE, infer_unary<is_float>, grad_erf, cost_transcendental);
const OpDef op_def_tanh =
    unary_def("tanh", "Hyperbolic tangent." SHAPE, infer_unary<is_float>, grad_tanh, cost_transcendental);
const OpDef op_def_sigmoid =
    unary_def("sigmoid", "1 / (1 + exp(-x))." SHAPE, infer_unary<is_float>, grad_sigmoid, cost_transcendental);
const OpDef op_def_softplus = unary_def("softplus", "log(1 + exp(x)), without overflow." SHAPE, infer_unary<is_float>,
                                        grad_softplus, cost_transcendental, kComputeWide);
const OpDef op_def_relu = [] {
  OpDef d = unary_def("relu", "max(x, 0); gradient 0 at 0." SHAPE, infer_unary<is_float>, grad_relu);
  d.as_activation = "relu";
  return d;
}();
const OpDef op_def_gelu =
    unary_def("gelu", "0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): the tanh form of GELU." SHAPE,
              infer_unary<is_float>, grad_activation<OpCode::k_gelu_grad>, cost_transcendental);
const OpDef op_def_gelu_erf =
    unary_def("gelu_erf", "0.5 x (1 + erf(x / sqrt(2))): the exact GELU." SHAPE, infer_unary<is_float>,
              grad_activation<OpCode::k_gelu_erf_grad>, cost_transcendental);
const OpDef op_def_silu = unary_def("silu", "x sigmoid(x)." SHAPE, infer_unary<is_float>,
                                    grad_activation<OpCode::k_silu_grad>, cost_transcendental);

const OpDef op_def_relu_grad =
    activation_grad_def("relu_grad", "dy, and 0 where y <= 0.\ny: result of relu." SHAPE, "y");
const OpDef op_def_gelu_grad = activation_grad_def("gelu_grad", "Gradient of gelu at x times dy." SHAPE, "x");
const OpDef op_def_gelu_erf_grad =
    activation_grad_def("gelu_erf_grad", "Gradient of gelu_erf at x times dy." SHAPE, "x");
const OpDef op_def_silu_grad = activation_grad_def("silu_grad", "Gradient of silu at x times dy." SHAPE, "x");

const OpDef op_def_bce_with_logits = {
    .name = "bce_with_logits",
    .doc =
        "Binary cross entropy of logits x against targets in [0, 1]: max(x, 0) - x t + log(1 + exp(-|x|)).\n"
        "Numpy broadcasting; floating point of one dtype -> the accumulate dtype.",
    .inputs = {{"x"}, {"target"}},
    .outputs = {{"loss"}},
    .attrs = {},
    .infer = infer_bce,
    .gradient = grad_bce,
    .factors = elementwise_factors,
    .cost = cost_transcendental,
    .aliases = {{0, 0}, {0, 1}},
    .flags = kElementwise | kComputeWide,
};

const OpDef op_def_fused = {
    .name = "fused",
    .doc =
        "A chain of elementwise ops in one pass over memory (ops/fused.h).\n"
        "Numpy broadcasting of all operands; every result has the shape of all operands broadcast.",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y", PortKind::kVariadic}},
    .attrs = {{"ops", AttrType::kInts, Ints(), true, "the steps, encoded"},
              {"values", AttrType::kFloats, std::vector<double>(), false, "one number a step"}},
    .infer = infer_fused,
    .gradient = nullptr,
    .factors = elementwise_factors,
    .cost = cost_fused,
    .flags = kElementwise | kOffsetAware | kInternal,
    .aliases_of = aliases_fused,
    .placed_dims = placed_dims_fused,
};

}  // namespace whale
