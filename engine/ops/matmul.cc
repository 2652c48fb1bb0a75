// Matrix products. Sums are kept in the accumulate dtype.
#include <algorithm>

#include "ops/family.h"

namespace whale {
namespace {

constexpr const char* kActivations[] = {"none", "relu", "gelu", "gelu_erf", "silu", "tanh", "sigmoid"};

// The extents of a product, from its operands: batch is what stands before the last two dimensions of a.
struct Product {
  Dims batch;
  int64_t m, k, n;
};

// The last two dimensions of operand i, as rows and columns of the product.
std::pair<int64_t, int64_t> matrix(const OpView& v, int i, bool transposed) {
  const Dims& d = in_dims(v, i);
  const int64_t rows = d[d.size() - 2], columns = d[d.size() - 1];
  return transposed ? std::pair{columns, rows} : std::pair{rows, columns};
}

Product product(const OpView& v) {
  const bool ta = attr_bool(*v.attrs, "transpose_a"), tb = attr_bool(*v.attrs, "transpose_b");
  const auto [m, k] = matrix(v, 0, ta);
  const auto [k2, n] = matrix(v, 1, tb);
  if (k != k2)
    throw invalid("a {}{} and b {}{} do not multiply: a sums over {} and b over {}", to_string(in_dims(v, 0)),
                  ta ? " transposed" : "", to_string(in_dims(v, 1)), tb ? " transposed" : "", k, k2);
  return {leading(leading(in_dims(v, 0))), m, k, n};
}

void need_products(const OpView& v, int a, int b) {
  const auto& ports = def(v.code).inputs;
  const char *an = ports[a].name, *bn = ports[b].name;
  need_float(v, a, an);
  if (in(v, a).dtype != in(v, b).dtype)
    throw invalid("operands '{}' ({}) and '{}' ({}) must have one dtype; cast one of them", an, to_string(in(v, a)), bn,
                  to_string(in(v, b)));
  need_rank_at_least(v, a, an, 2);
  need_rank_at_least(v, b, bn, 2);
}

DType result_dtype(const OpView& v) {
  const DType t = out_dtype(v, in(v, 0).dtype);
  if (!is_float(t)) throw invalid("attribute 'out_dtype' is '{}', expected a floating point type", name_of(t));
  return t;
}

std::vector<TensorType> infer_matmul(const OpView& v) {
  need_products(v, 0, 1);
  const Product p = product(v);
  if (rank_of(v, 1) != 2 && leading(leading(in_dims(v, 1))) != p.batch)
    throw invalid("leading dimensions of a {} and b {} differ; expected equal ones, or b of rank 2",
                  to_string(in_dims(v, 0)), to_string(in_dims(v, 1)));
  if (has(v, 2)) {
    need_dims(v, 2, "bias", {p.n}, "the columns of b");
    need_scale_dtype(v, 2, "bias", in(v, 0).dtype);
  }
  const std::string& activation = attr_string(*v.attrs, "activation");
  if (std::find(std::begin(kActivations), std::end(kActivations), activation) == std::end(kActivations))
    throw invalid("attribute 'activation' is '{}', expected one of {}", activation, fmt::join(kActivations, ", "));
  Dims out = p.batch;
  out.insert(out.end(), {p.m, p.n});
  return {{result_dtype(v), out}};
}

std::vector<TensorType> infer_weight_grad(const OpView& v) {
  need_products(v, 0, 1);
  const Dims &a = in_dims(v, 0), &dy = in_dims(v, 1);
  if (leading(a) != leading(dy))
    throw invalid("a {} and dy {} differ before the last dimension; expected [..., m, k] and [..., m, n]", to_string(a),
                  to_string(dy));
  const DType t = result_dtype(v);
  Dims dw{a.back(), dy.back()};
  if (attr_bool(*v.attrs, "transpose")) std::swap(dw[0], dw[1]);
  std::vector<TensorType> out{{t, dw}};
  if (attr_bool(*v.attrs, "bias")) out.push_back({t, {dy.back()}});
  return out;
}

// ---- factors --------------------------------------------------------------------------------------------------------
std::string batch_name(int d) { return d == 0 ? "b" : "b" + std::to_string(d); }

Factors factors_matmul(const OpView& v) {
  Factors f;
  const Product p = product(v);
  const int batch = static_cast<int>(p.batch.size());
  const bool ta = attr_bool(*v.attrs, "transpose_a"), tb = attr_bool(*v.attrs, "transpose_b");
  const bool shared = rank_of(v, 1) == 2;
  const int b0 = shared ? 0 : batch;  // where b's matrix begins
  for (int d = 0; d < batch; ++d)
    add_factor(f, v, batch_name(d), FactorKind::kMap, p.batch[d], {sub_axis(d), shared ? kAbsent : sub_axis(d)},
               {sub_axis(d)});
  add_factor(f, v, "m", FactorKind::kMap, p.m, {sub_axis(batch + (ta ? 1 : 0))}, {sub_axis(batch)});
  add_factor(f, v, "n", FactorKind::kMap, p.n, {kAbsent, sub_axis(b0 + (tb ? 0 : 1)), sub_axis(0)},
             {sub_axis(batch + 1)});
  // A bias or an activation works on the whole sum, so a partial one must not reach it.
  if (has(v, 2) || attr_string(*v.attrs, "activation") != "none") return f;
  add_factor(f, v, "k", FactorKind::kReduce, p.k, {sub_axis(batch + (ta ? 0 : 1)), sub_axis(b0 + (tb ? 1 : 0))}, {},
             {0});
  f.linear = {{0}, {1}};
  return f;
}

// Product, sum with the bias, activation: then the product is linear.
TensorIds decompose_matmul(Graph& graph, const Op& given) {
  const Op op = given;  // appending moves the graph's ops
  const std::string activation = attr_string(op.attrs, "activation");
  const bool bias = op.inputs.size() > 2 && op.inputs[2] != kNone, active = !activation.empty() && activation != "none";
  if (!bias && !active) return {};
  const auto append = [&](OpCode code, TensorIds inputs, Attrs attrs, std::string name = {}) {
    if (name.empty()) name = fmt::format("{}.{}", op.name, def(code).name);
    Op& made = graph.op(append_op(graph, code, std::move(inputs), std::move(attrs), op.scope, name));
    made.phase = op.phase, made.region = op.region, made.stage = op.stage, made.location = op.location;
    return made.outputs[0];
  };
  Attrs attrs = op.attrs;
  attrs["activation"] = std::string("none");
  TensorId y = append(op.code, {op.inputs[0], op.inputs[1]}, attrs, op.name);
  if (bias) {
    TensorId b = op.inputs[2];
    if (graph.tensor(b).dtype != graph.tensor(y).dtype)
      b = append(OpCode::k_cast, {b}, {{"dtype", std::string(name_of(graph.tensor(y).dtype))}});
    y = append(OpCode::k_add, {y, b}, {});
  }
  if (active) y = append(code_of(activation), {y}, {});
  return {y};
}

// The product, and the sum of dy over all rows.
TensorIds decompose_weight_grad(Graph& graph, const Op& given) {
  const Op op = given;  // appending moves the graph's ops
  if (!attr_bool(op.attrs, "bias")) return {};
  Attrs attrs = op.attrs;
  attrs["bias"] = false;
  const OpId product = append_op(graph, op.code, op.inputs, attrs, op.scope, op.name);
  Ints axes;
  for (size_t d = 0; d + 1 < graph.tensor(op.inputs[1]).dims.size(); ++d) axes.push_back(static_cast<int64_t>(d));
  const OpId sum =
      append_op(graph, OpCode::k_reduce_sum, {op.inputs[1]},
                {{"axes", axes}, {"out_dtype", attr_string(op.attrs, "out_dtype")}}, op.scope, op.name + ".bias");
  return {graph.op(product).outputs[0], graph.op(sum).outputs[0]};
}

Factors factors_weight_grad(const OpView& v) {
  Factors f;
  const Dims &a = in_dims(v, 0), &dy = in_dims(v, 1);
  const bool transpose = attr_bool(*v.attrs, "transpose");
  const int last = static_cast<int>(a.size()) - 1;
  for (int d = 0; d < last; ++d)
    add_factor(f, v, d == last - 1 ? "m" : batch_name(d), FactorKind::kReduce, a[d], {sub_axis(d), sub_axis(d)}, {},
               {0, 1});
  // Cutting k leaves the bias' gradient whole on every device.
  add_factor(f, v, "k", FactorKind::kMap, a.back(), {sub_axis(last)}, {sub_axis(transpose ? 1 : 0)});
  add_factor(f, v, "n", FactorKind::kMap, dy.back(), {kAbsent, sub_axis(last)},
             {sub_axis(transpose ? 0 : 1), sub_axis(0)});
  f.linear = {{1}};
  if (!attr_bool(*v.attrs, "bias")) f.linear.push_back({0});
  return f;
}

// ---- gradient -------------------------------------------------------------------------------------------------------
Attrs transposes(bool a, bool b) { return {{"transpose_a", a}, {"transpose_b", b}}; }

TensorId swap_last(GradBuilder& b, TensorId x) {
  Ints perm(b.dims(x).size());
  for (size_t i = 0; i < perm.size(); ++i) perm[i] = static_cast<int64_t>(i);
  std::swap(perm[perm.size() - 1], perm[perm.size() - 2]);
  return b.emit(OpCode::k_transpose, {x}, {{"perm", perm}});
}

TensorId before_activation(GradBuilder& b, const std::string& activation) {
  if (activation == "none") return b.grad();
  if (activation == "relu") return b.emit(OpCode::k_relu_grad, {b.output(0), b.grad()});
  throw unimplemented("matmul: activation '{}' cannot be differentiated from its result; use the separate op",
                      activation);
}

void grad_matmul(GradBuilder& g) {
  const Op op = g.op();
  const bool ta = attr_bool(op.attrs, "transpose_a"), tb = attr_bool(op.attrs, "transpose_b");
  const TensorId a = g.input(0), b = g.input(1);
  const bool shared = g.dims(b).size() == 2, batched = g.dims(a).size() > 2;
  const TensorId exact_dy = before_activation(g, attr_string(op.attrs, "activation"));
  const TensorId dy = g.cast(exact_dy, g.type(a).dtype);
  if (g.wants(0)) {
    if (!ta)
      g.set(0, g.emit(OpCode::k_matmul, {dy, b}, transposes(false, !tb)));
    else if (shared && batched)  // b cannot stand left: it has no leading dimensions
      g.set(0, swap_last(g, g.emit(OpCode::k_matmul, {dy, b}, transposes(false, !tb))));
    else
      g.set(0, g.emit(OpCode::k_matmul, {b, dy}, transposes(tb, true)));
  }
  const bool bias_alone = g.wants(2) && !(shared && g.wants(1));
  if (g.wants(1) && shared) {
    Attrs attrs{{"transpose", tb}, {"bias", g.wants(2)}};
    const TensorIds made = g.emit_all(OpCode::k_matmul_weight_grad, {ta ? swap_last(g, a) : a, dy}, std::move(attrs));
    g.set(1, made[0]);
    if (g.wants(2)) g.set(2, made[1]);
  } else if (g.wants(1)) {
    g.set(1, tb ? g.emit(OpCode::k_matmul, {dy, a}, transposes(true, ta))
                : g.emit(OpCode::k_matmul, {a, dy}, transposes(!ta, false)));
  }
  if (bias_alone) g.set(2, g.sum_to(exact_dy, g.dims(g.input(2))));
}

OpCost cost_matmul(const OpView& v) {
  const Product p = product(v);
  const double rows = static_cast<double>(element_count(p.batch)) * static_cast<double>(p.m);
  return {2 * rows * static_cast<double>(p.k) * static_cast<double>(p.n), bytes_of(v)};
}

OpCost cost_weight_grad(const OpView& v) {
  const Dims& a = in_dims(v, 0);
  return {2 * static_cast<double>(element_count(a)) * static_cast<double>(in_dims(v, 1).back()), bytes_of(v)};
}

}  // namespace

const OpDef op_def_matmul = {
    .name = "matmul",
    .doc =
        "Matrix product, plus a bias, through an activation.\n"
        "a [..., m, k], b [..., k, n] or [k, n], bias? [n] -> y [..., m, n]; leading dimensions equal, or b of rank 2 "
        "shared by all.",
    .inputs = {{"a"}, {"b"}, {"bias", PortKind::kOptional}},
    .outputs = {{"y"}},
    .attrs = {{"transpose_a", AttrType::kBool, false, false, "the last two dimensions of a are swapped before"},
              {"transpose_b", AttrType::kBool, false, false, "the last two dimensions of b are swapped before"},
              {"activation", AttrType::kString, std::string("none"), false,
               "none, relu, gelu, gelu_erf, silu, tanh, sigmoid"},
              {"out_dtype", AttrType::kString, std::string(), false, "of the result; empty: that of a"}},
    .infer = infer_matmul,
    .gradient = grad_matmul,
    .factors = factors_matmul,
    .cost = cost_matmul,
    .aliases = {},
    .flags = kComputeLow | kProduct | kMatrices,
    .decompose = decompose_matmul,
};

const OpDef op_def_matmul_weight_grad = {
    .name = "matmul_weight_grad",
    .doc =
        "Gradient of a matmul's shared operand: a^T dy summed over all leading dimensions, and of its bias.\n"
        "a [..., m, k], dy [..., m, n] -> dw [k, n] ([n, k] with transpose), dbias? [n] (with bias).",
    .inputs = {{"a"}, {"dy"}},
    .outputs = {{"dw"}, {"dbias", PortKind::kOptional}},
    .attrs = {{"transpose", AttrType::kBool, false, false, "dw is [n, k]"},
              {"out_dtype", AttrType::kString, std::string(), false, "of the results; empty: that of a"},
              {"bias", AttrType::kBool, false, false, "also give dbias"}},
    .infer = infer_weight_grad,
    .gradient = nullptr,
    .factors = factors_weight_grad,
    .cost = cost_weight_grad,
    .aliases = {},
    .flags = kInternal | kMatrices,
    .decompose = decompose_weight_grad,
};

}  // namespace whale
