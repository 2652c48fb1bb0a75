#include "rewrite/add_by_stage.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "rewrite/rewrite.h"
#include "shard/choose.h"

namespace whale {
namespace {

// A gradient as it was made: ((terms[0] + terms[1]) + terms[2]) + ..., and the op of each "+".
struct Sum {
  TensorIds terms;
  std::vector<OpId> adds;
};

const Op& maker(const Graph& g, TensorId id) { return g.op(g.tensor(id).producer); }

bool is_sum(const Graph& g, TensorId id) {
  if (g.tensor(id).producer == kNone) return false;
  const Op& op = maker(g, id);
  return op.code == OpCode::k_add && op.phase == Phase::kBackward && std::ranges::all_of(op.inputs, [&](TensorId x) {
           return g.tensor(x).producer != kNone && g.tensor(x).dims == g.tensor(id).dims &&
                  g.tensor(x).dtype == g.tensor(id).dtype;
         });
}

Sum sum_of(const Graph& g, TensorId gradient, const std::vector<int>& uses) {
  Sum out;
  TensorId id = gradient;
  for (; is_sum(g, id) && (id == gradient || uses[id] == 1); id = maker(g, id).inputs[0]) {
    out.adds.push_back(g.tensor(id).producer);
    out.terms.push_back(maker(g, id).inputs[1]);
  }
  out.terms.push_back(id);
  std::ranges::reverse(out.adds);
  std::ranges::reverse(out.terms);
  return out;
}

// The op adds these two now, in the earlier of their stages.
TensorId add(Graph& g, OpId number, TensorId a, TensorId b) {
  Op& op = g.op(number);
  const Op &left = maker(g, a), &right = maker(g, b), &first = left.stage < right.stage ? left : right;
  op.inputs = {a, b};
  op.stage = first.stage, op.scope = first.scope, op.origin = right.origin;
  return op.outputs[0];
}

void add_up(Graph& g, const Sum& sum) {
  std::vector<std::pair<int32_t, TensorId>> stages;  // what each has so far
  auto next = sum.adds.begin();
  for (const TensorId term : sum.terms) {
    const int32_t stage = maker(g, term).stage;
    const auto at = std::ranges::find(stages, stage, &std::pair<int32_t, TensorId>::first);
    if (at == stages.end())
      stages.emplace_back(stage, term);
    else
      at->second = add(g, *next++, at->second, term);
  }
  TensorId all = stages[0].second;
  for (size_t i = 1; i < stages.size(); ++i) all = add(g, *next++, all, stages[i].second);
}

}  // namespace

void add_by_stage(Graph& graph) {
  const std::vector<int> uses = use_counts(graph);
  bool changed = false;
  for (const auto& [gradient, parameter] : parameters_of_gradients(graph)) {
    const Sum sum = sum_of(graph, gradient, uses);
    const auto elsewhere = [&](TensorId id) { return maker(graph, id).stage != maker(graph, sum.terms[0]).stage; };
    if (sum.adds.size() < 2 || std::ranges::none_of(sum.terms, elsewhere)) continue;
    add_up(graph, sum);
    changed = true;
  }
  if (changed) compact(graph, {});
}

}  // namespace whale
