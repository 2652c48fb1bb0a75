// Where variables live.
#include <algorithm>

#include "shard/chooser.h"

namespace whale {

SubAxis CutChooser::state_sub_axis(TensorId id, size_t axis, int64_t ways) const {
  const Dims& dims = g_.tensor(id).dims;
  const std::vector<AxisSharding>& lies = form(id).sharding.axes;
  for (size_t d = 0; d < dims.size(); ++d) {
    const SubAxis sub_axis{static_cast<int>(d), 1, 1};
    bool free = dims[d] >= ways;
    for (size_t a = 1; a < axes() && free; ++a)
      if (a != axis && lies[a].placement == Placement::kShard)
        free = lies[a].sub_axis.dim != sub_axis.dim || (a < axis && lies[a] == shard(sub_axis, true));
    if (free) return sub_axis;
  }
  return {};
}

void CutChooser::place_variables() {
  std::vector<OpId> users(g_.tensors.size(), kNone);
  const auto user = [&](TensorId id) -> OpId& { return users[static_cast<size_t>(id)]; };
  for (const Variable& v : g_.variables) {
    const TensorId owner = v.owner == kNone ? v.tensor : v.owner;
    OpId first = first_user_[static_cast<size_t>(owner)];
    if (first == kNone) first = first_user_[static_cast<size_t>(v.tensor)];
    user(v.tensor) = first;
    if (first != kNone) form(v.tensor).stage = g_.op(first).stage;
  }
  if (options_.storage_shardings) {
    for (const Variable& v : g_.variables)
      if (const auto storage_sharding = options_.storage_shardings->find(g_.tensor(v.tensor).name);
          storage_sharding != options_.storage_shardings->end())
        live_at(v.tensor, storage_sharding->second);
    return;
  }
  for (const Variable& v : g_.variables)
    if (v.owner == kNone && user(v.tensor) != kNone) place_parameter(v.tensor, user(v.tensor));
  for (const Variable& v : g_.variables) {
    if (v.owner == kNone) continue;
    follow_owner(v);
    if (options_.zero >= 1 && user(v.tensor) != kNone) cut_state(v.tensor, user(v.tensor));
  }
  if (options_.zero >= 3)
    for (const Variable& v : g_.variables)
      if (v.role == Role::kParameter && v.trainable && user(v.tensor) != kNone) cut_state(v.tensor, user(v.tensor));
}

void CutChooser::follow_owner(const Variable& v) {
  const Sharding& owner = form(v.owner).sharding;
  if (g_.tensor(v.tensor).dims == g_.tensor(v.owner).dims) {
    form(v.tensor).sharding = owner;
    return;
  }
  for (size_t a = 1; a < axes(); ++a) {
    const AxisSharding& of = owner.axes[a];
    const auto dim = std::find(v.of_owner.begin(), v.of_owner.end(), of.sub_axis.dim);
    if (of.placement != Placement::kShard || dim == v.of_owner.end()) continue;
    form(v.tensor).sharding.axes[a] =
        shard({static_cast<int>(dim - v.of_owner.begin()), of.sub_axis.outer, of.sub_axis.inner}, of.state, of.samples);
  }
}

void CutChooser::live_at(TensorId id, const StorageSharding& storage_sharding) {
  std::copy(storage_sharding.sharding->axes.begin(), storage_sharding.sharding->axes.end(),
            form(id).sharding.axes.begin() + 1);
  const auto& meshes = axes_.tasks.mesh_of_stage;
  if (meshes[static_cast<size_t>(form(id).stage)] != storage_sharding.mesh)
    form(id).stage =
        static_cast<int32_t>(std::find(meshes.begin(), meshes.end(), storage_sharding.mesh) - meshes.begin());
}

void CutChooser::place_parameter(TensorId id, OpId user) {
  const Op& op = g_.op(user);
  const Factors& factors = factors_.of(op);
  for (size_t a = 1; a < axes(); ++a) {
    const OpCut& cut = splits_[a][static_cast<size_t>(user)];
    if (size(a, op) == 1 || !cut.present() || axes_.role(op, a) == AxisRole::kReplica) continue;
    const Factor& f = factors.list[static_cast<size_t>(cut.factor)];
    for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i)
      if (op.inputs[i] == id && f.inputs[i].present())
        form(id).sharding.axes[a] = shard(sub_axis_part(f.inputs[i], cut.sub));
  }
}

void CutChooser::cut_state(TensorId id, OpId user) {
  const Op& op = g_.op(user);
  for (size_t a = 1; a < axes(); ++a) {
    AxisSharding& now = form(id).sharding.axes[a];
    if (size(a, op) == 1 || axes_.role(op, a) != AxisRole::kReplica || now.placement != Placement::kReplicate) continue;
    if (const SubAxis sub_axis = state_sub_axis(id, a, size(a, op)); sub_axis.present()) now = shard(sub_axis, true);
  }
}

OpCut CutChooser::cut_of_state(const Placed& placed, size_t a) const {
  const TensorId gradient = placed.op.inputs[0];
  const auto p = parameter_of_.find(gradient);
  const auto states = p == parameter_of_.end() ? states_of_.end() : states_of_.find(p->second);
  if (states == states_of_.end()) return {};
  const Dims& dims = g_.tensor(gradient).dims;
  const auto along = [&](const SubAxis& sub_axis) {
    for (size_t k = 0; k < placed.factors.list.size(); ++k) {
      OpCut cut{static_cast<int>(k), {}, true};
      const Factor& f = placed.factors.list[k];
      if (find_sub_axis_part(f.inputs[0], f.extent, sub_axis, extent_of(dims, sub_axis), cut.sub) &&
          fits(placed, f, cut.sub, a))
        return cut;
    }
    return OpCut{};
  };
  bool factored = false;  // some state is of other dimensions
  for (const TensorId state : states->second) {
    const AxisSharding& l = form(state).sharding.axes[a];
    if (g_.tensor(state).dims != dims)
      factored = true;
    else if (l.placement == Placement::kShard && l.state)
      if (const OpCut cut = along(l.sub_axis); cut.present()) return cut;
  }
  if (!factored || options_.zero == 0) return {};
  const SubAxis sub_axis = state_sub_axis(p->second, a, size(a, placed.op));
  return sub_axis.present() ? along(sub_axis) : OpCut{};
}

}  // namespace whale
