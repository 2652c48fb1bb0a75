// Max and average pooling over channels-last images.
#include <algorithm>

#include "ops/grad_builder.h"
#include "ops/spatial.h"

namespace whale {
namespace {

// The output of pooling x. Strides default to the window; padding is smaller than the window, so that none is empty.
Dims pooled(const Attrs& attrs, const Dims& x) {
  if (x.size() < 3) throw invalid("x has shape {}, expected [n, spatial..., c]", to_string(x));
  const Dims& window = attr_ints(attrs, "window");
  if (window.size() != x.size() - 2)
    throw invalid("attribute 'window' has {} entries, expected {}", window.size(), x.size() - 2);
  const Window w = read_window(attrs, x.size() - 2, window);
  for (size_t i = 0; i < window.size(); ++i)
    if (w.low[i] >= window[i] || w.high[i] >= window[i])
      throw invalid("padding ({}, {}) of spatial dimension {} is not smaller than the window {}", w.low[i], w.high[i],
                    i, window[i]);
  return with_spatial(x[0], window_output(spatial_of(x), window, w), x.back());
}

std::vector<TensorType> infer_max_pool(const OpView& v) {
  need_float(v, 0, "x");
  const Dims y = pooled(*v.attrs, in_dims(v, 0));
  return {{in(v, 0).dtype, y}, {DType::kI32, y}};
}
std::vector<TensorType> infer_avg_pool(const OpView& v) {
  need_float(v, 0, "x");
  return {{in(v, 0).dtype, pooled(*v.attrs, in_dims(v, 0))}};
}
std::vector<TensorType> infer_grad(const OpView& v) {
  need_float(v, 0, "dy");
  const Dims& dy = in_dims(v, 0);
  if (dy.size() < 3) throw invalid("dy has shape {}, expected [n, spatial..., c]", to_string(dy));
  const Dims x = with_spatial(dy[0], spatial_attr(v, dy.size() - 2), dy.back());
  need_dims(v, 0, "dy", pooled(*v.attrs, x), "the output of this pooling");
  if (has(v, 1)) {
    need_dims(v, 1, "index", dy);
    need_dtype(v, 1, "index", DType::kI32);
  }
  return {{in(v, 0).dtype, x}};
}

void gradient_max(GradBuilder& b) {
  Attrs attrs = b.op().attrs;
  attrs["spatial"] = spatial_of(b.dims(b.input(0)));
  b.set(0, b.emit(OpCode::k_max_pool_grad, {b.grad(0), b.output(1)}, attrs));
}
void gradient_avg(GradBuilder& b) {
  Attrs attrs = b.op().attrs;
  attrs["spatial"] = spatial_of(b.dims(b.input(0)));
  // Without padding it counts for nothing either way; that it may count lets the op be cut.
  const Dims& padding = attr_ints(attrs, "padding");
  if (std::all_of(padding.begin(), padding.end(), [](int64_t p) { return p == 0; })) attrs["include_pad"] = true;
  b.set(0, b.emit(OpCode::k_avg_pool_grad, {b.grad(0)}, attrs));
}

Factors channels(const OpView& v) {
  Factors f;
  const int last = rank_of(v, 0) - 1;
  add_factor(f, v, "n", FactorKind::kMap, in_dims(v, 0)[0], {sub_axis(0), sub_axis(0)}, {sub_axis(0), sub_axis(0)});
  add_factor(f, v, "c", FactorKind::kMap, in_dims(v, 0).back(), {sub_axis(last), sub_axis(last)},
             {sub_axis(last), sub_axis(last)});
  return f;
}
Factors factors_of_pool(const OpView& v) {
  Factors f = channels(v);
  const Dims x = spatial_of(in_dims(v, 0)), &window = attr_ints(*v.attrs, "window");
  const Window w = read_window(*v.attrs, x.size(), window);
  add_windows(f, v,
              {.result = window_output(x, window, w),
               .source = x,
               .kernel = window,
               .window = w,
               .through = {0},
               .carried = {},
               .results = {0, 1}});
  return f;
}
// A window with rows of a neighbour counts as padded: an average is cut only where padding counts like any element.
Factors factors_of_gradient(const OpView& v, bool may_pad) {
  Factors f = channels(v);
  const Dims y = spatial_of(in_dims(v, 0)), &window = attr_ints(*v.attrs, "window");
  const Window w = read_window(*v.attrs, y.size(), window);
  for (size_t d = 0; d < y.size(); ++d) may_pad &= window[d] >= w.strides[d];  // padding stays smaller than the window
  if (may_pad)
    add_windows(f, v,
                {.result = spatial_attr(v, y.size()),
                 .source = y,
                 .kernel = window,
                 .window = w,
                 .transposed = true,
                 .through = has(v, 1) ? std::vector<int>{0, 1} : std::vector<int>{0},
                 .carried = {},
                 .results = {0}});
  f.linear = {{0}};
  return f;
}
Factors factors_max(const OpView& v) { return factors_of_pool(v); }
Factors factors_max_grad(const OpView& v) { return factors_of_gradient(v, true); }
Factors factors_avg(const OpView& v) {
  Factors f = factors_of_pool(v);
  f.linear = {{0}};
  return f;
}
Factors factors_avg_grad(const OpView& v) { return factors_of_gradient(v, attr_bool(*v.attrs, "include_pad")); }

OpCost cost(const OpView& v) {
  double flops = v.outputs.empty() ? 0 : elements(v.outputs[0]);
  for (const int64_t w : attr_ints(*v.attrs, "window")) flops *= static_cast<double>(w);
  return {flops, bytes_of(v)};
}

std::vector<AttrSpec> attrs(bool average, bool gradient) {
  std::vector<AttrSpec> all{
      ints_attr("window", "per spatial dimension", true),
      ints_attr("strides", "per spatial dimension; empty: the window"),
      ints_attr("padding", "(low, high) per spatial dimension, smaller than the window; empty: 0")};
  if (average)
    all.push_back({.name = "include_pad",
                   .type = AttrType::kBool,
                   .fallback = false,
                   .doc = "padding counts in the denominator"});
  if (gradient) all.push_back(ints_attr("spatial", "the spatial dimensions of x", true));
  return all;
}

}  // namespace

extern const OpDef op_def_max_pool, op_def_max_pool_grad, op_def_avg_pool, op_def_avg_pool_grad;

const OpDef op_def_max_pool = {
    .name = "max_pool",
    .doc =
        "Maximum over windows.\n"
        "x [n, s..., c] -> y [n, s'..., c], index i32 (row-major offset of the maximum inside its window; the first "
        "wins).",
    .inputs = {{"x"}},
    .outputs = {{"y"}, {"index"}},
    .attrs = attrs(false, false),
    .infer = infer_max_pool,
    .gradient = gradient_max,
    .factors = factors_max,
    .cost = cost,
};
const OpDef op_def_max_pool_grad = {
    .name = "max_pool_grad",
    .doc = "Gradient of max_pool.\ndy, index [n, s'..., c] -> dx [n, s..., c].",
    .inputs = {{"dy"}, {"index"}},
    .outputs = {{"dx"}},
    .attrs = attrs(false, true),
    .infer = infer_grad,
    .factors = factors_max_grad,
    .flags = kInternal,
};
const OpDef op_def_avg_pool = {
    .name = "avg_pool",
    .doc = "Mean over windows; padding does not count unless `include_pad`.\nx [n, s..., c] -> y [n, s'..., c].",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = attrs(true, false),
    .infer = infer_avg_pool,
    .gradient = gradient_avg,
    .factors = factors_avg,
    .cost = cost,
};
const OpDef op_def_avg_pool_grad = {
    .name = "avg_pool_grad",
    .doc = "Gradient of avg_pool.\ndy [n, s'..., c] -> dx [n, s..., c].",
    .inputs = {{"dy"}},
    .outputs = {{"dx"}},
    .attrs = attrs(true, true),
    .infer = infer_grad,
    .factors = factors_avg_grad,
    .flags = kInternal,
};

}  // namespace whale
