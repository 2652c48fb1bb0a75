// Following the batch through a program: which sub-axis of each tensor it is, and the same program for another batch
// size.
#include "grad/passes.h"
#include "grad/rewrite.h"
#include "ops/factor_table.h"

namespace whale {
namespace {

// The batch within factor `f` of extent e at sub-axis `at`: the factor may be the batch itself, or a merged run that
// contains it (rows of a matmul after [b, t, d] -> [b t, d]). Then batch = (outer, batch, inner) of the factor's own
// positions.
struct Inside {
  int64_t outer = 0, inner = 0;  // outer 0: not inside
};
Inside inside(const SubAxis& batch, int64_t extent, const SubAxis& at, int64_t factor) {
  if (batch.dim != at.dim || batch.outer % at.outer || batch.inner % at.inner) return {};
  const Inside in{batch.outer / at.outer, batch.inner / at.inner};
  return in.outer * extent * in.inner == factor ? in : Inside{};
}

// Samples meet in `op`, so that the program of another batch size is none that the graph speaks of.
Error refusal(const Graph& g, const Op& op, int64_t declared, const std::string& why) {
  return unimplemented(
             "{}op '{}' ({}) {}: what the graph says holds for its batch of {} only. Feed whole batches of {}, or "
             "build "
             "the graph for the other size",
             op.location.empty() ? "" : op.location + ": ", op.name, def(op.code).name, why, declared, declared)
      .at_op(op.name)
      .at_scope(g.scope_path(op.scope));
}

class Follower {
 public:
  Follower(const Graph& graph, bool strict) : g_(graph), strict_(strict) { sub_axes_.of.resize(g_.tensors.size()); }

  BatchSubAxes run() {
    const Tensor* first = nullptr;
    for (const TensorId id : g_.inputs) {
      const Tensor& t = g_.tensor(id);
      if (t.batch_dim < 0) continue;
      const int64_t batch = t.dims[t.batch_dim];
      if (first && batch != sub_axes_.batch)
        throw invalid(
            "input '{}' has a batch of {} and input '{}' one of {}; they must agree (or have no batch dimension: "
            "batch_dim -1)",
            first->name, sub_axes_.batch, t.name, batch);
      first = &t;
      sub_axes_.batch = batch;
      sub_axes_.of[id] = {t.batch_dim, 1, 1};
    }
    if (!first) return std::move(sub_axes_);
    // Forward mostly; backward for sources that take the batch from their users (a constant [b, t]). Two rounds settle
    // all but chains of sources; the bound is the graph's own length.
    for (const Op& op : g_.ops) factors_.push_back(&factors_of(op));
    bool again = true;
    for (size_t round = 0; again && round <= g_.ops.size(); ++round) {
      again = false;
      for (size_t i = 0; i < g_.ops.size(); ++i) again |= visit(i);
      for (size_t i = g_.ops.size(); i-- > 0;) again |= visit(i);
    }
    if (strict_)
      for (size_t i = 0; i < g_.ops.size(); ++i) check(i);
    return std::move(sub_axes_);
  }

 private:
  const Graph& g_;
  const bool strict_;
  BatchSubAxes sub_axes_;
  FactorTable table_;
  std::vector<const Factors*> factors_;  // per op

  const Factors& factors_of(const Op& op) {
    if (op.code != OpCode::k_reduce_mean) return table_.of(g_, op);
    Op sum = op;  // a mean names no factor that it reduces (a cut of it is no mean); here it is the sum that it becomes
    sum.code = OpCode::k_reduce_sum;
    return table_.of(g_, sum);
  }
  const SubAxis& of(TensorId id) const { return sub_axes_.of[id]; }

  template <class F>
  void each_operand(size_t i, const Factor& f, F visit) const {
    const Op& op = g_.ops[i];
    if (f.kind == FactorKind::kWindow) return;  // no samples lie beside each other in a window
    for (size_t k = 0; k < op.inputs.size() && k < f.inputs.size(); ++k)
      if (op.inputs[k] != kNone && f.inputs[k].present()) visit(op.inputs[k], f.inputs[k]);
    for (size_t k = 0; k < op.outputs.size() && k < f.outputs.size(); ++k)
      if (f.outputs[k].present()) visit(op.outputs[k], f.outputs[k]);
  }

  bool visit(size_t i) {
    bool changed = false;
    for (const Factor& f : factors_[i]->list) {
      Inside in;
      each_operand(i, f, [&](TensorId id, const SubAxis& at) {
        if (!in.outer && of(id).present()) in = inside(of(id), sub_axes_.batch, at, f.extent);
      });
      if (!in.outer) continue;
      each_operand(i, f, [&](TensorId id, const SubAxis& at) {
        const Tensor& t = g_.tensor(id);
        if (of(id).present() || t.kind != TensorKind::kValue) return;
        sub_axes_.of[id] = {at.dim, at.outer * in.outer, at.inner * in.inner};
        changed = true;
      });
    }
    return changed;
  }

  // Every operand that has the batch must have it in a factor, and no other operand may want it there.
  void check(size_t i) const {
    const Op& op = g_.ops[i];
    const auto fail = [&](const std::string& why) { return refusal(g_, op, sub_axes_.batch, why); };
    for (const TensorId id : op.inputs) {
      if (id == kNone || !of(id).present()) continue;
      bool found = false;
      for (const Factor& f : factors_[i]->list)
        each_operand(i, f, [&](TensorId other, const SubAxis& at) {
          found |= other == id && inside(of(id), sub_axes_.batch, at, f.extent).outer;
        });
      if (!found && sub_axes_.batch == 1)
        throw fail(
            "does not tell a batch of one from its other dimensions (declare the inputs with a larger one, and smaller "
            "ones are legal)");
      if (!found)
        throw fail(fmt::format("mixes the samples of '{}' with each other, or picks some", g_.tensor(id).name));
    }
    for (const Factor& f : factors_[i]->list) {
      Inside in;
      each_operand(i, f, [&](TensorId id, const SubAxis& at) {
        if (!in.outer && of(id).present()) in = inside(of(id), sub_axes_.batch, at, f.extent);
      });
      if (!in.outer) continue;
      each_operand(i, f, [&](TensorId id, const SubAxis&) {
        if (!of(id).present())
          throw fail(
              fmt::format("puts '{}' beside the samples, whose size does not follow the batch", g_.tensor(id).name));
      });
    }
  }
};

}  // namespace

BatchSubAxes batch_sub_axes(const Graph& graph, bool strict) { return Follower(graph, strict).run(); }

Graph rebatch(const Graph& graph, int64_t batch) {
  if (batch < 1) throw invalid("batch is {}, expected at least 1", batch);
  Graph g = graph;
  const BatchSubAxes sub_axes = batch_sub_axes(g, true);
  if (sub_axes.batch == 0 || sub_axes.batch == batch) return g;
  const auto rescaled = [&](TensorId id) {
    Dims dims = graph.tensor(id).dims;
    const SubAxis& d = sub_axes.of[id];
    if (d.present()) dims[d.dim] = d.outer * batch * d.inner;
    return dims;
  };
  for (const TensorId id : g.inputs) g.tensor(id).dims = rescaled(id);
  Rewriter r(g);
  for (size_t i = 0; i < r.old.size(); ++i) {
    Op& op = r.old[i];
    for (auto& [name, value] : op.attrs) {
      const AttrRole role = role_of(def(op.code), name);
      if (role == AttrRole::kShape) value = rescaled(op.outputs[0]);
      if (role != AttrRole::kEnds) continue;
      const SubAxis& d = sub_axes.of[op.inputs[0]];
      if (d.present()) std::get<Ints>(value)[d.dim] = d.outer * batch * d.inner;
    }
    r.keep(i, true);
    for (const TensorId y : op.outputs)
      if (g.tensor(y).dims != rescaled(y))
        throw refusal(graph, op, sub_axes.batch,
                      fmt::format("gives {} for a batch of {} where the rest of the graph has {}",
                                  to_string(g.tensor(y).dims), batch, to_string(rescaled(y))));
  }
  r.finish();
  return g;
}

}  // namespace whale
