#include "shard/place_variables.h"

#include <algorithm>

namespace whale {
namespace {

// Cut where its parameter is.
Sharding like_owner(const CutProblem& p, const Variable& state, const Sharding& owner) {
  if (p.graph.tensor(state.tensor).dims == p.graph.tensor(state.owner).dims) return owner;
  Sharding out{std::vector<AxisSharding>(p.axes.axes())};
  for (size_t a = 1; a < p.axes.axes(); ++a) {
    const AxisSharding& of = owner.axes[a];
    const auto dim = std::find(state.of_owner.begin(), state.of_owner.end(), of.sub_axis.dim);
    if (of.placement != Placement::kShard || dim == state.of_owner.end()) continue;
    const auto at = static_cast<int>(dim - state.of_owner.begin());
    out.axes[a] = shard({at, of.sub_axis.outer, of.sub_axis.inner}, of.state, of.samples);
  }
  return out;
}

// As another entry has it, where the first reader may be in another stage.
void live_at(const CutProblem& p, const StorageSharding& there, Form& form) {
  std::copy(there.sharding->axes.begin(), there.sharding->axes.end(), form.sharding.axes.begin() + 1);
  const auto& meshes = p.axes.tasks.mesh_of_stage;
  if (meshes[form.stage] != there.mesh)
    form.stage = static_cast<int32_t>(std::find(meshes.begin(), meshes.end(), there.mesh) - meshes.begin());
}

void cut_as_read(const CutProblem& p, const SplitCuts& splits, TensorId id, OpId reader, Sharding& sharding) {
  const Op& op = p.graph.op(reader);
  const Factors& factors = p.factors.of(op);
  for (size_t a = 1; a < p.axes.axes(); ++a) {
    const OpCut& cut = splits[a][reader];
    if (p.axes.size(a, op.stage) == 1 || !cut.present() || p.axes.role(op, a) == AxisRole::kReplica) continue;
    const Factor& f = factors.list[cut.factor];
    for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i)
      if (op.inputs[i] == id && f.inputs[i].present()) sharding.axes[a] = shard(sub_axis_part(f.inputs[i], cut.sub));
  }
}

void cut_over_replicas(const CutProblem& p, TensorId id, OpId reader, Sharding& sharding) {
  const Op& op = p.graph.op(reader);
  for (size_t a = 1; a < p.axes.axes(); ++a) {
    const int64_t n = p.axes.size(a, op.stage);
    if (n == 1 || p.axes.role(op, a) != AxisRole::kReplica || sharding.axes[a].placement != Placement::kReplicate)
      continue;
    if (const SubAxis sub_axis = state_sub_axis(p, id, sharding, a, n); sub_axis.present())
      sharding.axes[a] = shard(sub_axis, true);
  }
}

}  // namespace

SubAxis state_sub_axis(const CutProblem& p, TensorId id, const Sharding& lies, size_t axis, int64_t ways) {
  const Dims& dims = p.graph.tensor(id).dims;
  for (size_t d = 0; d < dims.size(); ++d) {
    const SubAxis sub_axis{static_cast<int>(d), 1, 1};
    bool free = dims[d] >= ways;
    for (size_t a = 1; a < p.axes.axes() && free; ++a)
      if (a != axis && lies.axes[a].placement == Placement::kShard)
        free = lies.axes[a].sub_axis.dim != sub_axis.dim || (a < axis && lies.axes[a] == shard(sub_axis, true));
    if (free) return sub_axis;
  }
  return {};
}

void place_variables(const CutProblem& p, const SplitCuts& splits, std::vector<Form>& forms) {
  const std::vector<Variable>& variables = p.graph.variables;
  const auto form = [&](TensorId id) -> Form& { return forms[id]; };
  const auto reader = [&](const Variable& v) {
    const OpId of_owner = v.owner == kNone ? kNone : p.first_reader[v.owner];
    return of_owner != kNone ? of_owner : p.first_reader[v.tensor];
  };
  for (const Variable& v : variables)
    if (const OpId first = reader(v); first != kNone) form(v.tensor).stage = p.graph.op(first).stage;
  if (const StorageShardings* fixed = p.options.storage_shardings) {
    for (const Variable& v : variables)
      if (const auto there = fixed->find(p.graph.tensor(v.tensor).name); there != fixed->end())
        live_at(p, there->second, form(v.tensor));
    return;
  }
  for (const Variable& v : variables)
    if (v.owner == kNone && reader(v) != kNone) cut_as_read(p, splits, v.tensor, reader(v), form(v.tensor).sharding);
  for (const Variable& v : variables) {
    if (v.owner == kNone) continue;
    form(v.tensor).sharding = like_owner(p, v, form(v.owner).sharding);
    if (p.options.zero >= 1 && reader(v) != kNone) cut_over_replicas(p, v.tensor, reader(v), form(v.tensor).sharding);
  }
  if (p.options.zero < 3) return;
  for (const Variable& v : variables)
    if (v.role == Role::kParameter && v.trainable && reader(v) != kNone)
      cut_over_replicas(p, v.tensor, reader(v), form(v.tensor).sharding);
}

}  // namespace whale
