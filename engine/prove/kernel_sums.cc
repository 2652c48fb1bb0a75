// Sums whose terms come one after the other: over micro-batches, in another order than the program's, in another type.
#include <algorithm>
#include <optional>

#include "prove/kernel.h"

namespace whale::proof {
namespace {

// If they are few, and each is in it once.
TensorIds summands_of(const Reference& ref, TensorId sum) {
  const std::optional<TensorIds> out = all_summands_of(ref, sum);
  return out && std::adjacent_find(out->begin(), out->end()) == out->end() ? *out : TensorIds{};
}

bool has_all(const TensorIds& all, const TensorIds& some) {
  return !some.empty() && std::ranges::all_of(some, [&](TensorId id) { return std::ranges::count(all, id) > 0; });
}

// Of a sum of `all`, the terms of `some`.
Terms terms_of(TensorIds all, const TensorIds& some, const std::vector<TermBox>& boxes) {
  std::ranges::sort(all);
  std::vector<Summand> out;
  for (const TensorId id : all) out.push_back({id, std::ranges::count(some, id) ? boxes : std::vector<TermBox>{}});
  return Terms::of(std::move(out));
}

}  // namespace

bool Kernels::is_asked_sum(const Value& value) const {
  return std::ranges::count(sum_dtypes_, value.dtype) > 0 &&
         (ref_.is_of_gradients(value.tensor) || ref_.is_zero(value.tensor));
}

void Kernels::exempt_sum(const Value& value) {
  if (is_asked_sum(value) && value.dtype != ref_.tensor(value.tensor).dtype)
    exempt(fmt::format("gradients are added up in {}, as an option of the plan asks", name_of(value.dtype)));
}

// Of sums that are kept in another type than the program's.
std::optional<Value> Kernels::cast(const KernelCall& call) {
  const Value& x = *call.in.at(0).value;
  const DType own = ref_.tensor(x.tensor).dtype, to = call.out.at(0).dtype;
  if (ref_.constant(x.tensor) && ref_.is_zero(x.tensor)) return {};  // zeros of any type are zeros
  Value out = x;
  out.dtype = to, out.order = tree_.cast(x, to);
  if (const TensorId narrow = x.terms.whole() && x.dtype == own ? ref_.before_cast(x.tensor, to) : kNone;
      narrow != kNone) {
    out.tensor = narrow;
    return out;
  }
  if (const TensorId by_way = x.terms.whole() && x.dtype == own ? ref_.cast_by_way(x.tensor, to) : kNone;
      by_way != kNone) {
    out.tensor = by_way;
    return out;
  }
  if (x.dtype != to && (is_asked_sum(x) || is_asked_sum(out))) {
    exempt_sum(x), exempt_sum(out);
    // Where the program casts it so, it is the program's cast.
    const std::vector<OpId>* casts = x.dtype == own ? ref_.find(OpCode::k_cast, {x.tensor}) : nullptr;
    const auto gives = [&](OpId id) { return ref_.tensor(ref_.graph().op(id).outputs[0]).dtype == to; };
    if (casts != nullptr && std::ranges::any_of(*casts, gives)) return {};
    return out;
  }
  if (ref_.is_gradient_in_loss(x.tensor) && std::ranges::count(sum_dtypes_, to) > 0)
    no_rule("{}, a gradient that the loss is made of, in the type of sums of gradients", describe(ref_, x));
  if (!x.terms.whole() && is_float(to) && size_of(to) < size_of(x.dtype) && x.dtype == own)
    refuse("{} is rounded before all terms are there", describe(ref_, x));
  if (x.dtype == own || to != own || x.dtype != accumulate_dtype(own)) return {};
  if (!x.terms.whole()) refuse("{} is rounded before all terms are there", describe(ref_, x));
  return out;
}

std::vector<Value> Kernels::accumulate(const KernelCall& call, std::string_view combine) {
  const Value &sum = *call.in.at(0).value, &x = *call.in.at(1).value;
  if (call.in[0].local != call.in[1].local)
    refuse("it adds a part of shape {} to a sum of shape {}", to_string(call.in[1].local), to_string(call.in[0].local));
  Value out = x;
  const auto with_zeros = [&](Value v, const Value& zeros, double number) {
    if (combine == name_of(Combine::kSum)) v.order = tree_.beside_zero(v, zeros, number);
    if (sum.dtype != x.dtype) v.order = tree_.cast(v, sum.dtype);
    return v;
  };
  if (const double* c = ref_.constant(x.tensor); c && is_neutral(combine, *c)) return {with_zeros(sum, x, *c)};
  out.dtype = sum.dtype;
  exempt_sum(out);
  const DType own = ref_.tensor(x.tensor).dtype;
  if (out.dtype != own && ref_.is_gradient_in_loss(x.tensor) && std::ranges::count(sum_dtypes_, out.dtype) > 0)
    no_rule("{}, a gradient that the loss is made of, in the type of sums of gradients", describe(ref_, x));
  if (out.dtype != own && out.dtype != accumulate_dtype(own) && !is_asked_sum(out))
    refuse("it adds up {} in {}", describe(ref_, x), name_of(out.dtype));
  if (const double* c = ref_.constant(sum.tensor)) {
    if (!is_neutral(combine, *c)) refuse("the {} over micro-batches begins with {}", combine, *c);
    if (!x.terms.whole() && combine != name_of(x.combine))
      refuse("it is combined by {}, where {} combines by {}", combine, describe(ref_, x), name_of(x.combine));
    return {with_zeros(out, sum, *c)};
  }
  if (!x.terms.whole() && combine != name_of(x.combine))
    refuse("it is combined by {}, where {} combines by {}", combine, describe(ref_, x), name_of(x.combine));
  Value both = with_terms(ref_, tree_, sum, x);
  const std::string fault = tree_.fault_of(sum.tensor, sum.terms, x.terms);
  if (!fault.empty()) refuse("in exact mode it adds {} to {}: {}", describe(ref_, x), describe(ref_, sum), fault);
  return {both};
}

// Two pieces of what is read piece by piece, each with the results of its own keys: lines of them that belong together.
std::vector<Value> Kernels::merge(const KernelCall& call) {
  const size_t n = call.out.size();
  if (call.in.size() != 2 * n) refuse("it merges {} operands to {} results", call.in.size(), n);
  const TermBox& terms = call.in[0].value->terms.summands()[0].boxes.at(0);
  const Op& op = ref_.graph().op(terms.at(0).key.op);
  OpView whole{call.code, &call.attrs, {}, {}, {}};
  for (size_t i = 0; i < call.in.size(); ++i) {
    const Operand& x = call.in[i];
    const size_t o = i % n;
    if (!x.value || x.value->terms.whole() || x.value->combine != Joining(call.code) || o >= op.outputs.size() ||
        x.value->tensor != ref_.root(op.outputs[o]))
      refuse("it merges {}, where a piece of result {} of {} is expected",
             x.value ? describe(ref_, *x.value) : "nothing", o, op.name);
    if (!(x.value->terms.summands()[0].boxes == call.in[i - o].value->terms.summands()[0].boxes))
      refuse("it merges {} beside {}", describe(ref_, *x.value), describe(ref_, *call.in[i - o].value));
    whole.present.push_back(true);
    whole.inputs.push_back({x.value->dtype, ref_.tensor(x.value->tensor).dims});
  }
  check_lines(call, def(call.code).factors(whole));
  std::vector<Value> out;
  for (size_t o = 0; o < n; ++o) {
    out.push_back(with_terms(ref_, tree_, *call.in[o].value, *call.in[o + n].value));
    Value& made = out.back();
    const DType own = ref_.tensor(made.tensor).dtype, to = call.out[o].dtype;
    if (made.dtype != accumulate_dtype(own) || call.in[o + n].value->dtype != made.dtype ||
        (to != made.dtype && (to != own || !made.terms.whole())))
      refuse("it makes {} in {}", describe(ref_, made), name_of(to));
    made.dtype = to;
    std::vector<uint64_t> orders = call.orders();  // each piece of a result goes into all of them
    orders.push_back(made.order);
    made.order = tree_.made(made, def(call.code).name, orders, {});
  }
  return out;
}

// Operands hold the same positions of each factor, and the rest as a whole.
void Kernels::check_lines(const KernelCall& call, const Factors& factors) const {
  std::vector<std::vector<Digit>> digits;
  for (const Operand& x : call.in) {
    const Dims& dims = ref_.tensor(x.value->tensor).dims;
    const auto in = x.value->region.in(dims);
    if (!in || x.local.size() != dims.size()) no_rule("{} of {}", to_string(x.value->region), to_string(dims));
    digits.push_back(in->digits());
    for (size_t d = 0; d < dims.size(); ++d)
      if (digits.back()[d].set.size() != x.local[d])
        refuse("it reads {} as {}", describe(ref_, *x.value), to_string(x.local));
  }
  std::vector<std::vector<bool>> cut;
  for (const auto& of : digits) cut.emplace_back(of.size());
  for (const Factor& f : factors.list)
    for (size_t i = 0; i < digits.size(); ++i) {
      const SubAxis& at = f.inputs.at(i);
      if (!at.present() || at.outer != 1 || at.inner != 1) no_rule("{} of {}", f.name, call.name);
      const auto &mine = digits[i][at.dim], &first = digits[0][f.inputs[0].dim];
      if (!(mine == first))
        refuse("operand {} has {} of {}, operand 0 {}", i, to_string(mine.set), f.name, to_string(first.set));
      cut[i][at.dim] = true;
    }
  for (size_t i = 0; i < digits.size(); ++i)
    for (size_t d = 0; d < digits[i].size(); ++d)
      if (!cut[i][d] && !digits[i][d].whole())
        refuse("operand {} is {}, and all of dimension {} is needed", i, describe(ref_, *call.in[i].value), d);
}

// The program adds these two in another order: one of its sums, or a part of the smallest that has both.
std::optional<Value> Kernels::two_of_sum(const KernelCall& call) {
  if (tree_.asked() || call.code != OpCode::k_add || !call.in[0].value || !call.in[1].value ||
      call.in[0].local != call.in[1].local)
    return {};
  const Value &a = *call.in[0].value, &b = *call.in[1].value;
  if (!a.terms.whole() || !b.terms.whole() || a.dtype != b.dtype || !same(a.region, b.region)) return {};
  const auto region = known(a.region, b.region);
  if (!region) return {};
  const auto fits = [&](TensorId sum) {
    return ref_.tensor(sum).dims == ref_.tensor(a.tensor).dims && ref_.tensor(sum).dtype == a.dtype;
  };
  std::optional<TensorIds> wanted = all_summands_of(ref_, a.tensor);
  const std::optional<TensorIds> more = all_summands_of(ref_, b.tensor);
  if (!wanted || !more) return {};
  wanted->insert(wanted->end(), more->begin(), more->end());
  std::ranges::sort(*wanted);
  for (const OpId id : ref_.ops_of(OpCode::k_add)) {
    const TensorId out = ref_.root(ref_.graph().op(id).outputs[0]);
    if (!fits(out) || all_summands_of(ref_, out) != wanted) continue;
    Value all = a;
    all.tensor = out, all.region = *region;
    return all;
  }
  const TensorIds left = summands_of(ref_, a.tensor), right = summands_of(ref_, b.tensor);
  if (std::ranges::any_of(left, [&](TensorId id) { return std::ranges::count(right, id) > 0; })) return {};
  TensorIds best, both = left;
  both.insert(both.end(), right.begin(), right.end());
  TensorId sum = kNone;
  for (const OpId id : ref_.ops_of(OpCode::k_add)) {
    const TensorId out = ref_.root(ref_.graph().op(id).outputs[0]);
    if (!fits(out)) continue;
    TensorIds all = summands_of(ref_, out);
    if (!has_all(all, left) || !has_all(all, right)) continue;
    if (sum == kNone || all.size() < best.size()) sum = out, best = std::move(all);
  }
  if (sum == kNone) return {};
  std::ranges::sort(best);
  std::vector<Summand> terms;
  for (const TensorId id : best) {
    const bool here = std::ranges::count(left, id) || std::ranges::count(right, id);
    terms.push_back({id, std::vector<TermBox>(here ? 1 : 0)});
  }
  Value out = a;
  out.tensor = sum, out.region = *region, out.terms = Terms::of(std::move(terms)), out.combine = Combine::kSum;
  return out;
}

// The program adds before an op that is linear (of layers that are one, in form); a plan may add behind it.
std::optional<std::vector<Value>> Kernels::of_summand(const KernelCall& call) {
  if (tree_.asked()) return {};  // bits depend on the order
  for (const OpId id : ref_.ops_of(call.code)) {
    const Op& op = ref_.graph().op(id);
    if (op.inputs.size() != call.in.size()) continue;
    size_t at = call.in.size(), unlike = 0;
    for (size_t i = 0; i < op.inputs.size(); ++i)
      if ((call.in[i].value ? call.in[i].value->tensor : kNone) != ref_.root(op.inputs[i])) at = i, ++unlike;
    if (unlike != 1 || !call.in[at].value || op.inputs[at] == kNone) continue;
    const Value& x = *call.in[at].value;
    const TensorId sum = ref_.root(op.inputs[at]);
    const TensorIds all = summands_of(ref_, sum);
    const std::vector<std::vector<int>>& linear = shape_of(id, false, {}).factors->linear;
    if (std::ranges::count(linear, std::vector<int>{static_cast<int>(at)}) == 0) continue;
    const TensorIds mine = x.terms.whole() ? summands_of(ref_, x.tensor) : TensorIds{x.tensor};
    if (all.size() <= mine.size() || !has_all(all, mine) || ref_.tensor(sum).dtype != x.dtype) continue;
    if (!x.terms.whole() && (x.combine != Combine::kSum || x.terms.summands().size() != 1)) continue;
    Value instead = x;
    instead.tensor = sum, instead.combine = Combine::kSum;
    instead.terms = terms_of(all, mine, x.terms.whole() ? std::vector<TermBox>(1) : x.terms.summands()[0].boxes);
    KernelCall with = call;
    with.in[at].value = &instead;
    try {
      return match(with, id);
    } catch (const Stop&) {  // another one may fit
    }
  }
  return {};
}

// The program reads a summand, where the plan has the sum without the others.
std::optional<std::vector<Value>> Kernels::of_whole_summands(const KernelCall& call) {
  std::vector<std::optional<Value>> instead(call.in.size());
  KernelCall with = call;
  for (size_t i = 0; i < call.in.size(); ++i) {
    if (call.in[i].value && !call.in[i].value->terms.whole()) instead[i] = whole_summands(ref_, *call.in[i].value);
    if (instead[i]) with.in[i].value = &*instead[i];
  }
  const bool changed = std::ranges::any_of(instead, [](const auto& v) { return v.has_value(); });
  if (!changed || !has(with)) return {};
  return one(with);
}

// The program adds whole tensors in its order; a plan may add what unlike replicas made of each as it comes.
std::optional<Value> Kernels::more_terms(const KernelCall& call) {
  if (tree_.asked() || call.code != OpCode::k_add || call.in[0].local != call.in[1].local || !call.in[0].value ||
      !call.in[1].value)
    return {};
  const Value &a = *call.in[0].value, &b = *call.in[1].value;
  auto made = with_summands(ref_, a, b);
  return made ? made : with_summands(ref_, b, a);
}

}  // namespace whale::proof
