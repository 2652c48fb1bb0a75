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

std::vector<AttrSpec> with_limit(std::vector<AttrSpec> all) {
  all.push_back(index_limit_attr());
  return all;
}

// What the ops add that may see a part of the vocabulary.
std::vector<AttrSpec> part_attrs() {
  std::vector<AttrSpec> all = kAttrs;
  all.push_back({.name = "vocabulary",
                 .type = AttrType::kInt,
                 .fallback = int64_t{0},
                 .doc = "columns of all the logits, of which these may be a part; 0: these are all"});
  all.push_back(
      {.name = "label_begin", .type = AttrType::kInt, .fallback = int64_t{0}, .doc = "the label of the first column"});
  return all;
}

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

// The gradient's labels are those of the forward op.
Attrs unchecked(Attrs attrs) {
  attrs.erase(kIndexLimit);
  return attrs;
}

void gradient_cross_entropy(GradBuilder& b) {
  if (b.grad(1) != kNone)
    throw unimplemented("cross_entropy: the result 'lse' has no gradient; compute it with log and reduce_sum");
  if (!b.wants(0)) return;
  Attrs attrs = unchecked(b.op().attrs);
  attrs["vocabulary"] = b.dims(b.input(0)).back();
  b.set(0, b.emit(OpCode::k_cross_entropy_grad, {b.grad(0), b.input(0), b.input(1), b.output(1)}, attrs));
}

// The sums over a part of the vocabulary, which combine, and what follows from them.
TensorIds decompose_cross_entropy(Graph& graph, const Op& given) {
  const Op op = given;  // appending moves the graph's ops
  const auto append = [&](OpCode code, TensorIds inputs, Attrs attrs) {
    Op& made = graph.op(append_op(graph, code, std::move(inputs), std::move(attrs), op.scope,
                                  fmt::format("{}.{}", op.name, def(code).name)));
    made.phase = op.phase, made.region = op.region, made.origin = op.origin, made.stage = op.stage;
    made.location = op.location;
    return made.outputs;
  };
  Attrs attrs = op.attrs;
  attrs["vocabulary"] = graph.tensor(op.inputs[0]).dims.back();
  const auto stats = append(OpCode::k_cross_entropy_stats, {op.inputs[0], op.inputs[1]}, attrs);
  const auto loss = append(OpCode::k_cross_entropy_finish, {stats[0], stats[1], op.inputs[1]},
                           {{"ignore_index", attr_int(op.attrs, "ignore_index", -100)}});
  return {loss[0], stats[0]};
}

std::vector<TensorType> infer_stats(const OpView& v) {
  const int64_t vocabulary = attr_int(*v.attrs, "vocabulary"), begin = attr_int(*v.attrs, "label_begin");
  std::vector<TensorType> out = infer_cross_entropy(v);
  const int64_t width = in_dims(v, 0).back();
  if (vocabulary != 0 && (begin < 0 || vocabulary < width || begin > vocabulary - width))
    throw invalid("attributes 'label_begin' {} and 'vocabulary' {} do not fit {} columns", begin, vocabulary, width);
  return out;
}

// Of lse alone: the loss is lse - picked, so the gradient of picked is the opposite, which cross_entropy_grad knows.
// Ignored rows it leaves out by itself.
void gradient_finish(GradBuilder& b) { b.set(0, b.grad()); }
void gradient_stats(GradBuilder& b) {
  if (!b.wants(0) || b.grad(0) == kNone) return;
  b.set(0, b.emit(OpCode::k_cross_entropy_grad, {b.grad(0), b.input(0), b.input(1), b.output(0)},
                  unchecked(b.op().attrs)));
}

Factors factors_stats(const OpView& v) {
  Factors f;
  const int n = rank_of(v, 1);
  add_leading(f, v, n, {0, 1}, {0, 1});
  if (attr_int(*v.attrs, "vocabulary") == 0) return f;  // a part would take its own columns for all
  add_factor(f, v, "v", FactorKind::kReduce, in_dims(v, 0).back(), {sub_axis(n)}, {}, {0, 1});
  f.list.back().combines = {{0, Combine::kLogSumExp}};
  f.list.back().begin_attr = "label_begin";
  return f;
}

std::vector<TensorType> infer_finish(const OpView& v) {
  need_float(v, 0, "lse");
  need_dims(v, 1, "picked", in_dims(v, 0), "the shape of lse");
  need_dtype(v, 1, "picked", in(v, 0).dtype);
  need_ids(v, 2, "labels");
  need_dims(v, 2, "labels", in_dims(v, 0), "the shape of lse");
  return {in(v, 0)};
}
Factors factors_finish(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0), {0, 1, 2}, {0});
  return f;
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
  const int n = rank_of(v, 2);
  add_leading(f, v, n, {0, 1, 2, 3}, {0});
  f.linear = {{0}};
  if (attr_int(*v.attrs, "vocabulary") == 0) return f;  // a part would take its own columns for all
  add_factor(f, v, "v", FactorKind::kMap, in_dims(v, 1).back(), {kAbsent, sub_axis(n)}, {sub_axis(n)});
  f.list.back().begin_attr = "label_begin";
  return f;
}

OpCost cost_forward(const OpView& v) { return {5 * elements(in(v, 0)), bytes_of(v)}; }
OpCost cost_backward(const OpView& v) { return {6 * elements(in(v, 1)), bytes_of(v)}; }

}  // namespace

extern const OpDef op_def_cross_entropy, op_def_cross_entropy_grad, op_def_cross_entropy_stats,
    op_def_cross_entropy_finish;

const OpDef op_def_cross_entropy = {
    .name = "cross_entropy",
    .doc =
        "Cross entropy of softmax(logits) and integer labels, one value a row, with label smoothing.\n"
        "logits [..., v], labels i32/i64 [...] -> loss [...] (0 where ignored), lse [...] (log of the sum of "
        "exponentials), both in the "
        "accumulate dtype. Take the mean over counted rows yourself. A label that is neither in 0 to v - 1 nor "
        "ignore_index is an error.",
    .inputs = {{"logits"}, {"labels"}},
    .outputs = {{"loss"}, {"lse"}},
    .attrs = with_limit(kAttrs),
    .infer = infer_cross_entropy,
    .gradient = gradient_cross_entropy,
    .factors = factors_cross_entropy,
    .cost = cost_forward,
    .decompose = decompose_cross_entropy,
    .index = {1, [](const OpView& v) { return Dims{in_dims(v, 0).back()}; }, "ignore_index"},
};
const OpDef op_def_cross_entropy_grad = {
    .name = "cross_entropy_grad",
    .doc =
        "Gradient of cross_entropy: dloss * (softmax(logits) - target).\n"
        "dloss [...], logits [..., v], labels [...], lse [...] -> dlogits, like logits; may overwrite them.",
    .inputs = {{"dloss"}, {"logits"}, {"labels"}, {"lse"}},
    .outputs = {{"dlogits"}},
    .attrs = part_attrs(),
    .infer = infer_cross_entropy_grad,
    .factors = factors_cross_entropy_grad,
    .cost = cost_backward,
    .aliases = {{0, 1}},
    .flags = kInternal,
};
const OpDef op_def_cross_entropy_stats = {
    .name = "cross_entropy_stats",
    .doc =
        "First half of cross_entropy, of a part of the vocabulary: log of the sum of exponentials, and the sum of "
        "target "
        "times logits.\n"
        "logits [..., v], labels i32/i64 [...] -> lse [...], picked [...] (0 where ignored), both in the accumulate "
        "dtype. The lse of parts combine by logsumexp, picked by sum.",
    .inputs = {{"logits"}, {"labels"}},
    .outputs = {{"lse"}, {"picked"}},
    .attrs = with_limit(part_attrs()),
    .infer = infer_stats,
    .gradient = gradient_stats,
    .factors = factors_stats,
    .cost = cost_forward,
    .flags = kInternal,
    .index = {1,
              [](const OpView& v) {
                const int64_t all = attr_int(*v.attrs, "vocabulary");
                return Dims{all != 0 ? all : in_dims(v, 0).back()};
              },
              "ignore_index"},
};
const OpDef op_def_cross_entropy_finish = {
    .name = "cross_entropy_finish",
    .doc =
        "Second half of cross_entropy: lse - picked, 0 where ignored.\nlse, picked [...], labels [...] -> loss, like "
        "lse.",
    .inputs = {{"lse"}, {"picked"}, {"labels"}},
    .outputs = {{"loss"}},
    .attrs = {kAttrs[0]},
    .infer = infer_finish,
    .gradient = gradient_finish,
    .factors = factors_finish,
    .flags = kInternal,
};

}  // namespace whale
