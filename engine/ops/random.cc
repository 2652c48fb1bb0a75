// Random ops: numbers from the counter-based generator, a function of (seed, iteration, key, global element index).
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

std::vector<TensorType> infer_dropout(const OpView& v) {
  need_float(v, 0, "x");
  const double rate = attr_float(*v.attrs, "rate");
  if (!(rate >= 0 && rate < 1)) throw invalid("attribute 'rate' is {}, expected 0 <= rate < 1", rate);
  return {in(v, 0)};
}

void gradient_dropout(GradBuilder& b) {
  const Op op = b.op();
  const TensorId dx = b.emit(OpCode::k_dropout, {b.grad()}, op.attrs);
  b.graph.op(b.graph.tensor(dx).producer).key = op.key;
  b.set(0, dx);
}

Factors factors_dropout(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0), {0}, {0});
  f.linear = {{0}};
  return f;
}

uint32_t placed_dims_dropout(const OpView& v) { return attr_float(*v.attrs, "rate") > 0 ? ~uint32_t{0} : 0; }

}  // namespace

extern const OpDef op_def_dropout;
const OpDef op_def_dropout = {
    .name = "dropout",
    .doc =
        "Zeroes elements with probability `rate` and scales the others by 1 / (1 - rate).\n"
        "x [...] -> y, same shape and dtype. The mask depends on seed, iteration, key and global element index only.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {{.name = "rate", .type = AttrType::kFloat, .fallback = 0.1, .required = true, .doc = "0 <= rate < 1"},
              {.name = "key",
               .type = AttrType::kInt,
               .fallback = int64_t{0},
               .doc = "id of the random stream; 0: given when the graph is sealed"}},
    .infer = infer_dropout,
    .gradient = gradient_dropout,
    .factors = factors_dropout,
    .aliases = {{0, 0}},
    .flags = kElementwise | kRandom | kOffsetAware | kTrainingOnly,
    .placed_dims = placed_dims_dropout,
};

}  // namespace whale
