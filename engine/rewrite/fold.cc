#include "rewrite/fold.h"

#include <algorithm>
#include <set>
#include <string>

#include "grad/rewrite.h"
#include "ops/op.h"
#include "rewrite/rewrite.h"
#include "task/factor_names.h"

namespace whale {
namespace {

// What all folds ask: how often a tensor is read, and who makes it, while ops disappear.
struct Folder {
  Graph& g;
  std::vector<int> uses;
  std::vector<char> removed;
  explicit Folder(Graph& graph) : g(graph), uses(use_counts(graph)), removed(graph.ops.size()) {}

  bool once(TensorId id) const { return id != kNone && uses[id] == 1; }
  const Op* product(TensorId id) const {
    if (id == kNone || g.tensor(id).producer == kNone) return nullptr;
    const OpId p = g.tensor(id).producer;
    const Op& op = g.op(p);
    return has_flag(op.code, kProduct) && !removed[p] ? &op : nullptr;
  }
  OpId number(const Op& op) const { return static_cast<OpId>(&op - g.ops.data()); }
  void remove(const Op& op) { removed[number(op)] = 1; }
  TensorId input(const Op& op, size_t i) const { return i < op.inputs.size() ? op.inputs[i] : kNone; }
};

// What the splits ask of an op's form. Copies of one op have one form (unlike replicas): what any of them asks for.
class Asked {
 public:
  Asked(const Graph& graph, const TaskGraphs& tasks) : tasks_(tasks) {
    if (tasks.replicas.empty()) return;
    for (const Op& op : graph.ops) {
      if (is_split(op)) split_.emplace(name_of(op));
      if (is_unpacked(op)) unpacked_.emplace(name_of(op));
    }
  }
  bool split(const Op& op) const { return tasks_.replicas.empty() ? is_split(op) : split_.contains(name_of(op)); }
  // A factor that the op has only when its operands stand apart.
  bool unpacked(const Op& op) const {
    return tasks_.replicas.empty() ? is_unpacked(op) : unpacked_.contains(name_of(op));
  }

 private:
  static std::string name_of(const Op& op) { return op.name.substr(0, op.name.find('@')); }
  bool is_split(const Op& op) const { return std::ranges::count(tasks_.task(op).roles, AxisRole::kSplit) > 0; }
  bool is_unpacked(const Op& op) const {
    const OpDef& d = def(op.code);
    return d.unpack && std::ranges::any_of(tasks_.task(op).factors, [&](const std::string& wanted) {
             return !wanted.empty() && is_named(d.unpacked_factor, wanted);
           });
  }

  const TaskGraphs& tasks_;
  std::set<std::string> split_, unpacked_;  // names of ops
};

// Drops the folded ops and the tensors that only they made.
void finish(Folder& f) {
  for (size_t i = 0; i < f.removed.size(); ++i)
    if (f.removed[i])
      for (const TensorId id : f.g.ops[i].outputs)
        if (id != kNone && f.g.tensor(id).producer == static_cast<OpId>(i)) f.g.tensor(id).producer = kNone;
  compact(f.g, f.removed);
  drop_unmade_tensors(f.g);
}

}  // namespace

void fold_bias(Graph& graph, const TaskGraphs& tasks) {
  Folder f(graph);
  const Asked asked(graph, tasks);
  for (Op& op : graph.ops) {
    if (op.code != OpCode::k_add || asked.split(op)) continue;
    for (const int at : {0, 1}) {
      const TensorId product = op.inputs[at], bias = op.inputs[1 - at];
      const Op* matmul = f.product(product);
      if (!matmul || !f.once(product) || f.input(*matmul, 2) != kNone) continue;
      const Tensor &y = graph.tensor(product), &b = graph.tensor(bias);
      const std::string& activation = attr_string(matmul->attrs, "activation");
      if (b.dims.size() != 1 || y.dims.empty() || b.dims[0] != y.dims.back() || b.dtype != y.dtype || y.dims.size() < 2)
        continue;
      if (!activation.empty() && activation != "none") continue;
      if (matmul->scope != op.scope && graph.scope_path(matmul->scope) != graph.scope_path(op.scope)) continue;
      f.remove(*matmul);
      Op fused = *matmul;
      fused.inputs.resize(3, kNone);
      fused.inputs[2] = bias;
      fused.outputs = op.outputs;
      op = std::move(fused);
      break;
    }
  }
  finish(f);
}

void fold_activation(Graph& graph, const TaskGraphs& tasks) {
  Folder f(graph);
  const Asked asked(graph, tasks);
  for (Op& op : graph.ops) {
    const char* name = def(op.code).as_activation;
    if (!name || !f.once(op.inputs[0]) || asked.split(op)) continue;
    const Op* matmul = f.product(op.inputs[0]);
    if (!matmul) continue;
    const std::string& activation = attr_string(matmul->attrs, "activation");
    if (!activation.empty() && activation != "none") continue;
    f.remove(*matmul);
    Op fused = *matmul;
    fused.attrs["activation"] = std::string(name);
    fused.outputs = op.outputs;
    op = std::move(fused);
  }
  finish(f);
}

void decompose_splits(Graph& graph, const TaskGraphs& tasks) {
  const Asked asked(graph, tasks);
  const auto form_of = [&](const Op& op) {
    return asked.unpacked(op) ? def(op.code).unpack : asked.split(op) ? def(op.code).decompose : nullptr;
  };
  if (std::none_of(graph.ops.begin(), graph.ops.end(), form_of)) return;
  Rewriter r(graph);
  for (size_t i = 0; i < r.old.size(); ++i) {
    const auto form = form_of(r.old[i]);
    if (!form) {
      r.keep(i);
      continue;
    }
    Op op = r.old[i];
    for (TensorId& id : op.inputs) id = r.now(id);
    const TensorIds results = form(graph, op);
    if (results.empty()) {
      r.keep(i);
      continue;
    }
    for (size_t k = 0; k < results.size(); ++k)
      if (op.outputs[k] != kNone) r.replace(op.outputs[k], results[k]);
  }
  r.finish();
}

void fold_whole_products(ShardedGraph& lg) {
  Graph& g = lg.graph;
  const auto readers = readers_of(g);
  std::vector<char> removed(g.ops.size()), kept(g.tensors.size());
  std::vector<size_t> left;  // readers, while sums disappear
  for (size_t t = 0; t < g.tensors.size(); ++t) left.push_back(readers[t].size());
  for (const NamedTensor& f : lg.fetches) kept[f.tensor] = 1;
  for (Op& op : g.ops) {
    if (op.code != OpCode::k_add || op.phase != Phase::kForward) continue;
    for (const size_t at : {size_t{0}, size_t{1}}) {
      const TensorId product = op.inputs[at], bias = op.inputs[1 - at];
      const OpId maker = g.tensor(product).producer;
      if (maker == kNone || removed[maker] || !has_flag(g.op(maker).code, kProduct) || readers[product].size() != 1 ||
          kept[product])
        continue;
      const Op& matmul = g.op(maker);
      const Tensor &y = g.tensor(product), &b = g.tensor(bias);
      const std::string& activation = attr_string(matmul.attrs, "activation");
      if (b.dims.size() != 1 || y.dims.size() < 2 || b.dims[0] != y.dims.back() || b.dtype != y.dtype ||
          (matmul.inputs.size() > 2 && matmul.inputs[2] != kNone) || (!activation.empty() && activation != "none") ||
          matmul.stage != op.stage || matmul.region != op.region)
        continue;
      const auto partial = [&](TensorId id) {
        const auto& axes = lg.shardings[id].axes;
        return std::any_of(axes.begin(), axes.end(),
                           [](const AxisSharding& l) { return l.placement == Placement::kPartial; });
      };
      if (partial(product) || partial(bias) || !(lg.shardings[product] == lg.shardings[op.outputs[0]])) continue;
      // In 16 bits one device reads the bias as it is and rounds the sum alone.
      TensorId as_it_is = bias;
      if (size_of(y.dtype) == 2 && b.producer != kNone) {
        const Op& cast = g.op(b.producer);
        as_it_is = cast.code == OpCode::k_cast ? cast.inputs[0] : kNone;
        if (as_it_is == kNone || g.tensor(as_it_is).dtype != DType::kF32 ||
            !(lg.shardings[as_it_is] == lg.shardings[bias]))
          continue;
        if (--left[bias] == 0 && !kept[bias]) removed[b.producer] = 1;
      }
      Op fused = matmul;
      fused.inputs.resize(3, kNone);
      fused.inputs[2] = as_it_is;
      fused.outputs = op.outputs;
      removed[maker] = 1;
      op = std::move(fused);
      break;
    }
  }
  compact(g, removed);
}

}  // namespace whale
