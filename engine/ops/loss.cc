// Cross entropy from integer labels: never stores probabilities; the backward pass recomputes them from lse.
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

const std::vector<AttrSpec> kAttrs = {{.name = "ignore_index",
                                       .type = AttrType::kInt,
                                       .fallback = int64_t{-100},
                                       .doc = "rows with this label have loss and gradient 0"},
                                      {.name = "label_smoothing",
                                       .type = AttrType::kFloat,
                                       .fallback = 0.0,
                                       .doc = "weight of the uniform distribution in the target"}};

void check_smoothing(const OpView& v) {
  const double s = attr_float(*v.attrs, "label_smoothing");
  if (!(s >= 0 && s <= 1)) throw invalid("attribute 'label_smoothing' is {}, expected 0 .. 1", s);
}

std::vector<TensorType> infer_cross_entropy(const OpView& v) {
  need_float(v, 0, "logits");
  need_rank_at_least(v, 0, "logits", 1);
  need_ids(v, 1, "labels");
  const Dims rows = leading(in_dims(v, 0));
  need_dims(v, 1, "labels", rows, "the shape of logits without its last dimension");
  check_smoothing(v);
  const DType t = accumulate_dtype(in(v, 0).dtype);
  return {{t, rows}, {t, rows}};
}

void gradient_cross_entropy(GradBuilder& b) {
  if (b.grad(1) != kNone)
    throw unimplemented("cross_entropy: the result 'lse' has no gradient; compute it with log and reduce_sum");
  if (!b.wants(0)) return;
  b.set(0, b.emit(OpCode::k_cross_entropy_grad, {b.grad(0), b.input(0), b.input(1), b.output(1)}, b.op().attrs));
}

Factors factors_cross_entropy(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 1), {0, 1}, {0, 1});
  return f;
}

std::vector<TensorType> infer_cross_entropy_grad(const OpView& v) {
  need_float(v, 1, "logits");
  need_rank_at_least(v, 1, "logits", 1);
  need_ids(v, 2, "labels");
  const Dims rows = leading(in_dims(v, 1));
  need_dims(v, 0, "dloss", rows);
  need_dims(v, 2, "labels", rows);
  need_dims(v, 3, "lse", rows);
  need_dtype(v, 0, "dloss", accumulate_dtype(in(v, 1).dtype));
  need_dtype(v, 3, "lse", accumulate_dtype(in(v, 1).dtype));
  check_smoothing(v);
  return {in(v, 1)};
}

Factors factors_cross_entropy_grad(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 2), {0, 1, 2, 3}, {0});
  f.linear = {{0}};
  return f;
}

OpCost cost_forward(const OpView& v) { return {5 * elements(in(v, 0)), bytes_of(v)}; }
OpCost cost_backward(const OpView& v) { return {6 * elements(in(v, 1)), bytes_of(v)}; }

}  // namespace

extern const OpDef op_def_cross_entropy, op_def_cross_entropy_grad;

const OpDef op_def_cross_entropy = {
    .name = "cross_entropy",
    .doc =
        "Cross entropy of softmax(logits) and integer labels, one value a row, with label smoothing.\n"
        "logits [..., v], labels i32/i64 [...] -> loss [...] (0 where ignored), lse [...] (log of the sum of "
        "exponentials), both in the "
        "accumulate dtype. Take the mean over counted rows yourself.",
    .inputs = {{"logits"}, {"labels"}},
    .outputs = {{"loss"}, {"lse"}},
    .attrs = kAttrs,
    .infer = infer_cross_entropy,
    .gradient = gradient_cross_entropy,
    .factors = factors_cross_entropy,
    .cost = cost_forward,
};
const OpDef op_def_cross_entropy_grad = {
    .name = "cross_entropy_grad",
    .doc =
        "Gradient of cross_entropy: dloss * (softmax(logits) - target).\n"
        "dloss [...], logits [..., v], labels [...], lse [...] -> dlogits, like logits; may overwrite them.",
    .inputs = {{"dloss"}, {"logits"}, {"labels"}, {"lse"}},
    .outputs = {{"dlogits"}},
    .attrs = kAttrs,
    .infer = infer_cross_entropy_grad,
    .factors = factors_cross_entropy_grad,
    .cost = cost_backward,
    .aliases = {{0, 1}},
    .flags = kInternal,
};

}  // namespace whale
