// Batch norm: the user's op, and the pieces that canonicalise decomposes it into. Statistics are f64 sums [g, 2, c]
// (sum, sum of squares) of g groups of the batch, so that partial sums of any cut of the batch add up to the same
// value; `count` is the global number of elements per group and channel that they stand for. `group` positions of the
// first dimension of x are one group. Micro-batches hold whole groups, and then only their statistics; devices may cut
// a group: `begin` is where the rows of a device begin within the groups of its micro-batch.
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

int64_t channels(const OpView& v, int x) {
  need_rank_at_least(v, x, "x", 2);
  return in_dims(v, x).back();
}
void need_channels(const OpView& v, int i, const char* name, int64_t c, DType x) {
  if (!has(v, i)) return;
  need_dims(v, i, name, {c}, "the last dimension (channels) of x");
  need_scale_dtype(v, i, name, x);
}
// Positions of dimension 0 of x (operand `x`) that are one group; 0: all of them.
int64_t group_of(const OpView& v, int x) {
  constexpr int64_t kMost = int64_t{1} << 48;
  const int64_t rows = in_dims(v, x)[0], group = attr_int(*v.attrs, "group"), begin = attr_int(*v.attrs, "begin");
  if (group < 0 || group > kMost) throw invalid("attribute 'group' is {}, expected 0 (all rows of x) or more", group);
  if (begin < 0 || begin > kMost) throw invalid("attribute 'begin' is {}, expected 0 or more", begin);
  return group == 0 ? rows : group;
}
// Rows of statistics for x: of a device's part of the batch, the groups of its micro-batch.
void need_groups(const OpView& v, int x, int64_t groups) {
  const int64_t rows = in_dims(v, x)[0], group = group_of(v, x), begin = attr_int(*v.attrs, "begin");
  if (groups < 1 || (group > 0 && (begin + rows + group - 1) / group > groups))
    throw invalid("{} groups of {} rows for {} rows of x from row {}", groups, group, rows, begin);
}
int64_t groups_of(const OpView& v, int x) {
  const int64_t group = group_of(v, x);
  return group == 0 ? 1 : in_dims(v, x)[0] / group;
}
void need_sums(const OpView& v, int i, const char* name, const Dims& dims) {
  need_dims(v, i, name, dims);
  need_dtype(v, i, name, DType::kF64);
}
void need_stats(const OpView& v, int i, const char* name, int x) {
  need_rank(v, i, name, 3);
  need_sums(v, i, name, {in_dims(v, i)[0], 2, in_dims(v, x).back()});
  need_groups(v, x, in_dims(v, i)[0]);
}
void need_like_x(const OpView& v, int i, const char* name, const TensorType& x) {
  if (!has(v, i)) return;
  need_dims(v, i, name, x.dims, "the shape of x");
  need_dtype(v, i, name, x.dtype);
}
void need_count(const OpView& v) {
  if (attr_int(*v.attrs, "count") <= 0)
    throw invalid("attribute 'count' is {}, expected > 0", attr_int(*v.attrs, "count"));
}

// All dimensions but channels: rows; channels map everywhere.
void channel_factor(Factors& f, const OpView& v, int64_t c, std::vector<SubAxis> inputs, std::vector<SubAxis> outputs) {
  add_factor(f, v, "c", FactorKind::kMap, c, std::move(inputs), std::move(outputs));
}

// The leading dimensions of x (operand `x`); `stats` and `sums` hold a row per group of the first.
void leading_factors(Factors& f, const OpView& v, int x, const std::vector<int>& inputs,
                     const std::vector<int>& outputs, const std::vector<int>& stats,
                     const std::vector<int>& sums = {}) {
  if (sums.empty())
    add_leading(f, v, rank_of(v, x) - 1, inputs, outputs);
  else
    add_leading(f, v, rank_of(v, x) - 1, inputs, outputs, {0});
  if (groups_of(v, x) == 1) return;
  Factor& rows = f.list.front();
  rows.group = {group_of(v, x), stats, sums};
  rows.begin_attr = "begin";
}

// ---- batch_norm -------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_batch_norm(const OpView& v) {
  need_float(v, 0, "x");
  const int64_t c = channels(v, 0);
  const char* names[] = {"x", "gamma", "beta", "running_mean", "running_var"};
  for (int i = 1; i < 5; ++i) need_channels(v, i, names[i], c, in(v, 0).dtype);
  need_epsilon(v);
  const int64_t groups = attr_int(*v.attrs, "groups", 1);
  if (groups < 1 || in_dims(v, 0)[0] % groups)
    throw invalid("attribute 'groups' is {}, expected a divisor of the batch {}", groups, in_dims(v, 0)[0]);
  if (const double momentum = attr_float(*v.attrs, "momentum"); !(momentum >= 0 && momentum <= 1))
    throw invalid("attribute 'momentum' is {}, expected 0 <= momentum <= 1: the weight of the new statistics",
                  momentum);
  return {in(v, 0)};
}
// What rebatching and printing need; planning never sees this op (canonicalise decomposes it).
Factors factors_batch_norm(const OpView& v) {
  Factors f;
  const int last = rank_of(v, 0) - 1;
  add_leading(f, v, last, {0}, {0});
  channel_factor(f, v, in_dims(v, 0).back(), {sub_axis(last), sub_axis(0), sub_axis(0), sub_axis(0), sub_axis(0)},
                 {sub_axis(last)});
  return f;
}

// ---- batch_stats ------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_stats(const OpView& v) {
  need_float(v, 0, "x");
  const int64_t c = channels(v, 0);
  const auto& given = attr_ints(*v.attrs, "dims");
  if (!given.empty() && (given.size() != 3 || given[1] != 2 || given[2] != c))
    throw invalid("attribute 'dims' is {}, expected [groups, 2, {}]", to_string(given), c);
  const int64_t groups = given.empty() ? groups_of(v, 0) : given[0];
  need_groups(v, 0, groups);
  return {{DType::kF64, {groups, 2, c}}};
}
Factors factors_stats(const OpView& v) {
  Factors f;
  leading_factors(f, v, 0, {0}, {}, {}, {0});
  // Without dims a part would count its own groups.
  if (groups_of(v, 0) > 1 && attr_ints(*v.attrs, "dims").empty()) f.list.erase(f.list.begin());
  channel_factor(f, v, in_dims(v, 0).back(), {sub_axis(rank_of(v, 0) - 1)}, {sub_axis(2)});
  return f;
}

// ---- batch_norm_apply -------------------------------------------------------------------------------------------
std::vector<TensorType> infer_apply(const OpView& v) {
  need_float(v, 0, "x");
  const int64_t c = channels(v, 0);
  need_stats(v, 1, "stats", 0);
  need_channels(v, 2, "gamma", c, in(v, 0).dtype);
  need_channels(v, 3, "beta", c, in(v, 0).dtype);
  need_like_x(v, 4, "residual", in(v, 0));
  need_count(v);
  return {in(v, 0)};
}

// dx is the total derivative: it includes the path through the statistics, so `stats` itself gets no gradient.
void gradient_apply(GradBuilder& b) {
  const Attrs attrs = b.op().attrs;
  const bool relu = attr_bool(attrs, "relu");
  const Attrs common{
      {"epsilon", attrs.at("epsilon")}, {"count", attrs.at("count")}, {"group", attrs.at("group")}, {"relu", relu}};
  const TensorId y = relu ? b.output(0) : kNone;
  const TensorId sums = b.emit(OpCode::k_batch_norm_grad_stats, {b.grad(), b.input(0), b.input(1), y}, common);
  const bool masked_residual = relu && b.wants(4);
  if (b.wants(0) || masked_residual) {
    Attrs with = common;
    with["residual"] = masked_residual;
    const auto r = b.emit_all(OpCode::k_batch_norm_grad, {b.grad(), b.input(0), b.input(1), b.input(2), sums, y}, with);
    if (b.wants(0)) b.set(0, r[0]);
    if (masked_residual) b.set(4, r[1]);
  }
  if (!relu && b.wants(4)) b.set(4, b.grad());
  const int64_t groups = b.type(sums).dims[0];
  for (const int i : {2, 3}) {  // gamma: row 1 of the sums, beta: row 0
    if (!b.wants(i)) continue;
    const TensorType t = b.type(b.input(i));
    const int64_t row = i == 2 ? 1 : 0, c = t.dims[0];
    const TensorId cut =
        b.emit(OpCode::k_slice, {sums}, {{"starts", Ints{0, row, 0}}, {"limits", Ints{groups, row + 1, c}}});
    b.set(i, groups == 1 ? b.cast(b.reshape(cut, t.dims), t.dtype)
                         : b.emit(OpCode::k_reduce_sum, {b.cast(cut, t.dtype)}, {{"axes", Ints{0, 1}}}));
  }
}
Factors factors_apply(const OpView& v) {
  Factors f;
  const int last = rank_of(v, 0) - 1;
  leading_factors(f, v, 0, {0, 4}, {0}, {1});
  channel_factor(f, v, in_dims(v, 0).back(), {sub_axis(last), sub_axis(2), sub_axis(0), sub_axis(0), sub_axis(last)},
                 {sub_axis(last)});
  return f;
}

// ---- gradients --------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_grad_stats(const OpView& v) {
  need_float(v, 1, "x");
  channels(v, 1);  // checks the rank
  need_like_x(v, 0, "dy", in(v, 1));
  need_stats(v, 2, "stats", 1);
  need_like_x(v, 3, "y", in(v, 1));
  if (attr_bool(*v.attrs, "relu") && !has(v, 3)) throw invalid("operand 'y' is missing: relu needs it");
  need_count(v);
  return {in(v, 2)};
}
Factors factors_grad_stats(const OpView& v) {
  Factors f;
  const int last = rank_of(v, 1) - 1;
  leading_factors(f, v, 1, {0, 1, 3}, {}, {2}, {0});
  channel_factor(f, v, in_dims(v, 1).back(), {sub_axis(last), sub_axis(last), sub_axis(2), sub_axis(last)},
                 {sub_axis(2)});
  f.linear = {{0}};
  return f;
}

std::vector<TensorType> infer_grad(const OpView& v) {
  need_float(v, 1, "x");
  const int64_t c = channels(v, 1);
  need_like_x(v, 0, "dy", in(v, 1));
  need_stats(v, 2, "stats", 1);
  need_channels(v, 3, "gamma", c, in(v, 1).dtype);
  need_stats(v, 4, "grad_stats", 1);
  need_like_x(v, 5, "y", in(v, 1));
  if (attr_bool(*v.attrs, "relu") && !has(v, 5)) throw invalid("operand 'y' is missing: relu needs it");
  need_count(v);
  std::vector<TensorType> out{in(v, 1)};
  if (attr_bool(*v.attrs, "residual")) out.push_back(in(v, 1));
  return out;
}
Factors factors_grad(const OpView& v) {
  Factors f;
  const int last = rank_of(v, 1) - 1;
  leading_factors(f, v, 1, {0, 1, 5}, {0, 1}, {2, 4});
  channel_factor(f, v, in_dims(v, 1).back(),
                 {sub_axis(last), sub_axis(last), sub_axis(2), sub_axis(0), sub_axis(2), sub_axis(last)},
                 {sub_axis(last), sub_axis(last)});
  return f;  // linear in (dy, grad_stats) together, but a partial dy would be a different program: never passed
}

// ---- running statistics and inference ---------------------------------------------------------------------------
// Mean and unbiased variance, averaged over all groups: those that a micro-batch has are a part of the sum.
std::vector<TensorType> infer_moments(const OpView& v) {
  need_rank(v, 0, "stats", 3);
  const Dims& d = in_dims(v, 0);
  need_sums(v, 0, "stats", {d[0], 2, d[2]});
  need_count(v);
  if (attr_int(*v.attrs, "groups") < 1)
    throw invalid("attribute 'groups' is {}, expected at least 1", attr_int(*v.attrs, "groups"));
  return {{out_dtype(v, DType::kF64), {2, d[2]}}};
}
Factors factors_moments(const OpView& v) {
  Factors f;
  const Dims& d = in_dims(v, 0);
  add_factor(f, v, "g", FactorKind::kReduce, d[0], {sub_axis(0)}, {}, {0});
  channel_factor(f, v, d[2], {sub_axis(2)}, {sub_axis(1)});
  return f;
}

std::vector<TensorType> infer_running(const OpView& v) {
  need_float(v, 0, "running_mean");
  need_rank(v, 0, "running_mean", 1);
  need_dims(v, 1, "running_var", in_dims(v, 0));
  need_dtype(v, 1, "running_var", in(v, 0).dtype);
  need_dims(v, 2, "moments", {2, in_dims(v, 0)[0]});
  need_scale_dtype(v, 2, "moments", in(v, 0).dtype);
  if (has(v, 3)) need_dims(v, 3, "scale", {}, "a scalar");
  return {in(v, 0), in(v, 1)};
}
Factors factors_running(const OpView& v) {
  Factors f;
  channel_factor(f, v, in_dims(v, 0)[0], {sub_axis(0), sub_axis(0), sub_axis(1)}, {sub_axis(0), sub_axis(0)});
  return f;
}

std::vector<TensorType> infer_inference(const OpView& v) {
  need_float(v, 0, "x");
  const int64_t c = channels(v, 0);
  const char* names[] = {"x", "gamma", "beta", "running_mean", "running_var"};
  for (int i = 1; i < 5; ++i) need_channels(v, i, names[i], c, in(v, 0).dtype);
  return {in(v, 0)};
}

OpCost cost_read(const OpView& v) {
  const size_t x = v.inputs.size() > 1 ? 1 : 0;
  return {4 * elements(v.inputs[x]), bytes_of(v)};
}
OpCost cost_write(const OpView& v) { return {5 * output_elements(v), bytes_of(v)}; }

const AttrSpec kEpsilon{.name = "epsilon", .type = AttrType::kFloat, .fallback = 1e-5, .doc = "added to the variance"};
const AttrSpec kMomentum{.name = "momentum",
                         .type = AttrType::kFloat,
                         .fallback = 0.1,
                         .doc = "weight of the new value in the running statistics"};
const AttrSpec kCount{.name = "count",
                      .type = AttrType::kInt,
                      .fallback = int64_t{0},
                      .required = true,
                      .doc = "global number of elements per group and channel"};
const AttrSpec kGroup{.name = "group",
                      .type = AttrType::kInt,
                      .fallback = int64_t{0},
                      .doc = "positions of dimension 0 that are one group; 0: all"};
const AttrSpec kBegin{.name = "begin",
                      .type = AttrType::kInt,
                      .fallback = int64_t{0},
                      .doc = "where the rows at hand begin within those of the statistics"};
const AttrSpec kRelu{
    .name = "relu", .type = AttrType::kBool, .fallback = false, .doc = "y = max(y, 0), after the residual is added"};

}  // namespace

extern const OpDef op_def_batch_norm, op_def_batch_stats, op_def_batch_norm_apply, op_def_batch_norm_grad_stats,
    op_def_batch_norm_grad, op_def_batch_norm_moments, op_def_batch_norm_running, op_def_batch_norm_inference;

const OpDef op_def_batch_norm = {
    .name = "batch_norm",
    .doc =
        "Batch normalization over all dimensions but the last (Ioffe and Szegedy, 2015), with statistics of the whole "
        "batch.\n"
        "x [n, ..., c], gamma, beta, running_mean, running_var [c] -> y like x. The variance is biased for y and "
        "unbiased for "
        "running_var; running statistics are updated once a step: r = (1 - momentum) r + momentum new. With groups, "
        "each run of n / groups samples is normalized by its own statistics (micro-batches hold whole groups), and "
        "`new` is the mean over the groups.",
    .inputs = {{"x"}, {"gamma"}, {"beta"}, {"running_mean"}, {"running_var"}},
    .outputs = {{"y"}},
    .attrs = {kEpsilon,
              kMomentum,
              {.name = "groups",
               .type = AttrType::kInt,
               .fallback = int64_t{1},
               .doc = "the batch is normalized in this many parts; a multiple of the micro-batches"}},
    .infer = infer_batch_norm,
    .factors = factors_batch_norm,
    .cost = cost_write,
    .inference = OpCode::k_batch_norm_inference,
};
const OpDef op_def_batch_stats = {
    .name = "batch_stats",
    .doc = "Sum and sum of squares per group and channel.\nx [n, ..., c] -> stats f64 [g, 2, c], g = n / group.",
    .inputs = {{"x"}},
    .outputs = {{"stats"}},
    .attrs = {kGroup,
              kBegin,
              {.name = "dims",
               .type = AttrType::kInts,
               .fallback = Ints(),
               .doc = "of the result; none: of all rows of x",
               .role = AttrRole::kShape}},
    .infer = infer_stats,
    .factors = factors_stats,
    .cost = cost_read,
    .flags = kInternal,
};
const OpDef op_def_batch_norm_apply = {
    .name = "batch_norm_apply",
    .doc =
        "Normalizes with the given statistics; optionally adds a residual and applies relu.\n"
        "x [n, ..., c], stats f64 [g, 2, c], gamma, beta [c], residual like x? -> y like x.",
    .inputs = {{"x"}, {"stats"}, {"gamma"}, {"beta"}, {"residual", PortKind::kOptional}},
    .outputs = {{"y"}},
    .attrs = {kEpsilon, kCount, kGroup, kBegin, kRelu},
    .infer = infer_apply,
    .gradient = gradient_apply,
    .factors = factors_apply,
    .cost = cost_write,
    .aliases = {{0, 0}, {0, 4}},
    .flags = kInternal,
    .micro_batch_advice = "normalize groups of samples: batch_norm's attribute groups, a multiple of {}",
};
const OpDef op_def_batch_norm_grad_stats = {
    .name = "batch_norm_grad_stats",
    .doc =
        "Sums of dy' and of dy' * xhat per group and channel, dy' being dy, and 0 where y <= 0 when `relu`.\n"
        "dy, x [n, ..., c], stats f64 [g, 2, c], y? -> f64 [g, 2, c].",
    .inputs = {{"dy"}, {"x"}, {"stats"}, {"y", PortKind::kOptional}},
    .outputs = {{"grad_stats"}},
    .attrs = {kEpsilon, kCount, kGroup, kBegin, kRelu},
    .infer = infer_grad_stats,
    .factors = factors_grad_stats,
    .cost = cost_read,
    .flags = kInternal,
};
const OpDef op_def_batch_norm_grad = {
    .name = "batch_norm_grad",
    .doc =
        "Total derivative of batch_norm_apply by x, through the statistics too: gamma rstd (dy' - mean(dy') - xhat "
        "mean(dy' xhat)).\n"
        "dy, x [n, ..., c], stats, gamma, grad_stats, y? -> dx, dresidual = dy' when `residual`.",
    .inputs = {{"dy"}, {"x"}, {"stats"}, {"gamma"}, {"grad_stats"}, {"y", PortKind::kOptional}},
    .outputs = {{"dx"}, {"dresidual", PortKind::kOptional}},
    .attrs = {kEpsilon,
              kCount,
              kGroup,
              kBegin,
              kRelu,
              {.name = "residual", .type = AttrType::kBool, .fallback = false, .doc = "return dresidual"}},
    .infer = infer_grad,
    .factors = factors_grad,
    .cost = cost_write,
    .aliases = {{0, 1}, {1, 0}},
    .flags = kInternal,
};
const OpDef op_def_batch_norm_moments = {
    .name = "batch_norm_moments",
    .doc = "Mean and unbiased variance of the groups, their averages over all groups.\nstats f64 [g, 2, c] -> [2, c].",
    .inputs = {{"stats"}},
    .outputs = {{"moments"}},
    .attrs = {kCount,
              {.name = "groups",
               .type = AttrType::kInt,
               .fallback = int64_t{1},
               .required = true,
               .doc = "global number of groups"},
              {.name = "out_dtype",
               .type = AttrType::kString,
               .fallback = std::string(),
               .doc = "of the result; none: f64"}},
    .infer = infer_moments,
    .factors = factors_moments,
    .flags = kNoGradient | kInternal,
};
const OpDef op_def_batch_norm_running = {
    .name = "batch_norm_running",
    .doc =
        "The running statistics after this step; unchanged when the scale is NaN.\n"
        "running_mean, running_var [c], moments [2, c], scale scalar? -> new mean, new var.",
    .inputs = {{"running_mean"}, {"running_var"}, {"moments"}, {"scale", PortKind::kOptional}},
    .outputs = {{"mean"}, {"var"}},
    .attrs = {kMomentum},
    .infer = infer_running,
    .factors = factors_running,
    .aliases = {{0, 0, true}, {1, 1, true}},
    .flags = kUpdateOp | kNoGradient | kInternal,
};
const OpDef op_def_batch_norm_inference = {
    .name = "batch_norm_inference",
    .doc =
        "Batch norm with running statistics.\nx [n, ..., c], gamma, beta, running_mean, running_var [c] -> y like x.",
    .inputs = {{"x"}, {"gamma"}, {"beta"}, {"running_mean"}, {"running_var"}},
    .outputs = {{"y"}},
    .attrs = {kEpsilon},
    .infer = infer_inference,
    .factors = factors_batch_norm,
    .cost = cost_write,
    .aliases = {{0, 0}},
    .flags = kInternal,
};

}  // namespace whale
