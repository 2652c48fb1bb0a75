// By which factor an op that follows is cut along a split: the cheapest of those that its neighbours suggest.
#include <algorithm>

#include "cost/cost.h"
#include "ops/cost.h"
#include "shard/chooser.h"
#include "task/window.h"

namespace whale {

double CutChooser::bytes(const Op& reader, TensorId id, const Sharding& sharding, size_t a) const {
  const Tensor& t = g_.tensor(id);
  double n = static_cast<double>(element_count(t.dims) * size_of(t.dtype));
  for (size_t b = 1; b < axes(); ++b)
    if (b != a && sharding.axes[b].placement == Placement::kShard) n /= ways(b, reader.stage);
  return n;
}

std::vector<const AxisSharding*> CutChooser::wanted_results(const Op& op, size_t a) const {
  std::vector<const AxisSharding*> out(op.outputs.size());
  for (size_t o = 0; o < op.outputs.size(); ++o) {
    const TensorId id = op.outputs[o];
    if (id == kNone) continue;
    TensorId like = next_of_[static_cast<size_t>(id)];
    const auto parameter = parameter_of_.find(id);
    if (like == kNone && parameter != parameter_of_.end()) like = parameter->second;
    if (like == kNone) {
      like = adjoint_of_[static_cast<size_t>(id)];
      if (like != kNone && !axes_.same_devices(form(like).stage, op.stage)) like = kNone;
    }
    if (like != kNone) out[o] = &form(like).sharding.axes[a];
  }
  return out;
}

// Of the operands before the op, and of the results after it. `f`: null when nothing is cut.
double CutChooser::moved_bytes(const Placed& p, const Factor* f, const OpCut& cut,
                               const std::vector<const AxisSharding*>& wanted, const std::vector<SubAxis>& comes,
                               size_t a) const {
  const int64_t n = size(a, p.op);
  double moved = 0;
  for (size_t i = 0; i < p.op.inputs.size(); ++i) {
    const TensorId id = p.op.inputs[i];
    if (id == kNone) continue;
    const bool carries = f && i < f->inputs.size() && f->inputs[i].present();
    const AxisSharding& now = p.in[i]->axes[a];
    const double held = bytes(p.op, id, *p.in[i], a);
    const bool sum = now.placement == Placement::kPartial;
    const bool there =
        carries && !comes.empty() && comes[i].present() && comes[i] == sub_axis_part(f->inputs[i], cut.sub);
    if (there) continue;
    if (sum ||
        (now.placement == Placement::kShard && !(carries && now.sub_axis == sub_axis_part(f->inputs[i], cut.sub))))
      moved += received_bytes({sum, carries}, held, n);
    if (carries && f->reads_through(i))
      moved += held * static_cast<double>(halo_of(f->window, axes_.mesh_axis(a, p.op.stage))) /
               static_cast<double>(std::max<int64_t>(f->window.source, 1));
  }
  for (size_t o = 0; f && o < p.op.outputs.size(); ++o) {
    const TensorId id = p.op.outputs[o];
    if (id == kNone) continue;
    const bool carries = o < f->outputs.size() && f->outputs[o].present();
    const bool to_shard = wanted[o] && wanted[o]->placement == Placement::kShard;
    if (!carries || (wanted[o] && !(to_shard && wanted[o]->sub_axis == sub_axis_part(f->outputs[o], cut.sub))))
      moved += received_bytes({!carries, to_shard}, bytes(p.op, id, *p.out[o], a), n);
  }
  return moved;
}

// A gradient that all micro-batches have a term of.
bool CutChooser::of_parameters(TensorId id) const {
  const TensorId x = adjoint_of_[static_cast<size_t>(id)];
  return parameter_of_.contains(id) || (x != kNone && form(x).sharding.axes[kTime].placement == Placement::kReplicate);
}

// Over all micro-batches, of parameters and what is made of them alone: copies that are put together, and sums of
// gradients that no device has a part of. In a step of one micro-batch they come and go as activations do.
double CutChooser::held_bytes(const Placed& p, const Factor* f, size_t a) const {
  if (out_.micro_batches == 1) return 0;
  const int64_t n = size(a, p.op);
  double held = 0;
  for (size_t i = 0; i < p.op.inputs.size(); ++i) {
    const bool carries = f && i < f->inputs.size() && f->inputs[i].present();
    if (!carries && p.operand(i, a) == Placement::kShard && !p.time_varies(i))
      held += received_bytes({}, bytes(p.op, p.op.inputs[i], *p.in[i], a), n);
  }
  for (size_t o = 0; o < p.op.outputs.size(); ++o) {
    const TensorId id = p.op.outputs[o];
    if (id == kNone || (f && o < f->outputs.size() && f->outputs[o].present())) continue;
    if (of_parameters(id)) held += received_bytes({}, bytes(p.op, id, *p.out[o], a), n);
  }
  return held;
}

// What adds gradients of parameters up, in every micro-batch: reads the sum and the summand, writes the sum.
double CutChooser::added_bytes(const Placed& p, const Factor* f, size_t a) const {
  double added = 0;
  for (size_t o = 0; out_.micro_batches > 1 && o < p.op.outputs.size(); ++o) {
    const TensorId id = p.op.outputs[o];
    if (id == kNone || !of_parameters(id)) continue;
    const bool cut = f && o < f->outputs.size() && f->outputs[o].present();
    added += bytes(p.op, id, *p.out[o], a) / (cut ? static_cast<double>(size(a, p.op)) : 1);
  }
  return static_cast<double>(out_.micro_batches) * axes_.tasks.cost.add_passes * added;
}

std::vector<SubAxis> CutChooser::comes_for_others(const Placed& p, size_t a) const {
  std::vector<SubAxis> out;
  if (p.op.phase != Phase::kBackward || p.op.origin == kNone) return out;
  const auto moves = [&](TensorId id) {
    for (size_t i = 0; i < p.op.inputs.size(); ++i)
      if (p.op.inputs[i] == id && id != kNone) return p.operand(i, a) != Placement::kReplicate;
    return false;
  };
  for (const OpId number : gradients_of_[static_cast<size_t>(p.op.origin)]) {
    const Op& other = g_.op(number);
    const bool chosen =
        std::ranges::all_of(other.outputs, [&](TensorId id) { return id == kNone || !form(id).sharding.axes.empty(); });
    const bool known =
        std::ranges::all_of(other.inputs, [&](TensorId id) { return id == kNone || !form(id).sharding.axes.empty(); });
    if (&other == &p.op || chosen || !known || other.stage != p.op.stage || std::ranges::none_of(other.inputs, moves))
      continue;
    std::vector<Sharding> results(other.outputs.size());
    for (Sharding& result : results) result.axes.resize(axes());
    Placed placed{g_, axes_, other, factors_.of(other), {}, {}};
    for (const TensorId id : other.inputs) placed.in.push_back(id == kNone ? nullptr : &form(id).sharding);
    for (size_t o = 0; o < results.size(); ++o) placed.out.push_back(other.outputs[o] == kNone ? nullptr : &results[o]);
    const OpCut cut = cheapest_cut(placed, {}, a);
    if (!cut.present()) continue;
    const Factor& f = placed.factors.list[static_cast<size_t>(cut.factor)];
    out.resize(p.op.inputs.size());
    for (size_t k = 0; k < other.inputs.size(); ++k)
      for (size_t i = 0; i < p.op.inputs.size(); ++i)
        if (p.op.inputs[i] == other.inputs[k] && k < f.inputs.size() && f.inputs[k].present() && !f.reads_through(k))
          out[i] = sub_axis_part(f.inputs[k], cut.sub);
  }
  return out;
}

OpCut CutChooser::cheapest_cut(const Placed& p, size_t a) const { return cheapest_cut(p, comes_for_others(p, a), a); }

OpCut CutChooser::cheapest_cut(const Placed& p, const std::vector<SubAxis>& comes, size_t a) const {
  std::vector<OpCut> tries{{}};
  const auto enter = [&](const OpCut& cut) {
    if (std::find(tries.begin(), tries.end(), cut) == tries.end()) tries.push_back(cut);
  };
  for (const auto& [cut, operand] : cuts_of_operands(p, a)) enter(cut);
  const std::vector<const AxisSharding*> wanted = wanted_results(p.op, a);
  for (size_t o = 0; o < wanted.size(); ++o) {
    if (!wanted[o] || wanted[o]->placement != Placement::kShard) continue;
    const SubAxis& d = wanted[o]->sub_axis;
    for (size_t k = 0; k < p.factors.list.size(); ++k) {
      const Factor& f = p.factors.list[k];
      OpCut cut{static_cast<int>(k), {}, false};
      if (o < f.outputs.size() &&
          find_sub_axis_part(f.outputs[o], f.extent, d, extent_of(g_.tensor(p.op.outputs[o]).dims, d), cut.sub) &&
          fits(p, f, cut.sub, a))
        enter(cut);
    }
  }
  if (tries.size() == 1) return {};
  const CostModel& cost = axes_.tasks.cost;
  const double work = op_seconds(cost_of(g_, p.op), cost.device);
  const auto seconds = [&](const OpCut& cut) {
    const Factor* f = cut.present() ? &p.factors.list[static_cast<size_t>(cut.factor)] : nullptr;
    return (f ? work / static_cast<double>(size(a, p.op)) : work) +
           link_seconds(moved_bytes(p, f, cut, wanted, comes, a), 0, cost.link) +
           pass_seconds(added_bytes(p, f, a), cost.device) + cost.held_seconds(held_bytes(p, f, a));
  };
  OpCut best = tries[0];
  double least = seconds(best);
  for (size_t t = 1; t < tries.size(); ++t)
    if (const double s = seconds(tries[t]); s < least * (1 - 1e-9)) best = tries[t], least = s;
  return best;
}

}  // namespace whale
