// Small pieces that shape rules and factor rules of several families share.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "ops/op.h"

namespace whale {

inline bool has(const OpView& v, int i) {
  const auto k = static_cast<size_t>(i);
  return i >= 0 && k < v.inputs.size() && k < v.present.size() && v.present[k];
}
inline const TensorType& in(const OpView& v, int i) { return v.inputs[i]; }
inline const Dims& in_dims(const OpView& v, int i) { return v.inputs[i].dims; }
inline int rank_of(const OpView& v, int i) { return static_cast<int>(in_dims(v, i).size()); }

inline void need_float(const OpView& v, int i, const char* name) {
  if (!is_float(in(v, i).dtype))
    throw invalid("operand '{}' is {}, expected a floating-point type", name, name_of(in(v, i).dtype));
}
inline void need_ids(const OpView& v, int i, const char* name) {
  const DType t = in(v, i).dtype;
  if (t != DType::kI32 && t != DType::kI64) throw invalid("operand '{}' is {}, expected i32 or i64", name, name_of(t));
}
inline void need_dtype(const OpView& v, int i, const char* name, DType want) {
  if (in(v, i).dtype != want)
    throw invalid("operand '{}' is {}, expected {}", name, name_of(in(v, i).dtype), name_of(want));
}
// The dtype of a scale or shift: that of x, or the type that statistics of x are kept in.
inline void need_scale_dtype(const OpView& v, int i, const char* name, DType x) {
  const DType t = in(v, i).dtype;
  if (t != x && t != accumulate_dtype(x))
    throw invalid("operand '{}' is {}, expected {} or {}", name, name_of(t), name_of(x), name_of(accumulate_dtype(x)));
}
inline void need_dims(const OpView& v, int i, const char* name, const Dims& want, const char* why = "") {
  if (in_dims(v, i) != want)
    throw invalid("operand '{}' has shape {}, expected {}{}{}", name, to_string(in_dims(v, i)), to_string(want),
                  *why ? ": " : "", why);
}
inline void need_rank_at_least(const OpView& v, int i, const char* name, int rank) {
  if (rank_of(v, i) < rank)
    throw invalid("operand '{}' has shape {}, expected at least {} dimension(s)", name, to_string(in_dims(v, i)), rank);
}
inline void need_rank(const OpView& v, int i, const char* name, int rank) {
  if (rank_of(v, i) != rank)
    throw invalid("operand '{}' has shape {}, expected {} dimensions", name, to_string(in_dims(v, i)), rank);
}
inline Dims leading(const Dims& dims) { return Dims(dims.begin(), dims.empty() ? dims.end() : dims.end() - 1); }
inline DType out_dtype(const OpView& v, DType otherwise) {
  const std::string& name = attr_string(*v.attrs, "out_dtype");
  return name.empty() ? otherwise : parse_dtype(name);
}

// Attribute of every op with an index (see IndexOperand).
inline AttrSpec index_limit_attr() {
  return {.name = kIndexLimit,
          .type = AttrType::kInt,
          .fallback = int64_t{0},
          .doc = "each run checks that the indices are below it; 0: they were checked before"};
}

// Of operand 0's accumulate type: a number that this type rounds to 0 keeps nothing from being divided by 0.
inline void need_epsilon(const OpView& v) {
  const double e = attr_float(*v.attrs, "epsilon");
  if (!(e >= 0)) throw invalid("attribute 'epsilon' is {}, expected >= 0", e);
  if (e > 0 && static_cast<float>(e) == 0 && accumulate_dtype(in(v, 0).dtype) == DType::kF32)
    throw invalid("attribute 'epsilon' is {}, which f32 does not have: it would be 0; give at least 1e-45, or 0", e);
}

// ---- factors by hand --------------------------------------------------------------------------------------------
inline SubAxis sub_axis(int dim, int64_t outer = 1, int64_t inner = 1) { return SubAxis{dim, outer, inner}; }
inline constexpr SubAxis kAbsent{};

// Appends a factor; sub-axis lists may be shorter than the operands (the rest do not carry it). `partial` lists outputs
// that become partial when the factor is cut; then its kind is kReduce (or kLookup) even when other outputs carry the
// factor.
inline void add_factor(Factors& f, const OpView& v, std::string name, FactorKind kind, int64_t extent,
                       std::vector<SubAxis> inputs, std::vector<SubAxis> outputs,
                       std::initializer_list<int> partial = {}) {
  inputs.resize(v.inputs.size());
  outputs.resize(v.outputs.size());
  for (size_t i = 0; i < inputs.size(); ++i)
    if (!has(v, static_cast<int>(i))) inputs[i] = kAbsent;
  Factor factor{.name = std::move(name),
                .kind = kind,
                .extent = extent,
                .inputs = std::move(inputs),
                .outputs = std::move(outputs)};
  factor.partial.assign(v.outputs.size(), false);
  for (const int o : partial)
    if (static_cast<size_t>(o) < factor.partial.size()) factor.partial[o] = true;
  f.list.push_back(std::move(factor));
}

// Dimension i of every listed input and output is one factor "d<i>" (batch-like leading dimensions are named so).
inline void add_leading(Factors& f, const OpView& v, int count, const std::vector<int>& inputs,
                        const std::vector<int>& outputs, std::initializer_list<int> partial = {}) {
  const FactorKind kind = partial.size() ? FactorKind::kReduce : FactorKind::kMap;
  for (int d = 0; d < count; ++d) {
    std::vector<SubAxis> from(v.inputs.size()), to(v.outputs.size());
    int64_t extent = 1;
    for (const int i : inputs)
      if (has(v, i)) from[i] = sub_axis(d), extent = in_dims(v, i)[d];
    for (const int o : outputs)
      if (static_cast<size_t>(o) < to.size()) to[o] = sub_axis(d);
    add_factor(f, v, "d" + std::to_string(d), kind, extent, std::move(from), std::move(to), partial);
  }
}

inline double elements(const TensorType& t) { return static_cast<double>(element_count(t.dims)); }
inline double bytes_of(const OpView& v) {
  double bytes = 0;
  for (const auto& t : v.inputs) bytes += elements(t) * static_cast<double>(size_of(t.dtype));
  for (const auto& t : v.outputs) bytes += elements(t) * static_cast<double>(size_of(t.dtype));
  return bytes;
}
inline double output_elements(const OpView& v) { return v.outputs.empty() ? 0 : elements(v.outputs[0]); }

}  // namespace whale
