// A mixture of experts as dense ops (Lepikhin et al., GShard, 2020; Fedus et al., Switch, 2021). The gate gives every
// token of a routing group k slots, expert * capacity + position; dispatch copies tokens into [experts, groups,
// capacity, features], where the experts are batched matrix products; combine brings them back. Cut by experts, each
// device has a part of that first dimension: dispatch fills only its own slots, and combine gives a partial sum.
#include "ops/moe.h"

#include "ops/family.h"

namespace whale {
namespace {

constexpr double kUsualFactor = 1.25;

// ---- gate -------------------------------------------------------------------------------------------------------
struct Gate {
  int64_t groups, tokens, experts, k, capacity;
};

Gate gate_of(const OpView& v) {
  need_float(v, 0, "logits");
  need_rank(v, 0, "logits", 3);
  const Dims& d = in_dims(v, 0);
  const int64_t k = attr_int(*v.attrs, "k", 1), given = attr_int(*v.attrs, "capacity");
  if (k < 1 || k > d[2])
    throw invalid("attribute 'k' is {}, expected 1 to {}: the experts of logits {}", k, d[2], to_string(d));
  if (given < 0) throw invalid("attribute 'capacity' is {}, expected at least 1, or 0 to use capacity_factor", given);
  const double factor = attr_float(*v.attrs, "capacity_factor", kUsualFactor);
  if (given > 0 && factor != kUsualFactor)
    throw invalid("attribute 'capacity_factor' is {}, and 'capacity' is {}, which alone counts; leave one of them out",
                  factor, given);
  if (given == 0 && !(factor > 0)) throw invalid("attribute 'capacity_factor' is {}, expected > 0", factor);
  const int64_t capacity = moe_capacity(*v.attrs, d[1], d[2]);
  if (capacity > INT32_MAX / d[2])
    throw invalid("attribute 'capacity' is {}; {} experts have more slots than an i32 counts", capacity, d[2]);
  return {d[0], d[1], d[2], k, capacity};
}

std::vector<TensorType> infer_gate(const OpView& v) {
  const Gate g = gate_of(v);
  const DType t = accumulate_dtype(in(v, 0).dtype);
  const Dims choices{g.groups, g.tokens, g.k};
  return {{DType::kI32, choices}, {t, choices}, {t, {g.groups}}, {DType::kI32, {g.groups}}};
}

// Tokens of a group compete for slots, so that only whole groups can be apart.
Factors factors_gate(const OpView& v) {
  Factors f;
  add_factor(f, v, "g", FactorKind::kMap, in_dims(v, 0)[0], {sub_axis(0)},
             {sub_axis(0), sub_axis(0), sub_axis(0), sub_axis(0)});
  return f;
}

void gradient_gate(GradBuilder& b) {
  b.set(0, b.emit(OpCode::k_moe_gate_grad, {b.input(0), b.output(0), b.grad(1), b.grad(2)}, b.op().attrs));
}

Dims places_of_gate(const OpView& v) {
  const Gate g = gate_of(v);
  return {g.experts, g.capacity};
}

OpCost cost_gate(const OpView& v) { return {10 * elements(in(v, 0)), bytes_of(v)}; }

std::vector<TensorType> infer_gate_grad(const OpView& v) {
  const Gate g = gate_of(v);
  const DType t = accumulate_dtype(in(v, 0).dtype);
  need_dtype(v, 1, "slot", DType::kI32);
  need_dims(v, 1, "slot", {g.groups, g.tokens, g.k}, "a slot for each choice");
  if (has(v, 2)) need_dtype(v, 2, "dweight", t), need_dims(v, 2, "dweight", in_dims(v, 1), "the shape of slot");
  if (has(v, 3)) need_dtype(v, 3, "daux", t), need_dims(v, 3, "daux", {g.groups}, "the groups of logits");
  return {in(v, 0)};
}

Factors factors_gate_grad(const OpView& v) {
  Factors f;
  add_factor(f, v, "g", FactorKind::kMap, in_dims(v, 0)[0], {sub_axis(0), sub_axis(0), sub_axis(0), sub_axis(0)},
             {sub_axis(0)});
  std::vector<int> gradients;
  for (const int i : {2, 3})
    if (has(v, i)) gradients.push_back(i);
  if (!gradients.empty()) f.linear = {gradients};
  return f;
}

// ---- between tokens and experts -------------------------------------------------------------------------------------
// Operand `tokens` is [g, s, d], `slot` [g, s, k].
void need_slots(const OpView& v, int slot, int tokens) {
  need_dtype(v, slot, "slot", DType::kI32);
  need_rank(v, slot, "slot", 3);
  if (tokens < 0) return;
  const Dims &s = in_dims(v, slot), &x = in_dims(v, tokens);
  if (s[0] != x[0] || s[1] != x[1])
    throw invalid("operand 'slot' has shape {}, expected the groups and tokens of {}", to_string(s), to_string(x));
}
void need_weight(const OpView& v, int i, int slot, DType x) {
  if (!has(v, i)) return;
  need_scale_dtype(v, i, "weight", x);
  need_dims(v, i, "weight", in_dims(v, slot), "the shape of slot");
}
void need_begin(const OpView& v) {
  const int64_t begin = attr_int(*v.attrs, "expert_begin");
  if (begin < 0) throw invalid("attribute 'expert_begin' is {}, expected >= 0", begin);
}

std::vector<TensorType> infer_dispatch(const OpView& v) {
  need_float(v, 0, "x");
  need_rank(v, 0, "x", 3);
  need_slots(v, 1, 0);
  need_weight(v, 2, 1, in(v, 0).dtype);
  need_begin(v);
  const int64_t experts = attr_int(*v.attrs, "experts"), capacity = attr_int(*v.attrs, "capacity");
  if (experts < 1) throw invalid("attribute 'experts' is {}, expected at least 1", experts);
  if (capacity < 1) throw invalid("attribute 'capacity' is {}, expected at least 1", capacity);
  const Dims& x = in_dims(v, 0);
  return {{in(v, 0).dtype, {experts, x[0], capacity, x[2]}}};
}

// A slot is filled by one token at most, so parts of the tokens give partial sums.
Factors factors_dispatch(const OpView& v) {
  Factors f;
  const Dims& y = v.outputs.at(0).dims;
  add_factor(f, v, "g", FactorKind::kMap, y[1], {sub_axis(0), sub_axis(0), sub_axis(0)}, {sub_axis(1)});
  add_factor(f, v, "s", FactorKind::kReduce, in_dims(v, 0)[1], {sub_axis(1), sub_axis(1), sub_axis(1)}, {}, {0});
  add_factor(f, v, "d", FactorKind::kMap, y[3], {sub_axis(2)}, {sub_axis(3)});
  add_factor(f, v, "experts", FactorKind::kMap, y[0], {}, {sub_axis(0)});
  f.list.back().begin_attr = "expert_begin";
  f.list.back().size_attrs = {"experts"};
  f.linear = {{0}};
  if (has(v, 2)) f.linear.push_back({2});
  return f;
}

Dims places_of_dispatch(const OpView& v) { return {attr_int(*v.attrs, "experts"), attr_int(*v.attrs, "capacity")}; }
Dims places_of_combine(const OpView& v) { return {in_dims(v, 0)[0], in_dims(v, 0)[2]}; }

std::vector<TensorType> infer_combine(const OpView& v) {
  need_float(v, 0, "y");
  need_rank(v, 0, "y", 4);
  need_slots(v, 1, -1);
  const Dims &y = in_dims(v, 0), &s = in_dims(v, 1);
  if (y[1] != s[0])
    throw invalid("operand 'y' has shape {}, expected [experts, {}, capacity, d]: the groups of slot {}", to_string(y),
                  s[0], to_string(s));
  need_weight(v, 2, 1, in(v, 0).dtype);
  need_begin(v);
  return {{in(v, 0).dtype, {s[0], s[1], y[3]}}};
}

Factors factors_combine(const OpView& v) {
  Factors f;
  const Dims& x = v.outputs.at(0).dims;
  add_factor(f, v, "g", FactorKind::kMap, x[0], {sub_axis(1), sub_axis(0), sub_axis(0)}, {sub_axis(0)});
  add_factor(f, v, "s", FactorKind::kMap, x[1], {kAbsent, sub_axis(1), sub_axis(1)}, {sub_axis(1)});
  add_factor(f, v, "d", FactorKind::kMap, x[2], {sub_axis(3)}, {sub_axis(2)});
  add_factor(f, v, "experts", FactorKind::kReduce, in_dims(v, 0)[0], {sub_axis(0)}, {}, {0});
  f.list.back().begin_attr = "expert_begin";
  f.linear = {{0}};
  if (has(v, 2)) f.linear.push_back({2});
  return f;
}

std::vector<TensorType> infer_weight_grad(const OpView& v) {
  need_float(v, 0, "x");
  need_rank(v, 0, "x", 3);
  need_float(v, 1, "y");
  need_rank(v, 1, "y", 4);
  need_dtype(v, 1, "y", in(v, 0).dtype);
  need_slots(v, 2, 0);
  const Dims &x = in_dims(v, 0), &y = in_dims(v, 1);
  if (y[1] != x[0] || y[3] != x[2])
    throw invalid("operand 'y' has shape {}, expected [experts, {}, capacity, {}]: the groups and features of x {}",
                  to_string(y), x[0], x[2], to_string(x));
  need_begin(v);
  return {{accumulate_dtype(in(v, 0).dtype), in_dims(v, 2)}};
}

Factors factors_weight_grad(const OpView& v) {
  Factors f;
  const Dims& x = in_dims(v, 0);
  add_factor(f, v, "g", FactorKind::kMap, x[0], {sub_axis(0), sub_axis(1), sub_axis(0)}, {sub_axis(0)});
  add_factor(f, v, "s", FactorKind::kMap, x[1], {sub_axis(1), kAbsent, sub_axis(1)}, {sub_axis(1)});
  add_factor(f, v, "d", FactorKind::kReduce, x[2], {sub_axis(2), sub_axis(3)}, {}, {0});
  add_factor(f, v, "experts", FactorKind::kReduce, in_dims(v, 1)[0], {kAbsent, sub_axis(0)}, {}, {0});
  f.list.back().begin_attr = "expert_begin";
  f.linear = {{0}, {1}};
  return f;
}

// Dispatch and combine are each other's transposes: both ways, the weight's gradient is the product of the two rows.
Attrs begin_of(const Op& op) { return {{"expert_begin", op.attrs.at("expert_begin")}}; }

void gradient_dispatch(GradBuilder& b) {
  const Op op = b.op();
  if (b.wants(0)) b.set(0, b.emit(OpCode::k_moe_combine, {b.grad(), b.input(1), b.input(2)}, begin_of(op)));
  if (b.wants(2)) b.set(2, b.emit(OpCode::k_moe_weight_grad, {b.input(0), b.grad(), b.input(1)}, begin_of(op)));
}

void gradient_combine(GradBuilder& b) {
  const Op op = b.op();
  const Dims y = b.dims(b.input(0));
  if (b.wants(0)) {
    Attrs attrs = begin_of(op);
    attrs["experts"] = y[0];
    attrs["capacity"] = y[2];
    b.set(0, b.emit(OpCode::k_moe_dispatch, {b.grad(), b.input(1), b.input(2)}, std::move(attrs)));
  }
  if (b.wants(2)) b.set(2, b.emit(OpCode::k_moe_weight_grad, {b.grad(), b.input(0), b.input(1)}, begin_of(op)));
}

OpCost cost_moved(const OpView& v) { return {output_elements(v), bytes_of(v)}; }
OpCost cost_products(const OpView& v) {  // choices x features
  const double work = 2 * elements(in(v, 0)) * static_cast<double>(in_dims(v, 2).back());
  return {work, bytes_of(v)};
}

const AttrSpec kChoices{.name = "k", .type = AttrType::kInt, .fallback = int64_t{1}, .doc = "experts a token goes to"};
const AttrSpec kFactor{
    .name = "capacity_factor",
    .type = AttrType::kFloat,
    .fallback = kUsualFactor,
    .doc = "capacity = this * k * s / e, rounded up; at least 1, at most s; not beside a given capacity"};
const AttrSpec kCapacity{.name = "capacity",
                         .type = AttrType::kInt,
                         .fallback = int64_t{0},
                         .doc = "places per expert and group; 0: from capacity_factor"};
const AttrSpec kNormalize{.name = "normalize",
                          .type = AttrType::kBool,
                          .fallback = false,
                          .doc = "the weights of a token's k choices sum to 1"};
const AttrSpec kBegin{.name = "expert_begin",
                      .type = AttrType::kInt,
                      .fallback = int64_t{0},
                      .doc = "the first expert that is here; plans that cut experts set it"};

}  // namespace

const OpDef op_def_moe_gate = {
    .name = "moe_gate",
    .doc =
        "Routes each token to the k experts with the largest logits, ties to the lowest index.\n"
        "logits [g, s, e] -> slot i32 [g, s, k], weight [g, s, k], aux [g], dropped i32 [g]; weight and aux in the "
        "accumulate dtype. Each of the g groups routes its s tokens by itself: all first choices take places before "
        "all second ones, in order of tokens. slot = expert * capacity + place, or -1 when the expert is full; "
        "`dropped` counts those. weight: the softmax probability of the choice, 0 where dropped. aux: the load "
        "balancing loss e * sum_e(share of first choices * mean probability).",
    .inputs = {{"logits"}},
    .outputs = {{"slot"}, {"weight"}, {"aux"}, {"dropped"}},
    .attrs = {kChoices, kFactor, kCapacity, kNormalize},
    .infer = infer_gate,
    .gradient = gradient_gate,
    .factors = factors_gate,
    .cost = cost_gate,
    .flags = kComputeWide,
    .makes_index = {0, places_of_gate},
};
const OpDef op_def_moe_gate_grad = {
    .name = "moe_gate_grad",
    .doc =
        "Gradient of moe_gate by its logits, through the weights of what was not dropped and through aux.\n"
        "logits [g, s, e], slot [g, s, k], dweight? [g, s, k], daux? [g] -> dlogits like logits.",
    .inputs = {{"logits"}, {"slot"}, {"dweight", PortKind::kOptional}, {"daux", PortKind::kOptional}},
    .outputs = {{"dlogits"}},
    .attrs = {kChoices, kFactor, kCapacity, kNormalize},
    .infer = infer_gate_grad,
    .factors = factors_gate_grad,
    .cost = cost_gate,
    .flags = kInternal,
};
const OpDef op_def_moe_dispatch = {
    .name = "moe_dispatch",
    .doc =
        "Copies each token, times its weight when there is one, to its slots; empty slots are zero.\n"
        "x [g, s, d], slot i32 [g, s, k], weight? [g, s, k] -> y [experts, g, capacity, d]. Slots are those of "
        "moe_gate with the same experts and capacity, or -1; others are an error, and no two tokens of a group share "
        "one.",
    .inputs = {{"x"}, {"slot"}, {"weight", PortKind::kOptional}},
    .outputs = {{"y"}},
    .attrs = {{.name = "experts", .type = AttrType::kInt, .fallback = int64_t{0}, .required = true, .doc = "how many"},
              {.name = "capacity",
               .type = AttrType::kInt,
               .fallback = int64_t{0},
               .required = true,
               .doc = "places per expert and group"},
              kBegin,
              index_limit_attr()},
    .infer = infer_dispatch,
    .gradient = gradient_dispatch,
    .factors = factors_dispatch,
    .cost = cost_moved,
    .flags = kOffsetAware,
    .index = {.input = 1, .of = places_of_dispatch, .or_none = true},
};
const OpDef op_def_moe_combine = {
    .name = "moe_combine",
    .doc =
        "Adds up, for each token, what is in its slots, times the weights when there are any.\n"
        "y [e, g, c, d], slot i32 [g, s, k], weight? [g, s, k] -> x [g, s, d]. A token without slots gives zeros, and "
        "slots are as for moe_dispatch.",
    .inputs = {{"y"}, {"slot"}, {"weight", PortKind::kOptional}},
    .outputs = {{"x"}},
    .attrs = {kBegin, index_limit_attr()},
    .infer = infer_combine,
    .gradient = gradient_combine,
    .factors = factors_combine,
    .cost = cost_moved,
    .flags = kOffsetAware,
    .index = {.input = 1, .of = places_of_combine, .or_none = true},
};
const OpDef op_def_moe_weight_grad = {
    .name = "moe_weight_grad",
    .doc =
        "Gradient of moe_dispatch and moe_combine by the weights: each token's product with what is in its slots.\n"
        "x [g, s, d], y [e, g, c, d], slot i32 [g, s, k] -> dweight [g, s, k], accumulate dtype.",
    .inputs = {{"x"}, {"y"}, {"slot"}},
    .outputs = {{"dweight"}},
    .attrs = {kBegin},
    .infer = infer_weight_grad,
    .factors = factors_weight_grad,
    .cost = cost_products,
    .flags = kOffsetAware | kInternal,
};

}  // namespace whale
