// Layer norm and RMS norm: over the last dimension, statistics in the accumulate dtype.
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

// gamma or beta: [d], of x's dtype or of its accumulate dtype (parameters stay f32 beside bf16 activations).
void check_scale(const OpView& v, int i, const char* name, const TensorType& x) {
  if (!has(v, i)) return;
  need_dims(v, i, name, {x.dims.back()}, "the last dimension of x");
  need_scale_dtype(v, i, name, x.dtype);
}

void no_gradient_for_statistics(GradBuilder& b, int count) {
  for (int i = 1; i < count; ++i)
    if (b.grad(i) != kNone)
      throw unimplemented("the statistics that a norm returns have no gradient; compute them with reduce_mean");
}

// ---- layer norm -------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_layer_norm(const OpView& v) {
  need_float(v, 0, "x");
  need_rank_at_least(v, 0, "x", 1);
  check_scale(v, 1, "gamma", in(v, 0));
  check_scale(v, 2, "beta", in(v, 0));
  need_epsilon(v);
  const TensorType row{accumulate_dtype(in(v, 0).dtype), leading(in_dims(v, 0))};
  return {in(v, 0), row, row};
}

void gradient_layer_norm(GradBuilder& b) {
  no_gradient_for_statistics(b, 3);
  const bool gamma = b.input(1) != kNone, beta = b.input(2) != kNone;
  const auto r = b.emit_all(OpCode::k_layer_norm_grad, {b.grad(), b.input(0), b.output(1), b.output(2), b.input(1)},
                            {{"bias", beta}});
  if (b.wants(0)) b.set(0, r[0]);
  if (gamma && b.wants(1)) b.set(1, r[1]);
  if (beta && b.wants(2)) b.set(2, r[gamma ? 2 : 1]);
}

Factors factors_layer_norm(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0) - 1, {0}, {0, 1, 2});
  return f;
}

std::vector<TensorType> infer_layer_norm_grad(const OpView& v) {
  const TensorType& x = in(v, 1);
  need_float(v, 1, "x");
  need_rank_at_least(v, 1, "x", 1);
  need_dims(v, 0, "dy", x.dims, "the shape of x");
  need_dtype(v, 0, "dy", x.dtype);
  for (const int i : {2, 3}) {
    need_dims(v, i, i == 2 ? "mean" : "rstd", leading(x.dims));
    need_dtype(v, i, i == 2 ? "mean" : "rstd", accumulate_dtype(x.dtype));
  }
  check_scale(v, 4, "gamma", x);
  const TensorType scale{has(v, 4) ? in(v, 4).dtype : accumulate_dtype(x.dtype), {x.dims.back()}};
  std::vector<TensorType> out{x};
  if (has(v, 4)) out.push_back(scale);
  if (attr_bool(*v.attrs, "bias")) out.push_back(scale);
  return out;
}

Factors factors_layer_norm_grad(const OpView& v) {
  Factors f;
  const int n = rank_of(v, 1) - 1;
  if (v.outputs.size() == 1)
    add_leading(f, v, n, {0, 1, 2, 3}, {0});
  else if (v.outputs.size() == 2)
    add_leading(f, v, n, {0, 1, 2, 3}, {0}, {1});
  else
    add_leading(f, v, n, {0, 1, 2, 3}, {0}, {1, 2});
  f.linear = {{0}};
  return f;
}

// ---- RMS norm ---------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_rms_norm(const OpView& v) {
  need_float(v, 0, "x");
  need_rank_at_least(v, 0, "x", 1);
  check_scale(v, 1, "gamma", in(v, 0));
  need_epsilon(v);
  return {in(v, 0), {accumulate_dtype(in(v, 0).dtype), leading(in_dims(v, 0))}};
}

void gradient_rms_norm(GradBuilder& b) {
  no_gradient_for_statistics(b, 2);
  const auto r = b.emit_all(OpCode::k_rms_norm_grad, {b.grad(), b.input(0), b.output(1), b.input(1)});
  if (b.wants(0)) b.set(0, r[0]);
  if (b.wants(1)) b.set(1, r[1]);
}

Factors factors_rms_norm(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0) - 1, {0}, {0, 1});
  return f;
}

std::vector<TensorType> infer_rms_norm_grad(const OpView& v) {
  const TensorType& x = in(v, 1);
  need_float(v, 1, "x");
  need_rank_at_least(v, 1, "x", 1);
  need_dims(v, 0, "dy", x.dims, "the shape of x");
  need_dtype(v, 0, "dy", x.dtype);
  need_dims(v, 2, "rstd", leading(x.dims));
  need_dtype(v, 2, "rstd", accumulate_dtype(x.dtype));
  check_scale(v, 3, "gamma", x);
  if (!has(v, 3)) return {x};
  return {x, {in(v, 3).dtype, {x.dims.back()}}};
}

Factors factors_rms_norm_grad(const OpView& v) {
  Factors f;
  if (v.outputs.size() == 1)
    add_leading(f, v, rank_of(v, 1) - 1, {0, 1, 2}, {0});
  else
    add_leading(f, v, rank_of(v, 1) - 1, {0, 1, 2}, {0}, {1});
  f.linear = {{0}};
  return f;
}

OpCost cost_forward(const OpView& v) { return {7 * output_elements(v), bytes_of(v)}; }
OpCost cost_backward(const OpView& v) { return {12 * output_elements(v), bytes_of(v)}; }

AttrSpec epsilon(double fallback) {
  return {
      .name = "epsilon", .type = AttrType::kFloat, .fallback = fallback, .doc = "added to the variance or mean square"};
}

}  // namespace

extern const OpDef op_def_layer_norm, op_def_layer_norm_grad, op_def_rms_norm, op_def_rms_norm_grad;

const OpDef op_def_layer_norm = {
    .name = "layer_norm",
    .doc =
        "Layer normalization over the last dimension (Ba et al., 2016).\n"
        "x [..., d], gamma [d]?, beta [d]? -> y like x, mean [...], rstd [...] in the accumulate dtype.",
    .inputs = {{"x"}, {"gamma", PortKind::kOptional}, {"beta", PortKind::kOptional}},
    .outputs = {{"y"}, {"mean"}, {"rstd"}},
    .attrs = {epsilon(1e-5)},
    .infer = infer_layer_norm,
    .gradient = gradient_layer_norm,
    .factors = factors_layer_norm,
    .cost = cost_forward,
    .aliases = {{0, 0}},
};
const OpDef op_def_layer_norm_grad = {
    .name = "layer_norm_grad",
    .doc =
        "Gradient of layer_norm.\n"
        "dy, x [..., d], mean, rstd [...], gamma [d]? -> dx, dgamma [d] when gamma is present, dbeta [d] when `bias`.",
    .inputs = {{"dy"}, {"x"}, {"mean"}, {"rstd"}, {"gamma", PortKind::kOptional}},
    .outputs = {{"dx"}, {"dgamma", PortKind::kOptional}, {"dbeta", PortKind::kOptional}},
    .attrs = {{.name = "bias", .type = AttrType::kBool, .fallback = false, .doc = "return dbeta"}},
    .infer = infer_layer_norm_grad,
    .factors = factors_layer_norm_grad,
    .cost = cost_backward,
    .aliases = {{0, 0}},
    .flags = kInternal,
};
const OpDef op_def_rms_norm = {
    .name = "rms_norm",
    .doc =
        "Root mean square normalization over the last dimension (Zhang and Sennrich, 2019).\n"
        "x [..., d], gamma [d]? -> y like x, rstd [...] in the accumulate dtype.",
    .inputs = {{"x"}, {"gamma", PortKind::kOptional}},
    .outputs = {{"y"}, {"rstd"}},
    .attrs = {epsilon(1e-6)},
    .infer = infer_rms_norm,
    .gradient = gradient_rms_norm,
    .factors = factors_rms_norm,
    .cost = cost_forward,
    .aliases = {{0, 0}},
};
const OpDef op_def_rms_norm_grad = {
    .name = "rms_norm_grad",
    .doc = "Gradient of rms_norm.\ndy, x [..., d], rstd [...], gamma [d]? -> dx, dgamma [d] when gamma is present.",
    .inputs = {{"dy"}, {"x"}, {"rstd"}, {"gamma", PortKind::kOptional}},
    .outputs = {{"dx"}, {"dgamma", PortKind::kOptional}},
    .infer = infer_rms_norm_grad,
    .factors = factors_rms_norm_grad,
    .cost = cost_backward,
    .aliases = {{0, 0}},
    .flags = kInternal,
};

}  // namespace whale
