// Dot products between all pairs of vectors of a sample: DLRM's interaction of features (Naumov et al., 2019).
#include "ops/family.h"

namespace whale {
namespace {

int64_t pairs(size_t vectors) { return static_cast<int64_t>(vectors * (vectors - 1) / 2); }

// Operands from `first` on: at least two, alike. Returns how many.
size_t need_alike(const OpView& v, int first) {
  const size_t count = v.inputs.size() - static_cast<size_t>(first);
  if (count < 2) throw invalid("{} operand(s) 'x', expected at least 2", count);
  need_float(v, first, "x");
  need_rank_at_least(v, first, "x", 1);
  for (size_t k = 0; k < count; ++k) {
    const std::string name = fmt::format("x[{}]", k);
    const int i = first + static_cast<int>(k);
    if (!has(v, i)) throw invalid("operand '{}' is missing", name);
    need_dtype(v, i, name.c_str(), in(v, first).dtype);
    need_dims(v, i, name.c_str(), in_dims(v, first), "the shape of x[0]");
  }
  return count;
}

Dims pair_dims(const OpView& v, int first, size_t count) {
  Dims dims = leading(in_dims(v, first));
  dims.push_back(pairs(count));
  return dims;
}

std::vector<TensorType> infer_pairwise_dot(const OpView& v) {
  if (v.inputs.empty()) throw invalid("no operands, expected at least 2");
  const size_t count = need_alike(v, 0);
  return {{in(v, 0).dtype, pair_dims(v, 0, count)}};
}

void gradient_pairwise_dot(GradBuilder& b) {
  TensorIds inputs{b.grad()};
  const TensorIds x = b.op().inputs;
  inputs.insert(inputs.end(), x.begin(), x.end());
  const auto dx = b.emit_all(OpCode::k_pairwise_dot_grad, inputs);
  for (size_t i = 0; i < x.size(); ++i) b.set(static_cast<int>(i), dx[i]);
}

std::vector<int> range(int first, size_t count) {
  std::vector<int> out;
  for (size_t k = 0; k < count; ++k) out.push_back(first + static_cast<int>(k));
  return out;
}

Factors factors_pairwise_dot(const OpView& v) {
  Factors f;
  const int n = rank_of(v, 0) - 1;
  add_leading(f, v, n, range(0, v.inputs.size()), {0});
  add_factor(f, v, "d", FactorKind::kReduce, in_dims(v, 0).back(), std::vector<SubAxis>(v.inputs.size(), sub_axis(n)),
             {}, {0});
  return f;
}

std::vector<TensorType> infer_pairwise_dot_grad(const OpView& v) {
  if (v.inputs.empty()) throw invalid("no operands, expected dy and at least two of x");
  const size_t count = need_alike(v, 1);
  need_dtype(v, 0, "dy", in(v, 1).dtype);
  need_dims(v, 0, "dy", pair_dims(v, 1, count), "the shape of pairwise_dot's result");
  return std::vector<TensorType>(v.inputs.begin() + 1, v.inputs.end());
}

Factors factors_pairwise_dot_grad(const OpView& v) {
  Factors f;
  const int n = rank_of(v, 1) - 1;
  const size_t count = v.inputs.size() - 1;
  add_leading(f, v, n, range(0, v.inputs.size()), range(0, count));
  std::vector<SubAxis> x(v.inputs.size(), sub_axis(n));
  x[0] = kAbsent;
  add_factor(f, v, "d", FactorKind::kMap, in_dims(v, 1).back(), std::move(x), std::vector<SubAxis>(count, sub_axis(n)));
  f.linear = {{0}};
  return f;
}

OpCost cost_forward(const OpView& v) {
  return {2 * output_elements(v) * static_cast<double>(in_dims(v, 0).back()), bytes_of(v)};
}
OpCost cost_backward(const OpView& v) {
  return {4 * elements(in(v, 0)) * static_cast<double>(in_dims(v, 1).back()), bytes_of(v)};
}

}  // namespace

const OpDef op_def_pairwise_dot = {
    .name = "pairwise_dot",
    .doc =
        "Dot products between all pairs of operands, sample by sample: the interaction of features of DLRM (Naumov et "
        "al., 2019).\n"
        "n operands x [..., d] -> y [..., n (n - 1) / 2]: x1 x0, x2 x0, x2 x1, x3 x0, ... Sums in the accumulate "
        "dtype.",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y"}},
    .infer = infer_pairwise_dot,
    .gradient = gradient_pairwise_dot,
    .factors = factors_pairwise_dot,
    .cost = cost_forward,
    .flags = kComputeLow,
};

const OpDef op_def_pairwise_dot_grad = {
    .name = "pairwise_dot_grad",
    .doc =
        "Gradient of pairwise_dot: dx_i is the sum over j of the pair's dy times x_j.\n"
        "dy [..., n (n - 1) / 2], n operands x [..., d] -> n results dx, like x.",
    .inputs = {{"dy"}, {"x", PortKind::kVariadic}},
    .outputs = {{"dx", PortKind::kVariadic}},
    .infer = infer_pairwise_dot_grad,
    .factors = factors_pairwise_dot_grad,
    .cost = cost_backward,
    .flags = kInternal,
};

}  // namespace whale
