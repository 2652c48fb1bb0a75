#include "grad/rows.h"

#include "grad/passes.h"

namespace whale {
namespace {

struct Use {
  TensorId ids, dy;
  bool bags, mean;
};

// The ops whose results are summed to `grad`, in the order of the sum.
void leaves(const Graph& g, TensorId grad, std::vector<OpId>& all) {
  const OpId maker = g.tensor(grad).producer;
  const Op* op = maker == kNone ? nullptr : &g.op(maker);
  const bool sum = op && op->code == OpCode::k_add && op->phase == Phase::kBackward;
  const bool cast = op && op->code == OpCode::k_cast;
  if (!sum && !cast) return all.push_back(maker);
  leaves(g, op->inputs[0], all);
  if (sum) leaves(g, op->inputs[1], all);
}

// Values that were only widened are read as they were.
TensorId narrow(const Graph& g, TensorId id) {
  const OpId maker = g.tensor(id).producer;
  if (maker == kNone || g.op(maker).code != OpCode::k_cast) return id;
  const TensorId x = g.op(maker).inputs[0];
  return (g.tensor(x).dtype == DType::kBF16 || g.tensor(x).dtype == DType::kF16) && g.tensor(id).dtype == DType::kF32
             ? x
             : id;
}

// A use as one row of dy per id, in float.
Use flat(UpdateBuilder& b, const Use& u) {
  const auto dims = [&](TensorId id) { return b.g.tensor(id).dims; };
  const auto reshape = [&](TensorId x, const Dims& to) { return b.emit(OpCode::k_reshape, {x}, {{"shape", to}}); };
  const int64_t width = dims(u.dy).back(), bag = u.bags ? dims(u.ids).back() : 1, count = element_count(dims(u.ids));
  TensorId dy = u.dy;
  const DType wide = accumulate_dtype(b.g.tensor(dy).dtype);
  if (b.g.tensor(dy).dtype != wide) dy = b.emit(OpCode::k_cast, {dy}, {{"dtype", std::string(name_of(wide))}});
  if (u.mean) dy = b.emit(OpCode::k_mul, {dy, b.constant(1 / static_cast<double>(bag), wide)});
  if (bag != 1) {
    dy = b.emit(OpCode::k_broadcast_to, {reshape(dy, {count / bag, 1, width})},
                {{"shape", Dims{count / bag, bag, width}}});
  }
  return {reshape(u.ids, {count}), reshape(dy, {count, width}), false, false};
}

}  // namespace

RowGradient row_gradient(UpdateBuilder& b, TensorId parameter, TensorId grad) {
  std::vector<OpId> all;
  leaves(b.g, grad, all);
  std::vector<Use> uses;
  OpId dense = kNone;
  for (const OpId id : all) {
    if (id == kNone || !has_flag(b.g.op(id).code, kSumsRows)) {
      if (dense == kNone) dense = id;
      continue;
    }
    const Op& op = b.g.op(id);
    const bool bags = b.g.tensor(op.inputs[1]).dims.size() == b.g.tensor(op.inputs[0]).dims.size();
    uses.push_back({op.inputs[1], narrow(b.g, op.inputs[0]), bags, bags && attr_string(op.attrs, "mode") == "mean"});
  }
  if (uses.empty()) return {};
  const auto pad = [&](Use& u) {
    if (!many_micro_batches(b.g)) return;
    u.dy = b.emit(OpCode::k_pad_to_batch, {u.dy}, {{"dims", Dims(b.g.tensor(u.dy).dims)}});
    Op& op = b.g.op(b.g.tensor(u.dy).producer);
    op.phase = Phase::kBackward, op.origin = kNone;
  };
  if (uses.size() != all.size()) {
    const OpId use = dense == kNone ? kNone : b.g.op(dense).origin;
    const Op& op = b.g.op(use == kNone ? b.g.tensor(b.g.training.loss).producer : use);
    throw invalid(
        "training: sparse updates of table '{}' need that it is only looked up (embedding, embedding_bag), but op '{}' "
        "({}) uses all of it; train it without sparse_updates, or give that op a parameter of its own",
        b.g.tensor(parameter).name, op.name, def(op.code).name)
        .at_op(op.name)
        .at_scope(b.g.scope_path(op.scope));
  }
  for (Use& u : uses) pad(u);
  if (uses.size() == 1) return {uses[0].ids, uses[0].dy, uses[0].mean};
  TensorIds ids, dy;
  bool same = true;
  for (const Use& u : uses) {
    const Use one = flat(b, u);
    same &= b.g.tensor(one.ids).dtype == b.g.tensor(uses[0].ids).dtype;
    ids.push_back(one.ids), dy.push_back(one.dy);
  }
  for (TensorId& id : ids)
    if (!same && b.g.tensor(id).dtype != DType::kI64)
      id = b.emit(OpCode::k_cast, {id}, {{"dtype", std::string("i64")}});
  return {b.emit(OpCode::k_concat, ids, {{"axis", int64_t{0}}}), b.emit(OpCode::k_concat, dy, {{"axis", int64_t{0}}}),
          false};
}

}  // namespace whale
