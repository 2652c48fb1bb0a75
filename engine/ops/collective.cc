// Bridges: made by parallel/ when a tensor's layout changes. Groups are numbers of the Plan's table.
#include "ops/grad_builder.h"
#include "ops/rules.h"

namespace whale {
namespace {

std::vector<TensorType> infer_all_reduce(const OpView& v) {
  const std::string& combine = attr_string(*v.attrs, "combine");
  if (combine != "sum" && combine != "max" && combine != "min")
    throw invalid("attribute 'combine' is '{}', expected sum, max or min", combine);
  return v.inputs;
}
std::vector<Alias> aliases_all_reduce(const OpView& v) {
  std::vector<Alias> all;
  for (int i = 0; i < static_cast<int>(v.inputs.size()); ++i) all.push_back({i, i, true});
  return all;
}

// The attribute `digit`, (dim, outer, inner), checked against x; returns the extent that x has of it.
int64_t local_extent(const OpView& v, Digit& d) {
  const auto& given = attr_ints(*v.attrs, "digit");
  if (given.size() != 3)
    throw invalid("attribute 'digit' has {} entries, expected 3 (dim, outer, inner)", given.size());
  d = {static_cast<int>(given[0]), given[1], given[2]};
  if (given[0] < 0 || given[0] >= rank_of(v, 0) || d.outer < 1 || d.inner < 1)
    throw invalid("attribute 'digit' is {}, which x {} does not have", to_string(given), to_string(in_dims(v, 0)));
  const int64_t whole = in_dims(v, 0)[static_cast<size_t>(d.dim)];
  if (whole % (d.outer * d.inner))
    throw invalid("dimension {} of x {} is no multiple of {} * {}", d.dim, to_string(in_dims(v, 0)), d.outer, d.inner);
  return whole / (d.outer * d.inner);
}
TensorType resized(const OpView& v, const Digit& d, int64_t extent) {
  TensorType t = in(v, 0);
  t.dims[static_cast<size_t>(d.dim)] = d.outer * extent * d.inner;
  return t;
}

std::vector<TensorType> infer_all_gather(const OpView& v) {
  Digit d;
  local_extent(v, d);
  const auto& cuts = attr_ints(*v.attrs, "cuts");
  if (cuts.empty() || cuts.size() % 2)
    throw invalid("attribute 'cuts' has {} entries, expected (begin, end) pairs", cuts.size());
  int64_t at = 0;
  for (size_t i = 0; i < cuts.size(); i += 2) {
    if (cuts[i] != at || cuts[i + 1] < at)
      throw invalid("attribute 'cuts' {} are not adjacent intervals from 0", to_string(cuts));
    at = cuts[i + 1];
  }
  return {resized(v, d, at)};
}

std::vector<TensorType> infer_local_slice(const OpView& v) {
  Digit d;
  const int64_t extent = local_extent(v, d), begin = attr_int(*v.attrs, "begin"), end = attr_int(*v.attrs, "end");
  if (begin < 0 || end < begin || end > extent)
    throw invalid("interval [{}, {}) is not inside [0, {})", begin, end, extent);
  return {resized(v, d, end - begin)};
}

std::vector<TensorType> infer_accumulate(const OpView& v) {
  need_float(v, 0, "acc");
  need_float(v, 1, "x");
  need_dims(v, 1, "x", in_dims(v, 0), "the shape of acc");
  return {in(v, 0)};
}

const AttrSpec kGroup{
    .name = "group", .type = AttrType::kInt, .fallback = int64_t{0}, .doc = "number of the device group"};
const AttrSpec kDigit{.name = "digit",
                      .type = AttrType::kInts,
                      .fallback = std::vector<int64_t>{},
                      .required = true,
                      .doc = "(dim, outer, inner) that is cut"};

}  // namespace

extern const OpDef op_def_all_reduce, op_def_all_gather, op_def_local_slice, op_def_accumulate;

const OpDef op_def_all_reduce = {
    .name = "all_reduce",
    .doc =
        "Combines partial values over a group, in place; the operands of one op are one bucket.\nx... -> y..., same.",
    .inputs = {{"x", PortKind::kVariadic}},
    .outputs = {{"y", PortKind::kVariadic}},
    .attrs = {kGroup,
              {.name = "combine", .type = AttrType::kString, .fallback = std::string("sum"), .doc = "sum, max or min"}},
    .infer = infer_all_reduce,
    .flags = kCollective | kInternal,
    .aliases_of = aliases_all_reduce,
};
const OpDef op_def_all_gather = {
    .name = "all_gather",
    .doc =
        "Joins the intervals of a cut digit, which may be uneven, in order of the group's coordinates.\nx (local) -> y "
        "(whole).",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs = {kGroup,
              kDigit,
              {.name = "cuts",
               .type = AttrType::kInts,
               .fallback = std::vector<int64_t>{},
               .required = true,
               .doc = "(begin, end) per coordinate"}},
    .infer = infer_all_gather,
    .flags = kCollective | kInternal,
};
const OpDef op_def_local_slice = {
    .name = "local_slice",
    .doc = "This device's interval of a digit of a replicated tensor.\nx (whole) -> y (local).",
    .inputs = {{"x"}},
    .outputs = {{"y"}},
    .attrs =
        {kDigit,
         {.name = "begin", .type = AttrType::kInt, .fallback = int64_t{0}, .required = true, .doc = "of the interval"},
         {.name = "end",
          .type = AttrType::kInt,
          .fallback = int64_t{0},
          .required = true,
          .doc = "of the interval, exclusive"}},
    .infer = infer_local_slice,
    .flags = kInternal,
};
const OpDef op_def_accumulate = {
    .name = "accumulate",
    .doc = "acc + x, in place: the sum over micro-batches.\nacc, x of one shape -> acc'.",
    .inputs = {{"acc"}, {"x"}},
    .outputs = {{"acc"}},
    .infer = infer_accumulate,
    .aliases = {{0, 0, true}},
    .flags = kInternal,
};

}  // namespace whale
