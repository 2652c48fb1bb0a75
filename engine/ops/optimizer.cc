// Updates of parameters, in place. One op may update many parameters: after the scalars come tuples of equal layout.
// None is linear in anything, so a partial gradient never reaches an update. An op of one tuple can be cut in every
// dimension; one of several lists no factors, since their shapes have nothing to do with each other.
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

void need_scalar(const OpView& v, int i, const char* name) {
  if (!has(v, i)) return;
  need_dims(v, i, name, {}, "a scalar");
  if (std::string_view(name) == "updates")
    need_dtype(v, i, name, DType::kI64);
  else
    need_float(v, i, name);
}

// The number of tuples; each operand of a tuple is a float tensor shaped like its first.
int64_t tuples(const OpView& v, int first, const std::vector<const char*>& names) {
  const int64_t rest = static_cast<int64_t>(v.inputs.size()) - first, width = static_cast<int64_t>(names.size());
  if (rest < 0 || rest % width) throw invalid("{} operands after the scalars, expected a multiple of {}", rest, width);
  const int64_t count = rest / width;
  for (int64_t t = 0; t < count; ++t) {
    const int p = first + static_cast<int>(t * width);
    for (int k = 0; k < width; ++k) {
      if (has(v, p + k) && is_float(in(v, p + k).dtype) && in_dims(v, p + k) == in_dims(v, p)) continue;
      const std::string name = fmt::format("{}[{}]", names[k], t);  // of what is wrong
      if (!has(v, p + k)) throw invalid("operand '{}' is missing", name);
      need_float(v, p + k, name.c_str());
      need_dims(v, p + k, name.c_str(), in_dims(v, p), "the shape of the parameter");
    }
  }
  const auto& decays = attr_ints(*v.attrs, "decays");
  if (!decays.empty() && static_cast<int64_t>(decays.size()) != count)
    throw invalid("attribute 'decays' has {} entries, expected {} (one a parameter) or none", decays.size(), count);
  return count;
}

// Results: the listed operands of each tuple, in order.
std::vector<TensorType> results(const OpView& v, int first, int width, int64_t count, const std::vector<int>& which) {
  std::vector<TensorType> out;
  for (int64_t t = 0; t < count; ++t)
    for (const int k : which) out.push_back(in(v, first + static_cast<int>(t) * width + k));
  return out;
}

// Aliases of all tuples: result j of each is written over operand which[j] of its tuple.
std::vector<Alias> tuple_aliases(const OpView& v, int first, int width, const std::vector<int>& which) {
  std::vector<Alias> all;
  const int count = (static_cast<int>(v.inputs.size()) - first) / width, per = static_cast<int>(which.size());
  all.reserve(static_cast<size_t>(count * per));
  for (int t = 0; t < count; ++t)
    for (int j = 0; j < per; ++j) all.push_back({t * per + j, first + t * width + which[j], true});
  return all;
}

// One map factor a dimension of the parameter, which `carry` operands from `first` on and all results have.
Factors tuple_factors(const OpView& v, int first, int width, int carry) {
  Factors f;
  if (static_cast<int>(v.inputs.size()) - first != width) return f;
  for (int d = 0; d < rank_of(v, first); ++d) {
    std::vector<SubAxis> from(v.inputs.size());
    for (int i = first; i < first + carry; ++i) from[i] = sub_axis(d);
    add_factor(f, v, "d" + std::to_string(d), FactorKind::kMap, in_dims(v, first)[d], std::move(from),
               std::vector<SubAxis>(v.outputs.size(), sub_axis(d)));
  }
  return f;
}

bool has_momentum(const OpView& v) { return attr_float(*v.attrs, "momentum") != 0; }

std::vector<TensorType> infer_sgd(const OpView& v) {
  need_scalar(v, 0, "lr");
  need_scalar(v, 1, "scale");
  if (!has_momentum(v)) return results(v, 2, 2, tuples(v, 2, {"p", "g"}), {0});
  return results(v, 2, 3, tuples(v, 2, {"p", "g", "m"}), {0, 2});
}
std::vector<Alias> aliases_sgd(const OpView& v) {
  return has_momentum(v) ? tuple_aliases(v, 2, 3, {0, 2}) : tuple_aliases(v, 2, 2, {0});
}

Factors factors_sgd(const OpView& v) {
  const int width = has_momentum(v) ? 3 : 2;
  return tuple_factors(v, 2, width, width);
}
Factors factors_adam(const OpView& v) { return tuple_factors(v, 3, 4, 4); }
Factors factors_adagrad(const OpView& v) { return tuple_factors(v, 2, 3, 3); }
Factors factors_lamb_direction(const OpView& v) { return tuple_factors(v, 2, 4, 4); }
Factors factors_lamb_apply(const OpView& v) { return tuple_factors(v, 1, 4, 2); }  // the norms are scalars

std::vector<TensorType> infer_adam(const OpView& v) {
  need_scalar(v, 0, "lr");
  need_scalar(v, 1, "updates");
  need_scalar(v, 2, "scale");
  return results(v, 3, 4, tuples(v, 3, {"p", "g", "m", "v"}), {0, 2, 3});
}
std::vector<Alias> aliases_adam(const OpView& v) { return tuple_aliases(v, 3, 4, {0, 2, 3}); }

std::vector<TensorType> infer_adagrad(const OpView& v) {
  need_scalar(v, 0, "lr");
  need_scalar(v, 1, "scale");
  return results(v, 2, 3, tuples(v, 2, {"p", "g", "h"}), {0, 2});
}
std::vector<Alias> aliases_adagrad(const OpView& v) { return tuple_aliases(v, 2, 3, {0, 2}); }

std::vector<TensorType> infer_lamb_direction(const OpView& v) {
  need_scalar(v, 0, "updates");
  need_scalar(v, 1, "scale");
  const int64_t count = tuples(v, 2, {"p", "g", "m", "v"});
  std::vector<TensorType> out;
  for (int64_t t = 0; t < count; ++t)
    for (const int k : {0, 2, 3}) out.push_back(in(v, 2 + static_cast<int>(t) * 4 + k));  // u: like p
  return out;
}
// The direction may take the gradient's place when the types agree; m and v must be updated in place.
std::vector<Alias> aliases_lamb_direction(const OpView& v) {
  std::vector<Alias> all = tuple_aliases(v, 2, 4, {1, 2, 3});
  std::vector<Alias> kept;
  for (size_t i = 0; i < all.size(); ++i) {
    if (i % 3 == 0) all[i].must = false;
    if (i % 3 != 0 || in(v, all[i].input).dtype == in(v, all[i].input - 1).dtype) kept.push_back(all[i]);
  }
  return kept;
}

std::vector<TensorType> infer_lamb_apply(const OpView& v) {
  need_scalar(v, 0, "lr");
  const int64_t rest = static_cast<int64_t>(v.inputs.size()) - 1;
  if (rest < 0 || rest % 4) throw invalid("{} operands after the learning rate, expected a multiple of 4", rest);
  std::vector<TensorType> out;
  for (int i = 1; i < static_cast<int>(v.inputs.size()); i += 4) {
    need_float(v, i, "p");
    need_dims(v, i + 1, "u", in_dims(v, i), "the shape of the parameter");
    need_scalar(v, i + 2, "pn");
    need_scalar(v, i + 3, "un");
    out.push_back(in(v, i));
  }
  return out;
}
std::vector<Alias> aliases_lamb_apply(const OpView& v) { return tuple_aliases(v, 1, 4, {0}); }

std::vector<TensorType> infer_clip(const OpView& v) {
  if (v.inputs.empty()) throw invalid("no operands, expected at least one sum of squares");
  for (size_t i = 0; i < v.inputs.size(); ++i) need_scalar(v, static_cast<int>(i), "sum_of_squares");
  if (!(attr_float(*v.attrs, "max_norm") > 0))
    throw invalid("attribute 'max_norm' is {}, expected > 0", attr_float(*v.attrs, "max_norm"));
  return {in(v, 0)};
}

// A part of a gradient overflows when the whole does: infinity survives every sum.
std::vector<TensorType> infer_unscale(const OpView& v) {
  need_float(v, 0, "x");
  need_scalar(v, 1, "loss_scale");
  const DType wide = accumulate_dtype(in(v, 0).dtype);
  return {{wide, in_dims(v, 0)}, {wide, {}}};
}
Factors factors_unscale(const OpView& v) {
  Factors f;
  for (int d = 0; d < rank_of(v, 0); ++d)
    add_factor(f, v, "d" + std::to_string(d), FactorKind::kReduce, in_dims(v, 0)[d], {sub_axis(d)}, {sub_axis(d)}, {1});
  return f;
}
std::vector<Alias> aliases_unscale(const OpView& v) {
  return in(v, 0).dtype == accumulate_dtype(in(v, 0).dtype) ? std::vector<Alias>{{0, 0, false}} : std::vector<Alias>{};
}

std::vector<TensorType> infer_overflow(const OpView& v) {
  if (v.inputs.empty()) throw invalid("no operands, expected at least one scalar");
  for (size_t i = 0; i < v.inputs.size(); ++i) need_scalar(v, static_cast<int>(i), "x");
  return {{accumulate_dtype(in(v, 0).dtype), {}}};
}

OpCost cost_update(const OpView& v) {
  double flops = 0;
  for (const auto& t : v.outputs) flops += 5 * elements(t);
  return {flops, bytes_of(v)};
}

AttrSpec real(const char* name, double fallback, const char* doc) {
  return {.name = name, .type = AttrType::kFloat, .fallback = fallback, .doc = doc};
}
AttrSpec flag(const char* name, const char* doc) {
  return {.name = name, .type = AttrType::kBool, .fallback = false, .doc = doc};
}
const AttrSpec kDecays{.name = "decays",
                       .type = AttrType::kInts,
                       .fallback = Ints{},
                       .doc = "0/1 per parameter: weight decay applies; empty: to all"};
const AttrSpec kDecay = real("weight_decay", 0, "coefficient of weight decay");
constexpr uint32_t kFlags = kUpdateOp | kNoGradient | kInternal;
constexpr PortKind kOpt = PortKind::kOptional, kMany = PortKind::kVariadic;

}  // namespace

extern const OpDef op_def_sgd, op_def_adam, op_def_adagrad, op_def_lamb_direction, op_def_lamb_apply,
    op_def_clip_factor, op_def_unscale, op_def_overflow;

const OpDef op_def_sgd = {
    .name = "sgd",
    .doc =
        "Stochastic gradient descent with momentum: g += wd p; m = momentum m + g; p -= lr (nesterov ? g + momentum m "
        ": m).\n"
        "lr, scale?, then (p, g) or, with momentum, (p, g, m) per parameter -> p' or (p', m') per parameter.",
    .inputs = {{"lr"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {real("momentum", 0, "0: plain descent"), flag("nesterov", "look-ahead"), kDecay, kDecays},
    .infer = infer_sgd,
    .factors = factors_sgd,
    .cost = cost_update,
    .flags = kFlags,
    .aliases_of = aliases_sgd,
};
const OpDef op_def_adam = {
    .name = "adam",
    .doc =
        "Adam (Kingma and Ba, 2015), or AdamW (Loshchilov and Hutter, 2019) when `decoupled`, bias-corrected: p -= lr "
        "mhat / (sqrt(vhat) + epsilon).\n"
        "lr, updates i64, scale?, then (p, g, m, v) per parameter -> (p', m', v') per parameter.",
    .inputs = {{"lr"}, {"updates"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {real("beta1", 0.9, "of the mean"), real("beta2", 0.999, "of the squares"),
              real("epsilon", 1e-8, "added to the root"), kDecay,
              flag("decoupled", "weight decay beside the gradient (AdamW)"), kDecays},
    .infer = infer_adam,
    .factors = factors_adam,
    .cost = cost_update,
    .flags = kFlags,
    .aliases_of = aliases_adam,
};
const OpDef op_def_adagrad = {
    .name = "adagrad",
    .doc =
        "Adagrad (Duchi et al., 2011): h += g^2; p -= lr g / (sqrt(h) + epsilon).\n"
        "lr, scale?, then (p, g, h) per parameter -> (p', h') per parameter.",
    .inputs = {{"lr"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {real("epsilon", 1e-10, "added to the root"), kDecay, kDecays},
    .infer = infer_adagrad,
    .factors = factors_adagrad,
    .cost = cost_update,
    .flags = kFlags,
    .aliases_of = aliases_adagrad,
};
const OpDef op_def_lamb_direction = {
    .name = "lamb_direction",
    .doc =
        "First half of LAMB (You et al., 2020): u = mhat / (sqrt(vhat) + epsilon) + wd p.\n"
        "updates i64, scale?, then (p, g, m, v) per parameter -> (u, m', v') per parameter.",
    .inputs = {{"updates"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {real("beta1", 0.9, "of the mean"), real("beta2", 0.999, "of the squares"),
              real("epsilon", 1e-6, "added to the root"), kDecay, kDecays},
    .infer = infer_lamb_direction,
    .factors = factors_lamb_direction,
    .cost = cost_update,
    .flags = kFlags,
    .aliases_of = aliases_lamb_direction,
};
const OpDef op_def_lamb_apply = {
    .name = "lamb_apply",
    .doc =
        "Second half of LAMB: p -= lr ratio u, ratio = |p| / |u| where both are positive, else 1.\n"
        "lr, then (p, u, pn, un) per parameter, pn and un being sums of squares -> p' per parameter.",
    .inputs = {{"lr"}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .infer = infer_lamb_apply,
    .factors = factors_lamb_apply,
    .cost = cost_update,
    .flags = kFlags,
    .aliases_of = aliases_lamb_apply,
};
const OpDef op_def_clip_factor = {
    .name = "clip_factor",
    .doc =
        "The factor that clips gradients to a global norm: min(1, max_norm / (sqrt(sum of the operands) + 1e-6)).\n"
        "1 where the sum is NaN: a scale of NaN would say that nothing is to change.\n"
        "sums of squares, scalars -> scale, a scalar of their dtype.",
    .inputs = {{"sums", kMany}},
    .outputs = {{"scale"}},
    .attrs = {{.name = "max_norm", .type = AttrType::kFloat, .fallback = 1.0, .required = true, .doc = "> 0"}},
    .infer = infer_clip,
    .flags = kNoGradient | kInternal,
};

const OpDef op_def_unscale = {
    .name = "unscale",
    .doc =
        "A gradient without the factor that the loss was multiplied by, and whether it is finite.\n"
        "x, loss_scale scalar -> y = x / loss_scale like x in f32 (f64), overflow f32 scalar: 0, or infinite when a "
        "value of y is not finite.",
    .inputs = {{"x"}, {"loss_scale"}},
    .outputs = {{"y"}, {"overflow"}},
    .infer = infer_unscale,
    .factors = factors_unscale,
    .flags = kNoGradient | kInternal | kPreparesUpdate | kKeepsZero,
    .aliases_of = aliases_unscale,
};
const OpDef op_def_overflow = {
    .name = "overflow",
    .doc =
        "The scale of gradients of this step: 1 when all operands are finite, else NaN, by which update ops know that "
        "nothing is to change.\nscalars -> scale, a scalar of their type.",
    .inputs = {{"x", kMany}},
    .outputs = {{"scale"}},
    .infer = infer_overflow,
    .flags = kNoGradient | kSkipsUpdates | kInternal,
};

}  // namespace whale
