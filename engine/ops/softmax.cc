// Softmax and log-softmax over the last dimension; sums in the accumulate dtype.
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

std::vector<TensorType> infer_softmax(const OpView& v) {
  need_float(v, 0, "x");
  need_rank_at_least(v, 0, "x", 1);
  return {in(v, 0)};
}

std::vector<TensorType> infer_softmax_grad(const OpView& v) {
  need_float(v, 0, "y");
  need_rank_at_least(v, 0, "y", 1);
  need_dims(v, 1, "dy", in_dims(v, 0), "the shape of y");
  need_dtype(v, 1, "dy", in(v, 0).dtype);
  return {in(v, 0)};
}

template <OpCode kGrad>
void gradient(GradBuilder& b) {
  b.set(0, b.emit(kGrad, {b.output(0), b.grad()}));
}

Factors factors_rows(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0) - 1, {0, 1}, {0});
  return f;
}
Factors factors_grad(const OpView& v) {
  Factors f = factors_rows(v);
  f.linear = {{1}};
  return f;
}
OpCost cost(const OpView& v) { return {8 * output_elements(v), bytes_of(v)}; }

}  // namespace

extern const OpDef op_def_softmax, op_def_softmax_grad, op_def_log_softmax, op_def_log_softmax_grad;

const OpDef op_def_softmax = {
    .name = "softmax",
    .doc = "exp(x) / sum(exp(x)) over the last dimension, shifted by the maximum.\nx [..., d] -> y, same.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .infer = infer_softmax,
    .gradient = gradient<OpCode::k_softmax_grad>,
    .factors = factors_rows,
    .cost = cost,
    .aliases = {{0, 0}},
};
const OpDef op_def_softmax_grad = {
    .name = "softmax_grad",
    .doc = "Gradient of softmax: y * (dy - sum(y * dy)).\ny, dy [..., d] -> dx, same.",
    .inputs = {{"y"}, {"dy"}},
    .outputs = {{"dx"}},
    .infer = infer_softmax_grad,
    .factors = factors_grad,
    .cost = cost,
    .aliases = {{0, 1}},
    .flags = kInternal,
};
const OpDef op_def_log_softmax = {
    .name = "log_softmax",
    .doc = "x - log(sum(exp(x))) over the last dimension, shifted by the maximum.\nx [..., d] -> y, same.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .infer = infer_softmax,
    .gradient = gradient<OpCode::k_log_softmax_grad>,
    .factors = factors_rows,
    .cost = cost,
    .aliases = {{0, 0}},
    .flags = kComputeWide,
};
const OpDef op_def_log_softmax_grad = {
    .name = "log_softmax_grad",
    .doc = "Gradient of log_softmax: dy - exp(y) * sum(dy).\ny, dy [..., d] -> dx, same.",
    .inputs = {{"y"}, {"dy"}},
    .outputs = {{"dx"}},
    .infer = infer_softmax_grad,
    .factors = factors_grad,
    .cost = cost,
    .aliases = {{0, 1}},
    .flags = kInternal,
};

}  // namespace whale
