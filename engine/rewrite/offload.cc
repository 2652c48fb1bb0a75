#include "rewrite/offload.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "base/format.h"
#include "rewrite/moves.h"
#include "rewrite/order.h"

namespace whale {
namespace {

constexpr size_t kWorthOps = 4;  // that run while it is away

class Offloader {
 public:
  explicit Offloader(ShardedGraph& graph) : lg_(graph), g_(graph.graph), moves_(graph), first_new_(g_.tensors.size()) {}

  void run() {
    move_variables();
    if (lg_.offload & kOffloadGradients) {
      for (size_t i = 0; i < g_.ops.size(); ++i)
        if (g_.ops[i].code == OpCode::k_accumulate && g_.ops[i].phase != Phase::kForward) move_sum(i);
      each_value([&](TensorId id) { move_gradient(id); });
    }
    if (lg_.offload & kOffloadActivations) each_value([&](TensorId id) { move_activation(id); });
    moves_.apply();
  }

 private:
  const Op& producer(TensorId id) const { return g_.op(g_.tensor(id).producer); }
  bool fetched(TensorId root) const {
    return std::any_of(lg_.fetches.begin(), lg_.fetches.end(),
                       [&](const NamedTensor& f) { return view_root(g_, f.tensor) == root; });
  }
  // Made by whoever needs it: casts and gathers of parameters.
  bool made_of_variables(TensorId id, int depth = 0) const {
    const Tensor& t = g_.tensor(id);
    if (t.kind != TensorKind::kValue) return t.kind != TensorKind::kInput;
    if (t.producer == kNone || depth > 16) return false;
    const Op& op = g_.op(t.producer);
    return std::all_of(op.inputs.begin(), op.inputs.end(),
                       [&](TensorId x) { return x == kNone || made_of_variables(x, depth + 1); });
  }
  template <class Body>
  void each_value(Body body) {
    for (TensorId id = 0; id < static_cast<TensorId>(first_new_); ++id) {
      const Tensor& t = g_.tensor(id);
      if (t.kind != TensorKind::kValue || t.producer == kNone || is_view(producer(id).code) ||
          bytes_of(t) < lg_.tasks.cost.worth_copying_bytes || made_of_variables(id))
        continue;
      body(id);
    }
  }

  // Read from copies; what an update makes is copied to where the variable lives.
  void move_variables() {
    std::map<OpId, std::vector<Variable*>> updates;
    for (Variable& v : g_.variables) {
      if (!in_host(lg_, v.tensor)) continue;
      moves_.fetch(v.tensor, v.tensor, moves_.uses_of(v.tensor), 0);
      if (v.next != kNone && v.next != v.tensor) updates[g_.tensor(v.next).producer].push_back(&v);
      for (NamedTensor& f : lg_.fetches)
        if (view_root(g_, f.tensor) == v.tensor) f.tensor = moves_.fetch_first(v.tensor, f.tensor);
    }
    for (auto& [op, variables] : updates) {
      TensorIds next;
      for (const Variable* v : variables) next.push_back(v->next);
      const auto update = static_cast<size_t>(op);
      const TensorIds stored = moves_.store(next, update + 1, update);
      for (size_t k = 0; k < variables.size(); ++k) variables[k]->next = stored[k];
    }
  }

  // A sum over micro-batches stays in the host's memory from one to the next and until it is read.
  void move_sum(size_t number) {
    const Op op = g_.ops[number];
    const TensorId sum = op.outputs[0];
    if (bytes_of(g_.tensor(sum)) < lg_.tasks.cost.worth_copying_bytes || fetched(sum)) return;
    size_t made = number + 1;
    TensorId host = kNone;
    if (lg_.exact) {  // lowering keeps the nodes of the tree there; see finish_sums
      while (made < g_.ops.size() && g_.ops[made].region != Region::kEpilogue) ++made;
      if (made == g_.ops.size()) return;
      Op at = op;
      at.region = Region::kEpilogue;
      std::swap(g_.ops[number], at);
      host = moves_.store({sum}, made, number)[0];
      std::swap(g_.ops[number], at);
    } else {
      const TensorId zero = op.inputs[0];
      if (g_.tensor(zero).producer == kNone) return;
      const auto fill = static_cast<size_t>(g_.tensor(zero).producer);
      if (g_.ops[fill].code != OpCode::k_fill || moves_.uses_of(zero).size() != 1) return;
      const TensorId place = moves_.store({zero}, fill + 1, fill)[0];
      moves_.fetch(place, zero, {{number, zero}}, fill + 1);
      host = moves_.store({sum}, made, number, {place})[0];
    }
    moves_.fetch(host, sum, moves_.uses_of(sum), made);
    moved_.push_back(sum);
  }

  // Leaves in the longest pause between two of its uses before the update.
  void move_gradient(TensorId id) {
    const std::vector<Use>& uses = moves_.uses_of(id);
    if (producer(id).phase == Phase::kForward || (lg_.micro_batches > 1 && lg_.time_varies(id)) ||
        std::find(moved_.begin(), moved_.end(), id) != moved_.end() ||
        std::none_of(uses.begin(), uses.end(), [&](const Use& u) { return has_flag(g_.ops[u.op].code, kUpdateOp); }))
      return;
    auto before = static_cast<size_t>(g_.tensor(id).producer);
    size_t longest = 0, last = before, first = 0;
    for (size_t k = 0; k < uses.size(); ++k) {
      const size_t pause = moves_.ops_between(before + 1, uses[k].op);
      if (pause > longest) longest = pause, last = before, first = k;
      before = uses[k].op;
    }
    if (longest < kWorthOps) return;
    const TensorId host = moves_.store({id}, last + 1, static_cast<size_t>(g_.tensor(id).producer))[0];
    moves_.fetch(host, id, {uses.begin() + static_cast<std::ptrdiff_t>(first), uses.end()}, last + 1);
    moved_.push_back(id);
  }

  // Leaves after its last use in the forward pass, is back for its first use in the backward pass.
  void move_activation(TensorId id) {
    const auto made = static_cast<size_t>(g_.tensor(id).producer);
    if (g_.ops[made].phase != Phase::kForward || (lg_.micro_batches > 1 && !lg_.time_varies(id))) return;
    const Moves::Segment here = moves_.segment_of(made);
    std::vector<Use> later;
    size_t last = made;
    for (const Use& use : moves_.uses_of(id))
      if (moves_.segment_of(use.op, id) != here)
        later.push_back(use);
      else if (later.empty())
        last = use.op;
    if (std::none_of(later.begin(), later.end(), [&](const Use& u) { return g_.ops[u.op].phase == Phase::kBackward; }))
      return;
    const bool turns_at_once = lg_.micro_batches == 1 || lg_.tasks.schedule.empty() ||
                               lg_.stage(id) + 1 == static_cast<int32_t>(lg_.tasks.stages());
    if (turns_at_once && moves_.ops_between(last + 1, later.front().op) < kWorthOps) return;
    const TensorId host = moves_.store({id}, last + 1, made)[0];
    moves_.fetch(host, id, later, last + 1);
  }

  ShardedGraph& lg_;
  Graph& g_;
  Moves moves_;
  size_t first_new_;
  std::vector<TensorId> moved_;
};

}  // namespace

bool in_host(const ShardedGraph& lg, TensorId id) {
  const Tensor& t = lg.graph.tensor(id);
  if (t.kind == TensorKind::kVariable) {
    if (!lg.offload) return false;
    for (const Variable& v : lg.graph.variables) {
      if (v.tensor != id) continue;
      return (v.role == Role::kParameter && (lg.offload & kOffloadParameters)) ||
             (v.role == Role::kState && (lg.offload & kOffloadState));
    }
    return false;
  }
  return t.kind == TensorKind::kValue && t.producer != kNone && lg.graph.op(t.producer).code == OpCode::k_to_host;
}

void offload(ShardedGraph& graph, uint32_t classes) {
  graph.offload = classes;
  if (classes) Offloader(graph).run();
}

}  // namespace whale
