#include "prove/sum.h"

namespace whale::proof {
namespace {

std::string text_of(const Reference& ref, const Terms& terms) {
  std::string out;
  for (const Summand& s : terms.summands()) {
    out += out.empty() ? "" : " and ";
    out += "of " + ref.name(s.tensor) + ":";
    for (const TermBox& box : s.boxes) {
      std::string each;
      for (const FactorSet& f : box)
        each += fmt::format("{}{} {}", each.empty() ? "" : " x ", ref.graph().op(f.key.op).name,
                            f.any ? fmt::format("any {} of {}", f.set.size(), f.extent) : to_string(f.set));
      out += " " + (each.empty() ? "all" : each);
    }
  }
  return out;
}

// How often a tensor is a summand of another one, as it is; 2 where nobody looks on.
int64_t times_in(const Reference& ref, TensorId sum, TensorId summand, int& looks) {
  if (sum == summand) return 1;
  const OpId made = ref.tensor(sum).producer;
  if (made == kNone || ref.graph().op(made).code != OpCode::k_add) return 0;
  int64_t n = 0;
  for (const TensorId id : ref.graph().op(made).inputs) {
    if (--looks < 0) return 2;
    if (ref.tensor(id).dims == ref.tensor(sum).dims) n += times_in(ref, ref.root(id), summand, looks);
  }
  return n;
}

// Is each of these in the sum once, and none in another one?
bool are_summands(const Reference& ref, const Value& sum, const Terms& more) {
  int looks = 1000;
  const auto times = [&](TensorId of, TensorId summand) { return times_in(ref, of, summand, looks); };
  for (const Terms* terms : {&sum.terms, &more})
    for (const Summand& s : terms->summands())
      if (times(sum.tensor, s.tensor) != 1) return false;
  for (const Summand& a : sum.terms.summands())
    for (const Summand& b : more.summands())
      if (a.tensor != b.tensor && (times(a.tensor, b.tensor) != 0 || times(b.tensor, a.tensor) != 0)) return false;
  return true;
}

}  // namespace

std::string_view name_of(const Joining& joining) {
  return joining.merge == OpCode{} ? name_of(joining.combine) : def(joining.merge).name;
}

std::string describe(const Reference& ref, const Value& v) {
  std::string out = ref.name(v.tensor);
  if (!v.region.is_whole()) out += " " + to_string(v.region);
  if (!v.terms.whole()) out += fmt::format(" with terms {}", text_of(ref, v.terms));
  return out;
}

Value with_terms(const Reference& ref, const Value& sum, const Value& x) {
  if (sum.tensor != x.tensor || !same(sum.region, x.region))
    refuse("it adds {} to {}", describe(ref, x), describe(ref, sum));
  if (sum.terms.whole() || x.terms.whole())
    refuse("it adds {} to {}: one of them is the whole sum already", describe(ref, x), describe(ref, sum));
  if (sum.combine != x.combine)
    refuse("{} combines by {}, {} by {}", describe(ref, x), name_of(x.combine), describe(ref, sum),
           name_of(sum.combine));
  const auto region = known(sum.region, x.region);
  if (!region) no_rule("a sum of {} and {}", describe(ref, sum), describe(ref, x));
  Value out = sum;
  out.region = *region;
  Terms more = x.terms;
  Terms::name_alike(out.terms, more, x.tensor);
  if (!out.terms.named_as(more))
    no_rule("a sum of {} and {}, whose terms are told apart unlike", describe(ref, sum), describe(ref, x));
  if (const TensorId twice = out.terms.join(more); twice != kNone) {
    if (out.terms.counted()) no_rule("terms of {} of which there are many alike", ref.name(twice));
    refuse("terms of {} are added twice: {} to {}", ref.name(twice), describe(ref, x), describe(ref, sum));
  }
  return out;
}

std::optional<Value> with_summands(const Reference& ref, const Value& sum, const Value& x) {
  if (sum.terms.whole() || sum.combine != Combine::kSum || sum.dtype != x.dtype || !same(sum.region, x.region) ||
      (!x.terms.whole() && x.combine != Combine::kSum))
    return {};
  Terms more = x.terms;
  if (more.whole()) more.add_summand(x.tensor);
  if (!are_summands(ref, sum, more)) {
    more.unite(x.tensor);
    if (!are_summands(ref, sum, more)) return {};
  }
  Value out = sum;
  if (const TensorId twice = out.terms.join_some(more); twice != kNone) {
    if (out.terms.counted()) no_rule("terms of {} of which there are many alike", ref.name(twice));
    refuse("terms of {} are added twice: {} to {}", ref.name(twice), describe(ref, x), describe(ref, sum));
  }
  return out;
}

}  // namespace whale::proof
