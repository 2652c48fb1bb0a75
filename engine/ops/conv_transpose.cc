// Transposed convolution: what conv's gradient by x computes, as a layer. Its filters are those of the conv that it
// transposes, [c, kernel..., o / groups] for c channels in and o out, so that both its gradients are conv's ops and no
// filter is ever turned around.
#include "ops/grad_builder.h"
#include "ops/spatial.h"

namespace whale {
namespace {

struct Sizes {
  int64_t n = 0, c = 0, o = 0, groups = 1;
  Dims y;  // spatial
};

Sizes sizes_of(const OpView& v) {
  const Dims &x = in_dims(v, 0), &w = in_dims(v, 1);
  if (x.size() < 3)
    throw invalid("x has shape {}, expected [n, spatial..., c] with one to three spatial dimensions", to_string(x));
  if (w.size() != x.size())
    throw invalid("filters have shape {}, expected {} dimensions [c, kernel..., o / groups]", to_string(w), x.size());
  Sizes s{.n = x[0], .c = x.back(), .groups = attr_int(*v.attrs, "groups", 1), .y = {}};
  if (s.groups < 1 || s.c % s.groups)
    throw invalid("attribute 'groups' is {}, expected a divisor of {} input channels", s.groups, s.c);
  if (w[0] != s.c)
    throw invalid("filters have shape {}: expected a first dimension of {}, the input channels", to_string(w), s.c);
  s.o = w.back() * s.groups;
  const size_t rank = x.size() - 2;
  const Window window = read_window(*v.attrs, rank, Dims(rank, 1));
  const Dims& extra = attr_ints(*v.attrs, "output_padding");
  if (!extra.empty() && extra.size() != rank)
    throw invalid("attribute 'output_padding' has {} entries, expected {}", extra.size(), rank);
  for (size_t i = 0; i < rank; ++i) {
    const int64_t more = extra.empty() ? 0 : extra[i];
    if (more < 0 || more >= window.strides[i])
      throw invalid("attribute 'output_padding' is {} in spatial dimension {}, expected 0 <= it < the stride {}", more,
                    i, window.strides[i]);
    need_extent(x[i + 1], "x");
    need_extent(w[i + 1], "w");
    if (w[i + 1] < 1) throw invalid("filters have shape {}, with an empty kernel", to_string(w));
    s.y.push_back((x[i + 1] - 1) * window.strides[i] + window.dilation[i] * (w[i + 1] - 1) + 1 + more - window.low[i] -
                  window.high[i]);
    if (s.y.back() < 1)
      throw invalid("padding ({}, {}) leaves nothing of spatial dimension {} of y", window.low[i], window.high[i], i);
  }
  return s;
}

std::vector<TensorType> infer(const OpView& v) {
  need_float(v, 0, "x");
  need_dtype(v, 1, "w", in(v, 0).dtype);
  const Sizes s = sizes_of(v);
  if (has(v, 2)) {
    need_dims(v, 2, "bias", {s.o}, "the output channels");
    need_dtype(v, 2, "bias", in(v, 0).dtype);
  }
  return {{in(v, 0).dtype, with_spatial(s.n, s.y, s.o)}};
}

void gradient(GradBuilder& b) {
  Attrs attrs = b.op().attrs;
  attrs.erase("output_padding");
  const Dims w = b.dims(b.input(1));
  if (b.wants(0)) b.set(0, b.emit(OpCode::k_conv, {b.grad(), b.input(1)}, attrs));
  if (b.wants(1)) {
    Attrs a = attrs;
    a["kernel"] = spatial_of(w);
    b.set(1, b.emit(OpCode::k_conv_grad_weight, {b.grad(), b.input(0)}, a));
  }
  if (b.wants(2)) b.set(2, b.sum_to(b.grad(), b.dims(b.input(2))));
}

// n, o, c; with groups n only: a cut of the groups would change the attribute, which kernels read.
Factors factors(const OpView& v) {
  Factors f;
  const Sizes s = sizes_of(v);
  const int last = rank_of(v, 0) - 1;
  add_factor(f, v, "n", FactorKind::kMap, s.n, {sub_axis(0)}, {sub_axis(0)});
  if (s.groups == 1) {
    add_factor(f, v, "o", FactorKind::kMap, s.o, {kAbsent, sub_axis(last), sub_axis(0)}, {sub_axis(last)});
    if (!has(v, 2)) add_factor(f, v, "c", FactorKind::kReduce, s.c, {sub_axis(last), sub_axis(0)}, {}, {0});
  } else {
    const int64_t cg = s.c / s.groups, og = s.o / s.groups;
    add_factor(f, v, "groups", FactorKind::kMap, s.groups,
               {sub_axis(last, 1, cg), sub_axis(0, 1, cg), sub_axis(0, 1, og)}, {sub_axis(last, 1, og)});
    f.list.back().size_attrs = {"groups"};
  }
  add_windows(f, v,
              {.result = s.y,
               .source = spatial_of(in_dims(v, 0)),
               .kernel = spatial_of(in_dims(v, 1)),
               .window = read_window(*v.attrs, s.y.size(), Dims(s.y.size(), 1)),
               .transposed = true,
               .through = {0},
               .carried = {},
               .results = {0}});
  if (!has(v, 2)) f.linear = {{0}, {1}};
  return f;
}

// 2 * (elements of x) * (kernel volume) * (output channels of a group).
OpCost cost(const OpView& v) {
  double flops = 2 * elements(in(v, 0));
  for (size_t i = 1; i < in_dims(v, 1).size(); ++i) flops *= static_cast<double>(in_dims(v, 1)[i]);
  return {flops, bytes_of(v)};
}

}  // namespace

extern const OpDef op_def_conv_transpose;

const OpDef op_def_conv_transpose = {
    .name = "conv_transpose",
    .doc =
        "Transposed convolution of channels-last images in one to three spatial dimensions: conv's gradient by x.\n"
        "x [n, s..., c], w [c, k..., o / groups], bias [o]? -> y [n, s'..., o], s' = (s - 1) stride + dilation (k - "
        "1) + 1 + output_padding - low - high.",
    .inputs = {{"x"}, {"w"}, {"bias", PortKind::kOptional}},
    .outputs = {{"y"}},
    .attrs =
        {ints_attr("strides", "per spatial dimension; empty: 1"),
         ints_attr("padding", "(low, high) per spatial dimension, cut off y; empty: 0"),
         ints_attr("dilation", "of the kernel; empty: 1"),
         {.name = "groups", .type = AttrType::kInt, .fallback = int64_t{1}, .doc = "independent groups of channels"},
         ints_attr("output_padding", "rows that y has more at the high end, less than the stride; empty: 0")},
    .infer = infer,
    .gradient = gradient,
    .factors = factors,
    .cost = cost,
    .flags = kComputeLow,
};

}  // namespace whale
