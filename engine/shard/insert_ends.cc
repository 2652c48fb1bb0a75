// The end of the step: next values go to their storage sharding, fetched values to a sharding that can be handed over.
#include "shard/inserter.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "task/unlike.h"

namespace whale {

Op Inserter::reader_of(TensorId id, int32_t stage) {
  Op op;
  op.code = OpCode::k_stop_gradient;
  op.name = g().tensor(id).name;
  op.phase = Phase::kUpdate;
  op.stage = stage;
  return op;
}

// Axis by axis, what one axis takes back another one may cut again: more would move than is missing.
bool Inserter::takes_detour(TensorId id, const Sharding& to) const {
  const Dims& dims = g().tensor(id).dims;
  const Sharding& from = b_.out.shardings[static_cast<size_t>(id)];
  const auto cut = [](const AxisSharding& l) { return l.placement == Placement::kShard; };
  for (size_t a = 0; a < axes(); ++a)
    if (from.axes[a].placement == Placement::kPartial || (from.axes[a].window.present() && a > 0)) return false;
  if (placement(id, kTime) != Placement::kReplicate || cut(to.axes[kTime])) return false;
  for (size_t a = 1; a < axes(); ++a) {
    if (from.axes[a] == to.axes[a]) continue;
    for (size_t b = 1; b < axes(); ++b) {
      if (b == a || !cut(to.axes[b])) continue;
      if (cut(from.axes[a]) && !(from.axes[b] == to.axes[b])) return true;
      for (const AxisSharding* mine : {&from.axes[a], &to.axes[a]})
        for (const AxisSharding* inner : {&from.axes[b], &to.axes[b]})
          if (b > a && cut(*mine) && cut(*inner) &&
              (mine->sub_axis == inner->sub_axis || !compatible(dims, mine->sub_axis, inner->sub_axis)))
            return true;
    }
  }
  return false;
}

TensorId Inserter::to_sharding(TensorId id, const Sharding& sharding, int32_t stage) {
  id = b_.latest(id);
  const Op end = reader_of(id, stage);
  if (tasks().stages() > 1) id = at_stage(id, end);
  if (takes_detour(id, sharding)) return b_.rearrange(id, sharding);
  // Gathered from the inside out, cut from the outside in.
  for (size_t a = axes(); a-- > 0;)
    if (sharding.axes[a].placement == Placement::kReplicate) id = to_sharding(end, id, a, {});
  for (size_t a = 0; a < axes(); ++a) id = to_sharding(end, id, a, sharding.axes[a]);
  return id;
}

TensorId Inserter::replicated(TensorId id) {
  return to_sharding(id, Sharding{std::vector<AxisSharding>(axes())}, b_.out.stage(b_.latest(id)));
}

TensorId Inserter::fetchable(TensorId id) {
  id = b_.latest(id);
  for (size_t a = 0; a < axes(); ++a)
    if (placement(id, a) == Placement::kPartial) id = b_.reduce(id, a);
  const bool in_time = placement(id, kTime) == Placement::kShard;
  for (size_t a = axes(); a-- > 1;) {
    if (placement(id, a) != Placement::kShard) continue;
    const AxisSharding l = b_.out.at(id, a);
    if (!l.samples) continue;  // the session puts the parts together
    if (l.sub_axis.outer != 1 || (!in_time && micro_batches() > 1)) id = b_.gather(id, a);
  }
  if (in_time && b_.out.at(id, kTime).sub_axis.outer != 1)
    throw unimplemented(
        "fetching '{}' with {} micro-batches: its samples are not the outermost part of a dimension; transpose it "
        "first",
        g().tensor(id).name, micro_batches());
  return id;
}

// Why the variable of this name has no gradient to fetch.
static Error no_gradient(const Graph& graph, const std::string& name) {
  const auto it = std::find_if(graph.variables.begin(), graph.variables.end(),
                               [&](const Variable& v) { return graph.tensor(v.tensor).name == name; });
  const char* why = it == graph.variables.end() || it->role != Role::kParameter ? "no parameter has this name"
                    : !it->trainable
                        ? "this parameter is not trainable, so it has no gradient"
                        : "the loss does not reach this parameter: its gradient is zero, and is not computed";
  return error(Code::kNotFound, "fetch 'grad:{}': {}", brief(name), why);
}

void Inserter::finish() {
  ShardedGraph& out = b_.out;
  std::set<std::string> names;
  const auto fetch = [&](const std::string& name, TensorId id) {
    if (names.insert(name).second) out.fetches.push_back({name, fetchable(id)});
  };
  if (g().training.loss != kNone) fetch("loss", g().training.loss);
  std::vector<NamedTensor> of_copies;  // of names that are there already
  const auto fed = [&](TensorId id, const UnlikeReplica& replica) {
    Op reader = reader_of(id, replica.stage);
    reader.scope = *std::ranges::find_if(replica.scope, [](ScopeId s) { return s != kNone; });
    return at_stage(id, reader);
  };
  for (const NamedTensor& o : std::vector<NamedTensor>(g().outputs)) {
    if (tasks().replicas.empty()) {
      fetch(o.name, o.tensor);
    } else if (g().tensor(o.tensor).kind == TensorKind::kInput && g().tensor(o.tensor).batch_dim >= 0) {
      const std::string name(name_of_copy(o.name));
      if (names.insert(name).second)
        for (const UnlikeReplica& r : tasks().replicas)
          (&r == tasks().replicas.data() ? out.fetches : of_copies).push_back({name, fed(o.tensor, r)});
    } else if (names.insert(o.name).second) {  // each replica hands over its samples, whole
      TensorId id = fetchable(o.tensor);
      for (size_t a = axes(); a-- > 1;)
        if (placement(id, a) == Placement::kShard && !b_.out.at(id, a).samples) id = b_.gather(id, a);
      const std::string name(name_of_copy(o.name));
      (name == o.name ? out.fetches : of_copies).push_back({name, id});
    }
  }
  for (const std::string& name : options_.fetch_gradients) {
    const auto it =
        std::find_if(g().gradients.begin(), g().gradients.end(), [&](const NamedTensor& n) { return n.name == name; });
    if (it == g().gradients.end()) throw no_gradient(g(), name);
    // What the update reads is handed out: another sum would round in another way, and move the bytes twice.
    const auto used = used_.find(it->tensor);
    if (names.insert("grad:" + name).second)
      out.fetches.push_back({"grad:" + name, replicated(used == used_.end() ? it->tensor : used->second)});
  }
  out.fetches.insert(out.fetches.end(), of_copies.begin(), of_copies.end());
  bool updates = false;
  for (Variable& v : g().variables)
    if (v.next != kNone && v.next != v.tensor) {
      v.next = b_.alike(to_sharding(v.next, storage_sharding(v.tensor), b_.out.stage(v.tensor)));
      updates = true;
    }
  // Every device looks at the loss before it changes anything.
  if (updates && tasks().meshes.size() > 1 && g().training.loss != kNone) {
    const TensorId loss = out.fetches[0].tensor;
    std::set<int32_t> there{tasks().mesh_of_stage[static_cast<size_t>(b_.out.stage(loss))]};
    for (int32_t s = 0; s < static_cast<int32_t>(tasks().stages()); ++s)
      if (there.insert(tasks().mesh_of_stage[static_cast<size_t>(s)]).second)
        out.fetches.push_back({"loss", b_.transfer(loss, s, Phase::kForward)});
  }
  b_.finish();
}

}  // namespace whale
