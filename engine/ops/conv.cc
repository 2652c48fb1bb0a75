// Convolution over channels-last images: [n, spatial..., c] with filters [o, kernel..., c / groups].
#include "ops/grad_builder.h"
#include "ops/spatial.h"

namespace whale {
namespace {

struct Sizes {
  int64_t n = 0, c = 0, o = 0, groups = 1;
  Dims x, kernel, y;  // spatial
};

// Checks and derives everything from the dimensions of x and w, wherever they come from.
Sizes sizes_of(const Attrs& attrs, const Dims& x, const Dims& w) {
  if (x.size() < 3)
    throw invalid("x has shape {}, expected [n, spatial..., c] with one to three spatial dimensions", to_string(x));
  if (w.size() != x.size())
    throw invalid("filters have shape {}, expected {} dimensions [o, kernel..., c / groups]", to_string(w), x.size());
  Sizes s{.n = x[0],
          .c = x.back(),
          .o = w[0],
          .groups = attr_int(attrs, "groups", 1),
          .x = spatial_of(x),
          .kernel = spatial_of(w),
          .y = {}};
  if (s.groups < 1 || s.c % s.groups || s.o % s.groups)
    throw invalid("attribute 'groups' is {}, expected a divisor of {} input and {} output channels", s.groups, s.c,
                  s.o);
  if (w.back() * s.groups != s.c)
    throw invalid("filters have shape {}: expected a last dimension of {} ({} input channels / {} groups)",
                  to_string(w), s.c / s.groups, s.c, s.groups);
  s.y = window_output(s.x, s.kernel, read_window(attrs, s.x.size(), Dims(s.x.size(), 1)));
  return s;
}
Dims output_dims(const Sizes& s) { return with_spatial(s.n, s.y, s.o); }

std::vector<TensorType> infer_conv(const OpView& v) {
  need_float(v, 0, "x");
  need_dtype(v, 1, "w", in(v, 0).dtype);
  const Sizes s = sizes_of(*v.attrs, in_dims(v, 0), in_dims(v, 1));
  if (has(v, 2)) {
    need_dims(v, 2, "bias", {s.o}, "the number of filters");
    need_dtype(v, 2, "bias", in(v, 0).dtype);
  }
  return {{in(v, 0).dtype, output_dims(s)}};
}

void gradient_conv(GradBuilder& b) {
  const Attrs attrs = b.op().attrs;
  const Dims x = b.dims(b.input(0)), w = b.dims(b.input(1));
  if (b.wants(0)) {
    Attrs a = attrs;
    a["spatial"] = spatial_of(x);
    b.set(0, b.emit(OpCode::k_conv_grad_input, {b.grad(), b.input(1)}, a));
  }
  const bool bias = b.wants(2);
  if (!b.wants(1) && !bias) return;
  Attrs a = attrs;
  a["kernel"] = spatial_of(w);
  a["bias"] = bias;
  const auto r = b.emit_all(OpCode::k_conv_grad_weight, {b.input(0), b.grad()}, a);
  if (b.wants(1)) b.set(1, r[0]);
  if (bias) b.set(2, r[1]);
}

std::vector<TensorType> infer_grad_input(const OpView& v) {
  need_float(v, 0, "dy");
  need_dtype(v, 1, "w", in(v, 0).dtype);
  const Dims &dy = in_dims(v, 0), &w = in_dims(v, 1);
  if (dy.size() < 3 || w.size() != dy.size())
    throw invalid("dy {} and w {} do not belong to one convolution", to_string(dy), to_string(w));
  const Dims x = with_spatial(dy[0], spatial_attr(v, dy.size() - 2), w.back() * attr_int(*v.attrs, "groups", 1));
  need_dims(v, 0, "dy", output_dims(sizes_of(*v.attrs, x, w)), "the output of this convolution");
  return {{in(v, 0).dtype, x}};
}

std::vector<TensorType> infer_grad_weight(const OpView& v) {
  need_float(v, 0, "x");
  need_dtype(v, 1, "dy", in(v, 0).dtype);
  const Dims &x = in_dims(v, 0), &dy = in_dims(v, 1);
  if (x.size() < 3 || dy.size() != x.size())
    throw invalid("x {} and dy {} do not belong to one convolution", to_string(x), to_string(dy));
  const int64_t groups = attr_int(*v.attrs, "groups", 1);
  const Dims& kernel = attr_ints(*v.attrs, "kernel");
  if (kernel.size() != x.size() - 2)
    throw invalid("attribute 'kernel' has {} entries, expected {}", kernel.size(), x.size() - 2);
  if (groups < 1) throw invalid("attribute 'groups' is {}, expected > 0", groups);
  const Dims w = with_spatial(dy.back(), kernel, x.back() / groups);
  need_dims(v, 1, "dy", output_dims(sizes_of(*v.attrs, x, w)), "the output of this convolution");
  const DType t = out_dtype(v, in(v, 0).dtype);
  std::vector<TensorType> out{{t, w}};
  if (attr_bool(*v.attrs, "bias")) out.push_back({t, {w[0]}});
  return out;
}

// ---- factors: n, o, c, or with groups n and g; and the spatial dimensions ------------------------------------------
Factors factors_conv(const OpView& v) {
  Factors f;
  const Sizes s = sizes_of(*v.attrs, in_dims(v, 0), in_dims(v, 1));
  const int last = rank_of(v, 0) - 1;
  add_factor(f, v, "n", FactorKind::kMap, s.n, {sub_axis(0)}, {sub_axis(0)});
  if (s.groups == 1) {
    add_factor(f, v, "o", FactorKind::kMap, s.o, {kAbsent, sub_axis(0), sub_axis(0)}, {sub_axis(last)});
    if (!has(v, 2)) add_factor(f, v, "c", FactorKind::kReduce, s.c, {sub_axis(last), sub_axis(last)}, {}, {0});
  } else {
    const int64_t og = s.o / s.groups, cg = s.c / s.groups;
    add_factor(f, v, "groups", FactorKind::kMap, s.groups,
               {sub_axis(last, 1, cg), sub_axis(0, 1, og), sub_axis(0, 1, og)}, {sub_axis(last, 1, og)});
    f.list.back().size_attrs = {"groups"};
  }
  add_windows(f, v,
              {.result = s.y,
               .source = s.x,
               .kernel = s.kernel,
               .window = read_window(*v.attrs, s.x.size(), Dims(s.x.size(), 1)),
               .through = {0},
               .carried = {},
               .results = {0}});
  if (!has(v, 2)) f.linear = {{0}, {1}};
  return f;
}
Factors factors_grad_input(const OpView& v) {
  Factors f;
  const int last = rank_of(v, 0) - 1;
  const int64_t groups = std::max<int64_t>(attr_int(*v.attrs, "groups", 1), 1), o = in_dims(v, 1)[0],
                cg = in_dims(v, 1).back();
  add_factor(f, v, "n", FactorKind::kMap, in_dims(v, 0)[0], {sub_axis(0)}, {sub_axis(0)});
  if (groups == 1) {
    add_factor(f, v, "c", FactorKind::kMap, cg, {kAbsent, sub_axis(last)}, {sub_axis(last)});
    add_factor(f, v, "o", FactorKind::kReduce, o, {sub_axis(last), sub_axis(0)}, {}, {0});
  } else {
    add_factor(f, v, "groups", FactorKind::kMap, groups, {sub_axis(last, 1, o / groups), sub_axis(0, 1, o / groups)},
               {sub_axis(last, 1, cg)});
    f.list.back().size_attrs = {"groups"};
  }
  const Dims y = spatial_of(in_dims(v, 0));
  add_windows(f, v,
              {.result = spatial_attr(v, y.size()),
               .source = y,
               .kernel = spatial_of(in_dims(v, 1)),
               .window = read_window(*v.attrs, y.size(), Dims(y.size(), 1)),
               .transposed = true,
               .through = {0},
               .carried = {},
               .results = {0}});
  f.linear = {{0}, {1}};
  return f;
}
Factors factors_grad_weight(const OpView& v) {
  Factors f;
  const int last = rank_of(v, 0) - 1;
  const int64_t groups = std::max<int64_t>(attr_int(*v.attrs, "groups", 1), 1), o = in_dims(v, 1).back(),
                c = in_dims(v, 0).back();
  const bool bias = attr_bool(*v.attrs, "bias");
  if (bias)
    add_factor(f, v, "n", FactorKind::kReduce, in_dims(v, 0)[0], {sub_axis(0), sub_axis(0)}, {}, {0, 1});
  else
    add_factor(f, v, "n", FactorKind::kReduce, in_dims(v, 0)[0], {sub_axis(0), sub_axis(0)}, {}, {0});
  if (groups == 1) {
    add_factor(f, v, "o", FactorKind::kMap, o, {kAbsent, sub_axis(last)}, {sub_axis(0), sub_axis(0)});
    add_factor(f, v, "c", FactorKind::kMap, c, {sub_axis(last)}, {sub_axis(last)});  // every device has the whole dbias
  } else {
    const int64_t og = o / groups;
    add_factor(f, v, "groups", FactorKind::kMap, groups, {sub_axis(last, 1, c / groups), sub_axis(last, 1, og)},
               {sub_axis(0, 1, og), sub_axis(0, 1, og)});
    f.list.back().size_attrs = {"groups"};
  }
  const Dims x = spatial_of(in_dims(v, 0));
  add_windows(f, v,
              {.result = spatial_of(in_dims(v, 1)),
               .source = x,
               .kernel = attr_ints(*v.attrs, "kernel"),
               .window = read_window(*v.attrs, x.size(), Dims(x.size(), 1)),
               .through = {0},
               .carried = {1},
               .results = {},
               .partial = {0, 1}});
  f.linear = {{1}};
  if (!bias) f.linear.push_back({0});
  return f;
}

// 2 * (elements of y) * (kernel volume) * (channels of a group), the same for all three.
double flops(const Dims& y, const Dims& w) {
  double f = 2 * static_cast<double>(element_count(y));
  for (size_t i = 1; i < w.size(); ++i) f *= static_cast<double>(w[i]);
  return f;
}
OpCost cost_conv(const OpView& v) { return {flops(v.outputs[0].dims, in_dims(v, 1)), bytes_of(v)}; }
OpCost cost_grad_input(const OpView& v) { return {flops(in_dims(v, 0), in_dims(v, 1)), bytes_of(v)}; }
OpCost cost_grad_weight(const OpView& v) { return {flops(in_dims(v, 1), v.outputs[0].dims), bytes_of(v)}; }

std::vector<AttrSpec> attrs_with(std::vector<AttrSpec> more) {
  std::vector<AttrSpec> all{
      ints_attr("strides", "per spatial dimension; empty: 1"),
      ints_attr("padding", "(low, high) per spatial dimension; empty: 0"),
      ints_attr("dilation", "of the kernel; empty: 1"),
      {.name = "groups", .type = AttrType::kInt, .fallback = int64_t{1}, .doc = "independent groups of channels"}};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

}  // namespace

extern const OpDef op_def_conv, op_def_conv_grad_input, op_def_conv_grad_weight;

const OpDef op_def_conv = {
    .name = "conv",
    .doc =
        "Convolution (cross-correlation) of channels-last images in one to three spatial dimensions.\n"
        "x [n, s..., c], w [o, k..., c / groups], bias [o]? -> y [n, s'..., o], s' = (s + low + high - dilation (k - "
        "1) - 1) / stride + 1.",
    .inputs = {{"x"}, {"w"}, {"bias", PortKind::kOptional}},
    .outputs = {{"y"}},
    .attrs = attrs_with({}),
    .infer = infer_conv,
    .gradient = gradient_conv,
    .factors = factors_conv,
    .cost = cost_conv,
    .flags = kComputeLow,
};
const OpDef op_def_conv_grad_input = {
    .name = "conv_grad_input",
    .doc = "Gradient of conv by x.\ndy [n, s'..., o], w [o, k..., c / groups] -> dx [n, s..., c].",
    .inputs = {{"dy"}, {"w"}},
    .outputs = {{"dx"}},
    .attrs = attrs_with({ints_attr("spatial", "the spatial dimensions of x", true)}),
    .infer = infer_grad_input,
    .factors = factors_grad_input,
    .cost = cost_grad_input,
    .flags = kInternal,
};
const OpDef op_def_conv_grad_weight = {
    .name = "conv_grad_weight",
    .doc =
        "Gradient of conv by its filters and bias.\nx [n, s..., c], dy [n, s'..., o] -> dw [o, k..., c / groups], "
        "dbias [o] when `bias`.",
    .inputs = {{"x"}, {"dy"}},
    .outputs = {{"dw"}, {"dbias", PortKind::kOptional}},
    .attrs = attrs_with({ints_attr("kernel", "the spatial dimensions of w", true),
                         {.name = "bias", .type = AttrType::kBool, .fallback = false, .doc = "return dbias"},
                         {.name = "out_dtype",
                          .type = AttrType::kString,
                          .fallback = std::string(),
                          .doc = "dtype of the results; empty: that of x"}}),
    .infer = infer_grad_weight,
    .factors = factors_grad_weight,
    .cost = cost_grad_weight,
    .flags = kInternal,
};

}  // namespace whale
