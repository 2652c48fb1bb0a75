#include "shard/cheapest_cut.h"

#include <algorithm>

#include "cost/cost.h"
#include "ops/cost.h"
#include "shard/prices.h"
#include "task/window.h"

namespace whale {
namespace {

// The ways to cut one op along one axis, and what each costs.
class Ways {
 public:
  Ways(const CutProblem& problem, const Forms& forms, const Placed& placed, size_t axis)
      : p_(problem), forms_(forms), op_(placed), a_(axis), n_(problem.axes.size(axis, placed.op.stage)) {}

  // How an operand comes to lie for another reader anyway: so cut, or whole.
  struct Copy {
    bool whole = false;
    SubAxis cut = {};
  };
  // `copies`: per operand; empty: there are none.
  OpCut cheapest(const std::vector<Copy>& copies) const;
  // The gradients of one forward op read the same gradient: what one that is chosen later takes by itself is free for
  // this one.
  std::vector<Copy> copies_for_others() const;

 private:
  // Where the results are wanted: a gradient where its parameter lives, or as the value whose gradient it is; a
  // variable's next value at its storage sharding. Null: nowhere.
  std::vector<const AxisSharding*> wanted_results() const;
  std::vector<OpCut> suggested(const std::vector<const AxisSharding*>& wanted) const;
  double operand_bytes(size_t i) const { return bytes_beside(p_, op_.op.inputs[i], *op_.in[i], op_.op.stage, a_); }
  double result_bytes(size_t o) const { return bytes_beside(p_, op_.op.outputs[o], *op_.out[o], op_.op.stage, a_); }
  // Not cut, its results are terms of sums as its operands are: the sum of two such gradients is reduced, not each.
  bool passes_terms() const { return !linear_parts(op_, a_, p_.options.exact && p_.micro_batches > 1).empty(); }
  // `f`: null when nothing is cut.
  double moved_bytes(const Factor* f, const OpCut& cut, const std::vector<const AxisSharding*>& wanted,
                     const std::vector<Copy>& copies) const;
  double work_seconds(const Factor* f) const;
  bool of_parameters(TensorId gradient) const;
  double held_bytes(const Factor* f) const;
  double added_bytes(const Factor* f) const;

  const CutProblem& p_;
  const Forms& forms_;
  const Placed& op_;
  const size_t a_;
  const int64_t n_;
};

bool carries(const std::vector<SubAxis>& of_factor, size_t i) { return i < of_factor.size() && of_factor[i].present(); }

std::vector<const AxisSharding*> Ways::wanted_results() const {
  const TensorIds& results = op_.op.outputs;
  std::vector<const AxisSharding*> out(results.size());
  for (size_t o = 0; o < results.size(); ++o) {
    if (results[o] == kNone) continue;
    const auto t = static_cast<size_t>(results[o]);
    TensorId like = p_.variable_of[t];
    const auto parameter = p_.parameter_of.find(results[o]);
    if (like == kNone && parameter != p_.parameter_of.end()) like = parameter->second;
    if (like == kNone) {
      like = p_.forward_of[t];
      if (like != kNone && !p_.axes.same_devices(forms_.of(like).stage, op_.op.stage)) like = kNone;
    }
    if (like != kNone) out[o] = &forms_.of(like).sharding.axes[a_];
  }
  return out;
}

// Of the operands before the op, and of the results after it.
double Ways::moved_bytes(const Factor* f, const OpCut& cut, const std::vector<const AxisSharding*>& wanted,
                         const std::vector<Copy>& copies) const {
  double moved = 0;
  const bool terms = f == nullptr && passes_terms();
  for (size_t i = 0; i < op_.op.inputs.size(); ++i) {
    if (op_.op.inputs[i] == kNone) continue;
    const bool cuts = f && carries(f->inputs, i);
    const AxisSharding& now = op_.in[i]->axes[a_];
    const bool sum = now.placement == Placement::kPartial;
    if (sum && terms) continue;
    const SubAxis want = cuts ? sub_axis_part(f->inputs[i], cut.sub) : SubAxis{};
    if (!copies.empty() && (copies[i].whole || (cuts && copies[i].cut.present() && copies[i].cut == want))) continue;
    const double held = operand_bytes(i);
    if (sum || (now.placement == Placement::kShard && !(cuts && now.sub_axis == want)))
      moved += received_bytes({sum, cuts}, held, n_);
    if (cuts && f->reads_through(i))
      moved += held * static_cast<double>(halo_of(f->window, p_.axes.mesh_axis(a_, op_.op.stage))) /
               static_cast<double>(std::max<int64_t>(f->window.source, 1));
  }
  for (size_t o = 0; (f || terms) && o < op_.op.outputs.size(); ++o) {
    if (op_.op.outputs[o] == kNone) continue;
    const bool cuts = f && carries(f->outputs, o);
    const bool to_shard = wanted[o] && wanted[o]->placement == Placement::kShard;
    const bool there = to_shard && cuts && wanted[o]->sub_axis == sub_axis_part(f->outputs[o], cut.sub);
    if (!cuts || (wanted[o] && !there)) moved += received_bytes({!cuts, to_shard}, result_bytes(o), n_);
  }
  return moved;
}

// Of the op over the step. Where the shapes of a product say how fast it is, it has those that a device would see, by
// what is settled already: whole operands are read by all.
double Ways::work_seconds(const Factor* f) const {
  const Op& op = op_.op;
  const DeviceRates& device = p_.axes.tasks.cost.device;
  if (device.curve == nullptr || !has_flag(op.code, kProduct))
    return op_seconds(cost_of(p_.graph, op), device) / static_cast<double>(f ? n_ : 1);
  bool in_body = false;
  const auto cut = [&](TensorType& type, const Sharding* sharding, const std::vector<SubAxis>* carried, size_t k) {
    for (size_t b = 0; sharding != nullptr && b < a_; ++b) {
      if (sharding->axes[b].placement != Placement::kShard) continue;
      in_body |= b == kTime;
      int64_t& extent = type.dims[sharding->axes[b].sub_axis.dim];
      extent = std::max<int64_t>(1, extent / p_.axes.size(b, op.stage));
    }
    if (carried && carries(*carried, k)) {
      int64_t& extent = type.dims[(*carried)[k].dim];
      extent = std::max<int64_t>(1, extent / n_);
    }
  };
  OpView view = view_of(p_.graph, op);
  for (size_t i = 0; i < view.inputs.size(); ++i) cut(view.inputs[i], op_.in[i], f ? &f->inputs : nullptr, i);
  for (size_t o = 0; o < view.outputs.size(); ++o) cut(view.outputs[o], op_.out[o], f ? &f->outputs : nullptr, o);
  return op_seconds(view, device) * static_cast<double>(in_body ? p_.micro_batches : 1);
}

// A gradient that all micro-batches have a term of.
bool Ways::of_parameters(TensorId id) const {
  const TensorId x = p_.forward_of[id];
  return p_.parameter_of.contains(id) ||
         (x != kNone && forms_.of(x).sharding.axes[kTime].placement == Placement::kReplicate);
}

// Over all micro-batches, of parameters and what is made of them alone: copies that are put together, and sums of
// gradients that no device has a part of. In a step of one micro-batch they come and go as activations do.
double Ways::held_bytes(const Factor* f) const {
  if (p_.micro_batches == 1) return 0;
  double held = 0;
  for (size_t i = 0; i < op_.op.inputs.size(); ++i)
    if (!(f && carries(f->inputs, i)) && op_.operand(i, a_) == Placement::kShard && !op_.time_varies(i))
      held += received_bytes({}, operand_bytes(i), n_);
  for (size_t o = 0; o < op_.op.outputs.size(); ++o) {
    const TensorId id = op_.op.outputs[o];
    if (id != kNone && !(f && carries(f->outputs, o)) && of_parameters(id))
      held += received_bytes({}, result_bytes(o), n_);
  }
  return held;
}

// What adds gradients of parameters up, in every micro-batch: reads the sum and the summand, writes the sum.
double Ways::added_bytes(const Factor* f) const {
  double added = 0;
  for (size_t o = 0; p_.micro_batches > 1 && o < op_.op.outputs.size(); ++o) {
    const TensorId id = op_.op.outputs[o];
    if (id == kNone || !of_parameters(id)) continue;
    added += result_bytes(o) / (f && carries(f->outputs, o) ? static_cast<double>(n_) : 1);
  }
  return static_cast<double>(p_.micro_batches) * p_.axes.tasks.cost.add_passes * added;
}

std::vector<Ways::Copy> Ways::copies_for_others() const {
  const Op& op = op_.op;
  std::vector<Copy> out;
  if (op.phase != Phase::kBackward || op.origin == kNone) return out;
  const auto moves = [&](TensorId id) {
    const auto at = std::ranges::find(op.inputs, id);
    return id != kNone && at != op.inputs.end() &&
           op_.operand(static_cast<size_t>(at - op.inputs.begin()), a_) != Placement::kReplicate;
  };
  const auto known = [&](TensorId id) { return id == kNone || !forms_.of(id).sharding.axes.empty(); };
  for (const OpId number : p_.gradients_of[op.origin]) {
    const Op& other = p_.graph.op(number);
    if (&other == &op || std::ranges::all_of(other.outputs, known) || !std::ranges::all_of(other.inputs, known) ||
        other.stage != op.stage || std::ranges::none_of(other.inputs, moves))
      continue;
    std::vector<Sharding> results(other.outputs.size());
    for (Sharding& result : results) result.axes.resize(p_.axes.axes());
    Placed placed{p_.graph, p_.axes, other, p_.factors.of(other), {}, {}};
    for (const TensorId id : other.inputs) placed.in.push_back(id == kNone ? nullptr : &forms_.of(id).sharding);
    for (size_t o = 0; o < results.size(); ++o) placed.out.push_back(other.outputs[o] == kNone ? nullptr : &results[o]);
    const OpCut cut = Ways(p_, forms_, placed, a_).cheapest({});
    if (!cut.present()) continue;
    const Factor& f = placed.factors.list[cut.factor];
    out.resize(op.inputs.size());
    for (size_t k = 0; k < other.inputs.size(); ++k)
      for (size_t i = 0; i < op.inputs.size(); ++i)
        if (op.inputs[i] == other.inputs[k] && !f.reads_through(k))
          out[i] = carries(f.inputs, k) ? Copy{false, sub_axis_part(f.inputs[k], cut.sub)} : Copy{true, {}};
  }
  return out;
}

// By operands (or the storage sharding of a parameter whose gradient this makes); the first cuts nothing.
std::vector<OpCut> Ways::suggested(const std::vector<const AxisSharding*>& wanted) const {
  std::vector<OpCut> out{{}};
  const auto enter = [&](const OpCut& cut) {
    if (std::find(out.begin(), out.end(), cut) == out.end()) out.push_back(cut);
  };
  for (const auto& [cut, operand] : cuts_of_operands(op_, a_)) enter(cut);
  for (size_t o = 0; o < wanted.size(); ++o) {
    if (!wanted[o] || wanted[o]->placement != Placement::kShard) continue;
    const SubAxis& d = wanted[o]->sub_axis;
    for (size_t k = 0; k < op_.factors.list.size(); ++k) {
      const Factor& f = op_.factors.list[k];
      OpCut cut{static_cast<int>(k), {}, false};
      if (o < f.outputs.size() &&
          find_sub_axis_part(f.outputs[o], f.extent, d, extent_of(p_.graph.tensor(op_.op.outputs[o]).dims, d),
                             cut.sub) &&
          fits(op_, f, cut.sub, a_))
        enter(cut);
    }
  }
  return out;
}

OpCut Ways::cheapest(const std::vector<Copy>& copies) const {
  const std::vector<const AxisSharding*> wanted = wanted_results();
  const std::vector<OpCut> tries = suggested(wanted);
  if (tries.size() == 1) return {};
  const CostModel& cost = p_.axes.tasks.cost;
  const auto seconds = [&](const OpCut& cut) {
    const Factor* f = cut.present() ? &op_.factors.list[cut.factor] : nullptr;
    return work_seconds(f) +
           link_seconds(moved_bytes(f, cut, wanted, copies), 0, p_.axes.tasks.link(op_.op.stage, a_ - 1)) +
           pass_seconds(added_bytes(f), cost.device) + cost.held_seconds(held_bytes(f));
  };
  OpCut best = tries[0];
  double least = seconds(best);
  for (size_t t = 1; t < tries.size(); ++t)
    if (const double s = seconds(tries[t]); s < least * (1 - 1e-9)) best = tries[t], least = s;
  return best;
}

}  // namespace

OpCut cheapest_cut(const CutProblem& problem, const Forms& forms, const Placed& placed, size_t axis) {
  const Ways ways(problem, forms, placed, axis);
  return ways.cheapest(ways.copies_for_others());
}

}  // namespace whale
