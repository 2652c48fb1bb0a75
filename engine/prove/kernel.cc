#include "prove/kernel.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <optional>

#include "ops/fused.h"
#include "prove/join.h"

namespace whale::proof {
namespace {

// Ops that combine two values as collectives combine many.
constexpr std::pair<OpCode, Combine> kPairs[] = {{OpCode::k_add, Combine::kSum},
                                                 {OpCode::k_maximum, Combine::kMax},
                                                 {OpCode::k_minimum, Combine::kMin},
                                                 {OpCode::k_logaddexp, Combine::kLogSumExp}};

// Terms of one tensor on both sides, which the one-device program combines within an op. Of those of which only the
// number is known, as many on both sides may be others.
std::optional<Combine> combines_terms(const Reference& ref, const KernelCall& call) {
  for (const auto& [code, combine] : kPairs) {
    if (call.code != code) continue;
    const Value &a = *call.in.at(0).value, &b = *call.in.at(1).value;
    const bool others = !(a.terms == b.terms) || (a.terms.counted() && !ref.find(code, {a.tensor, b.tensor}));
    if (a.tensor == b.tensor && !a.terms.whole() && !b.terms.whole() && others) return combine;
  }
  return {};
}

// What a plan may have and its one-device program not, made of ops that programs have too.
bool is_of_plans(OpCode code) {
  constexpr OpCode kOwn[] = {OpCode::k_add,     OpCode::k_cast,    OpCode::k_concat, OpCode::k_logaddexp,
                             OpCode::k_maximum, OpCode::k_minimum, OpCode::k_slice};
  return has_flag(code, kInternal) || std::find(std::begin(kOwn), std::end(kOwn), code) != std::end(kOwn);
}

// An op that a kernel does beside others, where the kernel is.
KernelCall step_of(const KernelCall& call, OpCode code, uint64_t key) {
  return {.code = code,
          .key = key,
          .box = call.box,
          .samples = call.samples,
          .device = call.device,
          .forward = call.forward};
}

// The op that zeros without a name of the user's are called after, which has no part to make them of: "matmul_32",
// "matmul_32.none". None: they are numbers of their own.
OpCode named_after(std::string_view name) {
  name = name.substr(0, name.find('.'));
  while (!name.empty() && (name.back() == '_' || std::isdigit(static_cast<unsigned char>(name.back()))))
    name.remove_suffix(1);
  const OpCode code = find_op(name) != nullptr ? code_of(name) : OpCode{};
  return code == OpCode::k_fill ? OpCode{} : code;
}

// Sums of blocks, and then of those: in exact mode whoever does it does it so.
bool has_blocks(const Graph& parts) {
  return std::ranges::any_of(parts.ops, [&](const Op& op) {
    return std::ranges::any_of(factors_of(parts, op).list, [](const Factor& f) { return f.group.rows > 0; });
  });
}

// Which kernel does it: what it does at once may have other bits than its parts.
std::string kernel_of(const KernelCall& call) {
  std::string out(def(call.code).name);
  for (const Operand& o : call.in) out += o.value != nullptr ? " x" : " _";
  for (const auto& [name, value] : call.attrs)
    if (const auto* text = std::get_if<std::string>(&value)) out += " " + *text;
  return out;
}

}  // namespace

bool is_of_reshard(const KernelCall& call) {
  return std::ranges::any_of(call.in, [](const Operand& o) { return o.name.find(".from") != o.name.npos; });
}

std::vector<Value> Kernels::run(const KernelCall& call) {
  const OpDef& d = def(call.code);
  const bool updates_many = d.flags & kUpdateOp && !d.inputs.empty() && d.inputs.back().kind == PortKind::kVariadic;
  const auto is_empty = [](const Operand& o) { return o.value && o.value->region.size() == 0; };
  if (!updates_many && std::ranges::any_of(call.in, is_empty)) return without_elements(call);
  const auto makes_nothing = [](const Result& r) { return element_count(r.local) == 0; };
  if (!updates_many && !call.out.empty() && std::ranges::all_of(call.out, makes_nothing)) return nothing(call);
  if (call.code == OpCode::k_fused) return fused(call);
  if (call.code == OpCode::k_accumulate) {
    const std::string& combine = attr_string(call.attrs, "combine");
    return accumulate(call, combine.empty() ? "sum" : combine);
  }
  if (!call.in.empty() && call.in[0].value && !call.in[0].value->terms.whole() &&
      call.in[0].value->combine == Joining(call.code))
    return merge(call);
  // Nothing beside terms. Zeros may be another summand's (with_zeros), but for those that a reshard adds by messages.
  for (const auto& [code, combine] : kPairs)
    for (const size_t i : {size_t{0}, size_t{1}}) {
      if (call.code != code || (combine == Combine::kSum && !is_of_reshard(call))) continue;
      const Value &none = *call.in.at(i).value, &terms = *call.in.at(1 - i).value;
      const double* c = ref_.constant(none.tensor);
      const bool right = terms.terms.whole() ? !ref_.find(code, {call.in[0].value->tensor, call.in[1].value->tensor})
                                             : terms.combine == combine;
      if (!c || !is_neutral(name_of(combine), *c) || !right || call.in[0].local != call.in[1].local) continue;
      Value out = terms;
      if (combine == Combine::kSum) out.order = tree_.beside_zero(out, none, *c);
      return {std::move(out)};
    }
  if (const auto combine = combines_terms(ref_, call)) return accumulate(call, name_of(*combine));
  if (call.code == OpCode::k_cast)
    if (auto made = cast(call)) return {std::move(*made)};
  const bool copies = call.code == OpCode::k_stop_gradient ||
                      (call.code == OpCode::k_cast && call.in.at(0).value->dtype == call.out.at(0).dtype);
  if (copies) return {*call.in.at(0).value};
  if (call.code == OpCode::k_local_slice || call.code == OpCode::k_part_view) return slice(call);
  if (call.code == OpCode::k_fill) {
    Value number = constant(call.out.at(0), attr_float(call.attrs, "value"));
    number.of_nothing = named_after(call.name);
    return {std::move(number)};
  }
  if (updates_many) return updates(call);
  if (keeps_numbers(call.code) && call.in.at(0).value && ref_.constant(call.in[0].value->tensor)) {
    check_shapes(call);
    Value same = constant(call.out.at(0), 0);
    same.tensor = call.in[0].value->tensor, same.dtype = call.in[0].value->dtype;
    same.terms = call.in[0].value->terms, same.combine = call.in[0].value->combine;
    same.of_nothing = call.in[0].value->of_nothing;
    return {std::move(same)};
  }
  if (std::optional<Value> bias = wide_bias(call)) {
    KernelCall with = call;
    with.in[2].value = &*bias;
    return one(with);
  }
  if (d.decompose && !is_whole(call)) {
    Graph scratch;
    Op op{.code = call.code,
          .name = call.name,
          .inputs = {},
          .outputs = {},
          .attrs = call.attrs,
          .key = call.key,
          .location = {}};
    const auto tensor = [&](const Dims& dims, DType dtype) {
      scratch.tensors.push_back({.name = std::to_string(scratch.tensors.size()), .dtype = dtype, .dims = dims});
      return static_cast<TensorId>(scratch.tensors.size() - 1);
    };
    for (const Operand& o : call.in) op.inputs.push_back(o.value ? tensor(o.local, o.value->dtype) : kNone);
    for (const Result& r : call.out) op.outputs.push_back(tensor(r.local, r.dtype));
    TensorIds results;
    try {
      results = smaller_form(scratch, op);
    } catch (const Error& e) {
      refuse("{}", e.message());
    }
    if (!results.empty()) return parts(call, scratch, results);
  }
  return one(call);
}

// A bias as it is kept, in 16 bits, where the program reads it as the same number in a wider type: it is added as it
// is.
std::optional<Value> Kernels::wide_bias(const KernelCall& call) {
  if (!has_flag(call.code, kProduct) || call.in.size() < 3 || !call.in[2].value || is_whole(call)) return {};
  const Value& bias = *call.in[2].value;
  const std::vector<OpId>* casts =
      is_float(bias.dtype) && bias.terms.whole() ? ref_.find(OpCode::k_cast, {bias.tensor}) : nullptr;
  for (size_t k = 0; casts && k < casts->size(); ++k) {
    Value wide = bias;
    wide.tensor = ref_.root(ref_.graph().op((*casts)[k]).outputs[0]);
    wide.dtype = ref_.tensor(wide.tensor).dtype;
    KernelCall with = call;
    with.in[2].value = &wide;
    if (is_float(wide.dtype) && size_of(wide.dtype) > size_of(bias.dtype) && is_whole(with)) return wide;
  }
  return {};
}

// The program has it in one piece, too.
bool Kernels::is_whole(const KernelCall& call) const {
  if (!has_flag(call.code, kProduct)) return false;
  TensorIds roots;
  for (const Operand& o : call.in) roots.push_back(o.value ? o.value->tensor : kNone);
  const std::vector<OpId>* found = ref_.find(call.code, roots);
  return found && std::ranges::any_of(*found, [&](OpId id) { return ref_.graph().op(id).attrs == call.attrs; });
}

std::vector<Value> Kernels::parts(const KernelCall& call, const Graph& scratch, const TensorIds& results) {
  std::vector<std::optional<Value>> made(scratch.tensors.size());
  size_t next = 0;
  for (const Operand& o : call.in)
    if (o.value) made[next++] = *o.value;
  const std::string whole = !call.whole.empty() ? call.whole : has_blocks(scratch) ? "" : kernel_of(call);
  for (const Op& op : scratch.ops) {
    KernelCall step = step_of(call, op.code, op.key);
    step.attrs = op.attrs, step.name = call.name;
    step.whole = whole;
    for (const TensorId id : op.inputs) {
      if (id == kNone) {
        step.in.emplace_back();
        continue;
      }
      step.in.push_back({&*made[static_cast<size_t>(id)], scratch.tensor(id).dims, {}});
    }
    for (const TensorId id : op.outputs) step.out.push_back({scratch.tensor(id).dims, scratch.tensor(id).dtype});
    std::vector<Value> values = run(step);
    for (size_t k = 0; k < values.size(); ++k) made[static_cast<size_t>(op.outputs[k])] = std::move(values[k]);
  }
  std::vector<Value> out;
  for (const TensorId id : results) out.push_back(*made[static_cast<size_t>(id)]);
  return out;
}

std::vector<Value> Kernels::fused(const KernelCall& call) {
  const FusedBody body = decode(call.attrs, static_cast<int>(call.in.size()));
  std::vector<Value> made;
  std::vector<Dims> local;
  made.reserve(body.steps.size());
  const auto n = static_cast<int>(call.in.size());
  for (const FusedStep& step : body.steps) {
    KernelCall each = step_of(call, step.code, step.key);
    if (&step == &body.steps.back()) each.name = call.name;
    Dims dims;
    for (const int o : step.operands) {
      each.in.push_back(o < n ? call.in[static_cast<size_t>(o)]
                              : Operand{&made[static_cast<size_t>(o - n)], local[static_cast<size_t>(o - n)], {}});
      dims = broadcast_dims(dims, each.in.back().local);
    }
    if (step.code == OpCode::k_cast) each.attrs["dtype"] = std::string(name_of(step.dtype));
    if (has_flag(step.code, kRandom)) {
      each.attrs["rate"] = step.value;
      each.attrs["key"] = static_cast<int64_t>(step.key);
    }
    each.attrs = complete_attrs(def(step.code), std::move(each.attrs));
    each.out = {{dims, step.dtype}};
    made.push_back(std::move(run(each).at(0)));
    local.push_back(std::move(dims));
  }
  std::vector<Value> out;
  for (const int r : body.results) out.push_back(made[static_cast<size_t>(r - n)]);
  return out;
}

// One update a tuple.
std::vector<Value> Kernels::updates(const KernelCall& call) {
  const std::vector<OpId>& known = ref_.ops_of(call.code);
  if (known.empty()) refuse("the one-device program has no {}", def(call.code).name);
  const Op& like = ref_.graph().op(known[0]);
  const size_t first = def(call.code).inputs.size() - 1, width = like.inputs.size() - first, per = like.outputs.size();
  if (width == 0 || (call.in.size() - first) % width)
    refuse("{} operands, where {} a parameter were expected", call.in.size(), width);
  const size_t count = (call.in.size() - first) / width;
  if (call.out.size() != count * per) refuse("{} results, {} expected", call.out.size(), count * per);
  const Ints& decays = attr_ints(call.attrs, "decays");
  if (!decays.empty() && decays.size() != count) refuse("{} entries of decays, {} expected", decays.size(), count);
  std::vector<Value> out;
  for (size_t t = 0; t < count; ++t) {
    KernelCall each = call;
    each.in.assign(call.in.begin(), call.in.begin() + static_cast<std::ptrdiff_t>(first));
    each.out.clear();
    for (size_t k = 0; k < width; ++k) each.in.push_back(call.in[first + t * width + k]);
    for (size_t k = 0; k < per; ++k) each.out.push_back(call.out[t * per + k]);
    if (!decays.empty()) each.attrs["decays"] = Ints{decays[t]};
    if (std::any_of(each.out.begin(), each.out.end(), [](const Result& r) { return element_count(r.local) == 0; })) {
      out.resize(out.size() + per);  // nothing is here of this one
      continue;
    }
    std::vector<Value> values = one(each);
    out.insert(out.end(), values.begin(), values.end());
  }
  return out;
}

std::vector<Value> Kernels::slice(const KernelCall& call) {
  const Operand& x = call.in.at(0);
  const Ints& given = attr_ints(call.attrs, "sub_axis");
  const SubAxis s{static_cast<int>(given.at(0)), given.at(1), given.at(2)};
  const auto part = x.value->region.cut(x.local, s, {attr_int(call.attrs, "begin"), attr_int(call.attrs, "end")});
  if (!part) no_rule("a slice of {}", describe(ref_, *x.value));
  Value out = *x.value;
  out.region = *part;
  return {out};
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
  no_rule("{} reads a tensor without elements", call.name);
}

std::vector<Value> Kernels::nothing(const KernelCall& call) {
  std::vector<Value> out;
  for (const Result& r : call.out)
    out.push_back({.tensor = ref_.constant(r.dtype, 0), .dtype = r.dtype, .region = Region({{0, Set(), true}})});
  return out;
}

std::vector<Value> Kernels::one(const KernelCall& call) {
  const auto of_no_terms = [&](const Operand& o) {
    const double* c = o.value ? ref_.constant(o.value->tensor) : nullptr;
    return c && (*c == 0 || std::isinf(*c));
  };
  if (std::ranges::any_of(call.in, of_no_terms))
    if (std::vector<Value> none = zeros(call); !none.empty()) return none;
  TensorIds roots;
  for (const Operand& o : call.in) roots.push_back(o.value ? o.value->tensor : kNone);
  const std::vector<OpId>* found = ref_.find(call.code, roots);
  std::optional<KernelCall> turned;  // a sum is the same in any order
  if (!found && call.code == OpCode::k_add) {
    turned = call;
    std::swap(turned->in[0], turned->in[1]);
    std::swap(roots[0], roots[1]);
    found = ref_.find(call.code, roots);
  }
  if (!found) {
    if (auto made = of_numbers(call)) return {std::move(*made)};
    if (auto made = with_asked_zeros(call)) return *made;
    if (auto made = with_zeros(call)) return *made;
    if (auto made = part_of_one(call)) return {*made};
    if (auto made = more_terms(call)) return {*made};
    if (auto made = two_of_sum(call)) return {*made};
    if (auto made = of_summand(call)) return *made;
    if (call.code == OpCode::k_add)
      for (const size_t i : {size_t{0}, size_t{1}})
        if (const double* c = ref_.constant(call.in[i].value->tensor);
            c && *c == 0 && call.in[0].local == call.in[1].local) {
          Value out = *call.in[1 - i].value;
          out.order = tree_.beside_zero(out, *call.in[i].value, *c);
          return {std::move(out)};
        }
    if (ref_.ops_of(call.code).empty()) {
      // A plan combines terms by itself, not whole values, nor those that are combined in another way.
      const auto pair = std::ranges::find(kPairs, call.code, &std::pair<OpCode, Combine>::first);
      const bool of_pair = std::ranges::any_of(call.in, [&](const Operand& o) {
        return o.value && !o.value->terms.whole() && o.value->combine == pair->second;
      });
      const bool sums = pair == std::end(kPairs) || pair->second == Combine::kSum;
      if (is_of_plans(call.code) && call.code != OpCode::k_cast && (sums || of_pair))
        no_rule("{}, which the one-device program does not have", def(call.code).name);
      refuse("{}, which the one-device program does not have", def(call.code).name);
    }
    refuse("{}", unlike(call));
  }
  if (auto made = beside_zeros(turned ? *turned : call, *found)) return *made;
  if (auto made = uniform(call, *found)) return *made;
  // Of several that read the same the one of that name first, then those that make that type: what is the same all
  // along a dimension may fit others too.
  std::vector<OpId> fit = *found;
  std::stable_partition(fit.begin(), fit.end(), [&](OpId op) {
    return !call.out.empty() && ref_.tensor(ref_.graph().op(op).outputs[0]).dtype == call.out[0].dtype;
  });
  std::stable_partition(fit.begin(), fit.end(), [&](OpId op) { return ref_.graph().op(op).name == call.name; });
  std::optional<Stop> last;
  std::optional<std::vector<Value>> some;  // of what is the same all along, a part
  const auto open = [](const Value& v) {
    return std::ranges::any_of(v.region.digits(), [](const Digit& d) { return d.any && !d.whole(); });
  };
  for (const OpId op : fit) try {
      std::vector<Value> made = match(turned ? *turned : call, op);
      if (ref_.graph().op(op).name == call.name || std::ranges::none_of(made, open)) return made;
      guessed_ |= some.has_value();
      if (!some) some = std::move(made);
    } catch (Stop& stop) {
      // What the op of that name asks for says the most.
      if (!last || ref_.graph().op(op).name == call.name) last = std::move(stop);
    }
  if (some) return *some;
  if (auto made = with_zeros(call)) return *made;
  throw *last;
}

// A sum of no terms is zero, and so is what is linear in it.
std::vector<Value> Kernels::zeros(const KernelCall& call) {
  const OpDef& d = def(call.code);
  if (!d.factors) return {};
  OpView view{call.code, &call.attrs, {}, {}, {}};
  std::vector<char> zero;
  bool of_nothing = false;
  for (const Operand& o : call.in) {
    view.present.push_back(o.value != nullptr);
    view.inputs.push_back(o.value ? TensorType{o.value->dtype, o.local} : TensorType{});
    const double* c = o.value ? ref_.constant(o.value->tensor) : nullptr;
    zero.push_back(o.value && ((c && *c == 0) || o.value->region.size() == 0));
    of_nothing |= zero.back() && (o.value->of_nothing != OpCode{} || o.value->region.size() == 0);
    if (c && std::isinf(*c)) no_rule("{} of the largest of no terms", call.name);
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
  const bool linear = makes_zeros(d.factors(view), zero) && std::ranges::all_of(call.in, is_finite);
  std::vector<Value> out;
  for (const Result& r : call.out)
    if (linear) {
      out.push_back(constant(r, 0));
      out.back().of_nothing = of_nothing ? call.code : OpCode{};
      std::vector<uint64_t> orders;
      for (const Operand& o : call.in) orders.push_back(o.value ? o.value->order : 0);
      if (!of_nothing) out.back().order = tree_.made(out.back(), d.name, orders, {});
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
    out.order = tree_.beside_zero(out, *call.in[i].value, 0);
    return std::vector<Value>{std::move(out)};
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
      std::vector<uint64_t> orders;
      for (const Operand& x : call.in) orders.push_back(x.value ? x.value->order : 0);
      out[o].order = tree_.made(out[o], call.whole, orders, {});
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

// A gradient that is zero by form, in the type of sums that an option asks for.
std::optional<std::vector<Value>> Kernels::with_asked_zeros(const KernelCall& call) {
  for (const DType own : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
    KernelCall with = call;
    std::vector<Value> instead(call.in.size());
    TensorIds roots;
    for (size_t i = 0; i < call.in.size(); ++i) {
      const Value*& v = with.in[i].value;
      if (v && ref_.constant(v->tensor) && ref_.is_zero(v->tensor) && v->dtype != own && is_asked_sum(*v)) {
        instead[i] = *v, instead[i].tensor = ref_.constant(own, 0);
        v = &instead[i];
      }
      roots.push_back(v ? v->tensor : kNone);
    }
    const bool changed = std::ranges::any_of(instead, [](const Value& v) { return v.tensor != kNone; });
    if (changed && ref_.find(call.code, roots)) return one(with);
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

// A piece of a tensor, or pieces put together again: the plan's own, since the one-device program makes it whole.
std::optional<Value> Kernels::part_of_one(const KernelCall& call) {
  if (call.code == OpCode::k_slice) {
    const Ints &starts = attr_ints(call.attrs, "starts"), &limits = attr_ints(call.attrs, "limits"),
               &strides = attr_ints(call.attrs, "strides");
    if (std::any_of(strides.begin(), strides.end(), [](int64_t s) { return s != 1; })) return {};
    std::vector<Interval> at;
    for (size_t d = 0; d < call.in.at(0).local.size(); ++d) at.push_back({starts.at(d), limits.at(d)});
    const auto region = box_of(call.in[0].value->region, call.in[0].local, at);
    if (!region) return {};
    Value out = *call.in[0].value;
    out.region = *region;
    return out;
  }
  if (call.code != OpCode::k_concat) return {};
  const auto axis = static_cast<size_t>(attr_int(call.attrs, "axis"));
  const Dims& local = call.out.at(0).local;
  std::vector<Piece> pieces;
  int64_t begin = 0;
  for (const Operand& o : call.in) {
    if (o.value && element_count(o.local) == 0) continue;
    if (!o.value || axis >= o.local.size() || o.value->tensor != call.in[0].value->tensor) return {};
    std::vector<Interval> at;
    for (size_t d = 0; d < local.size(); ++d) at.push_back({0, local[d]});
    at[axis] = {begin, begin + o.local[axis]};
    begin += o.local[axis];
    pieces.push_back({std::make_shared<const Value>(*o.value), std::move(at)});
  }
  return *joined(ref_, pieces, local);
}

Value Kernels::constant(const Result& r, double value) {
  Value v{.tensor = ref_.constant(r.dtype, value), .dtype = r.dtype};
  std::vector<Digit> digits;
  for (const int64_t n : r.local) digits.push_back({n, Set::first(n), true});
  v.region = Region(std::move(digits));
  return v;
}

std::string Kernels::unlike(const KernelCall& call) const {
  const Op* best = nullptr;
  size_t most = 0;
  for (const OpId id : ref_.ops_of(call.code)) {
    const Op& op = ref_.graph().op(id);
    size_t alike = op.name == call.name ? 100 : 1;
    for (size_t i = 0; i < op.inputs.size() && i < call.in.size(); ++i)
      alike += (call.in[i].value ? call.in[i].value->tensor : kNone) == ref_.root(op.inputs[i]);
    if (alike > most) most = alike, best = &op;
  }
  std::string out;
  for (size_t i = 0; i < std::max(best->inputs.size(), call.in.size()); ++i) {
    const TensorId want = i < best->inputs.size() ? ref_.root(best->inputs[i]) : kNone;
    const Value* have = i < call.in.size() ? call.in[i].value : nullptr;
    if ((have ? have->tensor : kNone) == want) continue;
    out += fmt::format("{}{} as operand {}, found {}", out.empty() ? "" : "; ", ref_.name(want), i,
                       have ? describe(ref_, *have) : "nothing");
  }
  return fmt::format("expected, as {} of the one-device program reads it, {}", best->name, out);
}

}  // namespace whale::proof
