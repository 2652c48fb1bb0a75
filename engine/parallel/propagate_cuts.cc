// By which factor an op is cut along an axis, and what that asks of its operands.
#include "parallel/propagator.h"

#include <algorithm>

#include "cost/cost.h"
#include "parallel/factor_names.h"
#include "parallel/window.h"

namespace whale {

OpCut Propagator::choose(const Op& op, const Factors& factors, size_t a, OpId number) {
  const OpCut samples = number != kNone && b_.out.batch > 1 ? samples_[static_cast<size_t>(number)] : OpCut{};
  if (a == kTime) {
    const OpCut cut = largest_cut(op, factors, a);
    return !cut.present() && has_own_rows(op, number) &&
                   fits(op, factors.list[static_cast<size_t>(samples.factor)], samples.sub, a)
               ? samples
               : cut;
  }
  if (b_.out.by_micro_batch(a)) {
    if (samples.present()) return {};
    // Replicas are in different micro-batches: what belongs to one is not cut between them.
    if (std::any_of(op.inputs.begin(), op.inputs.end(),
                    [&](TensorId x) { return x != kNone && b_.out.time_varies(x); }))
      return {};
    return options_.exact && !keeps_bits(op) ? OpCut{} : largest_cut(op, factors, a);
  }
  const AxisRole what = role(op, a);
  if (what == AxisRole::kReplica) {
    if (samples.present()) return samples;
    if (op.code == OpCode::k_unscale && placement(op.inputs[0], a) == Placement::kPartial)
      if (const OpCut cut = cut_of_state(op, factors, a); cut.present()) return cut;
    return largest_cut(op, factors, a);
  }
  if (number != kNone && op.phase == Phase::kForward) {
    const OpCut& planned = cuts_[a][static_cast<size_t>(number)];
    // State may have cut an operand along an axis outside in a way that was not foreseen.
    if (!planned.present() || fits(op, factors.list[static_cast<size_t>(planned.factor)], planned.sub, a))
      return planned;
  }
  return cheapest_cut(op, factors, a);
}

bool Propagator::has_own_rows(const Op& op, OpId number) const {
  return number != kNone && b_.out.batch > 1 && samples_[static_cast<size_t>(number)].present() &&
         op.phase != Phase::kUpdate;
}

bool Propagator::fits(const Op& op, const Factor& f, const SubDigit& sub, size_t a) const {
  if (!can_cut(op, f, sub)) return false;
  if (a == kTime && f.kind == FactorKind::kLookup) return false;
  if (a == kTime && f.group.rows && !digit_of_groups(f, sub, micro_batches()).present())
    throw invalid(
        "op '{}' ({}) has {} groups of samples, which {} micro-batches would cut; give it a multiple of {} groups, or "
        "plan with a number of micro-batches that divides them",
        op.name, def(op.code).name, f.extent / f.group.rows, micro_batches(), micro_batches())
        .at_op(op.name)
        .at_scope(written_scope(op));
  const bool window = f.kind == FactorKind::kWindow;
  if (window && (a == kTime || !window_fits(f.window, b_.out.mesh_axis(a, op.stage)))) return false;
  // Beside what the axes before cut already.
  const auto clash = [&](TensorId id, const Digit& whole) {
    if (id == kNone || !whole.present()) return false;
    const Digit digit = sub_digit(whole, sub);
    for (size_t b = 0; b < a; ++b)
      if (placement(id, b) == Placement::kShard && (!compatible(g().tensor(id).dims, b_.out.at(id, b).digit, digit) ||
                                                    (window && b_.out.at(id, b).digit.dim == digit.dim)))
        return true;
    return false;
  };
  for (size_t i = 0; i < op.inputs.size() && i < f.inputs.size(); ++i)
    if (clash(op.inputs[i], f.inputs[i])) return false;
  for (size_t o = 0; o < op.outputs.size() && o < f.outputs.size(); ++o)
    if (clash(op.outputs[o], f.outputs[o])) return false;
  return true;
}

std::vector<std::pair<OpCut, size_t>> Propagator::cuts_of_operands(const Op& op, const Factors& factors,
                                                                   size_t a) const {
  std::vector<std::pair<OpCut, size_t>> out;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    if (placement(op.inputs[i], a) != Placement::kShard) continue;
    const AxisLayout& l = b_.out.at(op.inputs[i], a);
    for (size_t k = 0; k < factors.list.size(); ++k) {
      const Factor& f = factors.list[k];
      OpCut cut{static_cast<int>(k), {}, l.state, l.samples};
      if (f.kind == FactorKind::kWindow && (l.samples || l.state)) continue;
      if (cut_of_operand(f, i, l.digit, extent_of(g().tensor(op.inputs[i]).dims, l.digit), cut.sub) &&
          fits(op, f, cut.sub, a)) {
        out.emplace_back(cut, i);
        break;
      }
    }
  }
  return out;
}

OpCut Propagator::largest_cut(const Op& op, const Factors& factors, size_t a) const {
  OpCut best;
  int64_t most = -1;
  for (const auto& [cut, operand] : cuts_of_operands(op, factors, a))
    if (const int64_t n = element_count(g().tensor(op.inputs[operand]).dims); n > most) best = cut, most = n;
  return best;
}

double Propagator::bytes(TensorId id, size_t a) const {
  const Tensor& t = g().tensor(id);
  double n = static_cast<double>(element_count(t.dims) * size_of(t.dtype));
  for (size_t b = 1; b < axes(); ++b)
    if (b != a && placement(id, b) == Placement::kShard) n /= static_cast<double>(b_.out.size(b, b_.out.stage(id)));
  return n;
}

std::vector<Propagator::Wanted> Propagator::wanted_results(const Op& op, size_t a) const {
  std::vector<Wanted> out(op.outputs.size());
  for (size_t o = 0; o < op.outputs.size(); ++o) {
    if (op.outputs[o] == kNone) continue;
    const auto p = parameter_of_.find(op.outputs[o]);
    const auto x = adjoint_of_.find(op.outputs[o]);
    const auto v = next_of_.find(op.outputs[o]);
    if (v != next_of_.end())
      out[o] = {true, home_.at(v->second).axes[a]};
    else if (p != parameter_of_.end() && p->second != kNone)
      out[o] = {true, home_.at(p->second).axes[a]};
    else if (x != adjoint_of_.end() && same_devices(b_.out.stage(b_.latest(x->second)), op.stage))
      out[o] = {true, b_.out.at(b_.latest(x->second), a)};
  }
  return out;
}

// Of the operands before the op, and of the results after it. `f`: null when nothing is cut.
double Propagator::moved_bytes(const Op& op, const Factor* f, const OpCut& cut, const std::vector<Wanted>& wanted,
                               size_t a) const {
  const auto n = static_cast<double>(size(a, op));
  double moved = 0;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const TensorId id = op.inputs[i];
    if (id == kNone) continue;
    const bool carries = f && i < f->inputs.size() && f->inputs[i].present();
    const AxisLayout& now = b_.out.at(id, a);
    const double whole = bytes(id, a) * (n - 1) / n;
    if (now.placement == Placement::kPartial)
      moved += carries ? whole : 2 * whole;
    else if (now.placement == Placement::kShard && !(carries && now.digit == sub_digit(f->inputs[i], cut.sub)))
      moved += carries ? whole / n : whole;
    if (carries && f->reads_through(i))
      moved += bytes(id, a) * static_cast<double>(halo_of(f->window, b_.out.mesh_axis(a, op.stage))) /
               static_cast<double>(std::max<int64_t>(f->window.source, 1));
  }
  for (size_t o = 0; f && o < op.outputs.size(); ++o) {
    const TensorId id = op.outputs[o];
    if (id == kNone) continue;
    const double whole = bytes(id, a) * (n - 1) / n;
    const bool carries = o < f->outputs.size() && f->outputs[o].present();
    const bool to_shard = wanted[o].given && wanted[o].layout.placement == Placement::kShard;
    if (!carries)
      moved += to_shard ? whole : 2 * whole;
    else if (wanted[o].given && !(to_shard && wanted[o].layout.digit == sub_digit(f->outputs[o], cut.sub)))
      moved += to_shard ? whole / n : whole;
  }
  return moved;
}

// Over all micro-batches, of parameters and what is made of them alone: copies that are put together, and sums of
// gradients that no device has a part of. In a step of one micro-batch they come and go as activations do.
double Propagator::held_bytes(const Op& op, const Factor* f, size_t a) const {
  if (micro_batches() == 1) return 0;
  const auto n = static_cast<double>(size(a, op));
  double held = 0;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    const bool carries = f && i < f->inputs.size() && f->inputs[i].present();
    if (!carries && placement(op.inputs[i], a) == Placement::kShard && !b_.out.time_varies(op.inputs[i]))
      held += bytes(op.inputs[i], a) * (n - 1) / n;
  }
  for (size_t o = 0; o < op.outputs.size(); ++o) {
    const TensorId id = op.outputs[o];
    if (id == kNone || (f && o < f->outputs.size() && f->outputs[o].present())) continue;
    const auto x = adjoint_of_.find(id);
    if (parameter_of_.contains(id) || (x != adjoint_of_.end() && !b_.out.time_varies(b_.latest(x->second))))
      held += bytes(id, a) * (n - 1) / n;
  }
  return held;
}

OpCut Propagator::cheapest_cut(const Op& op, const Factors& factors, size_t a) const {
  std::vector<OpCut> tries{{}};
  const auto enter = [&](const OpCut& cut) {
    if (std::find(tries.begin(), tries.end(), cut) == tries.end()) tries.push_back(cut);
  };
  for (const auto& [cut, operand] : cuts_of_operands(op, factors, a)) enter(cut);
  const std::vector<Wanted> wanted = wanted_results(op, a);
  for (size_t o = 0; o < wanted.size(); ++o) {
    if (wanted[o].layout.placement != Placement::kShard) continue;
    for (size_t k = 0; k < factors.list.size(); ++k) {
      const Factor& f = factors.list[k];
      OpCut cut{static_cast<int>(k), {}, false};
      const Digit& d = wanted[o].layout.digit;
      if (o < f.outputs.size() &&
          find_sub_digit(f.outputs[o], f.extent, d, extent_of(g().tensor(op.outputs[o]).dims, d), cut.sub) &&
          fits(op, f, cut.sub, a))
        enter(cut);
    }
  }
  if (tries.size() == 1) return {};
  const double work = op_seconds(cost_of(view_of(g(), op)), tasks().cost.device);
  const auto seconds = [&](const OpCut& cut) {
    const Factor* f = cut.present() ? &factors.list[static_cast<size_t>(cut.factor)] : nullptr;
    return (f ? work / static_cast<double>(size(a, op)) : work) +
           moved_bytes(op, f, cut, wanted, a) / tasks().cost.link.bytes_per_second +
           held_bytes(op, f, a) / tasks().cost.freed_bytes_per_second;
  };
  OpCut best = tries[0];
  double least = seconds(best);
  for (size_t t = 1; t < tries.size(); ++t)
    if (const double s = seconds(tries[t]); s < least * (1 - 1e-9)) best = tries[t], least = s;
  return best;
}

void Propagator::apply_cut(Op& op, const Factors& factors, size_t a, const OpCut& cut) {
  const Factor& f = factors.list[static_cast<size_t>(cut.factor)];
  const Digit groups = a == kTime ? digit_of_groups(f, cut.sub, micro_batches()) : Digit{};
  const auto of_groups = [&](const std::vector<int>& operands, size_t k) {
    return groups.present() && std::find(operands.begin(), operands.end(), static_cast<int>(k)) != operands.end();
  };
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    if (op.inputs[i] == kNone) continue;
    const bool carries = i < f.inputs.size() && f.inputs[i].present();
    AxisLayout want;
    if (of_groups(f.group.inputs, i))
      want = shard(groups, cut.state, cut.samples);
    else if (carries && f.reads_through(i))
      want = read_layout(f, f.inputs[i], b_.out.mesh_axis(a, op.stage));
    else if (carries)
      want = shard(sub_digit(f.inputs[i], cut.sub), cut.state, cut.samples);
    else if (const Digit piece = streamed_digit(factors, i); piece.present() && asks_for(tasks(), op, a, f))
      op.inputs[i] = bring(op, op.inputs[i], a, shard(piece));  // so that it can go round (parallel/stream.h)
    op.inputs[i] = bring(op, op.inputs[i], a, want);
  }
  for (size_t o = 0; o < op.outputs.size(); ++o) {
    if (op.outputs[o] == kNone) continue;
    AxisLayout& l = b_.out.at(op.outputs[o], a);
    if (of_groups(f.group.outputs, o))
      l = shard(groups, cut.state, cut.samples);
    else if (o < f.outputs.size() && f.outputs[o].present())
      l = shard(sub_digit(f.outputs[o], cut.sub), cut.state, cut.samples);
    else
      l = {.placement = Placement::kPartial, .digit = {}, .state = false, .samples = false, .combine = f.combine_of(o)};
  }
}

void Propagator::pass_partial(Op& op, const Factors& factors, size_t a) {
  std::vector<int> partial;
  bool sum = true, narrows = false;
  for (size_t i = 0; i < op.inputs.size(); ++i) {
    if (placement(op.inputs[i], a) == Placement::kShard) op.inputs[i] = bring(op, op.inputs[i], a, {});
    if (placement(op.inputs[i], a) != Placement::kPartial) continue;
    partial.push_back(static_cast<int>(i));
    sum &= b_.out.at(op.inputs[i], a).combine == Combine::kSum;
    for (const TensorId o : op.outputs)  // sums stay in the wider type
      if (o != kNone) narrows |= size_of(g().tensor(o).dtype) < size_of(g().tensor(op.inputs[i]).dtype);
  }
  if (partial.empty()) return;
  // Exact mode adds each use of a parameter over time for itself: stages may lie between uses.
  const bool passes = sum && !narrows && !(b_.out.exact && a == kTime) &&
                      std::find(factors.linear.begin(), factors.linear.end(), partial) != factors.linear.end();
  if (!passes) {
    for (const int i : partial) op.inputs[static_cast<size_t>(i)] = bring(op, op.inputs[static_cast<size_t>(i)], a, {});
    return;
  }
  for (const TensorId o : op.outputs)
    if (o != kNone) b_.out.at(o, a) = {.placement = Placement::kPartial, .digit = {}, .state = false, .samples = false};
}

}  // namespace whale
