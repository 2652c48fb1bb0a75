// The terms that a kernel's result has: those of its operands, and the positions of what it sums over a part.
#include <algorithm>
#include <optional>

#include "prove/match.h"

namespace whale::proof {
namespace {

// Summands that go on together: so many as one where their terms are alike, and so many at all. Uses of uses of one sum
// double them.
constexpr size_t kMany = 16, kVeryMany = 512, kMost = 1024;

// The factor whose groups of positions (GroupRows) dimension 0 of this tensor stands for; slices of other dimensions
// may lie between it and the op that has it.
std::optional<FactorKey> groups_behind(Reference& ref, TensorId tensor) {
  for (OpId maker = ref.tensor(tensor).producer; maker != kNone; maker = ref.tensor(tensor).producer) {
    const Op& op = ref.graph().op(maker);
    const std::vector<Factor>& list = ref.factors(op).list;
    for (size_t f = 0; f < list.size(); ++f)
      for (const int o : list[f].group.outputs)
        if (list[f].group.rows > 0 && op.outputs[o] == tensor) return FactorKey{maker, static_cast<int32_t>(f)};
    if (op.code != OpCode::k_slice || ref.tensor(op.inputs[0]).dims.at(0) != ref.tensor(tensor).dims.at(0)) return {};
    tensor = op.inputs[0];
  }
  return {};
}

// Where groups are added up, terms are those of the batch's positions in them, however they were told apart before: the
// groups that are added here go from `mine`, and `terms` (those of what is added; told of none: all of these groups)
// are counted from the batch's begin.
void count_of_batch(Reference& ref, const FactorKey& key, TermBox& mine, TermBox::iterator groups, Terms& terms) {
  const Factor& factor = ref.factors(ref.graph().op(key.op)).list[key.factor];
  const int64_t rows = factor.group.rows;
  if (groups->any || groups->set.runs().size() != 1 || groups->extent * rows != factor.extent) return;
  const Interval at = groups->set.runs()[0];
  const bool told = std::ranges::any_of(terms.summands(), [&](const Summand& s) {  // which of them
    return std::ranges::any_of(s.boxes,
                               [&](const TermBox& b) { return std::ranges::count(b, key, &FactorSet::key) > 0; });
  });
  if (!told) {
    *groups = {key, factor.extent, Set(Interval{at.begin * rows, at.end * rows})};
  } else if (terms.all_have(key, at.size() * rows)) {
    terms.count_from(key, at.begin * rows, factor.extent);
    mine.erase(groups);
  }
}

}  // namespace

// The terms of what is linear in operands that have not all of them.
void Kernels::Match::find_terms() {
  if (partial.empty()) return;
  combine = call.in[partial[0]].value->combine;
  const auto holds = [&](const std::vector<int>& set) {
    return std::all_of(partial.begin(), partial.end(),
                       [&](size_t i) { return std::find(set.begin(), set.end(), static_cast<int>(i)) != set.end(); });
  };
  const auto linear = std::find_if(shape.factors->linear.begin(), shape.factors->linear.end(), holds);
  const bool same_combine =
      std::all_of(partial.begin(), partial.end(), [&](size_t i) { return call.in[i].value->combine == combine; });
  const auto alone = [&](size_t i) {
    return std::ranges::count(shape.factors->linear, std::vector<int>{static_cast<int>(i)}) > 0;
  };
  std::optional<Terms> pairs;  // linear in either of two
  if (linear == shape.factors->linear.end() && partial.size() == 2 && alone(partial[0]) && alone(partial[1]))
    pairs = call.in[partial[0]].value->terms.times(call.in[partial[1]].value->terms);
  if (!same_combine || combine != Combine::kSum || (linear == shape.factors->linear.end() && !pairs)) {
    const Terms& some = call.in[partial[0]].value->terms;
    const bool one_box = some.summands().size() == 1 && some.summands()[0].boxes.size() == 1;
    if (some.counted() && !one_box) no_rule("terms of {} of which there are many alike", op.name);
    throw Stop{.what = fmt::format("operand {} has not all terms: {}; {} is not linear in it", partial[0],
                                   describe(ref, *call.in[partial[0]].value), op.name),
               .lacks = true};
  }
  if (linear == shape.factors->linear.end() || linear->size() == 1)  // of one sum by either of two operands
    for (const size_t i : partial)
      for (size_t j = 0; j < call.in.size(); ++j)
        if (j != i && call.in[j].value && alone(j)) tell_apart(i, op.inputs[j]);
  if (pairs) terms = std::move(*pairs);
  const std::vector<int> together = pairs ? std::vector<int>{} : *linear;
  // What two operands have in common is told apart by which of them it comes from.
  const bool apart = together.size() > 1 && (op.code != OpCode::k_add || ref.shares_summands(id));
  for (size_t k = 0; k < together.size(); ++k) {
    const auto at = [&](size_t which) -> const Value* {
      const auto i = static_cast<size_t>(together[which]);
      return i < call.in.size() ? call.in[i].value : nullptr;
    };
    const Value* v = at(k);
    if (!v || ref.is_zero(v->tensor)) continue;  // zeros have no terms
    // The same terms of one tensor: what is linear in it is counted once, in both.
    const auto is_twin = [&](size_t n) {
      const auto i = static_cast<size_t>(together[n]), mine = static_cast<size_t>(together[k]);
      return i < op.inputs.size() && mine < op.inputs.size() && op.inputs[i] != kNone && op.inputs[mine] != kNone &&
             ref.root(op.inputs[i]) == ref.root(op.inputs[mine]);
    };
    bool twice = false;
    for (size_t before = 0; before < k; ++before) {
      if (!is_twin(before)) continue;
      if (!at(before) || at(before)->tensor != v->tensor || !(at(before)->terms == v->terms))
        no_rule("{} reads {} twice, with unlike terms", op.name, ref.name(v->tensor));
      twice = true;
    }
    if (twice) continue;
    Terms mine = v->terms;
    name_by_sum(ref, v->tensor, mine);
    if (mine.whole()) mine.add_summand(v->tensor);
    if (mine.summands().size() > kMany) unite(ref, v->tensor, mine);
    if (mine.summands().size() > kVeryMany)
      mine.unite_lots([&](const std::vector<TensorId>& names) { return ref.group_of(v->tensor, names); });
    if (apart) mine.rename_each([&](TensorId summand) { return ref.image_of(summand, v->tensor); });
    if (!terms.beside(mine)) no_rule("{} adds terms of one sum to others of it: {}", op.name, describe(ref, *v));
    if (terms.summands().size() > kMost) no_rule("{} adds more than {} summands of unlike terms", op.name, kMost);
  }
}

// What the operand has terms of, where the other one is made of that too.
void Kernels::Match::tell_apart(size_t operand, TensorId other) {
  for (const Summand& s : call.in[operand].value->terms.summands()) {
    if (ref.is_made_of(other, s.tensor)) ways.emplace(ref.root(s.tensor), operand);
    for (const TermBox& box : s.boxes)
      for (const FactorSet& f : box)
        for (const TensorId made : ref.graph().op(f.key.op).outputs)
          if (made != kNone && ref.is_made_of(other, made)) ways.emplace(ref.root(made), operand);
  }
}

Value Kernels::Match::result(size_t o) const {
  const bool streams = std::ranges::any_of(cut, [&](size_t f) { return list[f].kind == FactorKind::kStream; });
  const Tensor& whole = ref.tensor(op.outputs[o]);
  // Parts of a sum may be wider than the sum, which is rounded when all are there.
  const bool wide = call.out[o].dtype == accumulate_dtype(whole.dtype) &&
                    (streams || ((!cut.empty() || !partial.empty()) &&
                                 attr_string(call.attrs, "out_dtype") == name_of(call.out[o].dtype)));
  if (call.out[o].dtype != whole.dtype && !wide)
    refuse("it makes {} in {}; {} of the one-device program in {}", whole.name, name_of(call.out[o].dtype), op.name,
           name_of(whole.dtype));
  if (call.out[o].dtype != whole.dtype && !streams)
    kernels.exemptions_.insert("parts of products are added up in f32 and rounded once");
  Value v{.tensor = ref.root(op.outputs[o]), .dtype = call.out[o].dtype};
  v.region = of_each_element(op) ? call.in[0].value->region : region_of(o);
  v.terms = terms, v.combine = combine;
  const auto image = [&](TensorId summand) { return ref.image_of(summand, v.tensor); };
  const TensorId from = partial.empty() ? kNone : call.in[partial[0]].value->tensor;
  const TensorId all = partial.size() == 1 && op.code != OpCode::k_add ? from : v.tensor;
  if (v.terms.summands().size() > kMany) unite(ref, all, v.terms);
  const bool own = v.terms.summands().size() == 1 && v.terms.summands()[0].tensor == from;
  if (!ways.empty()) {
    // By the operand; of both, by what is in which.
    const size_t one = ways.begin()->second;
    const bool both = std::ranges::any_of(ways, [&](const auto& way) { return way.second != one; });
    v.terms.rename_each([&](TensorId summand) {
      TensorId name = image(summand);
      const auto by = [&](size_t operand) {
        for (size_t n = 0; n <= operand; ++n) name = image(name);
      };
      if (!both) by(one);
      for (const auto& [of, operand] : ways)
        if (both) name = ref.image_of(name, of), by(operand);
      return name;
    });
  } else if (own) {
    v.terms.rename(v.tensor);
  } else if (op.code != OpCode::k_add && from != v.tensor) {  // not as they are
    v.terms.rename_each(image);
  }
  name_terms(o, v);
  for (const Digit& d : v.region.digits())
    if (!d.any && !d.whole() && d.set.runs().size() == 1)
      kernels.parts_[{call.device, d.extent, d.set.size()}] = d.set.runs()[0];
  v.order = order_of(v);
  return v;
}

std::optional<size_t> Kernels::Match::inner_of(size_t f) const {
  for (size_t k = 0; k < splits.size(); ++k)
    if (splits[k].factor == static_cast<int>(f)) return list.size() - splits.size() + k;
  return {};
}

// The positions of a factor that is cut. One that was divided is one again where its positions are known; none: they
// are told with those of the other half.
std::optional<FactorSet> Kernels::Match::cut_of(size_t f) const {
  const auto of_factor = [&](size_t k) {
    return FactorSet{{id, static_cast<int32_t>(k)}, list[k].extent, sets[k].set, sets[k].any};
  };
  const auto known = [&](size_t k) { return !sets[k].any || sets[k].whole(); };
  const size_t first = list.size() - splits.size();
  const size_t outer = f < first ? f : static_cast<size_t>(splits[f - first].factor);
  const std::optional<size_t> inner = inner_of(outer);
  if (list[f].kind != FactorKind::kReduce || !inner || !known(outer) || !known(*inner)) return of_factor(f);
  if (f != outer && !sets[outer].whole()) return {};
  FactorSet both = of_factor(outer);
  both.extent *= sets[*inner].extent, both.any = false;
  const auto set = both.set.times(sets[*inner].set, sets[*inner].extent);
  if (!set) no_rule("{} of {} and {} of {}", to_string(both.set), list[f].name, to_string(sets[*inner].set), op.name);
  both.set = *set;
  return both;
}

// The terms of the factors that are cut, beside those of the operands.
void Kernels::Match::name_terms(size_t o, Value& v) const {
  TermBox mine;
  for (const size_t f : cut) {
    const bool streamed =
        list[f].kind == FactorKind::kStream && (o >= list[f].outputs.size() || !list[f].outputs[o].present());
    if (!streamed && (o >= list[f].partial.size() || !list[f].partial[o])) continue;
    std::optional<FactorSet> positions = cut_of(f);
    if (!positions) continue;
    FactorSet& terms_of = *positions;
    if (list[f].group.rows && group_of(list, o, false) == static_cast<int>(f)) {
      // Those of its own rows are all that there are.
      const Interval run = sets[f].set.runs()[0];
      terms_of.extent = groups->size() * list[f].group.rows;
      terms_of.set =
          Set(Interval{run.begin - groups->begin * list[f].group.rows, run.end - groups->begin * list[f].group.rows});
      if (terms_of.set.is_first(terms_of.extent)) continue;
    }
    mine.push_back(terms_of);
    const bool merges = streamed && list[f].merge != OpCode{};
    const Joining how = merges ? Joining(list[f].merge) : Joining(list[f].combine_of(o));
    if ((mine.size() > 1 || !terms.whole()) && how != v.combine) no_rule("{} combines in two ways", op.name);
    v.combine = how;
  }
  std::ranges::sort(mine, {}, &FactorSet::key);
  if (const auto key = !mine.empty() && call.in.size() == 1 ? groups_behind(ref, op.inputs[0]) : std::nullopt) {
    const auto groups = std::ranges::find_if(mine, [&](const FactorSet& f) {
      return list[f.key.factor].inputs[0] == SubAxis{0, 1, 1};
    });
    if (groups != mine.end()) count_of_batch(ref, *key, mine, groups, v.terms);
  }
  if (!mine.empty()) {
    if (v.terms.whole())
      v.terms.add_summand(v.tensor, mine);
    else
      v.terms.restrict(mine);
  }
}

}  // namespace whale::proof
