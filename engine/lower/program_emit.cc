// Ops as instructions: kernels, collectives, copies, messages, and what stands for parts that have nothing.
#include <algorithm>

#include "rewrite/order.h"
#include "lower/program_builder.h"

namespace whale {

// The neutral value in the place of a partial result of no samples.
void ProgramBuilder::emit_identity(const Op& op, size_t output) {
  const TensorId id = op.outputs[output];
  Combine combine = Combine::kSum;
  for (size_t a = 0; a < lg_.axes(); ++a)
    if (lg_.at(id, a).placement == Placement::kPartial) combine = lg_.at(id, a).combine;
  Instruction fill;
  fill.op = OpCode::k_fill;
  fill.name = op.name + ".none";
  const DType dtype = g_.tensor(id).dtype;
  fill.attrs = {{"shape", dims(id)}, {"value", neutral_of(combine, dtype)}, {"dtype", std::string(name_of(dtype))}};
  fill.out = {buffer(id)};
  fill.phase = op.phase;
  fill.scope = op.scope;
  fill.bytes = static_cast<double>(draft_.program.buffers[static_cast<size_t>(fill.out[0])].bytes);
  add(std::move(fill), nullptr);
}

void ProgramBuilder::emit_transfer(const Op& op) {
  const auto link = low_.link_of.find({&op, timed_ && op.region == Region::kBody ? key_.variant : 0});
  if (link == low_.link_of.end()) return;
  const auto half = [&](InstructionKind kind, TensorId id) {
    if (empty(id)) return;
    Instruction i;
    i.kind = kind;
    i.op = op.code;
    i.name = (kind == InstructionKind::kSend ? "send." : "receive.") + op.name;
    (kind == InstructionKind::kSend ? i.in : i.out) = {buffer(id)};
    i.ref = link->second;
    i.phase = op.phase;
    i.scope = op.scope;
    i.bytes = static_cast<double>(element_count(dims(id)) * size_of(g_.tensor(id).dtype));
    if (const auto inside = low_.inside.find(link->second); inside != low_.inside.end())
      i.bytes = static_cast<double>(inside->second * size_of(g_.tensor(id).dtype));
    add(std::move(i), nullptr);
  };
  if (sends_here(op)) half(InstructionKind::kSend, op.inputs[0]);
  if (in_segment(op)) half(InstructionKind::kReceive, op.outputs[0]);
}

// An operand of which this device has no part. Of a list (norms, grouped updates) other members may have one.
bool ProgramBuilder::reads_nothing(const Op& op) const {
  const auto& ports = def(op.code).inputs;
  const bool list = !ports.empty() && ports.back().kind == PortKind::kVariadic;
  const auto cut = [&](TensorId id) {
    for (size_t a = 0; a < lg_.axes(); ++a)
      if (lg_.at(id, a).placement == Placement::kShard) return true;
    return false;
  };
  bool some = false, all = true;
  for (size_t i = list ? ports.size() - 1 : 0; i < op.inputs.size(); ++i) {
    const TensorId id = op.inputs[i];
    const bool none = id != kNone && empty(id) && cut(id);
    some |= none, all &= none;
  }
  return list ? some && all : some;
}

// A collective of whose operands the whole group has nothing (a micro-batch without samples).
bool ProgramBuilder::nobody_has_any(const Op& op, const Instruction& i) const {
  if (op.code == OpCode::k_reduce_scatter)
    return std::all_of(op.inputs.begin(), op.inputs.end(), [&](TensorId id) { return empty(id); });
  if (op.code != OpCode::k_all_gather && op.code != OpCode::k_all_to_all) return false;
  const auto& digits = attr_ints(i.attrs, "digit");
  for (size_t k = 0; k < op.inputs.size(); ++k) {
    Dims whole = dims(op.inputs[k]);
    whole[static_cast<size_t>(digits[3 * k])] = digits[3 * k + 1] * digits[3 * k + 2];
    if (element_count(whole) > 0) return false;
  }
  return true;
}

void ProgramBuilder::emit(const Op& op) {
  if (is_view(op.code) || is_tree(op) || emitted_.contains(&op)) return;
  const bool collective = has_flag(op.code, kCollective), moves = has_flag(op.code, kMemoryCopy);
  bool none_out = true;
  for (const TensorId id : op.outputs) none_out &= id == kNone || empty(id);
  const bool none_in = reads_nothing(op);
  if (none_out && !collective) return;  // no samples, nothing to do
  // Merged updates go on with those of their parameters that this device has a part of.
  if (none_in && !collective && !has_flag(op.code, kUpdateOp) && !moves) {
    for (size_t o = 0; o < op.outputs.size(); ++o)
      if (op.outputs[o] != kNone && !empty(op.outputs[o])) emit_identity(op, o);
    return;
  }
  Instruction i;
  for (const TensorId id : op.inputs) i.in.push_back(id == kNone ? kNone : buffer(id));
  for (const TensorId id : op.outputs) i.out.push_back(buffer(id));
  i.kind = collective ? InstructionKind::kCollective : moves ? InstructionKind::kMove : InstructionKind::kKernel;
  if (low_.options.overlap) i.stream = collective ? Stream::kCommunication : moves ? Stream::kCopy : Stream::kCompute;
  i.op = op.code;
  i.name = op.name;
  i.attrs = low_.local.attrs(op, place_);
  if (collective && nobody_has_any(op, i)) return;
  i.box = low_.local.box(op, place_);
  if (const TensorId boxed = low_.local.box_tensor(op); boxed != kNone)
    i.samples = low_.mask_number(low_.local.sample_mask(boxed));
  i.key = op.key;
  if (collective) i.ref = static_cast<int32_t>(attr_int(op.attrs, "group"));
  i.phase = op.phase;
  i.scope = op.scope;
  const OpCost cost = low_.local.cost(op, i.attrs, place_);
  i.flops = cost.flops;
  i.bytes = cost.bytes;
  add(std::move(i), &op);
}

}  // namespace whale
