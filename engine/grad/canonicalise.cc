// Fewer ops for the passes that follow; see passes.h.
#include <algorithm>

#include "grad/passes.h"
#include "grad/rewrite.h"
#include "ops/axes.h"

namespace whale {
namespace {

// Keys that are given here live above those that users may write.
constexpr int64_t kFirstKey = int64_t{1} << 32;

void give_keys(Graph& graph) {
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    Op& op = graph.ops[i];
    if (!has_flag(op.code, kRandom)) continue;
    int64_t key = attr_int(op.attrs, "key");
    if (key == 0) key = kFirstKey + static_cast<int64_t>(i);
    op.key = static_cast<uint64_t>(key);
    op.attrs["key"] = key;
  }
}

// reduce_mean(x) = reduce_sum(x) * (1 / N). In 16 bits the sum, which may be beyond the range that its mean fits in, is
// f32, and the mean is rounded.
void expand_mean(Rewriter& r, size_t i) {
  const Op& op = r.old[i];
  const TensorId x = r.now(op.inputs[0]), y = op.outputs[0];
  const Dims& dims = r.graph.tensor(x).dims;
  const std::vector<bool> reduced = reduced_axes(op.attrs, dims.size());
  double count = 1;
  for (size_t d = 0; d < dims.size(); ++d)
    if (reduced[d]) count *= static_cast<double>(dims[d]);
  const DType type = r.graph.tensor(y).dtype, exact = accumulate_dtype(type);
  Attrs attrs = op.attrs;
  if (exact != type) attrs["out_dtype"] = std::string(name_of(exact));
  const TensorId sum = r.emit(i, OpCode::k_reduce_sum, {x}, attrs);
  const TensorId share =
      r.emit(i, OpCode::k_fill, {},
             {{"shape", Dims{}}, {"value", count > 0 ? 1 / count : 0.0}, {"dtype", std::string(name_of(exact))}});
  TensorId mean = r.emit(i, OpCode::k_mul, {sum, share});
  if (exact != type) mean = r.emit(i, OpCode::k_cast, {mean}, {{"dtype", std::string(name_of(type))}});
  r.graph.tensor(mean).name = r.graph.tensor(y).name;
  r.replace(y, mean);
  r.moved(i, r.graph.tensor(mean).producer);
}

void set_next(Graph& graph, TensorId variable, TensorId next) {
  for (Variable& v : graph.variables) {
    if (v.tensor != variable) continue;
    if (v.role != Role::kBuffer)
      throw invalid("batch_norm: running statistic '{}' must be a buffer, not a parameter",
                    graph.tensor(variable).name);
    if (v.next != kNone)
      throw unimplemented("batch_norm: two ops update the running statistic '{}'; give each its own",
                          graph.tensor(variable).name);
    v.next = next;
    return;
  }
  throw invalid("batch_norm: running_mean and running_var must be variables");
}

void expand_batch_norm(Rewriter& r, size_t i) {
  const Op& op = r.old[i];
  Graph& g = r.graph;
  TensorIds in;
  for (const TensorId id : op.inputs) in.push_back(r.now(id));
  const Dims& x = g.tensor(in[0]).dims;
  const int64_t groups = attr_int(op.attrs, "groups", 1), group = groups == 1 ? 0 : x[0] / groups;
  const int64_t count = element_count(x) / std::max<int64_t>(x.back() * groups, 1);
  const TensorId stats =
      r.emit(i, OpCode::k_batch_stats, {in[0]}, {{"group", group}, {"dims", Dims{groups, 2, x.back()}}});
  g.op(g.tensor(stats).producer).name = op.name + ".stats";
  const TensorId y = r.emit(i, OpCode::k_batch_norm_apply, {in[0], stats, in[1], in[2]},
                            {{"epsilon", op.attrs.at("epsilon")}, {"count", count}, {"group", group}});
  g.tensor(y).name = g.tensor(op.outputs[0]).name;
  g.op(g.tensor(y).producer).name = op.name;
  r.moved(i, g.tensor(y).producer);
  r.replace(op.outputs[0], y);
  const TensorId moments =
      r.emit(i, OpCode::k_batch_norm_moments, {stats},
             {{"count", count}, {"groups", groups}, {"out_dtype", std::string(name_of(g.tensor(in[3]).dtype))}});
  const TensorId mean =
      r.emit(i, OpCode::k_batch_norm_running, {in[3], in[4], moments}, {{"momentum", op.attrs.at("momentum")}});
  Op& running = g.op(g.tensor(mean).producer);
  running.phase = Phase::kUpdate;
  running.origin = g.tensor(y).producer;
  set_next(g, in[3], running.outputs[0]);
  set_next(g, in[4], running.outputs[1]);
}

// batch_norm_apply -> relu, or -> add a residual -> relu: one op, which then keeps nothing but x and y for its
// gradient. The normalization is made anew where the last of them stood (the residual may be made after the first); the
// old one dies.
void fuse_batch_norm(Graph& graph) {
  const std::vector<int> uses = use_counts(graph);
  Rewriter r(graph);
  const auto open = [&](TensorId id) -> const Op* {  // a normalization that may still take more in
    const Op* op = r.producer(id);
    if (!op || op->code != OpCode::k_batch_norm_apply || attr_bool(op->attrs, "relu")) return nullptr;
    return op;
  };
  for (size_t i = 0; i < r.old.size(); ++i) {
    const Op& op = r.old[i];
    const auto single = [&](size_t k) { return uses[op.inputs[k]] == 1; };
    TensorIds inputs;
    Attrs attrs;
    std::string name;
    if (op.code == OpCode::k_relu && single(0)) {
      if (const Op* norm = open(r.now(op.inputs[0]))) {
        inputs = norm->inputs, attrs = norm->attrs, name = norm->name;
        attrs["relu"] = true;
      }
    } else if (op.code == OpCode::k_add) {
      for (size_t k = 0; k < 2 && inputs.empty(); ++k) {
        const TensorId mine = r.now(op.inputs[k]), other = r.now(op.inputs[1 - k]);
        const Op* norm = single(k) ? open(mine) : nullptr;
        if (!norm || norm->inputs[4] != kNone || mine == other || graph.tensor(mine).dims != graph.tensor(other).dims)
          continue;
        inputs = norm->inputs, attrs = norm->attrs, name = norm->name;
        inputs[4] = other;
      }
    }
    if (inputs.empty()) {
      r.keep(i);
      continue;
    }
    const TensorId y = r.emit(i, OpCode::k_batch_norm_apply, inputs, attrs);
    graph.op(graph.tensor(y).producer).name = name;
    graph.tensor(y).name = graph.tensor(op.outputs[0]).name;
    r.moved(i, graph.tensor(y).producer);
    r.replace(op.outputs[0], y);
  }
  r.finish();
}

// matmul with an activation whose gradient needs what went into it (relu's needs only the result): the product, then
// the activation as an op of its own.
bool hides_operand(const Op& op) {
  if (op.code != OpCode::k_matmul) return false;
  const std::string& activation = attr_string(op.attrs, "activation");
  return !activation.empty() && activation != "none" && activation != "relu";
}

void expand_activation(Rewriter& r, size_t i) {
  const Op& op = r.old[i];
  TensorIds in;
  for (const TensorId id : op.inputs) in.push_back(r.now(id));
  Attrs attrs = op.attrs;
  attrs["activation"] = std::string("none");
  const TensorId product = r.emit(i, OpCode::k_matmul, in, attrs);
  r.graph.op(r.graph.tensor(product).producer).name = op.name + ".product";
  const TensorId y = r.emit(i, code_of(attr_string(op.attrs, "activation")), {product});
  r.graph.op(r.graph.tensor(y).producer).name = op.name;
  r.graph.tensor(y).name = r.graph.tensor(op.outputs[0]).name;
  r.moved(i, r.graph.tensor(y).producer);
  r.replace(op.outputs[0], y);
}

}  // namespace

void canonicalise(Graph& graph) {
  give_keys(graph);
  Rewriter r(graph);
  bool norms = false;
  for (size_t i = 0; i < r.old.size(); ++i) {
    const Op& op = r.old[i];
    try {
      if (op.code == OpCode::k_reduce_mean)
        expand_mean(r, i);
      else if (op.code == OpCode::k_batch_norm)
        expand_batch_norm(r, i), norms = true;
      else if (graph.training.loss != kNone && hides_operand(op))
        expand_activation(r, i);
      else
        r.keep(i);
    } catch (Error& e) {
      e.at_op(op.name).at_scope(graph.scope_path(op.scope));
      throw;
    }
  }
  r.finish();
  if (norms) fuse_batch_norm(graph);
}

}  // namespace whale
