#include "prove/kernel.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "base/watch.h"
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
  const auto is_named = [](std::string_view name) { return name.find(".from") != name.npos; };
  if (!call.name.empty() && !is_named(call.name)) return false;  // one of the program's, of what a reshard made
  return std::ranges::any_of(call.in, [&](const Operand& o) { return is_named(o.name); });
}

TensorIds KernelCall::roots() const {
  TensorIds out;
  for (const Operand& o : in) out.push_back(o.value ? o.value->tensor : kNone);
  return out;
}

std::vector<uint64_t> KernelCall::orders() const {
  std::vector<uint64_t> out;
  for (const Operand& o : in) out.push_back(o.value ? o.value->order : 0);
  return out;
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
  if (auto number = as_number(call)) return {std::move(*number)};
  if (updates_many) return updates(call);
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
  const std::vector<OpId>* found = ref_.find(call.code, call.roots());
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
      step.in.push_back({&*made[id], scratch.tensor(id).dims, {}});
    }
    for (const TensorId id : op.outputs) step.out.push_back({scratch.tensor(id).dims, scratch.tensor(id).dtype});
    std::vector<Value> values = run(step);
    for (size_t k = 0; k < values.size(); ++k) made[op.outputs[k]] = std::move(values[k]);
  }
  std::vector<Value> out;
  for (const TensorId id : results) out.push_back(*made[id]);
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
      each.in.push_back(o < n ? call.in[o] : Operand{&made[o - n], local[o - n], {}});
      dims = broadcast_dims(dims, each.in.back().local);
    }
    if (step.code == OpCode::k_cast) each.attrs["dtype"] = std::string(name_of(step.dtype));
    if (has_flag(step.code, kRandom)) {
      each.attrs["rate"] = step.value;
      each.attrs["key"] = static_cast<int64_t>(step.key);
    }
    each.attrs = complete_attrs(def(step.code), std::move(each.attrs));
    each.out = {{dims, step.dtype}};
    const bool placed = has_flag(step.code, kRandom) || has_flag(step.code, kOffsetAware);
    if (placed && dims != call.out.at(0).local)
      refuse("{} of {} within a kernel that counts the elements of {}", def(step.code).name, to_string(dims),
             to_string(call.out[0].local));
    made.push_back(std::move(run(each).at(0)));
    local.push_back(std::move(dims));
  }
  std::vector<Value> out;
  for (const int r : body.results) out.push_back(made[r - n]);
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
  KernelCall each = call;
  for (size_t t = 0; t < count; ++t) {
    Watch::look();
    each.in.assign(call.in.begin(), call.in.begin() + static_cast<std::ptrdiff_t>(first));
    each.out.clear();
    for (size_t k = 0; k < width; ++k) each.in.push_back(call.in[first + t * width + k]);
    for (size_t k = 0; k < per; ++k) each.out.push_back(call.out[t * per + k]);
    if (!decays.empty()) each.attrs["decays"] = Ints{decays[t]};
    if (std::any_of(each.out.begin(), each.out.end(), [](const Result& r) { return element_count(r.local) == 0; })) {
      out.resize(out.size() + per);  // nothing is here of this one
      continue;
    }
    try {
      std::vector<Value> values = one(each);
      out.insert(out.end(), values.begin(), values.end());
    } catch (Stop& stop) {
      for (size_t k = 0; k < width; ++k) stop.operands.push_back(first + t * width + k);
      throw;
    }
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

std::vector<Value> Kernels::one(const KernelCall& call) {
  const auto of_no_terms = [&](const Operand& o) {
    const double* c = o.value ? ref_.constant(o.value->tensor) : nullptr;
    return c && (*c == 0 || std::isinf(*c));
  };
  if (std::ranges::any_of(call.in, of_no_terms))
    if (std::vector<Value> none = zeros(call); !none.empty()) return none;
  TensorIds roots = call.roots();
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
    if (auto made = of_own_zeros(call)) return *made;
    if (auto made = with_zeros(call)) return *made;
    // A slice that the program has too, of a sum of which this device has one summand alone, is no piece of that
    // summand.
    const auto is_named = [&](OpId id) { return ref_.graph().op(id).name == call.name; };
    if (call.code == OpCode::k_slice && !call.in[0].value->terms.whole() &&
        std::ranges::any_of(ref_.ops_of(call.code), is_named))
      if (auto made = of_summand(call)) return *made;
    if (auto made = part_of_one(call)) return {*made};
    if (auto made = more_terms(call)) return {*made};
    if (auto made = of_whole_summands(call)) return *made;
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
  const bool of_constants =
      fit.size() > 1 && std::ranges::all_of(roots, [&](TensorId id) { return id == kNone || ref_.constant(id); });
  if (of_constants) {  // what tells them apart is their shape alone: they come in the order of the program
    int64_t& n = seen_[{call.device, call.code, roots}];
    std::rotate(fit.begin(), fit.begin() + n++ % std::ssize(fit), fit.end());
  }
  std::stable_partition(fit.begin(), fit.end(), [&](OpId op) {
    return !call.out.empty() && ref_.tensor(ref_.graph().op(op).outputs[0]).dtype == call.out[0].dtype;
  });
  std::stable_partition(fit.begin(), fit.end(), [&](OpId op) { return ref_.graph().op(op).name == call.name; });
  std::optional<Stop> last;
  std::optional<std::vector<Value>> some;  // of what is the same all along, a part
  const auto open = [](const Value& v) { return v.region.open(); };
  for (const OpId op : fit) try {
      std::vector<Value> made = match(turned ? *turned : call, op);
      const bool guess = of_constants || std::ranges::any_of(made, open);
      if ((call.forward && ref_.graph().op(op).name == call.name) || !guess) return made;
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

std::string Kernels::unlike(const KernelCall& call) const {
  const Op* best = nullptr;
  size_t most = 0;
  for (const OpId id : ref_.ops_of(call.code)) {
    const Op& op = ref_.graph().op(id);
    // Several gradients, or updates, may have one name: it says less than operands.
    size_t alike = op.name == call.name ? 2 : 1;
    for (size_t i = 0; i < op.inputs.size() && i < call.in.size(); ++i)
      alike +=
          2 * static_cast<size_t>((call.in[i].value ? call.in[i].value->tensor : kNone) == ref_.root(op.inputs[i]));
    if (alike > most) most = alike, best = &op;
  }
  if (most < 2 || (most == 2 && !call.forward)) {  // nothing that it reads is what one of them reads
    std::string found;
    for (const Operand& o : call.in)
      found += fmt::format("{}{}", found.empty() ? "" : ", ", o.value ? describe(ref_, *o.value) : "nothing");
    return fmt::format("{} of {}, which the one-device program does not have", def(call.code).name, found);
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
