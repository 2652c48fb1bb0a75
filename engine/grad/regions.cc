// Prologue, body or epilogue (semantics.md section 2).
//
// Prologue: what depends on no sample: casts of parameters, constants. Epilogue: updates, and what only they need.
// Body: the rest, once per micro-batch. With several micro-batches, a reduction over the batch that depends on labels
// but on no parameter (the count of labels that are not ignored) is computed in the prologue from the whole batch, with
// copies of the ops that lead to it.
#include <algorithm>

#include "grad/passes.h"
#include "grad/rewrite.h"

namespace whale {

bool many_micro_batches(const Graph& g) {
  return g.training.accumulation > 1 || std::any_of(g.scopes.begin(), g.scopes.end(), [](const Scope& s) {
           return s.kind == ScopeKind::kPipeline && s.micro_batches > 1;
         });
}

namespace {

// What a tensor is a function of.
struct Depends {
  bool sample = false, variable = false, update = false;
};

std::vector<Depends> dependencies(const Graph& g) {
  std::vector<Depends> of(g.tensors.size());
  for (size_t i = 0; i < g.tensors.size(); ++i) {
    of[i].sample = g.tensors[i].kind == TensorKind::kInput;
    of[i].variable = g.tensors[i].kind == TensorKind::kVariable;
    of[i].update = g.tensors[i].kind == TensorKind::kStep && g.tensors[i].name != "loss_scale";
  }
  for (const Op& op : g.ops) {
    Depends d{.sample = false, .variable = false, .update = op.phase == Phase::kUpdate};
    for (const TensorId id : op.inputs) {
      if (id == kNone) continue;
      const Depends& x = of[id];
      d.sample |= x.sample, d.variable |= x.variable, d.update |= x.update;
    }
    for (const TensorId id : op.outputs) of[id] = d;
  }
  return of;
}

// Its sums are of groups of samples, of which a micro-batch has its own.
bool in_groups(const Graph& g, const Op& op) {
  if (!def(op.code).factors) return false;
  const Factors factors = def(op.code).factors(view_of(g, op));
  return std::any_of(factors.list.begin(), factors.list.end(), [](const Factor& f) { return f.group.rows > 0; });
}

// Marks reductions over the batch that depend on no parameter, with all that they depend on.
std::vector<bool> hoisted(const Graph& g, const std::vector<Depends>& of, const BatchSubAxes& sub_axes) {
  const auto batched = [&](TensorId id) { return id != kNone && sub_axes.of[id].present(); };
  std::vector<bool> wanted(g.ops.size());
  for (size_t i = g.ops.size(); i-- > 0;) {
    const Op& op = g.ops[i];
    const Depends& d = of[op.outputs[0]];
    if (!d.sample || d.variable || d.update || (def(op.code).flags & kRandom)) continue;
    const bool reduces = std::any_of(op.inputs.begin(), op.inputs.end(), batched) &&
                         std::none_of(op.outputs.begin(), op.outputs.end(), batched) && !in_groups(g, op);
    if (reduces) wanted[i] = true;
    if (!wanted[i]) continue;
    for (const TensorId id : op.inputs)
      if (id != kNone && g.tensor(id).producer != kNone) wanted[g.tensor(id).producer] = true;
  }
  return wanted;
}

// Puts a copy of each hoisted op that has the batch before it; its original goes on for the body and, when nothing
// reads it there, dies. What has no batch any more needs no original.
void hoist(Graph& g) {
  const std::vector<Depends> of = dependencies(g);
  const BatchSubAxes sub_axes = batch_sub_axes(g, false);
  const std::vector<bool> wanted = hoisted(g, of, sub_axes);
  if (std::find(wanted.begin(), wanted.end(), true) == wanted.end()) return;
  std::vector<TensorId> whole(g.tensors.size(), kNone);  // the prologue's copy
  Rewriter r(g);
  for (size_t i = 0; i < r.old.size(); ++i) {
    if (!wanted[i]) {
      r.keep(i);
      continue;
    }
    Op copy = r.old[i];
    for (TensorId& id : copy.inputs)
      if (id != kNone) id = whole[id] != kNone ? whole[id] : r.now(id);
    const TensorId first = r.emit(i, copy.code, copy.inputs, copy.attrs);
    Op& made = g.op(g.tensor(first).producer);
    made.region = Region::kPrologue;
    const TensorIds made_outputs = made.outputs;
    const bool scalar = !sub_axes.of[r.old[i].outputs[0]].present();
    for (size_t k = 0; k < made_outputs.size(); ++k) {
      whole[r.old[i].outputs[k]] = made_outputs[k];
      if (scalar) r.replace(r.old[i].outputs[k], made_outputs[k]);
    }
    if (scalar)
      r.moved(i, g.tensor(first).producer);
    else
      r.keep(i);
  }
  r.finish();
}

}  // namespace

void assign_regions(Graph& graph) {
  for (Op& op : graph.ops) op.region = Region::kBody;
  if (many_micro_batches(graph)) {
    hoist(graph);
    drop_dead(graph);  // originals; no more, as what is rounded is known by now, by who reads it
  }
  const std::vector<Depends> of = dependencies(graph);
  std::vector<bool> prologue(graph.tensors.size());
  for (Op& op : graph.ops) {
    const Depends& d = of[op.outputs[0]];
    const bool hoisted_here = op.region == Region::kPrologue;
    if (d.update)
      op.region = Region::kEpilogue;
    else if (!hoisted_here) {
      // A function of hoisted values, parameters and constants only is prologue too.
      const bool per_sample = std::any_of(op.inputs.begin(), op.inputs.end(),
                                          [&](TensorId id) { return id != kNone && of[id].sample && !prologue[id]; });
      op.region = per_sample ? Region::kBody : Region::kPrologue;
    }
    if (op.region == Region::kPrologue)
      for (const TensorId id : op.outputs) prologue[id] = true;
  }
}

}  // namespace whale
