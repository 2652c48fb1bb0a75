// Table lookup and rotary position embedding.
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

// ---- embedding --------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_embedding(const OpView& v) {
  need_float(v, 0, "table");
  need_rank(v, 0, "table", 2);
  need_ids(v, 1, "ids");
  Dims dims = in_dims(v, 1);
  dims.push_back(in_dims(v, 0)[1]);
  return {{in(v, 0).dtype, dims}};
}

void gradient_embedding(GradBuilder& b) {
  if (!b.wants(0)) return;
  const TensorType table = b.type(b.input(0));
  b.set(0, b.emit(OpCode::k_embedding_grad, {b.grad(), b.input(1)},
                  {{"rows", table.dims[0]}, {"out_dtype", std::string(name_of(table.dtype))}}));
}

Factors factors_embedding(const OpView& v) {
  Factors f;
  const int n = rank_of(v, 1);
  add_leading(f, v, n, {1}, {0});
  add_factor(f, v, "rows", FactorKind::kLookup, in_dims(v, 0)[0], {sub_axis(0)}, {}, {0});
  f.list.back().begin_attr = "row_begin";
  add_factor(f, v, "d", FactorKind::kMap, in_dims(v, 0)[1], {sub_axis(1)}, {sub_axis(n)});
  f.linear = {{0}};
  return f;
}

std::vector<TensorType> infer_embedding_grad(const OpView& v) {
  need_float(v, 0, "dy");
  need_ids(v, 1, "ids");
  need_rank_at_least(v, 0, "dy", 1);
  const int64_t rows = attr_int(*v.attrs, "rows");
  if (rows < 0) throw invalid("attribute 'rows' is {}, expected >= 0", rows);
  Dims want = in_dims(v, 1);
  want.push_back(in_dims(v, 0).back());
  need_dims(v, 0, "dy", want, "the shape of ids followed by the width of the table");
  return {{out_dtype(v, in(v, 0).dtype), {rows, in_dims(v, 0).back()}}};
}

Factors factors_embedding_grad(const OpView& v) {
  Factors f;
  const int n = rank_of(v, 1);
  for (int d = 0; d < n; ++d)
    add_factor(f, v, "d" + std::to_string(d), FactorKind::kReduce, in_dims(v, 1)[d], {sub_axis(d), sub_axis(d)}, {},
               {0});
  add_factor(f, v, "d", FactorKind::kMap, in_dims(v, 0).back(), {sub_axis(n)}, {sub_axis(1)});
  add_factor(f, v, "rows", FactorKind::kMap, attr_int(*v.attrs, "rows"), {}, {sub_axis(0)});
  f.list.back().size_attrs = {"rows"};
  f.list.back().begin_attr = "row_begin";
  f.linear = {{0}};
  return f;
}

OpCost cost_embedding(const OpView& v) {
  const double moved = output_elements(v) * static_cast<double>(size_of(in(v, 0).dtype));
  return {output_elements(v), 2 * moved + elements(in(v, 1)) * static_cast<double>(size_of(in(v, 1).dtype))};
}

// ---- rotary -----------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_rotary(const OpView& v) {
  need_float(v, 0, "x");
  need_rank(v, 0, "x", 4);
  const Dims& d = in_dims(v, 0);
  if (d[3] % 2) throw invalid("operand 'x' has shape {}, expected an even head dimension (the last)", to_string(d));
  const int64_t heads = attr_int(*v.attrs, "heads", -1);
  if (heads < -1) throw invalid("attribute 'heads' is {}, expected -1 (all) or >= 0", heads);
  const double base = attr_float(*v.attrs, "base", 10000);
  if (!(base > 0)) throw invalid("attribute 'base' is {}, expected > 0", base);
  return {in(v, 0)};
}

// `heads` counts in the logical tensor.
void check_rotary(const OpView& v) {
  const int64_t heads = attr_int(*v.attrs, "heads", -1);
  if (heads > in_dims(v, 0)[2])
    throw invalid("attribute 'heads' is {}, expected -1 (all) or 0 to {}: the heads of x {}", heads, in_dims(v, 0)[2],
                  to_string(in_dims(v, 0)));
}

void gradient_rotary(GradBuilder& b) {
  Attrs attrs = b.op().attrs;
  attrs["inverse"] = !attr_bool(attrs, "inverse");
  b.set(0, b.emit(OpCode::k_rotary, {b.grad()}, attrs));
}

Factors factors_rotary(const OpView& v) {
  Factors f;
  const Dims& d = in_dims(v, 0);
  add_factor(f, v, "b", FactorKind::kMap, d[0], {sub_axis(0)}, {sub_axis(0)});
  add_factor(f, v, "t", FactorKind::kMap, d[1], {sub_axis(1)}, {sub_axis(1)});
  add_factor(f, v, "heads", FactorKind::kMap, d[2], {sub_axis(2)}, {sub_axis(2)});
  f.linear = {{0}};
  return f;
}

OpCost cost_rotary(const OpView& v) { return {3 * output_elements(v), bytes_of(v)}; }

const AttrSpec kRowBegin{.name = "row_begin",
                         .type = AttrType::kInt,
                         .fallback = int64_t{0},
                         .doc = "id of the table's first row, for a part of a table"};

}  // namespace

extern const OpDef op_def_embedding, op_def_embedding_grad, op_def_rotary;

const OpDef op_def_embedding = {
    .name = "embedding",
    .doc =
        "Looks up rows of a table.\n"
        "table [v, d], ids i32/i64 [...] -> y [..., d], dtype of the table. An id outside of 0 to v - 1 is an error.",
    .inputs = {{"table"}, {"ids"}},
    .outputs = {{"y"}},
    .attrs = {kRowBegin, index_limit_attr()},
    .infer = infer_embedding,
    .gradient = gradient_embedding,
    .factors = factors_embedding,
    .cost = cost_embedding,
    .flags = kOffsetAware | kRoundOutput,
    .index = {1, [](const OpView& v) { return Dims{in_dims(v, 0)[0]}; }},
};

const OpDef op_def_embedding_grad = {
    .name = "embedding_grad",
    .doc =
        "Gradient of embedding: rows of dy are added to the rows of the table that they came from, in order of "
        "occurrence.\n"
        "dy [..., d], ids [...] -> dtable [rows, d].",
    .inputs = {{"dy"}, {"ids"}},
    .outputs = {{"dtable"}},
    .attrs =
        {{.name = "rows", .type = AttrType::kInt, .fallback = int64_t{0}, .required = true, .doc = "rows of the table"},
         kRowBegin,
         {.name = "out_dtype",
          .type = AttrType::kString,
          .fallback = std::string(),
          .doc = "dtype of dtable; empty: that of dy"}},
    .infer = infer_embedding_grad,
    .factors = factors_embedding_grad,
    .flags = kSumsRows | kInternal,
};

const OpDef op_def_rotary = {
    .name = "rotary",
    .doc =
        "Rotary position embedding (Su et al., RoFormer, 2021): rotates pairs of a head by position times base^(-2 i / "
        "d).\n"
        "x [b, t, h, d] -> y, same. Pairs are (i, i + d/2), or (2 i, 2 i + 1) when interleaved. Position is the index "
        "along t.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs =
        {{.name = "base", .type = AttrType::kFloat, .fallback = 10000.0, .doc = "wavelength base"},
         {.name = "heads",
          .type = AttrType::kInt,
          .fallback = int64_t{-1},
          .doc = "rotate the first `heads` only; -1: all"},
         {.name = "interleaved", .type = AttrType::kBool, .fallback = false, .doc = "pairs are neighbours"},
         {.name = "inverse", .type = AttrType::kBool, .fallback = false, .doc = "rotate backwards (the gradient)"}},
    .infer = infer_rotary,
    .gradient = gradient_rotary,
    .factors = factors_rotary,
    .cost = cost_rotary,
    .aliases = {{0, 0}},
    .flags = kOffsetAware,
    .check_whole = check_rotary,
};

}  // namespace whale
