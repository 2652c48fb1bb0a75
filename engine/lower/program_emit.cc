// Ops as instructions: kernels, collectives, copies, messages, and what stands for parts that have nothing.
#include <algorithm>

#include "rewrite/order.h"
#include "lower/program.h"

namespace whale {
namespace {

// The neutral value in the place of a partial result of no samples.
void emit_identity(Draft& draft, const Site& at, const Op& op, size_t output) {
  const TensorId id = op.outputs[output];
  Combine combine = Combine::kSum;
  for (size_t a = 0; a < at.lg().axes(); ++a)
    if (at.lg().at(id, a).placement == Placement::kPartial) combine = at.lg().at(id, a).combine;
  Instruction fill;
  fill.op = OpCode::k_fill;
  fill.name = op.name + ".none";
  const DType dtype = at.graph().tensor(id).dtype;
  fill.attrs = {{"shape", at.dims(id)}, {"value", neutral_of(combine, dtype)}, {"dtype", std::string(name_of(dtype))}};
  fill.out = {buffer_of(draft, at, id)};
  fill.phase = op.phase;
  fill.scope = op.scope;
  fill.bytes = static_cast<double>(draft.buffer(fill.out[0]).bytes);
  draft.add(std::move(fill), nullptr);
}

// An operand of which this device has no part. Of a list (norms, grouped updates) other members may have one.
bool reads_nothing(const Site& at, const Op& op) {
  const auto& ports = def(op.code).inputs;
  const bool list = !ports.empty() && ports.back().kind == PortKind::kVariadic;
  const auto cut = [&](TensorId id) {
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

// A collective of whose operands the whole group has nothing (a micro-batch without samples).
bool nobody_has_any(const Site& at, const Op& op, const Instruction& i) {
  if (op.code == OpCode::k_reduce_scatter)
    return std::all_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return at.empty(id); });
  if (op.code != OpCode::k_all_gather && op.code != OpCode::k_all_to_all) return false;
  const auto& digits = attr_ints(i.attrs, "digit");
  for (size_t k = 0; k < op.inputs.size(); ++k) {
    Dims whole = at.dims(op.inputs[k]);
    whole[static_cast<size_t>(digits[3 * k])] = digits[3 * k + 1] * digits[3 * k + 2];
    if (element_count(whole) > 0) return false;
  }
  return true;
}

}  // namespace

void emit_transfer(Draft& draft, const Site& at, const Op& op) {
  const auto link = at.low.link_of.find({&op, at.low.timed() && op.region == Region::kBody ? at.key.variant : 0});
  if (link == at.low.link_of.end()) return;
  const auto half = [&](InstructionKind kind, TensorId id) {
    if (at.empty(id)) return;
    Instruction i;
    i.kind = kind;
    i.op = op.code;
    i.name = (kind == InstructionKind::kSend ? "send." : "receive.") + op.name;
    (kind == InstructionKind::kSend ? i.in : i.out) = {buffer_of(draft, at, id)};
    i.ref = link->second;
    i.phase = op.phase;
    i.scope = op.scope;
    i.bytes = static_cast<double>(element_count(at.dims(id)) * size_of(at.graph().tensor(id).dtype));
    if (const auto inside = at.low.inside.find(link->second); inside != at.low.inside.end())
      i.bytes = static_cast<double>(inside->second * size_of(at.graph().tensor(id).dtype));
    draft.add(std::move(i), nullptr);
  };
  if (at.sends(op)) half(InstructionKind::kSend, op.inputs[0]);
  if (at.runs(op)) half(InstructionKind::kReceive, op.outputs[0]);
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
  i.kind = collective ? InstructionKind::kCollective : moves ? InstructionKind::kMove : InstructionKind::kKernel;
  if (at.low.options.overlap) i.stream = collective ? Stream::kCommunication : moves ? Stream::kCopy : Stream::kCompute;
  i.op = op.code;
  i.name = op.name;
  i.attrs = at.low.local.attrs(op, at.place);
  if (collective && nobody_has_any(at, op, i)) return;
  i.box = at.low.local.box(op, at.place);
  if (const TensorId boxed = at.low.local.box_tensor(op); boxed != kNone)
    i.samples = at.low.mask_number(at.low.local.sample_mask(boxed));
  i.key = op.key;
  if (collective) i.ref = static_cast<int32_t>(attr_int(op.attrs, "group"));
  i.phase = op.phase;
  i.scope = op.scope;
  const OpCost cost = at.low.local.cost(op, i.attrs, at.place);
  i.flops = cost.flops;
  i.bytes = cost.bytes;
  draft.add(std::move(i), &op);
}

}  // namespace whale
