// Updates that touch only a part of what they update: rows of tables, from the ids that looked them up and the
// gradients of what was looked up; and split weights, whose bf16 half is the model's. An op of one
// tuple can be cut by rows or columns of its table; the ids and gradients of the whole batch reach every part of it.
#include "ops/family.h"

namespace whale {
namespace {

void need_scalar(const OpView& v, int i, const char* name) {
  if (!has(v, i)) return;
  need_dims(v, i, name, {}, "a scalar");
  need_float(v, i, name);
}

// Where an op's tuples stand: the parameter, `states` tensors of its shape, then ids and dy, or a gradient.
struct Form {
  int first, states;
  bool rows;
  bool split = false;  // the parameter is bf16 and its state u16
  int width() const { return 1 + states + (rows ? 2 : 1); }
};

void check_tuple(const OpView& v, const Form& form, int at, int64_t t) {
  const auto name = [&](const char* what) { return fmt::format("{}[{}]", what, t); };
  for (int k = 0; k < form.width(); ++k)
    if (!has(v, at + k)) throw invalid("operand {} of tuple {} is missing", k, t);
  if (form.split) need_dtype(v, at, name("p").c_str(), DType::kBF16);
  need_float(v, at, name("p").c_str());
  for (int k = 1; k <= form.states; ++k) {
    if (form.split)
      need_dtype(v, at + k, name("low").c_str(), DType::kU16);
    else
      need_float(v, at + k, name("state").c_str());
    need_dims(v, at + k, name("state").c_str(), in_dims(v, at), "the shape of the parameter");
  }
  const int last = at + form.width() - 1;
  if (!form.rows) {
    need_float(v, last, name("g").c_str());
    return need_dims(v, last, name("g").c_str(), in_dims(v, at), "the shape of the parameter");
  }
  need_rank(v, at, name("p").c_str(), 2);
  need_ids(v, last - 1, name("ids").c_str());
  need_float(v, last, name("dy").c_str());
  Dims want = in_dims(v, last - 1);
  if (want.size() == in_dims(v, last).size() && !want.empty()) want.pop_back();  // bags
  want.push_back(in_dims(v, at)[1]);
  need_dims(v, last, name("dy").c_str(), want, "the shape of ids (or of their bags), then the width of the table");
}

// The parameter and its states, tuple by tuple.
std::vector<TensorType> infer_tuples(const OpView& v, const Form& form) {
  need_scalar(v, 0, "lr");
  need_scalar(v, form.first - 1, "scale");
  const int64_t rest = static_cast<int64_t>(v.inputs.size()) - form.first;
  if (rest < 0 || rest % form.width())
    throw invalid("{} operands after the scalars, expected a multiple of {}", rest, form.width());
  const auto& decays = attr_ints(*v.attrs, "decays");
  const int64_t count = rest / form.width();
  if (!decays.empty() && static_cast<int64_t>(decays.size()) != count)
    throw invalid("attribute 'decays' has {} entries, expected {} (one a parameter) or none", decays.size(), count);
  std::vector<TensorType> out;
  for (int64_t t = 0; t < count; ++t) {
    const int at = form.first + static_cast<int>(t) * form.width();
    check_tuple(v, form, at, t);
    for (int k = 0; k <= form.states; ++k) out.push_back(in(v, at + k));
  }
  return out;
}

std::vector<Alias> alias_tuples(const OpView& v, const Form& form) {
  std::vector<Alias> all;
  const int count = (static_cast<int>(v.inputs.size()) - form.first) / form.width(), per = form.states + 1;
  for (int t = 0; t < count; ++t)
    for (int k = 0; k < per; ++k) all.push_back({t * per + k, form.first + t * form.width() + k, true});
  return all;
}

template <int first, int states, bool rows, bool split>
std::vector<TensorType> infer_form(const OpView& v) {
  if (first == 3 && has(v, 1)) need_dtype(v, 1, "updates", DType::kI64);
  return infer_tuples(v, {first, states, rows, split});
}
template <int first, int states, bool rows, bool split>
std::vector<Alias> aliases_form(const OpView& v) {
  return alias_tuples(v, {first, states, rows, split});
}

// Of a table at most the rows that the ids name are read and written.
template <int first, int states, bool rows, bool split>
OpCost cost_form(const OpView& v) {
  const Form form{first, states, rows, split};
  OpCost cost;
  for (int at = form.first; at + form.width() <= static_cast<int>(v.inputs.size()); at += form.width()) {
    const int last = at + form.width() - 1;
    double touched = elements(in(v, at));
    if (rows) {
      touched = std::min(touched, elements(in(v, last - 1)) * static_cast<double>(in_dims(v, at)[1]));
      cost.bytes += elements(in(v, last - 1)) * static_cast<double>(size_of(in(v, last - 1).dtype));
    }
    cost.bytes += elements(in(v, last)) * static_cast<double>(size_of(in(v, last).dtype));
    for (int k = 0; k <= states; ++k) cost.bytes += 2 * touched * static_cast<double>(size_of(in(v, at + k).dtype));
    cost.flops += 5 * touched * (states + 1);
  }
  return cost;
}

template <int first, int states, bool rows, bool split>
Factors factors_form(const OpView& v) {
  const Form form{first, states, rows, split};
  Factors f;
  if (static_cast<int>(v.inputs.size()) - form.first != form.width()) return f;
  const auto last = v.inputs.size() - 1;
  for (int d = 0; d < rank_of(v, form.first); ++d) {
    std::vector<SubAxis> from(v.inputs.size());
    for (size_t k = 0; k <= static_cast<size_t>(states); ++k) from[static_cast<size_t>(first) + k] = sub_axis(d);
    if (!rows) from[last] = sub_axis(d);
    if (rows && d == 1) from[last] = sub_axis(static_cast<int>(v.inputs[last].dims.size()) - 1);
    add_factor(f, v, "d" + std::to_string(d), FactorKind::kMap, in_dims(v, first)[d], std::move(from),
               std::vector<SubAxis>(v.outputs.size(), sub_axis(d)));
    if (rows && d == 0) f.list.back().begin_attr = "row_begin";
  }
  return f;
}

AttrSpec real(const char* name, double fallback, const char* doc) {
  return {.name = name, .type = AttrType::kFloat, .fallback = fallback, .doc = doc};
}
const AttrSpec kDecays{.name = "decays",
                       .type = AttrType::kInts,
                       .fallback = Ints{},
                       .doc = "0/1 per parameter: weight decay applies; empty: to all"};
const AttrSpec kDecay = real("weight_decay", 0, "coefficient of weight decay");
const AttrSpec kRowBegin{.name = "row_begin",
                         .type = AttrType::kInt,
                         .fallback = int64_t{0},
                         .doc = "id of the table's first row, for a part of a table"};
const AttrSpec kMean{.name = "mean",
                     .type = AttrType::kBool,
                     .fallback = false,
                     .doc = "the bags were averaged: dy is divided by their size"};
constexpr uint32_t kFlags = kUpdateOp | kNoGradient | kInternal;
constexpr PortKind kOpt = PortKind::kOptional, kMany = PortKind::kVariadic;

}  // namespace

const OpDef op_def_sgd_rows = {
    .name = "sgd_rows",
    .doc =
        "sgd without momentum on the rows of tables that a step looked up: the gradients of a row are summed in order "
        "of occurrence, then it is decayed and updated; others are not touched.\n"
        "lr, scale?, then (p [v, d], ids [...] or [..., bag], dy [..., d]) per table -> p' per table.",
    .inputs = {{"lr"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {kMean, kRowBegin, kDecay, kDecays},
    .infer = infer_form<2, 0, true, false>,
    .factors = factors_form<2, 0, true, false>,
    .cost = cost_form<2, 0, true, false>,
    .flags = kFlags,
    .aliases_of = aliases_form<2, 0, true, false>,
};
const OpDef op_def_adagrad_rows = {
    .name = "adagrad_rows",
    .doc =
        "adagrad on the rows of tables that a step looked up, as sgd_rows.\n"
        "lr, scale?, then (p [v, d], h, ids, dy) per table -> (p', h') per table.",
    .inputs = {{"lr"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {real("epsilon", 1e-10, "added to the root"), kMean, kRowBegin, kDecay, kDecays},
    .infer = infer_form<2, 1, true, false>,
    .factors = factors_form<2, 1, true, false>,
    .cost = cost_form<2, 1, true, false>,
    .flags = kFlags,
    .aliases_of = aliases_form<2, 1, true, false>,
};
const OpDef op_def_adam_rows = {
    .name = "adam_rows",
    .doc =
        "adam on the rows of tables that a step looked up, as sgd_rows; the bias is corrected by the number of all "
        "updates.\n"
        "lr, updates i64, scale?, then (p [v, d], m, v, ids, dy) per table -> (p', m', v') per table.",
    .inputs = {{"lr"}, {"updates"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {real("beta1", 0.9, "of the mean"),
              real("beta2", 0.999, "of the squares"),
              real("epsilon", 1e-8, "added to the root"),
              {.name = "decoupled",
               .type = AttrType::kBool,
               .fallback = false,
               .doc = "weight decay beside the gradient (AdamW)"},
              kMean,
              kRowBegin,
              kDecay,
              kDecays},
    .infer = infer_form<3, 2, true, false>,
    .factors = factors_form<3, 2, true, false>,
    .cost = cost_form<3, 2, true, false>,
    .flags = kFlags,
    .aliases_of = aliases_form<3, 2, true, false>,
};
const OpDef op_def_split_sgd = {
    .name = "split_sgd",
    .doc =
        "sgd without momentum on split weights (Kalamkar et al., 2020): the upper 16 bits of an fp32 weight are the "
        "model's bf16 weight p (cut off, not rounded), the lower 16 are `low`; the arithmetic is that of fp32.\n"
        "lr, scale?, then (p bf16, low u16, g) per parameter -> (p', low') per parameter.",
    .inputs = {{"lr"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {kDecay, kDecays},
    .infer = infer_form<2, 1, false, true>,
    .factors = factors_form<2, 1, false, true>,
    .cost = cost_form<2, 1, false, true>,
    .flags = kFlags,
    .aliases_of = aliases_form<2, 1, false, true>,
};
const OpDef op_def_split_sgd_rows = {
    .name = "split_sgd_rows",
    .doc =
        "split_sgd on the rows of tables that a step looked up, as sgd_rows.\n"
        "lr, scale?, then (p bf16 [v, d], low u16, ids, dy) per table -> (p', low') per table.",
    .inputs = {{"lr"}, {"scale", kOpt}, {"tuples", kMany}},
    .outputs = {{"new", kMany}},
    .attrs = {kMean, kRowBegin, kDecay, kDecays},
    .infer = infer_form<2, 1, true, true>,
    .factors = factors_form<2, 1, true, true>,
    .cost = cost_form<2, 1, true, true>,
    .flags = kFlags,
    .aliases_of = aliases_form<2, 1, true, true>,
};

}  // namespace whale
