// Ops that read or write by index: gather, one-hot, top-k.
#include <algorithm>

#include "ops/family.h"

namespace whale {
namespace {

// An extent: of a part it may be 0.
int64_t extent_attr(const OpView& v, const char* name) {
  const int64_t value = attr_int(*v.attrs, name);
  if (value < 0) throw invalid("attribute '{}' is {}, expected at least 0", name, value);
  return value;
}

int64_t positive(const OpView& v, const char* name) {
  const int64_t value = attr_int(*v.attrs, name);
  if (value < 1) throw invalid("attribute '{}' is {}, expected at least 1", name, value);
  return value;
}

void need_number(const OpView& v, int i, const char* name) {
  if (in(v, i).dtype == DType::kBool)
    throw invalid("operand '{}' is {}, expected a number type", name, to_string(in(v, i)));
}

std::string dim_name(int d) { return "d" + std::to_string(d); }

// ---- gather ---------------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_gather(const OpView& v) {
  need_rank_at_least(v, 0, "x", 1);
  need_ids(v, 1, "indices");
  const Dims &x = in_dims(v, 0), &ids = in_dims(v, 1);
  const int axis = normalize_axis(attr_int(*v.attrs, "axis"), x.size());
  Dims out(x.begin(), x.begin() + axis);
  out.insert(out.end(), ids.begin(), ids.end());
  out.insert(out.end(), x.begin() + axis + 1, x.end());
  return {{in(v, 0).dtype, out}};
}

Dims gathered(const OpView& v) {
  return {in_dims(v, 0)[normalize_axis(attr_int(*v.attrs, "axis"), in_dims(v, 0).size())]};
}

// dy has the shape of gather's result; `size` stands where the dimensions of the indices were.
int grad_axis(const OpView& v) {
  if (rank_of(v, 0) < rank_of(v, 1))
    throw invalid("operand 'dy' {} has a lower rank than 'indices' {}", to_string(in_dims(v, 0)),
                  to_string(in_dims(v, 1)));
  return normalize_axis(attr_int(*v.attrs, "axis"), in_dims(v, 0).size() - in_dims(v, 1).size() + 1);
}

std::vector<TensorType> infer_gather_grad(const OpView& v) {
  need_float(v, 0, "dy");
  need_ids(v, 1, "indices");
  const int axis = grad_axis(v);
  const Dims &dy = in_dims(v, 0), &ids = in_dims(v, 1);
  if (!std::equal(ids.begin(), ids.end(), dy.begin() + axis))
    throw invalid("operand 'dy' {} does not hold the dimensions of 'indices' {} from dimension {}", to_string(dy),
                  to_string(ids), axis);
  Dims out(dy.begin(), dy.begin() + axis);
  out.push_back(extent_attr(v, "size"));
  out.insert(out.end(), dy.begin() + axis + static_cast<int>(ids.size()), dy.end());
  return {{in(v, 0).dtype, out}};
}

// Dimensions of the large side (gather's result, dy) and the small one (x, dx), without the axis; those of the indices
// by `index`.
template <class Outer, class Index>
void gather_dims(int axis, int indices, int large_rank, Outer outer, Index index) {
  for (int d = 0; d < large_rank; ++d) {
    if (d < axis)
      outer(d, d);
    else if (d < axis + indices)
      index(d, d - axis);
    else
      outer(d, d - indices + 1);
  }
}

Factors factors_gather(const OpView& v) {
  Factors f;
  const Dims& out = v.outputs.at(0).dims;
  const int axis = normalize_axis(attr_int(*v.attrs, "axis"), in_dims(v, 0).size());
  const auto extent = [&](int d) { return out[d]; };
  gather_dims(
      axis, rank_of(v, 1), static_cast<int>(out.size()),
      [&](int y, int x) { add_factor(f, v, dim_name(y), FactorKind::kMap, extent(y), {sub_axis(x)}, {sub_axis(y)}); },
      [&](int y, int i) {
        add_factor(f, v, dim_name(y), FactorKind::kMap, extent(y), {kAbsent, sub_axis(i)}, {sub_axis(y)});
      });
  add_factor(f, v, "rows", FactorKind::kLookup, in_dims(v, 0)[axis], {sub_axis(axis)}, {}, {0});
  f.list.back().begin_attr = "begin";
  f.linear = {{0}};
  return f;
}

Factors factors_gather_grad(const OpView& v) {
  Factors f;
  const Dims& dy = in_dims(v, 0);
  const auto extent = [&](int d) { return dy[d]; };
  gather_dims(
      grad_axis(v), rank_of(v, 1), rank_of(v, 0),
      [&](int y, int x) { add_factor(f, v, dim_name(y), FactorKind::kMap, extent(y), {sub_axis(y)}, {sub_axis(x)}); },
      [&](int y, int i) {
        add_factor(f, v, dim_name(y), FactorKind::kReduce, extent(y), {sub_axis(y), sub_axis(i)}, {}, {0});
      });
  add_factor(f, v, "rows", FactorKind::kMap, attr_int(*v.attrs, "size"), {}, {sub_axis(grad_axis(v))});
  f.list.back().size_attrs = {"size"};
  f.list.back().begin_attr = "begin";
  f.linear = {{0}};
  return f;
}

void grad_gather(GradBuilder& b) {
  const Dims x = b.dims(b.input(0));
  const int axis = normalize_axis(attr_int(b.op().attrs, "axis"), x.size());
  b.set(0, b.emit(OpCode::k_gather_grad, {b.grad(), b.input(1)}, {{"axis", int64_t{axis}}, {"size", x[axis]}}));
}

// ---- one_hot --------------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_one_hot(const OpView& v) {
  need_ids(v, 0, "indices");
  Dims out = in_dims(v, 0);
  out.push_back(extent_attr(v, "depth"));
  return {{parse_dtype(attr_string(*v.attrs, "dtype")), out}};
}

Factors factors_one_hot(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0), {0}, {0});
  add_factor(f, v, "depth", FactorKind::kMap, attr_int(*v.attrs, "depth"), {}, {sub_axis(rank_of(v, 0))});
  f.list.back().size_attrs = {"depth"};
  f.list.back().begin_attr = "begin";
  return f;
}

// ---- top_k ----------------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_top_k(const OpView& v) {
  need_rank_at_least(v, 0, "x", 1);
  need_number(v, 0, "x");
  Dims out = in_dims(v, 0);
  const int64_t k = positive(v, "k");
  if (k > out.back() || out.back() > INT32_MAX)
    throw invalid("attribute 'k' is {}, expected 1 to {}: the last dimension of {}", k, out.back(),
                  to_string(in_dims(v, 0)));
  out.back() = k;
  return {{in(v, 0).dtype, out}, {DType::kI32, out}};
}

Factors factors_top_k(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0) - 1, {0}, {0, 1});
  return f;
}

void grad_top_k(GradBuilder& b) {
  if (b.grad(0) == kNone) return;
  b.set(0, b.emit(OpCode::k_top_k_grad, {b.grad(0), b.output(1)}, {{"size", b.dims(b.input(0)).back()}}));
}

std::vector<TensorType> infer_top_k_grad(const OpView& v) {
  need_rank_at_least(v, 0, "dvalues", 1);
  need_float(v, 0, "dvalues");
  need_dtype(v, 1, "indices", DType::kI32);
  need_dims(v, 1, "indices", in_dims(v, 0), "the shape of dvalues");
  Dims out = in_dims(v, 0);
  const int64_t size = positive(v, "size");
  if (size < out.back())
    throw invalid("attribute 'size' is {}, expected at least {}: the number of values", size, out.back());
  out.back() = size;
  return {{in(v, 0).dtype, out}};
}

Factors factors_top_k_grad(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0) - 1, {0, 1}, {0});
  f.linear = {{0}};
  return f;
}

// Rows that are read and written, and the indices: not the whole table.
OpCost cost_gather(const OpView& v) {
  const double moved = 2 * output_elements(v) * static_cast<double>(size_of(v.outputs[0].dtype));
  return {0, moved + elements(in(v, 1)) * static_cast<double>(size_of(in(v, 1).dtype))};
}

const AttrSpec kBegin{"begin", AttrType::kInt, int64_t{0}, false,
                      "the index of the first element, for a part of a tensor"};

}  // namespace

const OpDef op_def_gather = {
    .name = "gather",
    .doc =
        "Slices of x along an axis, chosen by indices; an index outside of it is an error.\n"
        "x [any shape], indices i32/i64 [...] -> x.dims[:axis] + indices.dims + x.dims[axis+1:].",
    .inputs = {{"x"}, {"indices"}},
    .outputs = {{"y"}},
    .attrs = {{"axis", AttrType::kInt, int64_t{0}, false, "which dimension of x"}, kBegin, index_limit_attr()},
    .infer = infer_gather,
    .gradient = grad_gather,
    .factors = factors_gather,
    .cost = cost_gather,
    .aliases = {},
    .flags = 0,
    .index = {1, gathered},
};
const OpDef op_def_gather_grad = {
    .name = "gather_grad",
    .doc =
        "Zeros, to which each slice of dy is added at its index.\n"
        "dy of gather's result, indices -> dx, with extent `size` along the axis.",
    .inputs = {{"dy"}, {"indices"}},
    .outputs = {{"dx"}},
    .attrs = {{"axis", AttrType::kInt, int64_t{0}, false, "which dimension of dx"},
              {"size", AttrType::kInt, int64_t{0}, true, "its extent"},
              kBegin},
    .infer = infer_gather_grad,
    .gradient = nullptr,
    .factors = factors_gather_grad,
    .cost = nullptr,
    .aliases = {},
    .flags = kInternal,
};
const OpDef op_def_one_hot = {
    .name = "one_hot",
    .doc =
        "1 at the index along a new last dimension, else 0; an index outside of 0 to depth - 1 is an error.\n"
        "indices i32/i64 [...] -> y [..., depth].",
    .inputs = {{"indices"}},
    .outputs = {{"y"}},
    .attrs = {{"depth", AttrType::kInt, int64_t{0}, true, "extent of the new dimension"},
              {"dtype", AttrType::kString, std::string("f32"), false, "of the result"},
              kBegin,
              index_limit_attr()},
    .infer = infer_one_hot,
    .gradient = nullptr,
    .factors = factors_one_hot,
    .cost = nullptr,
    .aliases = {},
    .flags = kNoGradient,
    .index = {0, [](const OpView& v) { return Dims{attr_int(*v.attrs, "depth")}; }},
};
const OpDef op_def_top_k = {
    .name = "top_k",
    .doc =
        "The k largest elements of the last dimension, descending, ties to the lowest index.\n"
        "x [..., n] -> values [..., k], indices i32 [..., k].",
    .inputs = {{"x"}},
    .outputs = {{"values"}, {"indices"}},
    .attrs = {{"k", AttrType::kInt, int64_t{1}, true, "how many"}},
    .infer = infer_top_k,
    .gradient = grad_top_k,
    .factors = factors_top_k,
    .cost = nullptr,
    .aliases = {},
    .flags = 0,
};
const OpDef op_def_top_k_grad = {
    .name = "top_k_grad",
    .doc = "Zeros with dvalues at their indices.\ndvalues [..., k], indices i32 [..., k] -> dx [..., size].",
    .inputs = {{"dvalues"}, {"indices"}},
    .outputs = {{"dx"}},
    .attrs = {{"size", AttrType::kInt, int64_t{0}, true, "extent of the last dimension"}},
    .infer = infer_top_k_grad,
    .gradient = nullptr,
    .factors = factors_top_k_grad,
    .cost = nullptr,
    .aliases = {},
    .flags = kInternal,
};

}  // namespace whale
