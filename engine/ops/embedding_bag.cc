// Pooled table lookup: the sum or mean of the rows that a bag of ids names.
#include "ops/family.h"

namespace whale {
namespace {

bool is_mean(const OpView& v) {
  const std::string& mode = attr_string(*v.attrs, "mode");
  if (mode != "sum" && mode != "mean") throw invalid("attribute 'mode' is '{}', expected sum or mean", mode);
  return mode == "mean";
}

std::vector<TensorType> infer_embedding_bag(const OpView& v) {
  need_float(v, 0, "table");
  need_rank(v, 0, "table", 2);
  need_ids(v, 1, "ids");
  need_rank_at_least(v, 1, "ids", 1);
  is_mean(v);
  Dims dims = leading(in_dims(v, 1));
  dims.push_back(in_dims(v, 0)[1]);
  return {{in(v, 0).dtype, dims}};
}

void gradient_embedding_bag(GradBuilder& b) {
  if (!b.wants(0)) return;
  const TensorType table = b.type(b.input(0));
  b.set(0, b.emit(OpCode::k_embedding_bag_grad, {b.grad(), b.input(1)},
                  {{"mode", attr_string(b.op().attrs, "mode")},
                   {"rows", table.dims[0]},
                   {"out_dtype", std::string(name_of(table.dtype))}}));
}

// A bag that is cut gives partial sums; a mean would need the whole bag's size.
void add_bag(Factors& f, const OpView& v, std::vector<SubAxis> inputs, std::vector<SubAxis> outputs) {
  add_factor(f, v, "bag", is_mean(v) ? FactorKind::kFixed : FactorKind::kReduce, in_dims(v, 1).back(),
             std::move(inputs), std::move(outputs), {0});
}

Factors factors_embedding_bag(const OpView& v) {
  Factors f;
  const int n = rank_of(v, 1) - 1;
  add_leading(f, v, n, {1}, {0});
  add_bag(f, v, {kAbsent, sub_axis(n)}, {});
  add_factor(f, v, "rows", FactorKind::kLookup, in_dims(v, 0)[0], {sub_axis(0)}, {}, {0});
  f.list.back().begin_attr = "row_begin";
  add_factor(f, v, "d", FactorKind::kMap, in_dims(v, 0)[1], {sub_axis(1)}, {sub_axis(n)});
  f.linear = {{0}};
  return f;
}

std::vector<TensorType> infer_embedding_bag_grad(const OpView& v) {
  need_float(v, 0, "dy");
  need_ids(v, 1, "ids");
  need_rank_at_least(v, 0, "dy", 1);
  need_rank_at_least(v, 1, "ids", 1);
  is_mean(v);
  const int64_t rows = attr_int(*v.attrs, "rows");
  if (rows < 0) throw invalid("attribute 'rows' is {}, expected >= 0", rows);
  Dims want = leading(in_dims(v, 1));
  want.push_back(in_dims(v, 0).back());
  need_dims(v, 0, "dy", want, "the shape of ids without the bag, followed by the width of the table");
  return {{out_dtype(v, in(v, 0).dtype), {rows, in_dims(v, 0).back()}}};
}

Factors factors_embedding_bag_grad(const OpView& v) {
  Factors f;
  const int n = rank_of(v, 1) - 1;
  for (int d = 0; d < n; ++d)
    add_factor(f, v, "d" + std::to_string(d), FactorKind::kReduce, in_dims(v, 1)[d], {sub_axis(d), sub_axis(d)}, {},
               {0});
  add_bag(f, v, {kAbsent, sub_axis(n)}, {});
  add_factor(f, v, "d", FactorKind::kMap, in_dims(v, 0).back(), {sub_axis(n)}, {sub_axis(1)});
  add_factor(f, v, "rows", FactorKind::kMap, attr_int(*v.attrs, "rows"), {}, {sub_axis(0)});
  f.list.back().size_attrs = {"rows"};
  f.list.back().begin_attr = "row_begin";
  f.linear = {{0}};
  return f;
}

// Each id reads a row; the rest of the table is not touched.
OpCost cost_embedding_bag(const OpView& v) {
  const double read = elements(in(v, 1)) * static_cast<double>(in_dims(v, 0)[1]), size = size_of(in(v, 0).dtype);
  return {read, (read + output_elements(v)) * size + elements(in(v, 1)) * static_cast<double>(size_of(in(v, 1).dtype))};
}

const AttrSpec kRowBegin{.name = "row_begin",
                         .type = AttrType::kInt,
                         .fallback = int64_t{0},
                         .doc = "id of the table's first row, for a part of a table"};
const AttrSpec kMode{
    .name = "mode", .type = AttrType::kString, .fallback = std::string("sum"), .doc = "how a bag is pooled: sum, mean"};

}  // namespace

const OpDef op_def_embedding_bag = {
    .name = "embedding_bag",
    .doc =
        "Looks up the rows of a table that each bag of ids names, and pools them.\n"
        "table [v, d], ids i32/i64 [..., bag] -> y [..., d], dtype of the table. An id outside of 0 to v - 1 is an "
        "error.",
    .inputs = {{"table"}, {"ids"}},
    .outputs = {{"y"}},
    .attrs = {kMode, kRowBegin, index_limit_attr()},
    .infer = infer_embedding_bag,
    .gradient = gradient_embedding_bag,
    .factors = factors_embedding_bag,
    .cost = cost_embedding_bag,
    .flags = kOffsetAware | kRoundOutput,
    .index = {1, [](const OpView& v) { return Dims{in_dims(v, 0)[0]}; }},
};

const OpDef op_def_embedding_bag_grad = {
    .name = "embedding_bag_grad",
    .doc =
        "Gradient of embedding_bag: each row of dy is added to the rows of the table that its bag names, in order of "
        "occurrence; for a mean, divided by the size of the bag.\n"
        "dy [..., d], ids [..., bag] -> dtable [rows, d].",
    .inputs = {{"dy"}, {"ids"}},
    .outputs = {{"dtable"}},
    .attrs =
        {kMode,
         kRowBegin,
         {.name = "rows", .type = AttrType::kInt, .fallback = int64_t{0}, .required = true, .doc = "rows of the table"},
         {.name = "out_dtype",
          .type = AttrType::kString,
          .fallback = std::string(),
          .doc = "dtype of dtable; empty: that of dy"}},
    .infer = infer_embedding_bag_grad,
    .factors = factors_embedding_bag_grad,
    .flags = kSumsRows | kInternal,
};

}  // namespace whale
