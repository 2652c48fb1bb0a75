#include "shard/ends.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "task/unlike.h"

namespace whale {
namespace {

// Stands for whoever reads it at the end of the step, in messages.
Op reader_of(const Graph& graph, TensorId id, int32_t stage) {
  Op op;
  op.code = OpCode::k_stop_gradient;
  op.name = graph.tensor(id).name;
  op.phase = Phase::kUpdate;
  op.stage = stage;
  return op;
}

// Axis by axis, what one axis takes back another one may cut again: more would move than is missing.
bool takes_detour(const ShardedGraph& graph, TensorId id, const Sharding& to) {
  const Dims& dims = graph.graph.tensor(id).dims;
  const Sharding& from = graph.shardings[id];
  const auto cut = [](const AxisSharding& l) { return l.placement == Placement::kShard; };
  for (size_t a = 0; a < graph.axes(); ++a)
    if (from.axes[a].placement == Placement::kPartial || (from.axes[a].window.present() && a > 0)) return false;
  if (graph.placement(id, kTime) != Placement::kReplicate || cut(to.axes[kTime])) return false;
  for (size_t a = 1; a < graph.axes(); ++a) {
    if (from.axes[a] == to.axes[a]) continue;
    for (size_t b = 1; b < graph.axes(); ++b) {
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

// Why the variable of this name has no gradient to fetch.
Error no_gradient(const Graph& graph, const std::string& name) {
  const auto it = std::find_if(graph.variables.begin(), graph.variables.end(),
                               [&](const Variable& v) { return graph.tensor(v.tensor).name == name; });
  const char* why = it == graph.variables.end() || it->role != Role::kParameter ? "no parameter has this name"
                    : !it->trainable
                        ? "this parameter is not trainable, so it has no gradient"
                        : "the loss does not reach this parameter: its gradient is zero, and is not computed";
  return error(Code::kNotFound, "fetch 'grad:{}': {}", brief(name), why);
}

class Ends {
 public:
  explicit Ends(Placer& placer) : placer_(placer), b_(placer.builder()), out_(b_.out), g_(out_.graph) {}
  void fetch_outputs();
  void fetch_gradients();
  bool store_variables();  // whether there are any
  void show_loss();        // to every device

 private:
  void fetch(const std::string& name, TensorId id) {
    if (names_.insert(name).second) out_.fetches.push_back({name, fetchable(id)});
  }
  void fetch_of_unlike(const NamedTensor& output);
  TensorId fed(TensorId input, const UnlikeReplica& replica);
  // Sums are finished; samples stay where they are and are put together by the session.
  TensorId fetchable(TensorId id);
  TensorId to_sharding(TensorId id, const Sharding& sharding, int32_t stage);

  Placer& placer_;
  ReshardBuilder& b_;
  ShardedGraph& out_;
  Graph& g_;
  std::set<std::string> names_;
  std::vector<NamedTensor> of_copies_;  // of names that are there already
};

TensorId Ends::to_sharding(TensorId id, const Sharding& sharding, int32_t stage) {
  id = b_.latest(id);
  const Op end = reader_of(g_, id, stage);
  if (out_.tasks.stages() > 1) id = placer_.at_stage(id, end);
  if (takes_detour(out_, id, sharding)) return b_.rearrange(id, sharding);
  // Gathered from the inside out, cut from the outside in.
  for (size_t a = out_.axes(); a-- > 0;)
    if (sharding.axes[a].placement == Placement::kReplicate) id = placer_.to_sharding(end, id, a, {});
  for (size_t a = 0; a < out_.axes(); ++a) id = placer_.to_sharding(end, id, a, sharding.axes[a]);
  return id;
}

TensorId Ends::fetchable(TensorId id) {
  id = b_.latest(id);
  for (size_t a = 0; a < out_.axes(); ++a)
    if (out_.placement(id, a) == Placement::kPartial) id = b_.reduce(id, a);
  const bool in_time = out_.placement(id, kTime) == Placement::kShard;
  for (size_t a = out_.axes(); a-- > 1;) {
    if (out_.placement(id, a) != Placement::kShard) continue;
    const AxisSharding l = out_.at(id, a);
    if (!l.samples) continue;  // the session puts the parts together
    if (l.sub_axis.outer != 1 || (!in_time && out_.micro_batches > 1)) id = b_.gather(id, a);
  }
  if (in_time && out_.at(id, kTime).sub_axis.outer != 1)
    throw unimplemented(
        "fetching '{}' with {} micro-batches: its samples are not the outermost part of a dimension; transpose it "
        "first",
        g_.tensor(id).name, out_.micro_batches);
  return id;
}

TensorId Ends::fed(TensorId input, const UnlikeReplica& replica) {
  Op reader = reader_of(g_, input, replica.stage);
  reader.scope = *std::ranges::find_if(replica.scope, [](ScopeId s) { return s != kNone; });
  return placer_.at_stage(input, reader);
}

// Of each replica.
void Ends::fetch_of_unlike(const NamedTensor& output) {
  const std::string name(name_of_copy(output.name));
  const auto& replicas = out_.tasks.replicas;
  const Tensor& t = g_.tensor(output.tensor);
  if (t.kind == TensorKind::kInput && t.batch_dim >= 0) {
    if (!names_.insert(name).second) return;
    for (const UnlikeReplica& r : replicas)
      (&r == replicas.data() ? out_.fetches : of_copies_).push_back({name, fed(output.tensor, r)});
    return;
  }
  if (!names_.insert(output.name).second) return;
  TensorId id = fetchable(output.tensor);  // each hands over its samples, whole
  for (size_t a = out_.axes(); a-- > 1;)
    if (out_.placement(id, a) == Placement::kShard && !out_.at(id, a).samples) id = b_.gather(id, a);
  (name == output.name ? out_.fetches : of_copies_).push_back({name, id});
}

void Ends::fetch_outputs() {
  if (g_.training.loss != kNone) fetch("loss", g_.training.loss);
  for (const NamedTensor& o : std::vector<NamedTensor>(g_.outputs))
    if (out_.tasks.replicas.empty())
      fetch(o.name, o.tensor);
    else
      fetch_of_unlike(o);
}

void Ends::fetch_gradients() {
  const Sharding replicated{std::vector<AxisSharding>(out_.axes())};
  for (const std::string& name : placer_.options().fetch_gradients) {
    const auto it = std::ranges::find(g_.gradients, name, &NamedTensor::name);
    if (it == g_.gradients.end()) throw no_gradient(g_, name);
    if (!names_.insert("grad:" + name).second) continue;
    // What the update reads is handed out: another sum would round in another way, and move the bytes twice.
    const TensorId used = placer_.as_update_reads(it->tensor);
    out_.fetches.push_back({"grad:" + name, to_sharding(used, replicated, out_.stage(b_.latest(used)))});
  }
  out_.fetches.insert(out_.fetches.end(), of_copies_.begin(), of_copies_.end());
}

bool Ends::store_variables() {
  bool any = false;
  for (Variable& v : g_.variables)
    if (v.next != kNone && v.next != v.tensor) {
      v.next = b_.alike(to_sharding(v.next, placer_.storage_sharding(v.tensor), out_.stage(v.tensor)));
      any = true;
    }
  return any;
}

void Ends::show_loss() {
  const auto mesh = [&](int32_t stage) { return out_.tasks.mesh_of_stage[stage]; };
  const TensorId loss = out_.fetches[0].tensor;
  std::set<int32_t> there{mesh(out_.stage(loss))};
  for (int32_t s = 0; s < static_cast<int32_t>(out_.tasks.stages()); ++s)
    if (there.insert(mesh(s)).second) out_.fetches.push_back({"loss", b_.transfer(loss, s, Phase::kForward)});
}

}  // namespace

void finish_step(Placer& placer) {
  Ends ends(placer);
  ends.fetch_outputs();
  ends.fetch_gradients();
  const ShardedGraph& out = placer.builder().out;
  // Every device looks at the loss before it changes anything.
  if (ends.store_variables() && out.tasks.meshes.size() > 1 && out.graph.training.loss != kNone) ends.show_loss();
  placer.builder().finish();
}

}  // namespace whale
