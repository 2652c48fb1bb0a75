// What is one number all over: zeros and other constants, what is made of them, and what they stand for in sums.
#include <algorithm>
#include <cmath>
#include <optional>

#include "ops/nothing.h"
#include "prove/kernel.h"

namespace whale::proof {
namespace {

bool has_signs(const Operand& o) { return o.value && o.value->signs; }

}  // namespace

// Does the program have this op of these operands?
bool Kernels::has(const KernelCall& call) const { return ref_.find(call.code, call.roots()) != nullptr; }

Value Kernels::constant(const Result& r, double value) {
  Value v{.tensor = ref_.constant(r.dtype, value), .dtype = r.dtype};
  std::vector<Digit> digits;
  for (const int64_t n : r.local) digits.push_back({n, Set::first(n), true});
  v.region = Region(std::move(digits));
  return v;
}

// A constant, or elements of one.
std::optional<Value> Kernels::as_number(const KernelCall& call) {
  if (call.code == OpCode::k_fill) {
    Value number = constant(call.out.at(0), attr_float(call.attrs, "value"));
    number.of_nothing = maker_of_nothing(call.name);
    return number;
  }
  const Value* of = keeps_numbers(call.code) ? call.in.at(0).value : nullptr;
  if (!of || !ref_.constant(of->tensor)) return {};
  check_shapes(call);
  Value same = constant(call.out.at(0), 0);
  same.tensor = of->tensor, same.dtype = of->dtype;
  same.terms = of->terms, same.combine = of->combine;
  const bool is_view = has_flag(call.code, kView);  // the program has them as one
  same.of_nothing = is_view || of->of_nothing == OpCode{} ? of->of_nothing : call.code;
  same.order = of->order, same.signs = of->signs;
  return same;
}

std::vector<Value> Kernels::nothing(const KernelCall& call) {
  std::vector<Value> out;
  for (const Result& r : call.out)
    out.push_back({.tensor = ref_.constant(r.dtype, 0), .dtype = r.dtype, .region = Region({{0, Set(), true}})});
  return out;
}

// Nothing adds nothing.
std::vector<Value> Kernels::without_elements(const KernelCall& call) {
  if (call.code == OpCode::k_concat) {
    KernelCall rest = call;
    std::erase_if(rest.in, [](const Operand& o) { return !o.value || o.value->region.size() == 0; });
    if (rest.in.empty()) return {*call.in.at(0).value};
    return rest.in.size() == 1 ? std::vector<Value>{*rest.in[0].value} : run(rest);
  }
  if (std::ranges::all_of(call.out, [](const Result& r) { return element_count(r.local) == 0; })) return nothing(call);
  if (std::vector<Value> none = zeros(call); !none.empty()) return none;
  no_rule("{} reads a tensor without elements", def(call.code).name);
}

// A sum of no terms is zero, and so is what is linear in it.
std::vector<Value> Kernels::zeros(const KernelCall& call) {
  const OpDef& d = def(call.code);
  if (!d.factors) return {};
  OpView view{call.code, &call.attrs, {}, {}, {}};
  std::vector<char> zero;
  bool of_nothing = false, of_no_elements = false;
  for (const Operand& o : call.in) {
    view.present.push_back(o.value != nullptr);
    view.inputs.push_back(o.value ? TensorType{o.value->dtype, o.local} : TensorType{});
    const double* c = o.value ? ref_.constant(o.value->tensor) : nullptr;
    zero.push_back(o.value && ((c && *c == 0) || o.value->region.size() == 0));
    of_no_elements |= o.value && o.value->region.size() == 0;
    of_nothing |= zero.back() && (o.value->of_nothing != OpCode{} || o.value->region.size() == 0);
    if (c && std::isinf(*c) && has(call)) return {};  // the program's own
    if (c && std::isinf(*c)) no_rule("{} of an infinity, as what has no terms has one for its largest", d.name);
  }
  for (const Result& r : call.out) view.outputs.push_back({r.dtype, r.local});
  // Numbers that are known make a number, and zero times what is no number is none.
  const auto number = [&](const Operand& o) { return o.value ? ref_.constant(o.value->tensor) : nullptr; };
  const auto is_finite = [&](const Operand& o) {
    const double* c = number(o);
    return !c || !(std::isinf(*c) || o.value->tensor == ref_.constant(o.value->dtype, std::nan("")));
  };
  const auto is_known = [&](const Operand& o) { return number(o) && !std::isnan(*number(o)); };
  if (d.of_numbers != nullptr && std::ranges::all_of(call.in, is_known) &&
      d.of_numbers(*number(call.in[0]), *number(call.in[1])) != 0)
    return {};
  // The sign of a zero is that of what it is made of, at each place: what the program makes so is no number.
  const auto is_number = [&](const Operand& o) { return !o.value || number(o) || o.value->region.size() == 0; };
  const bool signs = tree_.asked() && !std::ranges::all_of(call.in, is_number);
  if (signs && !of_nothing && has(call)) return {};
  const bool linear = makes_zeros(call.code, d.factors(view), zero) && std::ranges::all_of(call.in, is_finite);
  std::vector<Value> out;
  if (linear) check_shapes(call);
  std::string numbers(d.name);  // each its own zero, 0 or -0
  for (const Operand& o : call.in)
    if (const double* c = number(o); tree_.asked() && c) numbers += fmt::format(" {}", *c);
  for (const Result& r : call.out)
    if (linear) {
      out.push_back(constant(r, 0));
      out.back().of_nothing = of_nothing ? call.code : OpCode{};
      if (!of_no_elements) out.back().order = tree_.made(out.back(), numbers, call.orders(), {});
      out.back().signs = (signs && !of_nothing) || std::ranges::any_of(call.in, has_signs);
    }
  return out;
}

// The program adds zeros to this, which changes nothing; or they are those of a sum without terms.
std::optional<std::vector<Value>> Kernels::beside_zeros(const KernelCall& call, const std::vector<OpId>& found) {
  if (call.code != OpCode::k_add) return {};
  const TensorId same = ref_.root(ref_.graph().op(found[0]).outputs[0]);
  for (const size_t i : {size_t{0}, size_t{1}}) {
    if (!ref_.is_zero(call.in[i].value->tensor) || call.in[1 - i].value->tensor != same) continue;
    const auto named = [&](OpId op) { return ref_.graph().op(op).name == call.name; };
    const bool is_named = call.forward && std::ranges::any_of(found, named);
    if (!is_named && call.in[i].value->of_nothing != OpCode{})
      if (auto made = with_zeros(call, Like::kMaker)) return made;
    if (!is_named && call.forward)
      if (auto made = with_zeros(call, Like::kName)) return made;
    Value out = *call.in[1 - i].value;
    const Value& zeros = *call.in[i].value;
    out.order = tree_.beside_zero(out, zeros, *ref_.constant(zeros.tensor));
    return std::vector<Value>{std::move(out)};
  }
  return {};
}

// A gradient that is zero by form, in the type of sums that an option asks for.
std::optional<std::vector<Value>> Kernels::with_asked_zeros(const KernelCall& call) {
  for (const DType own : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    KernelCall with = call;
    std::vector<Value> instead(call.in.size());
    for (size_t i = 0; i < call.in.size(); ++i) {
      const Value*& v = with.in[i].value;
      if (v && ref_.constant(v->tensor) && ref_.is_zero(v->tensor) && v->dtype != own && is_asked_sum(*v)) {
        instead[i] = *v, instead[i].tensor = ref_.constant(own, 0);
        v = &instead[i];
      }
    }
    const bool changed = std::ranges::any_of(instead, [](const Value& v) { return v.tensor != kNone; });
    if (changed && has(with)) return one(with);
  }
  return {};
}

// Zeros of a device that has nothing of what another one made by such an op: terms of the same sum, none.
std::optional<std::vector<Value>> Kernels::of_own_zeros(const KernelCall& call) {
  if (call.code != OpCode::k_add || call.in[0].local != call.in[1].local) return {};
  for (const size_t i : {size_t{0}, size_t{1}}) {
    const Value &zeros = *call.in[i].value, &terms = *call.in[1 - i].value;
    const OpId maker = ref_.tensor(terms.tensor).producer;
    if (!ref_.is_zero(zeros.tensor) || zeros.of_nothing == OpCode{} || maker == kNone ||
        ref_.graph().op(maker).code != zeros.of_nothing)
      continue;
    if (auto made = with_zeros(call, Like::kMaker)) return made;
    Value out = terms;
    const double* zero = ref_.constant(zeros.tensor);
    out.order = tree_.beside_zero(out, zeros, zero ? *zero : 0);
    return std::vector<Value>{std::move(out)};
  }
  return {};
}

// Zero in the place of a sum is that sum without any of its terms.
std::optional<std::vector<Value>> Kernels::with_zeros(const KernelCall& call, Like like) {
  const auto zero = [&](size_t i) {
    const double* c = call.in[i].value ? ref_.constant(call.in[i].value->tensor) : nullptr;
    return c && *c == 0;
  };
  std::vector<OpId> fit;
  for (const OpId id : ref_.ops_of(call.code)) {
    const Op& op = ref_.graph().op(id);
    bool fits = op.inputs.size() == call.in.size(), any = false;
    bool alike = like != Like::kMaker && op.name == call.name;  // what it is, or who makes it
    for (size_t i = 0; fits && i < op.inputs.size(); ++i) {
      const TensorId root = ref_.root(op.inputs[i]);
      if ((call.in[i].value ? call.in[i].value->tensor : kNone) == root) continue;
      fits = root != kNone && zero(i) && call.in[i].value->dtype == ref_.tensor(root).dtype;
      any = true;
      if (!fits || like == Like::kName) continue;
      const OpId maker = ref_.tensor(root).producer;
      alike |= maker != kNone && ref_.graph().op(maker).code == call.in[i].value->of_nothing;
    }
    if (fits && any && (like == Like::kAny || alike)) fit.insert(alike ? fit.begin() : fit.end(), id);
  }
  for (const OpId id : fit) {
    const Op& op = ref_.graph().op(id);
    std::vector<Value> instead(call.in.size());
    KernelCall with = call;
    for (size_t i = 0; i < op.inputs.size(); ++i) {
      if (!call.in[i].value || call.in[i].value->tensor == ref_.root(op.inputs[i])) continue;
      instead[i] = *call.in[i].value;
      instead[i].tensor = ref_.root(op.inputs[i]);
      instead[i].terms = Terms::none(instead[i].tensor);
      const Dims& dims = ref_.tensor(op.inputs[i]).dims;
      std::vector<Digit> digits;
      for (size_t d = 0; d < dims.size() && d < call.in[i].local.size(); ++d)
        digits.push_back({dims[d], Set::first(call.in[i].local[d]), true});
      instead[i].region = Region(std::move(digits));
      with.in[i].value = &instead[i];
    }
    try {
      return match(with, id);
    } catch (const Stop&) {  // another one may fit
    }
  }
  return {};
}

// What is one number all over is so after each element's op, whatever its shape.
std::optional<std::vector<Value>> Kernels::uniform(const KernelCall& call, const std::vector<OpId>& found) {
  if (!std::ranges::all_of(call.in, [](const Operand& o) { return !o.value || o.value->terms.whole(); })) return {};
  for (const OpId id : found) {
    const Op& op = ref_.graph().op(id);
    if (!ref_.constant(ref_.root(op.outputs[0])) || op.key != call.key || !same_attrs(op.attrs, call.attrs)) continue;
    check_shapes(call);
    std::vector<Value> out;
    for (size_t o = 0; o < call.out.size(); ++o) {
      out.push_back(constant(call.out[o], 0));
      out[o].tensor = ref_.root(op.outputs.at(o)), out[o].dtype = ref_.tensor(op.outputs[o]).dtype;
      out[o].order = tree_.made(out[o], call.whole, call.orders(), {});
      out[o].signs = std::ranges::any_of(call.in, has_signs);
    }
    return out;
  }
  return {};
}

// A number that the plan computes, where the program may have it as one.
std::optional<Value> Kernels::of_numbers(const KernelCall& call) {
  const auto number = [&](size_t i) { return call.in[i].value ? ref_.constant(call.in[i].value->tensor) : nullptr; };
  if (call.in.size() != 2 || call.out.size() != 1 || !number(0) || !number(1) || std::isnan(*number(0)) ||
      std::isnan(*number(1)))
    return {};
  const DType dtype = call.out[0].dtype;
  const auto in_type = [&](double x) { return dtype == DType::kF32 ? static_cast<float>(x) : x; };
  if (dtype != DType::kF32 && dtype != DType::kF64) return {};
  const auto make = def(call.code).of_numbers;
  const double made = make == nullptr ? std::nan("") : in_type(make(in_type(*number(0)), in_type(*number(1))));
  if (!std::isfinite(made)) return {};
  check_shapes(call);
  return constant(call.out[0], made);
}

}  // namespace whale::proof
