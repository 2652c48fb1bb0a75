#include "prove/collective.h"

#include "prove/sum.h"

namespace whale::proof {
namespace {

// All terms of all members.
Held combined(Reference& ref, Tree& tree, const Exchange& e) {
  const Held* first = nullptr;
  std::optional<Value> out;
  std::vector<const Value*> zeros;
  for (const Held& held : e.in) {
    const Value& v = *held;
    if (const double* c = ref.constant(v.tensor); c && is_neutral(name_of(e.work->combine), *c)) {
      if (*c == 0) zeros.push_back(&v);
      continue;
    }
    if (!v.terms.whole() && v.combine != e.work->combine)
      refuse("{} combines by {}, and is combined by {}", describe(ref, v), name_of(v.combine),
             name_of(e.work->combine));
    if (!out) {
      first = &held, out = v;
      continue;
    }
    if (v.dtype != out->dtype)
      refuse("{} is {}, and {} is {}", describe(ref, v), name_of(v.dtype), describe(ref, **first), name_of(out->dtype));
    if (v.tensor != out->tensor && e.work->combine == Combine::kSum) {  // where a member has some summands alone
      auto more = with_summands(ref, *out, v);
      if (!more) more = with_summands(ref, v, *out);
      if (more) {
        more->order = tree.added(*out, v);
        out = std::move(more);
        continue;
      }
    }
    out = with_terms(ref, tree, *out, v);
  }
  if (!out) {
    const auto alike = [&](const Held& v) { return v->order == e.in[0]->order && v->tensor == e.in[0]->tensor; };
    if (zeros.empty() || std::ranges::all_of(e.in, alike)) return e.in[0];
    out = *zeros.front();
    zeros.erase(zeros.begin());
  }
  for (const Value* zero : zeros) out->order = tree.beside_zero(*out, *zero, *ref.constant(zero->tensor));
  // Sums are rounded alike by kernels and transports; the larger of 0 and -0, and sums of logarithms, are not.
  if (e.work->combine != Combine::kSum) out->order = tree.made(*out, name_of(e.work->combine), {out->order}, {});
  return std::make_shared<const Value>(std::move(*out));
}

Held gathered(Reference& ref, const Exchange& e, const SubAxisCuts& cuts, const Dims& whole) {
  // Along the sub-axis alone: the outer, extent and inner of the flat local tensor.
  int64_t outer = cuts.sub_axis.outer, inner = cuts.sub_axis.inner;
  const auto dim = static_cast<size_t>(cuts.sub_axis.dim);
  for (size_t d = 0; d < dim; ++d) outer *= whole[d];
  for (size_t d = dim + 1; d < whole.size(); ++d) inner *= whole[d];
  const int64_t extent = whole[dim] / (cuts.sub_axis.outer * cuts.sub_axis.inner);
  std::vector<Piece> pieces;
  for (size_t m = 0; m < e.in.size(); ++m) {
    const Interval at = cuts.cuts.at(m);
    if (at.size() == 0) continue;
    pieces.push_back({e.in[m], {{0, outer}, at, {0, inner}}});
  }
  return joined(ref, pieces, {outer, extent, inner});
}

// Of these dims what lies in the member's interval.
Dims cut_dims(Dims whole, const SubAxisCuts& cuts, size_t member) {
  int64_t& n = whole.at(static_cast<size_t>(cuts.sub_axis.dim));
  n = cuts.sub_axis.outer * cuts.cuts.at(member).size() * cuts.sub_axis.inner;
  return whole;
}
Dims whole_dims(Dims part, const SubAxisCuts& cuts) {
  part.at(static_cast<size_t>(cuts.sub_axis.dim)) = cuts.sub_axis.outer * cuts.cuts.back().end * cuts.sub_axis.inner;
  return part;
}

Held part(Reference& ref, const Held& all, const SubAxisCuts& cuts, const Dims& local, size_t member) {
  if (ref.constant(all->tensor)) {  // a number, of whatever shape
    const int64_t n = element_count(cut_dims(local, cuts, member));
    Value some = *all;
    some.region = Region({Digit{n, Set::first(n), true}});
    return std::make_shared<const Value>(std::move(some));
  }
  const auto region = all->region.cut(local, cuts.sub_axis, cuts.cuts.at(member));
  if (!region) no_rule("a part of {}", describe(ref, *all));
  Value out = *all;
  out.region = *region;
  return std::make_shared<const Value>(std::move(out));
}

// Every member gives and gets its part of one whole.
void check_dims(const Exchange& e) {
  const auto expect = [](const Dims& wanted, const Dims& found, const char* what) {
    if (wanted != found && element_count(wanted) + element_count(found) > 0)
      refuse("a member {} {}, expected {}", what, to_string(found), to_string(wanted));
  };
  for (size_t m = 0; m < e.in.size(); ++m) {
    Dims in = e.in_dims[0], out = e.in_dims[0];
    if (e.work->op == OpCode::k_all_gather) {
      out = e.out_dims[0], in = cut_dims(out, e.work->cuts.at(e.operand), m);
    } else if (e.work->op == OpCode::k_reduce_scatter) {
      out = cut_dims(in, e.work->cuts.at(e.operand), m);
    } else if (e.work->op == OpCode::k_all_to_all) {
      const Dims whole = whole_dims(e.in_dims[0], e.work->cuts.at(0));
      in = cut_dims(whole, e.work->cuts.at(0), m), out = cut_dims(whole, e.work->to, m);
    } else if (e.work->op == OpCode::k_shift) {
      in = e.in_dims[m], out = e.in_dims[(m + e.in.size() - 1) % e.in.size()];
    }
    expect(in, e.in_dims[m], "gives");
    expect(out, e.out_dims[m], "gets");
  }
}

}  // namespace

std::vector<Held> exchanged(Reference& ref, Tree& tree, const Exchange& e) {
  const size_t n = e.in.size();
  std::vector<Held> out(n);
  check_dims(e);
  switch (e.work->op) {
    case OpCode::k_all_reduce: return std::vector<Held>(n, combined(ref, tree, e));
    case OpCode::k_adasum: {  // the walk names the exemption
      if (tree.asked()) no_rule("Adasum in exact mode");
      for (const Held& v : e.in)  // zeros: of a member without samples
        if (ref.is_gradient_in_loss(v->tensor))
          no_rule("Adasum of {}, a gradient that the loss is made of", describe(ref, *v));
        else if (!ref.is_zero(v->tensor) && !ref.is_of_gradients(v->tensor))
          refuse("{} is no gradient", describe(ref, *v));
      return std::vector<Held>(n, combined(ref, tree, e));
    }
    case OpCode::k_all_gather: return std::vector<Held>(n, gathered(ref, e, e.work->cuts.at(e.operand), e.out_dims[0]));
    case OpCode::k_reduce_scatter: {
      const Held all = combined(ref, tree, e);
      for (size_t m = 0; m < n; ++m) out[m] = part(ref, all, e.work->cuts.at(e.operand), e.in_dims[0], m);
      return out;
    }
    case OpCode::k_all_to_all: {
      const SubAxisCuts& cuts = e.work->cuts.at(0);
      Dims whole = e.in_dims[0];
      const auto dim = static_cast<size_t>(cuts.sub_axis.dim);
      whole[dim] = cuts.sub_axis.outer * cuts.cuts.back().end * cuts.sub_axis.inner;
      const Held all = gathered(ref, e, cuts, whole);
      for (size_t m = 0; m < n; ++m) out[m] = part(ref, all, e.work->to, whole, m);
      return out;
    }
    case OpCode::k_shift:
      for (size_t m = 0; m < n; ++m) out[m] = e.in[(m + n - 1) % n];
      return out;
    default: no_rule("{}", def(e.work->op).name);
  }
}

}  // namespace whale::proof
