// How the operands and results of an op of the one-device program are made of digits that its factors own.
#include <algorithm>

#include "prove/kernel.h"

namespace whale::proof {
namespace {

// A factor as an outer one, in its place, and an inner one, the last.
void divide(Factors& factors, size_t f, int64_t inner) {
  factors.list.push_back(factors.list[f]);
  Factor &rows = factors.list[f], &columns = factors.list.back();
  rows.extent /= inner, columns.extent = inner;
  const auto each = [&](std::vector<SubAxis>& outer_of, std::vector<SubAxis>& inner_of) {
    for (size_t k = 0; k < outer_of.size(); ++k) {
      if (!outer_of[k].present()) continue;
      outer_of[k].inner *= inner;
      inner_of[k].outer *= rows.extent;
    }
  };
  each(rows.inputs, columns.inputs), each(rows.outputs, columns.outputs);
}

}  // namespace

// The factor whose digit the region divides; none: it divides none that may be divided.
FactorSplit Kernels::split_of(const Region& region, const Layout& layout, const std::vector<Factor>& list) {
  size_t k = 0;
  int64_t left = 1;  // of the region's digit at hand, where it has several of the layout's
  for (const Digit& d : region.digits()) {
    if (d.extent == 1) continue;
    for (left *= d.extent; left > 1; ++k) {
      while (k < layout.digits.size() && layout.digits[k] == 1) ++k;
      if (k == layout.digits.size()) return {};
      const int64_t n = layout.digits[k];
      if (left % n == 0) {
        left /= n;
        continue;
      }
      if (n % left || layout.owner[k] < 0) return {};
      const Factor& f = list[layout.owner[k]];
      const bool plain = (f.kind == FactorKind::kMap || f.kind == FactorKind::kReduce) && f.unit == 1 &&
                         f.size_attrs.empty() && !f.begin_attr && !f.group.rows;
      return plain ? FactorSplit{layout.owner[k], n / left} : FactorSplit{};
    }
  }
  return {};
}

const Kernels::Shape& Kernels::shape_of(OpId id, bool rows, const FactorSplits& splits) {
  const auto [at, added] = shapes_.try_emplace({id, rows, splits});
  Shape& shape = at->second;
  if (!added) return shape;
  const Op& op = ref_.graph().op(id);
  if (rows) {
    OpView view = view_of(ref_.graph(), op);
    for (std::vector<TensorType>* types : {&view.inputs, &view.outputs})
      for (TensorType& t : *types) t.dims = in_rows(t.dims);
    shape.own = def(op.code).factors(view);
    shape.factors = &shape.own;
  } else {
    shape.factors = &ref_.factors(op);
  }
  if (!splits.empty()) {
    shape.own = *shape.factors;
    shape.factors = &shape.own;
    for (const FactorSplit& split : splits) divide(shape.own, static_cast<size_t>(split.factor), split.inner);
  }
  const auto lay_out = [&](TensorId tensor, size_t operand, bool input) {
    Layout out;
    if (tensor == kNone) return out;
    out.dims = rows ? in_rows(ref_.tensor(tensor).dims) : ref_.tensor(tensor).dims;
    const Dims& dims = out.dims;
    for (size_t d = 0; d < dims.size(); ++d) {
      if (dims[d] == 0) {  // nobody's
        out.digits.push_back(0), out.owner.push_back(-1), out.dim.push_back(static_cast<int>(d));
        continue;
      }
      std::vector<int64_t> bounds{1, dims[d]};
      struct Own {
        int64_t outer, end;
        int factor;
      };
      std::vector<Own> own;
      for (size_t f = 0; f < shape.factors->list.size(); ++f) {
        const Factor& factor = shape.factors->list[f];
        const auto& list = input ? factor.inputs : factor.outputs;
        if (operand >= list.size() || !list[operand].present() || list[operand].dim != static_cast<int>(d)) continue;
        const SubAxis& s = list[operand];
        const int64_t end = dims[d] / s.inner;
        own.push_back({s.outer, end, static_cast<int>(f)});
        bounds.push_back(s.outer), bounds.push_back(end);
      }
      std::sort(bounds.begin(), bounds.end());
      bounds.erase(std::unique(bounds.begin(), bounds.end()), bounds.end());
      for (size_t b = 0; b + 1 < bounds.size(); ++b) {
        if (bounds[b + 1] % bounds[b]) no_rule("the factors of {} overlap", op.name);
        int owner = -1;
        for (const Own& o : own)
          if (o.outer <= bounds[b] && bounds[b + 1] <= o.end) {
            if (owner >= 0 || o.outer != bounds[b] || o.end != bounds[b + 1])
              no_rule("the factors of {} overlap", op.name);
            owner = o.factor;
          }
        out.digits.push_back(bounds[b + 1] / bounds[b]), out.owner.push_back(owner);
        out.dim.push_back(static_cast<int>(d));
      }
    }
    return out;
  };
  for (size_t i = 0; i < op.inputs.size(); ++i) shape.in.push_back(lay_out(op.inputs[i], i, true));
  for (size_t o = 0; o < op.outputs.size(); ++o) shape.out.push_back(lay_out(op.outputs[o], o, false));
  return shape;
}

}  // namespace whale::proof
