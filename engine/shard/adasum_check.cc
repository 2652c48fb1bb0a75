#include "shard/adasum_check.h"

#include <algorithm>

#include "shard/cuts.h"

namespace whale {
namespace {

// The backward sum over replicas that the value comes from; kNone: it does not.
OpId summed_replicas(const ReshardBuilder& b, TensorId id) {
  while (id != kNone && b.producer(id) != kNone) {
    const Op& op = b.out.graph.op(b.producer(id));
    const TensorId from = op.inputs.empty() ? kNone : op.inputs[0];
    for (size_t a = 1; a < b.out.axes(); ++a)
      if (has_flag(op.code, kCollective) && op.code != OpCode::k_adasum && op.phase == Phase::kBackward &&
          b.out.size(a, op.stage) > 1 && b.out.role(op, a) == AxisRole::kReplica &&
          b.out.placement(from, a) == Placement::kPartial && b.out.placement(id, a) != Placement::kPartial)
        return b.producer(id);
    if (!passes_on(op)) return kNone;
    id = from;
  }
  return kNone;
}

Error tied_unlike(const ReshardBuilder& b, const Op& reader, int32_t stage, const MeshAxis& here,
                  const MeshAxis& there) {
  const char* form = here.size == there.size ? "have unlike shares" : "have {} and {} replicas";
  Error error = unimplemented(
      "Adasum of a gradient that stages {} and {} add up, which {}: a replica of one is none of the other; give both "
      "the same replicas, or use the parameter in one stage",
      stage, reader.stage, fmt::format(fmt::runtime(form), here.size, there.size));
  return error.at_op(reader.name).at_scope(written_scope(b.out.graph, b.out.tasks, reader));
}

// It came from a stage with as many replicas, if from another one.
void check_came_alike(const ReshardBuilder& b, const Op& reader, TensorId id) {
  for (OpId made = b.producer(id); made != kNone && passes_on(b.out.graph.op(made)); made = b.producer(id)) {
    id = b.out.graph.op(made).inputs[0];
    if (b.out.graph.op(made).code != OpCode::k_transfer) continue;
    for (size_t a = 1; a < b.out.axes(); ++a)
      if (const MeshAxis& here = b.out.mesh_axis(a, b.out.stage(id)), &there = b.out.mesh_axis(a, reader.stage);
          here.size != there.size)
        throw tied_unlike(b, reader, b.out.stage(id), here, there);
  }
}

}  // namespace

void check_adasum(const ReshardBuilder& b, const Gradients& gradients) {
  for (const auto& [gradient, parameter] : gradients.parameter_of) {
    const OpId last = parameter == kNone ? kNone : b.producer(gradient);
    if (last == kNone) continue;
    bool whole = false;  // along an axis of replicas: Adasum has nothing to combine there
    for (size_t a = 1; a < b.out.axes(); ++a)
      whole |= b.out.size(a, b.out.graph.op(last).stage) > 1 &&
               b.out.role(b.out.graph.op(last), a) == AxisRole::kReplica &&
               b.out.placement(gradient, a) != Placement::kPartial;
    if (!whole) continue;
    TensorIds look{gradient};
    std::set<TensorId> seen;
    while (!look.empty()) {
      const TensorId id = look.back();
      look.pop_back();
      const OpId made = b.producer(id);
      if (made == kNone || !seen.insert(id).second) continue;
      const Op& op = b.out.graph.op(made);
      if (op.phase != Phase::kBackward || op.code == OpCode::k_adasum) continue;
      for (const TensorId x : op.inputs)
        if (x != kNone) look.push_back(x);
      for (const std::vector<int>& summands : factors_of(b.out.graph, op).linear)
        for (const int i : summands) {
          const OpId sum = summed_replicas(b, op.inputs[i]);
          if (sum == kNone || std::all_of(summands.begin(), summands.end(),
                                          [&](int other) { return summed_replicas(b, op.inputs[other]) != kNone; }))
            continue;
          for (const int other : summands) check_came_alike(b, op, op.inputs[other]);
          throw unimplemented(
              "Adasum of the gradient of '{}', of which a part is the same on all replicas (a penalty on the "
              "parameter): '{}' joins it to what the replicas' own parts add up to; use the optimizer's weight decay, "
              "or leave adasum out",
              b.out.graph.tensor(parameter).name, op.name)
              .at_op(op.name)
              .at_scope(written_scope(b.out.graph, b.out.tasks, op));
        }
    }
  }
}

void check_tied(const ReshardBuilder& b, const Op& reader, TensorId id, size_t a) {
  const MeshAxis &here = b.out.mesh_axis(a, b.out.stage(id)), &there = b.out.mesh_axis(a, reader.stage);
  if (reader.phase != Phase::kBackward || b.out.placement(id, a) != Placement::kPartial ||
      (here.size == there.size && here.shares == there.shares))
    return;
  throw tied_unlike(b, reader, b.out.stage(id), here, there);
}

}  // namespace whale
