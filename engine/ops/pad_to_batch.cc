// A micro-batch's part of the batch on its way to an op that needs all of it at once: the updates of looked-up rows.
#include "ops/rules.h"

namespace whale {
namespace {

std::vector<TensorType> infer_pad_to_batch(const OpView& v) {
  need_float(v, 0, "x");
  need_rank_at_least(v, 0, "x", 2);
  const Dims &x = in_dims(v, 0), &y = attr_ints(*v.attrs, "dims");
  bool fits = x.size() == y.size() && x.back() == y.back();
  for (size_t d = 0; fits && d < x.size(); ++d) fits = x[d] <= y[d];
  if (!fits) throw invalid("attribute 'dims' is {}, expected room for x {}", to_string(y), to_string(x));
  return {{in(v, 0).dtype, y}};
}

// Parts of the rows give parts of a sum: each has zeros for the others.
Factors factors_pad_to_batch(const OpView& v) {
  Factors f;
  const int last = rank_of(v, 0) - 1;
  add_leading(f, v, last, {0}, {}, {0});
  add_factor(f, v, "c", FactorKind::kMap, in_dims(v, 0).back(), {sub_axis(last)}, {sub_axis(last)});
  f.linear = {{0}};
  return f;
}

}  // namespace

extern const OpDef op_def_pad_to_batch;

const OpDef op_def_pad_to_batch = {
    .name = "pad_to_batch",
    .doc = "The rows at hand at their places among all rows of the step, zeros elsewhere.\nx [..., c] -> y [dims].",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {{.name = "dims",
               .type = AttrType::kInts,
               .fallback = Ints(),
               .required = true,
               .doc = "of the result",
               .role = AttrRole::kShape}},
    .infer = infer_pad_to_batch,
    .factors = factors_pad_to_batch,
    .flags = kNoGradient | kOffsetAware | kBoxOfInput | kInternal,
};

}  // namespace whale
