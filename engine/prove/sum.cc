#include "prove/sum.h"

#include <algorithm>

namespace whale::proof {
namespace {

constexpr int kLooks = 100'000;  // at ops, before a question of what sums are made of is given up

std::string text_of(const Reference& ref, const Terms& terms) {
  constexpr size_t kSaid = 6;  // of each
  std::string out;
  size_t said = 0;
  for (const Summand& s : terms.summands()) {
    if (said++ == kSaid) return out + fmt::format(" and of {} more", terms.summands().size() - kSaid);
    out += out.empty() ? "" : " and ";
    out += "of " + ref.name(s.tensor) + ":";
    size_t boxes = 0;
    for (const TermBox& box : s.boxes) {
      if (boxes++ == kSaid) {
        out += fmt::format(" and {} more", s.boxes.size() - kSaid);
        break;
      }
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
  int looks = kLooks;
  const auto times = [&](TensorId of, TensorId summand) { return times_in(ref, of, summand, looks); };
  for (const Terms* terms : {&sum.terms, &more})
    for (const Summand& s : terms->summands())
      if (times(sum.tensor, s.tensor) != 1) return false;
  for (const Summand& a : sum.terms.summands())
    for (const Summand& b : more.summands())
      if (a.tensor != b.tensor && (times(a.tensor, b.tensor) != 0 || times(b.tensor, a.tensor) != 0)) return false;
  return true;
}

// What a sum is made of, down to these names, through additions and what is linear in one operand.
class Made {
 public:
  Made(Reference& ref, TensorIds names) : ref_(ref), names_(std::move(names)) {}
  // The names, each of which is in it once, and what else is; empty: there is no such list.
  TensorIds of(TensorId sum) {
    collect(sum, {});
    std::ranges::sort(all_);
    const bool once = std::adjacent_find(all_.begin(), all_.end()) == all_.end() &&
                      std::ranges::all_of(names_, [&](TensorId n) { return std::ranges::binary_search(all_, n); });
    return once && looks_ >= 0 ? std::move(all_) : TensorIds{};
  }

 private:
  // A tensor below and what a name of it becomes on the way up (Match::find_terms), outermost first.
  struct Below {
    TensorId tensor;
    TensorIds images;
  };
  std::vector<Below> below(TensorId id, const TensorIds& images) {
    const OpId made = ref_.tensor(id).producer;
    if (made == kNone) return {};
    const Op& op = ref_.graph().op(made);
    const bool adds = op.code == OpCode::k_add;
    std::vector<Below> out;
    for (const std::vector<int>& set : ref_.factors(op).linear) {
      if (set.size() != 1 && !adds) continue;
      for (const int i : set) {
        out.push_back({ref_.root(op.inputs[i]), images});
        if (!adds) out.back().images.push_back(id);
        if (adds && ref_.shares_summands(made)) out.back().images.push_back(out.back().tensor);
      }
    }
    return out;
  }
  TensorId name(const Below& at) const {
    TensorId out = at.tensor;
    for (auto image = at.images.rbegin(); image != at.images.rend() && out != kNone; ++image)
      out = ref_.known_image_of(out, *image);
    return out;
  }
  bool is_named(const Below& at) const { return std::ranges::count(names_, name(at)) > 0; }
  bool has_names(const Below& at) {
    if (at.tensor == kNone || --looks_ < 0) return false;
    return is_named(at) ||
           std::ranges::any_of(below(at.tensor, at.images), [&](const Below& x) { return has_names(x); });
  }
  void collect(TensorId id, const TensorIds& images) {
    if (looks_ < 0) return;
    const Below here{id, images};
    const std::vector<Below> all = below(id, images);
    const auto named = [&](const Below& x) { return has_names(x); };
    if (is_named(here) || std::ranges::none_of(all, named)) {
      TensorId mine = id;
      for (auto image = images.rbegin(); image != images.rend(); ++image) mine = ref_.image_of(mine, *image);
      return all_.push_back(mine);
    }
    const bool adds = ref_.graph().op(ref_.tensor(id).producer).code == OpCode::k_add;
    if (!adds && std::ranges::count_if(all, named) > 1) looks_ = -1;
    for (const Below& x : all)
      if (adds || named(x)) collect(x.tensor, x.images);
  }

  Reference& ref_;
  TensorIds names_, all_;
  int looks_ = kLooks;
};

// Terms of one sum that two devices name unlike (a sum of summands here, each of them there): all by the names that
// either has terms of, and what else the sum is made of. False: such names overlap.
bool name_all(Reference& ref, TensorId sum, Terms& a, Terms& b) {
  TensorIds names;
  for (const Terms* terms : {&a, &b})
    for (const Summand& s : terms->summands())
      if (!s.boxes.empty() && std::ranges::count(names, s.tensor) == 0) names.push_back(s.tensor);
  const TensorIds all = Made(ref, std::move(names)).of(sum);
  if (all.empty()) return false;
  for (Terms* terms : {&a, &b}) {
    std::vector<Summand> named;
    for (const TensorId id : all) {
      const auto at = std::ranges::find(terms->summands(), id, &Summand::tensor);
      named.push_back({id, at == terms->summands().end() ? std::vector<TermBox>{} : at->boxes});
    }
    *terms = Terms::of(std::move(named));
  }
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

// A product by either operand of what both are made of has names for either; they matter as long as terms of that do.
bool are_told(const Reference& ref, TensorId sum, const Terms& terms) {
  const auto is_told = [&](const FactorSet& f) { return ref.is_by_one_way(sum, f.key.op); };
  return std::ranges::all_of(terms.summands(), [&](const Summand& s) {
    return std::ranges::all_of(s.boxes, [&](const TermBox& box) { return std::ranges::all_of(box, is_told); });
  });
}

void unite(Reference& ref, TensorId sum, Terms& terms) {
  if (terms.alike()) terms.unite(are_told(ref, sum, terms) ? sum : ref.group_of(sum, terms.names()));
}

void name_by_sum(const Reference& ref, TensorId sum, Terms& terms) {
  if (terms.summands().size() == 1 && are_told(ref, sum, terms)) terms.rename(sum);
}

void name_alike(const Reference& ref, Terms& a, Terms& b, TensorId sum) {
  Terms::name_alike(a, b, sum, [&](const Terms& terms) { return are_told(ref, sum, terms); });
  if (a.named_as(b)) return;
  for (const auto& [one, other] : {std::pair(&a, &b), std::pair(&b, &a)}) {  // one name, of which the others are a part
    if (one->summands().size() != 1 || other->summands().empty()) continue;
    const TensorId coarse = one->summands()[0].tensor;
    const auto is_finer = [&](const Summand& s) { return ref.is_finer(s.tensor, coarse); };
    if (!std::ranges::all_of(other->summands(), is_finer)) continue;
    one->name_as(other->names());
    return;
  }
}

Value with_terms(Reference& ref, Tree& tree, const Value& sum, const Value& x) {
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
  if (!out.terms.named_as(more))
    for (Terms* terms : {&out.terms, &more}) name_by_sum(ref, x.tensor, *terms);
  name_alike(ref, out.terms, more, x.tensor);
  if (!out.terms.named_as(more) && (sum.combine != Combine::kSum || !name_all(ref, sum.tensor, out.terms, more)))
    no_rule("a sum of {} and {}, whose terms are told apart unlike", describe(ref, sum), describe(ref, x));
  if (const TensorId twice = out.terms.join(more); twice != kNone) {
    if (out.terms.counted()) no_rule("terms of {} of which there are many alike", ref.name(twice));
    refuse("terms of {} are added twice: {} to {}", ref.name(twice), describe(ref, x), describe(ref, sum));
  }
  out.order = tree.added(sum, x);
  return out;
}

std::optional<TensorIds> all_summands_of(const Reference& ref, TensorId sum) {
  constexpr size_t kMost = 16;
  TensorIds left{sum}, out;
  while (!left.empty()) {
    const TensorId id = left.back();
    left.pop_back();
    const OpId made = ref.tensor(id).producer;
    const bool adds = made != kNone && ref.graph().op(made).code == OpCode::k_add;
    if (adds && std::ranges::all_of(ref.graph().op(made).inputs,
                                    [&](TensorId x) { return ref.tensor(x).dims == ref.tensor(sum).dims; }))
      for (const TensorId x : ref.graph().op(made).inputs) left.push_back(ref.root(x));
    else if (out.size() == kMost)
      return std::nullopt;
    else
      out.push_back(id);
  }
  std::ranges::sort(out);
  return out;
}

std::optional<Value> whole_summands(const Reference& ref, const Value& sum) {
  TensorIds there;
  int looks = kLooks;
  for (const Summand& s : sum.terms.summands()) {
    if (times_in(ref, sum.tensor, s.tensor, looks) != 1) return {};
    if (s.boxes.empty()) continue;
    if (s.boxes.size() != 1 || !s.boxes[0].empty()) return {};
    there.push_back(s.tensor);
  }
  if (there.empty() || sum.combine != Combine::kSum) return {};
  Value out = sum;
  out.terms = {}, out.combine = {};
  out.tensor = there[0];
  if (there.size() == 1) return out;
  std::ranges::sort(there);
  for (const OpId id : ref.ops_of(OpCode::k_add)) {
    out.tensor = ref.root(ref.graph().op(id).outputs[0]);
    if (ref.tensor(out.tensor).dims == ref.tensor(sum.tensor).dims && all_summands_of(ref, out.tensor) == there)
      return out;
  }
  return {};
}

std::optional<Value> with_summands(Reference& ref, const Value& sum, const Value& x) {
  if (sum.terms.whole() || sum.combine != Combine::kSum || sum.dtype != x.dtype || !same(sum.region, x.region) ||
      (!x.terms.whole() && x.combine != Combine::kSum))
    return {};
  const auto region = known(sum.region, x.region);
  int looks = kLooks;
  if (!region || times_in(ref, sum.tensor, x.tensor, looks) != 1) return {};
  Terms more = x.terms;
  if (more.whole()) more.add_summand(x.tensor);
  name_by_sum(ref, x.tensor, more);
  if (more.summands().size() == 1 && more.summands()[0].tensor == x.tensor) {  // by the names that the sum has for it
    std::vector<TensorId> names = sum.terms.names();
    std::erase_if(names, [&](TensorId id) { return !ref.is_image_in(id, x.tensor); });
    if (!names.empty()) more.name_as(std::move(names));
  }
  const auto has = [&](const Summand& s) {
    return std::ranges::count(sum.terms.summands(), s.tensor, &Summand::tensor) > 0;
  };
  if (!std::ranges::all_of(more.summands(), has) && !are_summands(ref, sum, more)) {
    if (are_told(ref, x.tensor, more)) more.unite(x.tensor);
    if (!are_summands(ref, sum, more)) return {};
  }
  Value out = sum;
  out.region = *region;
  if (const TensorId twice = out.terms.join_some(more); twice != kNone) {
    if (out.terms.counted()) no_rule("terms of {} of which there are many alike", ref.name(twice));
    refuse("terms of {} are added twice: {} to {}", ref.name(twice), describe(ref, x), describe(ref, sum));
  }
  return out;
}

}  // namespace whale::proof
