// Ops as instructions: kernels, collectives, copies, messages, and what stands for parts that have nothing.
#include <algorithm>

#include "lower/program.h"
#include "ops/nothing.h"
#include "rewrite/order.h"

namespace whale {
namespace {

// The neutral value in the place of a partial result of no samples. A result that is whole along an axis that an
// operand is cut by could not be made here at all; unlike replicas have parts of a sum that are called whole.
void emit_identity(Draft& draft, const Site& at, const Op& op, size_t output) {
  const TensorId id = op.outputs[output];
  for (size_t a = 1; a < at.lg().axes(); ++a)
    for (const TensorId in : op.inputs)
      if (in != kNone && !at.lg().of_unlike(a) && at.empty(in) && at.lg().at(in, a).placement == Placement::kShard &&
          at.lg().at(id, a).placement == Placement::kReplicate)
        throw internal("'{}' would make all of '{}' out of no part of '{}'", op.name, at.graph().tensor(id).name,
                       at.graph().tensor(in).name);
  Combine combine = Combine::kSum;
  for (size_t a = 0; a < at.lg().axes(); ++a)
    if (at.lg().at(id, a).placement == Placement::kPartial) combine = at.lg().at(id, a).combine;
  Instruction fill;
  fill.name = name_of_nothing(op.name, op.code);
  const DType dtype = at.graph().tensor(id).dtype;
  fill.work = work::Kernel{
      .op = OpCode::k_fill,
      .attrs = {{"shape", at.dims(id)}, {"value", neutral_of(combine, dtype)}, {"dtype", std::string(name_of(dtype))}}};
  fill.out = {buffer_of(draft, at, id)};
  fill.phase = op.phase;
  fill.scope = op.scope;
  fill.bytes = static_cast<double>(draft.buffer(fill.out[0]).bytes);
  draft.add(std::move(fill), nullptr);
}

// An operand of which this device has no part, where others have one: what has no elements at all is read as it is.
// Of a list (norms, grouped updates) other members may have one.
bool reads_nothing(const Site& at, const Op& op) {
  const auto& ports = def(op.code).inputs;
  const bool list = !ports.empty() && ports.back().kind == PortKind::kVariadic;
  const auto cut = [&](TensorId id) {
    if (element_count(at.graph().tensor(id).dims) == 0) return false;
    for (size_t a = 0; a < at.lg().axes(); ++a)
      if (at.lg().at(id, a).placement == Placement::kShard) return true;
    return false;
  };
  bool some = false, all = true;
  for (size_t i = list ? ports.size() - 1 : 0; i < op.inputs.size(); ++i) {
    const TensorId id = op.inputs[i];
    const bool none = id != kNone && at.empty(id) && cut(id);
    some |= none, all &= none;
  }
  return list ? some && all : some;
}

// A collective of whose operands the whole group has nothing (a micro-batch without samples). Only what is gathered or
// exchanged may be nothing here and something at another member.
bool nobody_has_any(const Site& at, const Op& op, const work::Collective& c) {
  if (op.code != OpCode::k_all_gather && op.code != OpCode::k_all_to_all)
    return std::all_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return at.empty(id); });
  for (size_t k = 0; k < op.inputs.size(); ++k) {
    Dims whole = at.dims(op.inputs[k]);
    const SubAxis& sub_axis = c.cuts[k].sub_axis;
    whole[sub_axis.dim] = sub_axis.outer * sub_axis.inner;
    if (element_count(whole) > 0) return false;
  }
  return true;
}

Combine combine_of(const std::string& name) {
  const auto at = std::find(std::begin(kCombines), std::end(kCombines), name.empty() ? "sum" : name);
  WHALE_CHECK(at != std::end(kCombines), "a collective combines by '{}'", name);
  return static_cast<Combine>(at - std::begin(kCombines));
}

// Attributes of an op, (dim, outer, inner) and (begin, end) of each member, for each of so many operands.
std::vector<SubAxisCuts> cuts_of(const Attrs& attrs, const char* sub_axis, const char* cuts, size_t operands) {
  const Ints &sub_axes = attr_ints(attrs, sub_axis), &all = attr_ints(attrs, cuts);
  if (sub_axes.empty()) return {};
  WHALE_CHECK(sub_axes.size() == 3 * operands && all.size() % (2 * operands) == 0,
              "a collective of {} operands has {} numbers of sub-axes, {} of cuts", operands, sub_axes.size(),
              all.size());
  std::vector<SubAxisCuts> out(operands);
  const size_t numbers = all.size() / operands;
  for (size_t i = 0; i < operands; ++i) {
    out[i].sub_axis = {static_cast<int>(sub_axes[3 * i]), sub_axes[3 * i + 1], sub_axes[3 * i + 2]};
    for (size_t k = i * numbers; k < (i + 1) * numbers; k += 2) out[i].cuts.push_back({all[k], all[k + 1]});
  }
  return out;
}

work::Collective collective_of(const Op& op, const Attrs& attrs) {
  work::Collective c;
  c.op = op.code;
  c.group = static_cast<int32_t>(attr_int(attrs, "group"));
  c.combine = combine_of(attr_string(attrs, "combine"));
  c.cuts = cuts_of(attrs, "sub_axis", "cuts", op.inputs.size());
  if (auto to = cuts_of(attrs, "to_sub_axis", "to_cuts", 1); !to.empty()) c.to = std::move(to[0]);
  c.weights = attr_ints(attrs, "weights");
  return c;
}

}  // namespace

void emit_transfer(Draft& draft, const Site& at, const Op& op) {
  const auto link = at.low.link_of.find({&op, at.low.timed() && op.region == Region::kBody ? at.key.variant : 0});
  if (link == at.low.link_of.end()) return;
  const auto half = [&](bool sends, TensorId id) {
    if (at.empty(id)) return;
    Instruction i;
    if (sends)
      i.work = work::Send{link->second};
    else
      i.work = work::Receive{link->second};
    // Between stages: the other end comes to it at its own time, and compute does not wait for that.
    const bool leaves = at.lg().stage(op.inputs[0]) != op.stage;
    if (leaves && at.low.options.overlap) i.queue = sends ? Queue::kSend : Queue::kReceive;
    i.name = (sends ? "send." : "receive.") + op.name;
    (sends ? i.in : i.out) = {buffer_of(draft, at, id)};
    i.phase = op.phase;
    i.scope = op.scope;
    i.bytes = static_cast<double>(element_count(at.dims(id)) * size_of(at.graph().tensor(id).dtype));
    if (const auto inside = at.low.inside.find(link->second); inside != at.low.inside.end())
      i.bytes = static_cast<double>(inside->second * size_of(at.graph().tensor(id).dtype));
    draft.add(std::move(i), nullptr);
  };
  if (at.sends(op)) half(true, op.inputs[0]);
  if (at.runs(op)) half(false, op.outputs[0]);
}

void emit(Draft& draft, const Site& at, const Op& op) {
  const bool collective = has_flag(op.code, kCollective), moves = has_flag(op.code, kMemoryCopy);
  bool none_out = true;
  for (const TensorId id : op.outputs) none_out &= id == kNone || at.empty(id);
  const bool none_in = reads_nothing(at, op);
  if (none_out && !collective) return;  // no samples, nothing to do
  // Merged updates go on with those of their parameters that this device has a part of.
  if (none_in && !collective && !has_flag(op.code, kUpdateOp) && !moves) {
    for (size_t o = 0; o < op.outputs.size(); ++o)
      if (op.outputs[o] != kNone && !at.empty(op.outputs[o])) emit_identity(draft, at, op, o);
    return;
  }
  Instruction i;
  for (const TensorId id : op.inputs) i.in.push_back(id == kNone ? kNone : buffer_of(draft, at, id));
  for (const TensorId id : op.outputs) i.out.push_back(buffer_of(draft, at, id));
  i.name = op.name;
  Attrs attrs = at.low.local.attrs(op, at.place);
  const OpCost cost = at.low.local.cost(op, attrs, at.place);
  if (collective) {
    work::Collective c = collective_of(op, attrs);
    if (nobody_has_any(at, op, c)) return;
    if (at.low.options.overlap) i.queue = at.low.queue_of_group(c.group);
    i.work = std::move(c);
  } else if (moves) {
    const bool stores = op.code == OpCode::k_to_host;
    i.work = work::Copy{stores ? Memory::kHost : Memory::kDevice};
    if (at.low.options.overlap) i.queue = stores ? Queue::kCopyOut : Queue::kCopyIn;
  } else {
    work::Kernel k{.op = op.code, .attrs = std::move(attrs), .box = at.low.local.box(op, at.place), .key = op.key};
    if (const TensorId boxed = at.low.local.box_tensor(op); boxed != kNone)
      k.samples = at.low.mask_number(at.low.local.sample_mask(boxed));
    i.work = std::move(k);
  }
  i.phase = op.phase;
  i.scope = op.scope;
  i.flops = cost.flops;
  i.bytes = cost.bytes;
  draft.add(std::move(i), &op);
}

}  // namespace whale
