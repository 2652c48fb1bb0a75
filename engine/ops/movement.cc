// Sources, and ops that move elements without changing them. A kernel takes extents from its operands and results,
// never from attributes: those hold the logical shape, of which a device may have a part. Dimensions whose elements
// keep their place are map factors; the others stay whole.
#include <algorithm>
#include <numeric>

#include "ir/number_range.h"
#include "ops/family.h"

namespace whale {
namespace {

const Ints& ints(const OpView& v, const char* name) { return attr_ints(*v.attrs, name); }

// The attribute `name` with one entry a dimension; all of them `otherwise` when it is empty.
Ints per_dim(const Attrs& attrs, const char* name, size_t rank, int64_t otherwise) {
  Ints values = attr_ints(attrs, name);
  if (values.empty()) values.assign(rank, otherwise);
  if (values.size() != rank)
    throw invalid("attribute '{}' {} has {} entries, expected {}: one a dimension", name, to_string(values),
                  values.size(), rank);
  return values;
}

void need_shape(const Dims& dims) {
  for (const int64_t d : dims)
    if (d < 0) throw invalid("attribute 'shape' {} has a negative extent", to_string(dims));
}

int axis_of(const OpView& v, int operand) {
  return normalize_axis(attr_int(*v.attrs, "axis"), in_dims(v, operand).size());
}

std::string dim_name(int d) { return "d" + std::to_string(d); }

// The result carries each dimension that `kept` accepts, at the same place as operand 0.
template <class Kept>
Factors same_place(const OpView& v, Kept kept) {
  Factors f;
  const Dims& out = v.outputs.at(0).dims;
  for (int d = 0; d < static_cast<int>(out.size()); ++d)
    if (kept(d))
      add_factor(f, v, dim_name(d), FactorKind::kMap, out[d], std::vector<SubAxis>(v.inputs.size(), sub_axis(d)),
                 {sub_axis(d)});
  f.linear = {{}};
  for (int i = 0; i < static_cast<int>(v.inputs.size()); ++i) f.linear[0].push_back(i);
  return f;
}

// ---- sources --------------------------------------------------------------------------------------------------------
// A type of integers has the number: nothing is cut on the way into it. 2^63 is the largest number of i64, for which a
// double has no other; kernels saturate.
void need_value(const OpView& v, DType dtype) {
  const double value = attr_float(*v.attrs, "value");
  if (!has_number(dtype, value) && !(dtype == DType::kI64 && value == end_of(dtype)))
    throw invalid("attribute 'value' is {}, which {} does not have", value, name_of(dtype));
}

std::vector<TensorType> infer_constant(const OpView& v) {
  need_shape(ints(v, "shape"));
  return {{parse_dtype(attr_string(*v.attrs, "dtype")), ints(v, "shape")}};
}

std::vector<TensorType> infer_fill(const OpView& v) {
  std::vector<TensorType> out = infer_constant(v);
  need_value(v, out[0].dtype);
  return out;
}

// The type has all numbers from 0 to this one.
double counted(DType dtype) {
  switch (dtype) {
    case DType::kBF16: return 0x1p8;
    case DType::kF16: return 0x1p11;
    case DType::kF32: return 0x1p24;
    case DType::kF64: return 0x1p53;
    default: return end_of(dtype) - 1;
  }
}

std::vector<TensorType> infer_iota(const OpView& v) {
  const int dim = normalize_axis(attr_int(*v.attrs, "dim"), ints(v, "shape").size());
  std::vector<TensorType> out = infer_constant(v);
  if (out[0].dtype == DType::kBool) throw invalid("attribute 'dtype' is bool, expected a number type");
  const int64_t extent = out[0].dims[dim];
  if (static_cast<double>(extent) > counted(out[0].dtype) + 1)
    throw invalid("attribute 'shape' is {}; {} counts to {:.0f}, and there are {} indices along dimension {}",
                  to_string(out[0].dims), name_of(out[0].dtype), counted(out[0].dtype), extent, dim);
  return out;
}

Factors factors_source(const OpView& v) {
  Factors f;
  const Dims& out = v.outputs.at(0).dims;
  for (int d = 0; d < static_cast<int>(out.size()); ++d)
    add_factor(f, v, dim_name(d), FactorKind::kMap, out[d], {}, {sub_axis(d)});
  return f;
}

// ---- reshape, transpose, broadcast_to -------------------------------------------------------------------------------
std::vector<TensorType> infer_reshape(const OpView& v) {
  Dims to = ints(v, "shape");
  const int64_t count = element_count(in_dims(v, 0));
  int64_t known = 1;
  int64_t* open = nullptr;
  for (int64_t& d : to) {
    if (d == -1 && open == nullptr)
      open = &d;
    else if (d < 0)
      throw invalid("attribute 'shape' is {}; expected extents >= 0, at most one of them -1",
                    to_string(ints(v, "shape")));
    else if (__builtin_mul_overflow(known, d, &known))
      throw invalid("attribute 'shape' {} has more than 2^63 elements", to_string(ints(v, "shape")));
  }
  if (open != nullptr && known > 0) *open = count / known;
  if ((open != nullptr && known == 0) || element_count(to) != count)
    throw invalid("cannot reshape {} ({} elements) to {}", to_string(in_dims(v, 0)), count,
                  to_string(ints(v, "shape")));
  return {{in(v, 0).dtype, to}};
}

Factors factors_reshape(const OpView& v) {
  Factors f;
  for (const SharedSubAxis& s : refine_reshape(in_dims(v, 0), v.outputs.at(0).dims))
    add_factor(f, v, dim_name(static_cast<int>(f.list.size())), FactorKind::kMap, s.extent, {s.from}, {s.to});
  f.linear = {{0}};
  return f;
}

void grad_reshape(GradBuilder& b) { b.set(0, b.reshape(b.grad(), b.dims(b.input(0)))); }

Ints permutation(const OpView& v) {
  Ints perm = ints(v, "perm"), sorted;
  const size_t rank = in_dims(v, 0).size();
  if (perm.size() == rank) {
    for (int64_t& p : perm) p = normalize_axis(p, rank);
    sorted = perm;
    std::sort(sorted.begin(), sorted.end());
  }
  Ints all(rank);
  std::iota(all.begin(), all.end(), 0);
  if (perm.size() != rank || sorted != all)
    throw invalid("attribute 'perm' is {}, expected each of the {} dimensions of {} once", to_string(ints(v, "perm")),
                  rank, to_string(in_dims(v, 0)));
  return perm;
}

std::vector<TensorType> infer_transpose(const OpView& v) {
  TensorType out{in(v, 0).dtype, {}};
  for (const int64_t p : permutation(v)) out.dims.push_back(in_dims(v, 0)[p]);
  return {out};
}

Factors factors_transpose(const OpView& v) {
  Factors f;
  const Ints perm = permutation(v);
  for (int d = 0; d < static_cast<int>(perm.size()); ++d) {
    const int from = static_cast<int>(perm[d]);
    add_factor(f, v, dim_name(from), FactorKind::kMap, in_dims(v, 0)[from], {sub_axis(from)}, {sub_axis(d)});
  }
  f.linear = {{0}};
  return f;
}

void grad_transpose(GradBuilder& b) {
  const Op op = b.op();
  const Ints& perm = attr_ints(op.attrs, "perm");
  Ints inverse(perm.size());
  for (size_t d = 0; d < perm.size(); ++d) inverse[normalize_axis(perm[d], perm.size())] = static_cast<int64_t>(d);
  b.set(0, b.emit(OpCode::k_transpose, {b.grad()}, {{"perm", inverse}}));
}

std::vector<TensorType> infer_broadcast(const OpView& v) {
  const Dims& to = ints(v, "shape");
  need_shape(to);
  if (in_dims(v, 0).size() > to.size() || broadcast_dims(in_dims(v, 0), to) != to)
    throw invalid("x {} does not broadcast to {}", to_string(in_dims(v, 0)), to_string(to));
  return {{in(v, 0).dtype, to}};
}

Factors factors_broadcast(const OpView& v) {
  Factors f = elementwise_factors(v);
  f.linear = {{0}};
  return f;
}

void grad_broadcast(GradBuilder& b) { b.set(0, b.sum_to(b.grad(), b.dims(b.input(0)))); }

// ---- slice, pad, concat ---------------------------------------------------------------------------------------------
std::vector<TensorType> infer_slice(const OpView& v) {
  const Dims& x = in_dims(v, 0);
  const auto starts = per_dim(*v.attrs, "starts", x.size(), 0), strides = per_dim(*v.attrs, "strides", x.size(), 1);
  const auto& limits = ints(v, "limits");
  if (limits.size() != x.size())
    throw invalid("attribute 'limits' {} has {} entries, expected {}: one a dimension", to_string(limits),
                  limits.size(), x.size());
  TensorType out{in(v, 0).dtype, {}};
  for (size_t d = 0; d < x.size(); ++d) {
    if (starts[d] < 0 || limits[d] < starts[d] || limits[d] > x[d] || strides[d] < 1)
      throw invalid(
          "dimension {} of {}: slice {}:{}:{} is out of range; expected 0 <= start <= limit <= {} and stride >= 1", d,
          to_string(x), starts[d], limits[d], strides[d], x[d]);
    out.dims.push_back((limits[d] - starts[d] + strides[d] - 1) / strides[d]);
  }
  return {out};
}

Factors factors_slice(const OpView& v) {
  return same_place(v, [&](int d) { return in_dims(v, 0)[d] == v.outputs[0].dims[d]; });
}

void grad_slice(GradBuilder& b) {
  const Op op = b.op();
  const Dims dims = b.dims(b.input(0));
  b.set(0, b.emit(OpCode::k_slice_grad, {b.grad()},
                  {{"dims", dims},
                   {"starts", per_dim(op.attrs, "starts", dims.size(), 0)},
                   {"strides", per_dim(op.attrs, "strides", dims.size(), 1)}}));
}

std::vector<TensorType> infer_slice_grad(const OpView& v) {
  const Dims &dims = ints(v, "dims"), &dy = in_dims(v, 0);
  if (dims.size() != dy.size())
    throw invalid("attribute 'dims' {} has {} entries, expected {}: one a dimension", to_string(dims), dims.size(),
                  dy.size());
  const auto starts = per_dim(*v.attrs, "starts", dy.size(), 0), strides = per_dim(*v.attrs, "strides", dy.size(), 1);
  for (size_t d = 0; d < dy.size(); ++d) {
    // Divided, so that nothing overflows: the last element is start + (extent - 1) stride.
    const bool fits = starts[d] >= 0 && strides[d] >= 1 && dims[d] >= 0 &&
                      (dy[d] == 0 || (starts[d] < dims[d] && (dy[d] - 1) <= (dims[d] - 1 - starts[d]) / strides[d]));
    if (!fits)
      throw invalid("dimension {}: {} elements from {} by {} do not fit into an extent of {}", d, dy[d], starts[d],
                    strides[d], dims[d]);
  }
  return {{in(v, 0).dtype, dims}};
}

std::vector<TensorType> infer_pad(const OpView& v) {
  const Dims& x = in_dims(v, 0);
  const auto low = per_dim(*v.attrs, "low", x.size(), 0), high = per_dim(*v.attrs, "high", x.size(), 0);
  TensorType out = in(v, 0);
  for (size_t d = 0; d < x.size(); ++d) {
    if (low[d] < 0 || high[d] < 0 || __builtin_add_overflow(out.dims[d], low[d], &out.dims[d]) ||
        __builtin_add_overflow(out.dims[d], high[d], &out.dims[d]))
      throw invalid("dimension {} of {}: padding {} and {} must be >= 0 and not overflow", d, to_string(x), low[d],
                    high[d]);
  }
  need_value(v, out.dtype);
  return {out};
}

Factors factors_pad(const OpView& v) {
  Factors f = factors_slice(v);
  if (attr_float(*v.attrs, "value") != 0) f.linear.clear();
  return f;
}

void grad_pad(GradBuilder& b) {
  const Op op = b.op();
  const Dims dims = b.dims(b.input(0));
  const auto low = per_dim(op.attrs, "low", dims.size(), 0);
  Dims limits = dims;
  for (size_t d = 0; d < dims.size(); ++d) limits[d] += low[d];
  b.set(0, b.emit(OpCode::k_slice, {b.grad()}, {{"starts", low}, {"limits", limits}}));
}

std::vector<TensorType> infer_concat(const OpView& v) {
  if (v.inputs.empty()) throw invalid("has no operands, expected at least one");
  const auto axis = static_cast<size_t>(axis_of(v, 0));
  TensorType out = in(v, 0);
  for (size_t i = 1; i < v.inputs.size(); ++i) {
    const TensorType& x = v.inputs[i];
    Dims want = out.dims;
    if (x.dims.size() == want.size()) want[axis] = x.dims[axis];
    if (x.dtype != out.dtype || x.dims != want)
      throw invalid("operand {} is {}, operand 0 is {}; expected one dtype and shapes equal but in dimension {}", i,
                    to_string(x), to_string(v.inputs[0]), axis);
    if (__builtin_add_overflow(out.dims[axis], x.dims[axis], &out.dims[axis])) throw invalid("the result is too large");
  }
  return {out};
}

Factors factors_concat(const OpView& v) {
  const int axis = axis_of(v, 0);
  return same_place(v, [&](int d) { return d != axis; });
}

void grad_concat(GradBuilder& b) {
  const Op op = b.op();
  const auto axis = static_cast<size_t>(normalize_axis(attr_int(op.attrs, "axis"), b.dims(b.output(0)).size()));
  int64_t begin = 0;
  for (int i = 0; i < static_cast<int>(op.inputs.size()); ++i) {
    Dims limits = b.dims(b.input(i)), starts(limits.size(), 0);
    starts[axis] = begin;
    begin = limits[axis] += begin;
    if (b.wants(i)) b.set(i, b.emit(OpCode::k_slice, {b.grad()}, {{"starts", starts}, {"limits", limits}}));
  }
}

// ---- cumsum ---------------------------------------------------------------------------------------------------------
std::vector<TensorType> infer_cumsum(const OpView& v) {
  if (in(v, 0).dtype == DType::kBool) throw invalid("operand 'x' is {}, expected a number type", to_string(in(v, 0)));
  axis_of(v, 0);
  return {in(v, 0)};
}

Factors factors_cumsum(const OpView& v) {
  const int axis = axis_of(v, 0);
  Factors f = same_place(v, [](int) { return true; });
  f.list[axis].kind = FactorKind::kScan;
  return f;
}

void grad_cumsum(GradBuilder& b) {
  Attrs attrs = b.op().attrs;
  attrs["reverse"] = !attr_bool(attrs, "reverse");
  b.set(0, b.emit(OpCode::k_cumsum, {b.grad()}, std::move(attrs)));
}

OpCost cost_move(const OpView& v) { return {0, bytes_of(v)}; }
// What is read and written: not the whole operand.
OpCost cost_part(const OpView& v) {
  return {0, 2 * output_elements(v) * static_cast<double>(size_of(v.outputs[0].dtype))};
}
OpCost cost_none(const OpView&) { return {}; }

const AttrSpec kStarts = {"starts", AttrType::kInts, Ints(), false, "first element of each dimension; none: 0"};
const AttrSpec kStrides = {"strides", AttrType::kInts, Ints(), false, "step of each dimension; none: 1"};
const AttrSpec kShape = {"shape", AttrType::kInts, Ints(), true, "of the result", AttrRole::kShape};
const AttrSpec kDType = {"dtype", AttrType::kString, std::string("f32"), false, "of the result"};

}  // namespace

const OpDef op_def_fill = {
    .name = "fill",
    .doc =
        "A constant everywhere.\n() -> y [shape]. A batch of another size changes it only where an op lays it along "
        "samples (semantics.md, section 2).",
    .inputs = {},
    .outputs = {{"y"}},
    .attrs = {kShape, {"value", AttrType::kFloat, 0.0, false, "of each element"}, kDType},
    .infer = infer_fill,
    .gradient = nullptr,
    .factors = factors_source,
    .cost = cost_move,
    .aliases = {},
    .flags = kNoGradient,
};
const OpDef op_def_iota = {
    .name = "iota",
    .doc =
        "Each element's index along one dimension.\n() -> y [shape], number types. Batches of another size: as for "
        "fill.",
    .inputs = {},
    .outputs = {{"y"}},
    .attrs = {kShape,
              {"dim", AttrType::kInt, int64_t{0}, false, "which dimension"},
              {"dtype", AttrType::kString, std::string("i32"), false, "of the result"}},
    .infer = infer_iota,
    .gradient = nullptr,
    .factors = factors_source,
    .cost = cost_move,
    .aliases = {},
    .flags = kNoGradient | kOffsetAware,
};
const OpDef op_def_reshape = {
    .name = "reshape",
    .doc = "The same elements in row-major order under another shape; one extent may be -1.\nAny dtype.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {kShape},
    .infer = infer_reshape,
    .gradient = grad_reshape,
    .factors = factors_reshape,
    .cost = cost_none,
    .aliases = {{0, 0, true}},
    .flags = kRearranges | kView,
};
const OpDef op_def_transpose = {
    .name = "transpose",
    .doc = "Dimensions in another order: y.dims[i] = x.dims[perm[i]].\nAny dtype.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {{"perm", AttrType::kInts, Ints(), true, "each dimension once"}},
    .infer = infer_transpose,
    .gradient = grad_transpose,
    .factors = factors_transpose,
    .cost = cost_move,
    .aliases = {},
    .flags = kRearranges,
};
const OpDef op_def_broadcast_to = {
    .name = "broadcast_to",
    .doc =
        "x repeated to a shape, by numpy's rule.\nAny dtype. Batches of another size: as for fill, where x has no "
        "samples.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {kShape},
    .infer = infer_broadcast,
    .gradient = grad_broadcast,
    .factors = factors_broadcast,
    .cost = cost_move,
    .aliases = {},
    .flags = kRearranges,
};
const OpDef op_def_slice = {
    .name = "slice",
    .doc = "Elements start, start + stride, ... below limit, in each dimension.\nAny dtype.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {kStarts,
              {"limits", AttrType::kInts, Ints(), true, "one past the last element of each dimension", AttrRole::kEnds},
              kStrides},
    .infer = infer_slice,
    .gradient = grad_slice,
    .factors = factors_slice,
    .cost = cost_part,
    .aliases = {},
    .flags = 0,
};
const OpDef op_def_slice_grad = {
    .name = "slice_grad",
    .doc = "Zeros of shape dims, with dy at the places that a slice reads.\nAny dtype.",
    .inputs = {{"dy"}},
    .outputs = {{"dx"}},
    .attrs = {{"dims", AttrType::kInts, Ints(), true, "shape of the result", AttrRole::kShape}, kStarts, kStrides},
    .infer = infer_slice_grad,
    .gradient = nullptr,
    .factors = factors_slice,
    .cost = cost_move,
    .aliases = {},
    .flags = kInternal,
};
const OpDef op_def_concat = {
    .name = "concat",
    .doc = "Operands one after another along an axis.\nx* of one dtype, shapes equal but in the axis.",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y"}},
    .attrs = {{"axis", AttrType::kInt, int64_t{0}, false, "which dimension"}},
    .infer = infer_concat,
    .gradient = grad_concat,
    .factors = factors_concat,
    .cost = cost_move,
    .aliases = {},
    .flags = 0,
};
const OpDef op_def_pad = {
    .name = "pad",
    .doc = "x with a constant around it.\nAny dtype; low and high >= 0.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {{"low", AttrType::kInts, Ints(), false, "elements before each dimension; none: 0"},
              {"high", AttrType::kInts, Ints(), false, "elements after each dimension; none: 0"},
              {"value", AttrType::kFloat, 0.0, false, "of the padding"}},
    .infer = infer_pad,
    .gradient = grad_pad,
    .factors = factors_pad,
    .cost = cost_move,
    .aliases = {},
    .flags = 0,
};
const OpDef op_def_cumsum = {
    .name = "cumsum",
    .doc = "Running sum along an axis.\nNumber types; sums in the accumulate dtype.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {{"axis", AttrType::kInt, int64_t{-1}, false, "which dimension"},
              {"reverse", AttrType::kBool, false, false, "from the end"},
              {"exclusive", AttrType::kBool, false, false, "without the element itself"}},
    .infer = infer_cumsum,
    .gradient = grad_cumsum,
    .factors = factors_cumsum,
    .cost = nullptr,
    .aliases = {{0, 0}},
    .flags = 0,
};

}  // namespace whale
