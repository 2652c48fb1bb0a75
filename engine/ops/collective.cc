// Reshards: made by shard/ when a tensor's sharding changes. Groups are numbers of the Plan's table.
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

void check_combine(const std::string& combine) {
  if (combine != "sum" && combine != "max" && combine != "min" && combine != "logsumexp")
    throw invalid("attribute 'combine' is '{}', expected sum, max, min or logsumexp", combine);
}

std::vector<TensorType> infer_all_reduce(const OpView& v) {
  const std::string& combine = attr_string(*v.attrs, "combine");
  check_combine(combine);
  return v.inputs;
}
std::vector<Alias> aliases_all_reduce(const OpView& v) {
  std::vector<Alias> all;
  for (int i = 0; i < static_cast<int>(v.inputs.size()); ++i) all.push_back({i, i, true});
  return all;
}

// The attribute, (dim, outer, inner) of each operand, checked against operand i; returns the extent that it has of it.
int64_t local_extent(const OpView& v, SubAxis& d, const char* name = "sub_axis", int i = 0) {
  const auto& given = attr_ints(*v.attrs, name);
  const auto at = static_cast<size_t>(i) * 3;
  if (given.size() != 3 * v.inputs.size())
    throw invalid("attribute '{}' has {} entries, expected 3 (dim, outer, inner) for each of {} operand(s)", name,
                  given.size(), v.inputs.size());
  d = {static_cast<int>(given[at]), given[at + 1], given[at + 2]};
  if (given[at] < 0 || given[at] >= rank_of(v, i) || d.outer < 1 || d.inner < 1)
    throw invalid("attribute '{}' is {}, which x {} does not have", name, to_string(given), to_string(in_dims(v, i)));
  const int64_t whole = in_dims(v, i)[d.dim];
  if (whole > 0 && (d.outer > whole || d.inner > whole / d.outer || whole % (d.outer * d.inner)))
    throw invalid("dimension {} of x {} is no multiple of {} * {}", d.dim, to_string(in_dims(v, i)), d.outer, d.inner);
  return whole == 0 ? 0 : whole / (d.outer * d.inner);
}
TensorType resized(const OpView& v, const SubAxis& d, int64_t extent, int i = 0) {
  constexpr int64_t kMost = int64_t{1} << 48;
  TensorType t = in(v, i);
  if (d.outer > kMost || d.inner > kMost / d.outer || extent > kMost / (d.outer * d.inner))
    throw invalid("a sub-axis of {} x {} x {} is too large", d.outer, extent, d.inner);
  t.dims[d.dim] = d.outer * extent * d.inner;
  return t;
}

// The intervals of operand i, which are adjacent and begin at 0.
std::vector<Interval> intervals_of(const OpView& v, const char* name, int i = 0) {
  const auto& cuts = attr_ints(*v.attrs, name);
  const size_t each = cuts.size() / std::max<size_t>(v.inputs.size(), 1), from = each * static_cast<size_t>(i);
  if (cuts.empty() || each % 2 || each * v.inputs.size() != cuts.size())
    throw invalid("attribute '{}' has {} entries, expected (begin, end) pairs for each of {} operand(s)", name,
                  cuts.size(), v.inputs.size());
  std::vector<Interval> out;
  for (size_t k = from; k < from + each; k += 2) {
    const int64_t at = out.empty() ? 0 : out.back().end;
    if (cuts[k] != at || cuts[k + 1] < at)
      throw invalid("attribute '{}' {} are not adjacent intervals from 0", name, to_string(cuts));
    out.push_back({cuts[k], cuts[k + 1]});
  }
  return out;
}

std::vector<TensorType> infer_all_gather(const OpView& v) {
  std::vector<TensorType> out;
  for (int i = 0; i < static_cast<int>(v.inputs.size()); ++i) {
    SubAxis d;
    local_extent(v, d, "sub_axis", i);
    out.push_back(resized(v, d, intervals_of(v, "cuts", i).back().end, i));
  }
  return out;
}

// Which member this is does not stand in the attributes: the result's extent is checked where it is bound.
std::vector<TensorType> infer_reduce_scatter(const OpView& v) {
  check_combine(attr_string(*v.attrs, "combine"));
  std::vector<TensorType> out;
  for (int i = 0; i < static_cast<int>(v.inputs.size()); ++i) {
    SubAxis d;
    const int64_t extent = local_extent(v, d, "sub_axis", i);
    const std::vector<Interval> cuts = intervals_of(v, "cuts", i);
    if (extent != cuts.back().end) throw invalid("'cuts' do not cover the sub-axis's extent of {}", extent);
    out.push_back(v.outputs.empty() ? resized(v, d, cuts[0].end, i) : v.outputs[i]);
  }
  return out;
}
std::vector<TensorType> infer_all_to_all(const OpView& v) {
  SubAxis from, to;
  local_extent(v, from);
  const int64_t extent = local_extent(v, to, "to_sub_axis");
  if (extent != intervals_of(v, "to_cuts").back().end)
    throw invalid("'to_cuts' do not cover the sub-axis's extent of {}", extent);
  if (!v.outputs.empty()) return {v.outputs[0]};
  TensorType t = resized(v, from, intervals_of(v, "cuts").back().end);
  t.dims[to.dim] = to.outer * attr_ints(*v.attrs, "to_cuts")[1] * to.inner;
  return {t};
}

std::vector<TensorType> infer_local_slice(const OpView& v) {
  SubAxis d;
  const int64_t extent = local_extent(v, d), begin = attr_int(*v.attrs, "begin"), end = attr_int(*v.attrs, "end");
  if (begin < 0 || end < begin || end > extent)
    throw invalid("interval [{}, {}) is not inside [0, {})", begin, end, extent);
  return {resized(v, d, end - begin)};
}

std::vector<TensorType> infer_adasum(const OpView& v) {
  need_float(v, 0, "x");
  return {in(v, 0)};
}

std::vector<TensorType> infer_accumulate(const OpView& v) {
  const std::string& combine = attr_string(*v.attrs, "combine");
  if (!combine.empty() && combine != "sum" && combine != "max" && combine != "min")
    throw invalid("attribute 'combine' is '{}', expected sum, max or min", combine);
  if (in(v, 0).dtype == DType::kBool) throw invalid("operand 'acc' is bool, expected numbers");
  if (is_float(in(v, 0).dtype))
    need_float(v, 1, "x");
  else
    need_dtype(v, 1, "x", in(v, 0).dtype);
  need_dims(v, 1, "x", in_dims(v, 0), "the shape of acc");
  return {in(v, 0)};
}

Factors factors_logaddexp(const OpView& v) {
  Factors f;
  add_leading(f, v, rank_of(v, 0), {0, 1}, {0});
  return f;
}

const AttrSpec kGroup{
    .name = "group", .type = AttrType::kInt, .fallback = int64_t{0}, .doc = "number of the device group"};
const AttrSpec kSubAxis{.name = "sub_axis",
                        .type = AttrType::kInts,
                        .fallback = Ints{},
                        .required = true,
                        .doc = "(dim, outer, inner) that is cut, of each operand"};
const AttrSpec kCuts{.name = "cuts",
                     .type = AttrType::kInts,
                     .fallback = Ints{},
                     .required = true,
                     .doc = "(begin, end) per coordinate, of each operand"};
const AttrSpec kCombine{
    .name = "combine", .type = AttrType::kString, .fallback = std::string("sum"), .doc = "sum, max, min or logsumexp"};

}  // namespace

extern const OpDef op_def_all_reduce, op_def_all_gather, op_def_reduce_scatter, op_def_all_to_all, op_def_transfer,
    op_def_local_slice, op_def_part_view, op_def_accumulate, op_def_adasum, op_def_shift, op_def_logaddexp;

const OpDef op_def_all_reduce = {
    .name = "all_reduce",
    .doc =
        "Combines partial values over a group, in place; the operands of one op are one bucket.\nx... -> y..., same.",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y", PortKind::kVariadic}},
    .attrs = {kGroup, kCombine},
    .infer = infer_all_reduce,
    .flags = kCollective | kInternal,
    .aliases_of = aliases_all_reduce,
};
const OpDef op_def_all_gather = {
    .name = "all_gather",
    .doc =
        "Joins the intervals of a cut sub-axis, which may be uneven, in order of the group's coordinates; the operands "
        "of "
        "one op are one bucket.\nx... (local) -> y... (whole).",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y", PortKind::kVariadic}},
    .attrs = {kGroup, kSubAxis, kCuts},
    .infer = infer_all_gather,
    .flags = kCollective | kInternal,
};
const OpDef op_def_reduce_scatter = {
    .name = "reduce_scatter",
    .doc =
        "Combines partial values over a group; each member keeps its interval of a sub-axis; the operands of one op "
        "are "
        "one "
        "bucket.\nx... (whole, partial) -> y... (local).",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y", PortKind::kVariadic}},
    .attrs = {kGroup, kCombine, kSubAxis, kCuts},
    .infer = infer_reduce_scatter,
    .flags = kCollective | kInternal,
};
const OpDef op_def_all_to_all = {
    .name = "all_to_all",
    .doc =
        "From a cut along one sub-axis to a cut along another.\nx (cut along sub-axis) -> y (cut along to_sub_axis).",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {kGroup,
              kSubAxis,
              kCuts,
              {.name = "to_sub_axis",
               .type = AttrType::kInts,
               .fallback = Ints{},
               .required = true,
               .doc = "(dim, outer, inner) that is cut after"},
              {.name = "to_cuts",
               .type = AttrType::kInts,
               .fallback = Ints{},
               .required = true,
               .doc = "(begin, end) per coordinate"}},
    .infer = infer_all_to_all,
    .flags = kCollective | kInternal,
};
const OpDef op_def_transfer = {
    .name = "transfer",
    .doc = "Moves a tensor to another stage of a pipeline, piece by piece.\nx -> y, same type.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .infer = [](const OpView& v) -> std::vector<TensorType> { return {v.inputs[0]}; },
    .flags = kInternal,
};
const OpDef op_def_shift = {
    .name = "shift",
    .doc =
        "What the member before this one in the group has; the first gets the last one's. Sizes may differ between "
        "members.\nx -> y: a neighbour's x.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {kGroup},
    .infer = [](const OpView& v) -> std::vector<TensorType> {
      return {v.outputs.empty() ? v.inputs[0] : v.outputs[0]};
    },
    .flags = kCollective | kInternal,
};
const OpDef op_def_local_slice = {
    .name = "local_slice",
    .doc = "This device's interval of a sub-axis of a replicated tensor.\nx (whole) -> y (local).",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs =
        {kSubAxis,
         {.name = "begin", .type = AttrType::kInt, .fallback = int64_t{0}, .required = true, .doc = "of the interval"},
         {.name = "end",
          .type = AttrType::kInt,
          .fallback = int64_t{0},
          .required = true,
          .doc = "of the interval, exclusive"}},
    .infer = infer_local_slice,
    .flags = kInternal,
};
const OpDef op_def_part_view = {
    .name = "part_view",
    .doc =
        "This device's interval of the outermost sub-axis of a replicated tensor, in its place: no instruction, and "
        "what "
        "is written to y is written to x.\nx (whole) -> y (local).",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = op_def_local_slice.attrs,
    .infer = infer_local_slice,
    .flags = kInternal | kView,
};
const OpDef op_def_logaddexp = {
    .name = "logaddexp",
    .doc = "log(exp(a) + exp(b)): the parts of a logsumexp, put together.\na, b float, of one shape -> y, same.",
    .inputs = {{"a"}, {"b"}},
    .outputs = {{"y"}},
    .infer = infer_accumulate,
    .factors = factors_logaddexp,
    .flags = kNoGradient | kInternal,
    .of_partial = Combine::kLogSumExp,
};
const OpDef op_def_accumulate = {
    .name = "accumulate",
    .doc = "acc + x, in place: the sum over micro-batches, or their maximum or minimum.\nacc, x of one shape -> acc'.",
    .inputs = {{"acc"}, {"x"}},
    .outputs = {{"acc"}},
    .attrs = {{.name = "combine", .type = AttrType::kString, .fallback = std::string("sum"), .doc = "sum, max or min"}},
    .infer = infer_accumulate,
    .aliases = {{0, 0, true}},
    .flags = kInternal,
};

const OpDef op_def_adasum = {
    .name = "adasum",
    .doc =
        "Combines the gradients of replicas in place (Maleki et al., 2021): parallel ones are averaged, orthogonal "
        "ones "
        "summed. Pairs of neighbours become (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b, then pairs of those; "
        "members "
        "behind the largest power of two enter first. A member's x is taken as the gradient of the mean over its own "
        "samples.\nx (a part of a sum) -> y, same.",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {kGroup,
              {.name = "weights",
               .type = AttrType::kInts,
               .fallback = Ints{},
               .doc = "samples of each member; empty: equal"}},
    .infer = infer_adasum,
    .aliases = {{0, 0, true}},
    .flags = kCollective | kInternal,
};

}  // namespace whale
