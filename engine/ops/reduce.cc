// Reductions. Axes may be negative; none means all. Sums are kept in the accumulate dtype, results have the dtype of x.
#include <algorithm>

#include "ops/family.h"

namespace whale {
namespace {

Dims reduced_dims(const Dims& dims, const std::vector<bool>& reduced, bool keep) {
  Dims out;
  for (size_t i = 0; i < dims.size(); ++i) {
    if (!reduced[i]) out.push_back(dims[i]);
    if (reduced[i] && keep) out.push_back(1);
  }
  return out;
}

void need_number(const OpView& v, int i, const char* name) {
  const DType t = in(v, i).dtype;
  if (!is_float(t) && !is_integer(t))
    throw invalid("operand '{}' is {}, expected a number type", name, to_string(in(v, i)));
}

std::vector<TensorType> infer_axes(const OpView& v) {
  need_number(v, 0, "x");
  const std::vector<bool> reduced = reduced_axes(*v.attrs, in_dims(v, 0).size());
  return {{in(v, 0).dtype, reduced_dims(in_dims(v, 0), reduced, attr_bool(*v.attrs, "keep_dims"))}};
}

// A sum is kept in the accumulate dtype; out_dtype says what it is rounded to.
std::vector<TensorType> infer_sum(const OpView& v) {
  std::vector<TensorType> out = infer_axes(v);
  const DType t = out_dtype(v, out[0].dtype);
  if (t != out[0].dtype && !(is_float(t) && is_float(out[0].dtype)))
    throw invalid("attribute 'out_dtype' is '{}', expected {}", name_of(t),
                  is_float(out[0].dtype) ? "a floating point type" : "none: a sum of integers has their type");
  out[0].dtype = t;
  return out;
}

std::vector<TensorType> infer_mean(const OpView& v) {
  need_float(v, 0, "x");
  std::vector<TensorType> out = infer_axes(v);
  if (element_count(in_dims(v, 0)) == 0 && element_count(out[0].dims) > 0)
    throw invalid("operand 'x' of shape {} has no elements to take the mean of; where there may be none, divide a sum",
                  to_string(in_dims(v, 0)));
  return out;
}

std::vector<TensorType> infer_extremum(const OpView& v) {
  std::vector<TensorType> out = infer_axes(v);
  if (element_count(in_dims(v, 0)) == 0)
    throw invalid("operand 'x' of shape {} has no elements to choose from", to_string(in_dims(v, 0)));
  return out;
}

std::vector<bool> one_axis(const OpView& v) {
  std::vector<bool> reduced(in_dims(v, 0).size());
  reduced[normalize_axis(attr_int(*v.attrs, "axis"), reduced.size())] = true;
  return reduced;
}

std::vector<TensorType> infer_argmax(const OpView& v) {
  need_number(v, 0, "x");
  const std::vector<bool> reduced = one_axis(v);
  const auto axis = static_cast<size_t>(std::find(reduced.begin(), reduced.end(), true) - reduced.begin());
  const int64_t extent = in_dims(v, 0)[axis];
  if (extent < 1 || extent > INT32_MAX)
    throw invalid("axis {} of {} has extent {}, expected 1 to 2^31 - 1", axis, to_string(in_dims(v, 0)), extent);
  return {{DType::kI32, reduced_dims(in_dims(v, 0), reduced, attr_bool(*v.attrs, "keep_dims"))}};
}

std::vector<TensorType> infer_sum_of_squares(const OpView& v) {
  if (v.inputs.empty()) throw invalid("has no operands, expected at least one");
  DType out = DType::kF32;
  for (int i = 0; i < static_cast<int>(v.inputs.size()); ++i) {
    need_float(v, i, "x");
    if (in(v, i).dtype == DType::kF64) out = DType::kF64;
  }
  return {{out, {}}};
}

// ---- factors: kept dimensions are maps; reduced ones are reductions where a combine exists --------------------------
Factors axes_factors(const OpView& v, const std::vector<bool>& reduced, bool cut_reduced, Combine combine) {
  Factors f;
  const bool keep = attr_bool(*v.attrs, "keep_dims");
  int to = 0;
  for (int d = 0; d < static_cast<int>(reduced.size()); ++d) {
    const bool gone = reduced[d];
    const int64_t extent = in_dims(v, 0)[d];
    const std::string name = "d" + std::to_string(d);
    if (!gone) add_factor(f, v, name, FactorKind::kMap, extent, {sub_axis(d)}, {sub_axis(to)});
    if (gone && cut_reduced) {
      add_factor(f, v, name, FactorKind::kReduce, extent, {sub_axis(d)}, {}, {0});
      f.list.back().combine = combine;
    }
    if (!gone || keep) ++to;
  }
  return f;
}

Factors factors_sum(const OpView& v) {
  Factors f = axes_factors(v, reduced_axes(*v.attrs, in_dims(v, 0).size()), true, Combine::kSum);
  f.linear = {{0}};
  return f;
}
// The mean of a part is not part of a mean: reduced dimensions stay whole. A sum times 1/N replaces it before planning.
Factors factors_mean(const OpView& v) {
  Factors f = axes_factors(v, reduced_axes(*v.attrs, in_dims(v, 0).size()), false, Combine::kSum);
  f.linear = {{0}};
  return f;
}
template <Combine kCombine>
Factors factors_extremum(const OpView& v) {
  return axes_factors(v, reduced_axes(*v.attrs, in_dims(v, 0).size()), true, kCombine);
}
Factors factors_argmax(const OpView& v) { return axes_factors(v, one_axis(v), false, Combine::kMax); }
// With several operands, cutting one would count the others once a device.
Factors factors_sum_of_squares(const OpView& v) {
  Factors f;
  if (v.inputs.size() != 1) return f;
  for (int d = 0; d < rank_of(v, 0); ++d)
    add_factor(f, v, "d" + std::to_string(d), FactorKind::kReduce, in_dims(v, 0)[d], {sub_axis(d)}, {}, {0});
  return f;
}

// ---- gradients ------------------------------------------------------------------------------------------------------
struct Reduced {
  Dims from, kept;  // kept: reduced dimensions with extent 1
  Ints axes;
  double count = 1;
};

Reduced reduced(GradBuilder& b) {
  Reduced r;
  r.from = b.dims(b.input(0));
  const std::vector<bool> gone = reduced_axes(b.op().attrs, r.from.size());
  r.kept = reduced_dims(r.from, gone, true);
  for (size_t i = 0; i < gone.size(); ++i) {
    if (!gone[i]) continue;
    r.axes.push_back(static_cast<int64_t>(i));
    r.count *= static_cast<double>(r.from[i]);
  }
  return r;
}

TensorId broadcast(GradBuilder& b, TensorId a, const Dims& to) {
  return b.dims(a) == to ? a : b.emit(OpCode::k_broadcast_to, {a}, {{"shape", to}});
}

void grad_sum(GradBuilder& b) {
  const Reduced r = reduced(b);
  b.set(0, broadcast(b, b.cast(b.reshape(b.grad(), r.kept), b.type(b.input(0)).dtype), r.from));
}
void grad_mean(GradBuilder& b) {
  const Reduced r = reduced(b);
  const TensorId dy = b.reshape(b.grad(), r.kept);
  b.set(0, broadcast(b, b.mul(dy, b.constant(1 / r.count, b.type(dy).dtype)), r.from));
}
void grad_extremum(GradBuilder& b) {
  const Reduced r = reduced(b);
  if (r.axes.empty()) return b.set(0, b.grad());                   // rank 0: the identity
  const DType exact = accumulate_dtype(b.type(b.input(0)).dtype);  // a count of ties needs more than bf16 has
  const TensorId at = b.emit(OpCode::k_equal, {b.input(0), b.reshape(b.output(0), r.kept)});
  const TensorId ties = b.emit(OpCode::k_reduce_sum, {b.cast(at, exact)}, {{"axes", r.axes}, {"keep_dims", true}});
  const TensorId share = b.emit(OpCode::k_div, {b.cast(b.reshape(b.grad(), r.kept), exact), ties});
  b.set(0, b.emit(OpCode::k_where, {at, share, b.constant(0, exact)}));
}
void grad_sum_of_squares(GradBuilder& b) {
  const TensorId twice = b.mul(b.grad(), b.constant(2, b.type(b.grad()).dtype));
  for (int i = 0; i < static_cast<int>(b.op().inputs.size()); ++i)
    if (b.wants(i)) b.set(i, b.mul(b.cast(b.input(i), b.type(twice).dtype), twice));
}

OpCost cost_reduce(const OpView& v) {
  double count = 0;
  for (const TensorType& t : v.inputs) count += elements(t);
  return {count, bytes_of(v)};
}

OpDef axes_def(const char* name, const char* doc, std::vector<TensorType> (*infer)(const OpView&),
               GradientRule gradient, Factors (*factors)(const OpView&)) {
  return {.name = name,
          .doc = doc,
          .inputs = {{"x"}},
          .outputs = {{"y"}},
          .attrs = {{"axes", AttrType::kInts, Ints(), false, "which dimensions; none: all of them"},
                    {"keep_dims", AttrType::kBool, false, false, "keep them with extent 1"}},
          .infer = infer,
          .gradient = gradient,
          .factors = factors,
          .cost = cost_reduce,
          .aliases = {},
          .flags = 0};
}

}  // namespace

#define SHAPE "\nx [any shape] -> y without the dimensions `axes`, or with extent 1."
const OpDef op_def_reduce_sum = [] {
  OpDef d = axes_def("reduce_sum", "Sum over axes." SHAPE, infer_sum, grad_sum, factors_sum);
  d.attrs.push_back({"out_dtype", AttrType::kString, std::string(), false, "of the result; empty: that of x"});
  return d;
}();
const OpDef op_def_reduce_mean =
    axes_def("reduce_mean", "Mean over axes, of one element at least." SHAPE, infer_mean, grad_mean, factors_mean);
const OpDef op_def_reduce_max =
    axes_def("reduce_max", "Largest element over axes; the gradient is spread evenly over ties." SHAPE, infer_extremum,
             grad_extremum, factors_extremum<Combine::kMax>);
const OpDef op_def_reduce_min =
    axes_def("reduce_min", "Smallest element over axes; the gradient is spread evenly over ties." SHAPE, infer_extremum,
             grad_extremum, factors_extremum<Combine::kMin>);

const OpDef op_def_argmax = {
    .name = "argmax",
    .doc =
        "Index of the largest element along an axis, the lowest of ties.\nx [any shape] -> i32, without the axis or "
        "with extent 1.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {{"axis", AttrType::kInt, int64_t{-1}, false, "which dimension"},
              {"keep_dims", AttrType::kBool, false, false, "keep it with extent 1"}},
    .infer = infer_argmax,
    .gradient = nullptr,
    .factors = factors_argmax,
    .cost = cost_reduce,
    .aliases = {},
    .flags = kNoGradient,
};
const OpDef op_def_sum_of_squares = {
    .name = "sum_of_squares",
    .doc =
        "Sum of the squares of all elements of all operands: the square of a norm.\nx* [any shapes], floating point -> "
        "scalar of the "
        "accumulate dtype.",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y"}},
    .attrs = {},
    .infer = infer_sum_of_squares,
    .gradient = grad_sum_of_squares,
    .factors = factors_sum_of_squares,
    .cost = cost_reduce,
    .aliases = {},
    .flags = kComputeWide | kKeepsZero,
};

}  // namespace whale
