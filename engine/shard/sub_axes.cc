#include "shard/sub_axes.h"

#include <algorithm>

namespace whale {

bool can_cut(const Op& op, const Factor& f, const SubAxisPart& sub) {
  if (f.kind != FactorKind::kMap && f.kind != FactorKind::kReduce && f.kind != FactorKind::kLookup &&
      f.kind != FactorKind::kWindow)
    return false;
  if (f.kind == FactorKind::kWindow && (sub.outer != 1 || sub.inner != 1)) return false;
  if (f.unit > 1 && sub.inner % f.unit) return false;
  // The attributes count whole factors, those of groups also positions.
  if ((!f.size_attrs.empty() || f.begin_attr) && (sub.outer != 1 || (sub.inner != 1 && f.group.rows == 0)))
    return false;
  for (size_t o = 0; o < op.outputs.size(); ++o) {
    if (op.outputs[o] == kNone) continue;
    const bool carries = o < f.outputs.size() && f.outputs[o].present();
    if (!carries && !(o < f.partial.size() && f.partial[o])) return false;
  }
  return true;
}

SubAxis sub_axis_of_groups(const Factor& f, const SubAxisPart& sub, int64_t runs) {
  const int64_t rows = f.group.rows;
  if (rows == 0 || sub.outer != 1) return {};
  if (sub.inner % rows == 0) return {0, 1, sub.inner / rows};  // a sample has whole groups
  return rows % sub.inner == 0 && f.extent / rows % runs == 0 ? SubAxis{0, 1, 1} : SubAxis{};
}

bool cut_of_operand(const Factor& f, size_t input, const SubAxis& sub_axis, int64_t extent, SubAxisPart& sub) {
  if (input >= f.inputs.size()) return false;
  if (!f.reads_through(input)) return find_sub_axis_part(f.inputs[input], f.extent, sub_axis, extent, sub);
  sub = {};
  return f.inputs[input] == sub_axis;
}

SubAxis streamed_sub_axis(const Factors& factors, size_t input) {
  for (const Factor& f : factors.list)
    if (f.kind == FactorKind::kStream && input < f.inputs.size() && f.inputs[input].present()) return f.inputs[input];
  return {};
}

namespace {

// Where a sub-axis is, op by op: forward from the seeds, and back from a reader to a value that no seed reaches (a
// first state, a mask, a gradient that is the same for every sample).
class Follower {
 public:
  Follower(const Graph& graph, const std::vector<SubAxis>& seeds, OpFactors& factors)
      : g_(graph), at_(seeds), cuts_(graph.ops.size()), factors_(factors) {
    at_.resize(graph.tensors.size());
  }
  std::vector<OpCut> run() {
    // Chains of values without seeds take another round each; the bound is the graph's own length.
    bool again = true;
    for (size_t round = 0; again && round <= g_.ops.size(); ++round) {
      again = false;
      for (size_t i = 0; i < g_.ops.size(); ++i) forward(i);
      for (size_t i = g_.ops.size(); i-- > 0;) again |= back(i);
    }
    return std::move(cuts_);
  }

 private:
  const Graph& g_;
  std::vector<SubAxis> at_;  // per tensor
  std::vector<OpCut> cuts_;
  OpFactors& factors_;

  const Factors& factors(size_t i) { return factors_.of(g_.ops[i]); }
  const SubAxis& at(TensorId id) const { return at_[id]; }

  // The first factor that holds the operand's or result's sub-axis.
  OpCut cut_at(size_t i, TensorId id, size_t k, std::vector<SubAxis> Factor::*carriers) {
    const Factors& all = factors(i);
    for (size_t f = 0; f < all.list.size(); ++f) {
      SubAxisPart sub;
      const Factor& factor = all.list[f];
      if (k < (factor.*carriers).size() && factor.kind != FactorKind::kWindow &&
          find_sub_axis_part((factor.*carriers)[k], factor.extent, at(id), extent_of(g_.tensor(id).dims, at(id)),
                             sub) &&
          can_cut(g_.ops[i], factor, sub))
        return {static_cast<int>(f), sub, false, true};
    }
    return {};
  }

  void take(size_t i, const OpCut& cut) {
    cuts_[i] = cut;
    const Factor& f = factors(i).list[cut.factor];
    const Op& op = g_.ops[i];
    for (size_t o = 0; o < op.outputs.size(); ++o)
      if (op.outputs[o] != kNone && f.outputs[o].present()) at_[op.outputs[o]] = sub_axis_part(f.outputs[o], cut.sub);
  }

  void forward(size_t i) {  // as the largest operand that has the sub-axis
    if (cuts_[i].present()) return;
    const Op& op = g_.ops[i];
    OpCut best;
    int64_t most = -1;
    for (size_t k = 0; k < op.inputs.size(); ++k) {
      const TensorId id = op.inputs[k];
      if (id == kNone || !at(id).present()) continue;
      const int64_t size = element_count(g_.tensor(id).dims);
      if (size <= most) continue;
      if (const OpCut cut = cut_at(i, id, k, &Factor::inputs); cut.present()) best = cut, most = size;
    }
    if (best.present()) take(i, best);
  }

  bool back(size_t i) {
    const Op& op = g_.ops[i];
    for (size_t o = 0; o < op.outputs.size() && !cuts_[i].present(); ++o)
      if (op.outputs[o] != kNone && at(op.outputs[o]).present())
        if (const OpCut cut = cut_at(i, op.outputs[o], o, &Factor::outputs); cut.present()) take(i, cut);
    if (!cuts_[i].present()) return false;
    const Factor& f = factors(i).list[cuts_[i].factor];
    bool found = false;
    for (size_t k = 0; k < op.inputs.size() && k < f.inputs.size(); ++k) {
      const TensorId id = op.inputs[k];
      if (id == kNone || g_.tensor(id).kind != TensorKind::kValue || at(id).present() || !f.inputs[k].present() ||
          f.reads_through(k))
        continue;
      at_[id] = sub_axis_part(f.inputs[k], cuts_[i].sub);
      found = true;
    }
    return found;
  }
};

}  // namespace

std::vector<OpCut> follow(const Graph& graph, const std::vector<SubAxis>& seeds, OpFactors& factors) {
  return Follower(graph, seeds, factors).run();
}

std::vector<OpCut> follow_samples(const Graph& graph, OpFactors& factors) {
  std::vector<SubAxis> seeds(graph.tensors.size());
  for (const TensorId id : graph.inputs)
    if (const int dim = graph.tensor(id).batch_dim; dim >= 0) seeds[id] = SubAxis{dim, 1, 1};
  return follow(graph, seeds, factors);
}

std::vector<SubAxes> candidate_sub_axes(const Graph& graph, OpFactors& factors) {
  std::vector<SubAxes> sub_axes(graph.tensors.size());
  const auto enter = [&](TensorId id, const SubAxis& sub_axis) {
    auto& list = sub_axes[id];
    if (list.size() < kMaxSubAxes && extent_of(graph.tensor(id).dims, sub_axis) > 1 &&
        std::find(list.begin(), list.end(), sub_axis) == list.end())
      list.push_back(sub_axis);
  };
  std::vector<std::pair<TensorId, SubAxis>> carriers;
  std::vector<SubAxisPart> subs;
  const auto pass = [&](const Op& op) {
    for (const Factor& f : factors.of(op).list) {
      if (f.kind == FactorKind::kFixed || f.extent <= 1) continue;
      carriers.clear();
      for (size_t k = 0; k < op.inputs.size() && k < f.inputs.size(); ++k)
        if (op.inputs[k] != kNone && f.inputs[k].present()) carriers.emplace_back(op.inputs[k], f.inputs[k]);
      for (size_t k = 0; k < op.outputs.size() && k < f.outputs.size(); ++k)
        if (op.outputs[k] != kNone && f.outputs[k].present()) carriers.emplace_back(op.outputs[k], f.outputs[k]);
      subs.assign({{1, 1}});
      for (const auto& [id, whole] : carriers)
        for (const SubAxis& d : sub_axes[id]) {
          if (f.kind == FactorKind::kWindow) break;
          SubAxisPart sub;
          if (find_sub_axis_part(whole, f.extent, d, extent_of(graph.tensor(id).dims, d), sub) &&
              std::find(subs.begin(), subs.end(), sub) == subs.end())
            subs.push_back(sub);
        }
      for (const SubAxisPart& sub : subs)
        for (const auto& [id, whole] : carriers) enter(id, sub_axis_part(whole, sub));
    }
  };
  for (size_t i = graph.ops.size(); i-- > 0;) pass(graph.ops[i]);
  for (const Op& op : graph.ops) pass(op);
  return sub_axes;
}

}  // namespace whale
