// Where variables live, and the gradients that go into them.
#include "parallel/propagator.h"

#include <algorithm>

namespace whale {

Digit Propagator::state_digit(TensorId id, size_t axis, int64_t ways) const {
  const Dims& dims = g().tensor(id).dims;
  for (size_t d = 0; d < dims.size(); ++d) {
    const Digit digit{static_cast<int>(d), 1, 1};
    bool free = dims[d] >= ways;
    for (size_t a = 1; a < axes() && free; ++a)
      if (a != axis && placement(id, a) == Placement::kShard)
        free = b_.out.at(id, a).digit.dim != digit.dim || (a < axis && b_.out.at(id, a) == shard(digit, true));
    if (free) return digit;
  }
  return {};
}

void Propagator::place_variables() {
  std::map<TensorId, OpId> user;
  for (const Variable& v : g().variables) {
    const TensorId owner = v.owner == kNone ? v.tensor : v.owner;
    OpId first = first_user_[static_cast<size_t>(owner)];
    if (first == kNone) first = first_user_[static_cast<size_t>(v.tensor)];
    user[v.tensor] = first;
    if (first != kNone) b_.out.stages[static_cast<size_t>(v.tensor)] = g().op(first).stage;
  }
  if (options_.homes) {
    for (const Variable& v : g().variables)
      if (const auto home = options_.homes->find(g().tensor(v.tensor).name); home != options_.homes->end())
        live_at(v.tensor, home->second);
  } else {
    for (const Variable& v : g().variables)
      if (v.owner == kNone && user[v.tensor] != kNone) place_parameter(v.tensor, user[v.tensor]);
    for (const Variable& v : g().variables) {
      if (v.owner == kNone) continue;
      follow_owner(v);
      if (options_.zero >= 1 && user[v.tensor] != kNone) cut_state(v.tensor, user[v.tensor]);
    }
    if (options_.zero >= 3)
      for (const Variable& v : g().variables)
        if (v.role == Role::kParameter && v.trainable && user[v.tensor] != kNone) cut_state(v.tensor, user[v.tensor]);
  }
  for (const Variable& v : g().variables) home_[v.tensor] = b_.out.layouts[static_cast<size_t>(v.tensor)];
}

void Propagator::follow_owner(const Variable& v) {
  if (g().tensor(v.tensor).dims == g().tensor(v.owner).dims) {
    b_.out.layouts[static_cast<size_t>(v.tensor)] = b_.out.layouts[static_cast<size_t>(v.owner)];
    return;
  }
  for (size_t a = 1; a < axes(); ++a) {
    const AxisLayout& of = b_.out.at(v.owner, a);
    const auto dim = std::find(v.of_owner.begin(), v.of_owner.end(), of.digit.dim);
    if (of.placement != Placement::kShard || dim == v.of_owner.end()) continue;
    b_.out.at(v.tensor, a) =
        shard({static_cast<int>(dim - v.of_owner.begin()), of.digit.outer, of.digit.inner}, of.state, of.samples);
  }
}

void Propagator::live_at(TensorId id, const Home& home) {
  b_.out.layouts[static_cast<size_t>(id)] = home.layout;
  const auto& meshes = tasks().mesh_of_stage;
  if (meshes[static_cast<size_t>(b_.out.stage(id))] != home.mesh)
    b_.out.stages[static_cast<size_t>(id)] =
        static_cast<int32_t>(std::find(meshes.begin(), meshes.end(), home.mesh) - meshes.begin());
}

void Propagator::place_parameter(TensorId id, OpId user) {
  const Op& op = g().op(user);
  const Factors factors = factors_of(g(), op);
  for (size_t a = 1; a < axes(); ++a) {
    const OpCut& cut = cuts_[a][static_cast<size_t>(user)];
    if (size(a, op) == 1 || !cut.present() || role(op, a) == AxisRole::kReplica) continue;
    const Factor& f = factors.list[static_cast<size_t>(cut.factor)];
    for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i)
      if (op.inputs[i] == id && f.inputs[i].present()) b_.out.at(id, a) = shard(sub_digit(f.inputs[i], cut.sub));
  }
}

void Propagator::cut_state(TensorId id, OpId user) {
  const Op& op = g().op(user);
  for (size_t a = 1; a < axes(); ++a) {
    if (size(a, op) == 1 || role(op, a) != AxisRole::kReplica || placement(id, a) != Placement::kReplicate) continue;
    if (const Digit digit = state_digit(id, a, size(a, op)); digit.present()) b_.out.at(id, a) = shard(digit, true);
  }
}

void Propagator::cut_gradient(TensorId id) {
  const auto p = parameter_of_.find(id);
  if (id == kNone || p == parameter_of_.end() || p->second == kNone) return;
  const Op op = g().op(b_.producer(id));  // a copy: bridges are appended
  for (size_t a = 1; a < axes(); ++a) {
    if (placement(b_.latest(id), a) != Placement::kPartial || role(op, a) != AxisRole::kReplica) continue;
    AxisLayout want = home_.at(p->second).axes[a];
    if (want.placement != Placement::kShard) {
      const Digit digit = state_digit(p->second, a, size(a, op));
      if (!digit.present()) continue;
      want = shard(digit, true);
    }
    // The gradient itself may be cut in ways that its parameter is not.
    bool fits = true;
    for (size_t b = 1; b < axes(); ++b)
      if (const TensorId now = b_.latest(id); b != a && placement(now, b) == Placement::kShard)
        fits &= compatible(g().tensor(id).dims, b_.out.at(now, b).digit, want.digit);
    if (!fits) continue;
    const TensorId from = b_.latest(id);
    b_.replace(from, bring(op, from, a, want));
  }
}

OpCut Propagator::cut_of_state(const Op& op, const Factors& factors, size_t a) const {
  const auto p = parameter_of_.find(op.outputs[0]);
  if (p == parameter_of_.end() || p->second == kNone) return {};
  const Dims& dims = g().tensor(op.outputs[0]).dims;
  for (const Variable& v : g().variables) {
    if (v.owner != p->second || g().tensor(v.tensor).dims != dims) continue;
    const AxisLayout& l = home_.at(v.tensor).axes[a];
    if (l.placement != Placement::kShard || !l.state) continue;
    for (size_t k = 0; k < factors.list.size(); ++k) {
      OpCut cut{static_cast<int>(k), {}, true};
      const Factor& f = factors.list[k];
      if (find_sub_digit(f.inputs[0], f.extent, l.digit, extent_of(dims, l.digit), cut.sub) && fits(op, f, cut.sub, a))
        return cut;
    }
  }
  return {};
}

}  // namespace whale
