#include "simulate/simulate.h"

#include <algorithm>
#include <map>
#include <memory>
#include <numeric>
#include <unordered_map>

#include "base/error.h"
#include "cost/measured.h"
#include "simulate/beside.h"
#include "simulate/layer_seconds.h"
#include "simulate/rates.h"

namespace whale {
namespace {

std::vector<int32_t> numbers(size_t n) {
  std::vector<int32_t> all(n);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

// Of each device: equal numbers for one program on devices that are alike.
std::vector<int32_t> kinds_of(const Entries& e) {
  const std::vector<int32_t> kinds = PlanRates(cost_of(e.plan), e.plan, e.entry).kinds();
  std::map<std::pair<int32_t, int32_t>, int32_t> known;
  std::vector<int32_t> out;
  for (size_t d = 0; d < kinds.size(); ++d)
    out.push_back(known.try_emplace({e.entry.rows[d].program, kinds[d]}, std::ssize(known)).first->second);
  return out;
}

// Of instructions that compute, feed or fetch, by what was measured of their shapes or of their layers. Each is looked
// up once for each kind of device.
class MeasuredSeconds {
 public:
  explicit MeasuredSeconds(const Entries& e) : e_(e) {}

  std::optional<double> of(const Instruction& i, int32_t device, const DeviceRates& rates) {
    const MeasuredDevice& measured = *rates.measured;
    if (!measured.layers.empty()) return by_layer(i, device, rates);
    const auto [at, fresh] = by_op_[&measured].try_emplace(&i);
    if (fresh)
      if (const auto times = measured.of(measured_shape(i, e_.program(device).buffers), rates.flops_per_second,
                                         rates.bytes_per_second))
        at->second = times->at(1);
    return at->second;
  }

 private:
  std::optional<double> by_layer(const Instruction& i, int32_t device, const DeviceRates& rates) {
    const auto [known, fresh] = by_layer_.try_emplace(device);
    if (fresh)
      known->second = layer_seconds(e_.plan, e_.entry, device, *rates.measured, [&](const Instruction& each) {
        return op_seconds(OpCost{each.flops, each.bytes}, rates);
      });
    const auto at = known->second.find(&i);
    if (at == known->second.end()) return std::nullopt;
    return at->second;
  }

  const Entries e_;
  std::unordered_map<const MeasuredDevice*, std::unordered_map<const Instruction*, std::optional<double>>> by_op_;
  std::unordered_map<int32_t, std::unordered_map<const Instruction*, double>> by_layer_;
};

std::vector<Event> events_of(const Entries& e, const EntryPeers& peers, const std::vector<int32_t>& classes,
                             const Duration& duration, const Besides& besides = {}) {
  PlanWalk walk(e, peers, classes, steps_of(e.entry, Walked::kAll), Walked::kAll, duration, besides);
  if (const auto stuck = walk.run(); !stuck.text.empty()) throw error(Code::kFailedPrecondition, "{}", stuck.text);
  std::vector<Event> events;
  for (const PlanWalk::Visit& v : walk.visits())
    events.push_back(
        {v.device, v.row, v.segment, v.instruction, walk.instruction(v).queue, walk.begin(v), walk.end(v)});
  return events;
}

}  // namespace

std::vector<Event> simulate(const Plan& plan, const Entry& entry, const Duration& duration) {
  const Entries e{plan, entry};
  return events_of(e, peers_of(e), numbers(entry.rows.size()), duration);
}

namespace {

OpView operands_of(const Instruction& i, const std::vector<Buffer>& buffers) {
  OpView view;
  for (const auto& [list, types] : {std::pair(&i.in, &view.inputs), {&i.out, &view.outputs}})
    for (const BufferId b : *list) {
      const bool there = b != kNone;
      if (types == &view.inputs) view.present.push_back(there);
      types->push_back(there ? TensorType{buffers[b].dtype, buffers[b].dims} : TensorType{});
    }
  if (const work::Kernel* kernel = i.kernel()) view.code = kernel->op, view.attrs = &kernel->attrs;
  return view;
}

}  // namespace

OpShape measured_shape(const Instruction& i, const std::vector<Buffer>& buffers) {
  const OpView view = operands_of(i, buffers);
  const OpCost cost{i.flops, i.bytes};
  if (i.kernel() != nullptr) return shape_of(view, cost);
  const TensorType moved =
      view.outputs.empty() ? (view.inputs.empty() ? TensorType{} : view.inputs[0]) : view.outputs[0];
  return shape_of(i.verb(), moved.dtype, element_count(moved.dims), cost);
}

namespace {

// Of kernels that are products, by the curves of devices. Each is worked out once for each type.
class ProductSeconds {
 public:
  explicit ProductSeconds(const Entries& e) : e_(e) {}

  double of(const Instruction& i, int32_t device, const DeviceRates& rates) {
    const OpCost cost{i.flops, i.bytes};
    if (i.kernel() == nullptr || i.in.size() < 2) return op_seconds(cost, rates);
    const auto [at, fresh] = known_[rates.curve].try_emplace(&i);
    if (fresh) at->second = op_seconds(cost, product_of(operands_of(i, e_.program(device).buffers), cost), rates);
    return at->second;
  }

 private:
  const Entries e_;
  std::unordered_map<const DeviceCurve*, std::unordered_map<const Instruction*, double>> known_;
};

}  // namespace

double makespan(const std::vector<Event>& events) {
  double end = 0;
  for (const Event& e : events) end = std::max(end, e.end);
  return end;
}

Duration seconds_by(const CostModel& cost, const Plan& plan, const Entry& entry) {
  return [rates = std::make_shared<PlanRates>(cost, plan, entry), e = Entries{plan, entry},
          measured = std::make_shared<MeasuredSeconds>(Entries{plan, entry}),
          products = std::make_shared<ProductSeconds>(Entries{plan, entry})](const Instruction& i, int32_t device) {
    const auto& buffers = e.program(device).buffers;
    const auto bytes = [&](const BufferIds& list) {
      double sum = 0;
      for (const BufferId b : list)
        if (b != kNone) sum += static_cast<double>(buffers[b].bytes);
      return sum;
    };
    const bool half = !i.in.empty() && i.in[0] != kNone && size_of(buffers[i.in[0]].dtype) == 2;
    switch (i.kind()) {
      case InstructionKind::kSend: return link_seconds(bytes(i.in), 1, rates->link(i.link(), device));
      case InstructionKind::kCopy: return link_seconds(bytes(i.in), 1, rates->host(device));
      case InstructionKind::kReceive: return op_seconds({0, bytes(i.out)}, rates->device(device, half));
      case InstructionKind::kVote: return link_seconds(bytes(i.in), 1, rates->vote());
      case InstructionKind::kCommit: return 0.0;
      case InstructionKind::kCollective: break;
      default: {
        const DeviceRates mine = rates->device(device, half);
        if (mine.measured != nullptr)
          if (const std::optional<double> seconds = measured->of(i, device, mine)) return *seconds;
        if (mine.curve != nullptr) return products->of(i, device, mine);
        return op_seconds(OpCost{i.flops, i.bytes}, mine);
      }
    }
    const auto& collective = *i.as<work::Collective>();
    const int64_t n = rates->members(collective.group, device);
    const LinkRates link = rates->group(collective.group, device);
    if (collective.op == OpCode::k_all_reduce || collective.op == OpCode::k_adasum)
      return all_reduce_seconds(bytes(i.in), n, link);
    return all_gather_seconds(std::max(bytes(i.in), bytes(i.out)), n, link);
  };
}

std::optional<StepTimes> times_of(const Plan& plan, const Entry& entry, size_t most) {
  const Entries e{plan, entry};
  const EntryPeers peers = peers_of(e);
  StepTimes times{.classes = classes_alike(e, peers, kinds_of(e))};
  size_t steps = 0;
  int32_t known = 0;
  for (size_t d = 0; d < times.classes.size(); ++d) {
    if (times.classes[d] != known) continue;
    ++known;
    const Program& p = e.program(static_cast<int32_t>(d));
    for (const ScheduleRow& row : p.schedule) steps += p.segments[row.segment].instructions.size();
  }
  if (steps > most) return std::nullopt;
  const CostModel cost = cost_of(plan);
  times.events = events_of(e, peers, times.classes, seconds_by(cost, plan, entry), besides_of(plan, entry));
  times.seconds = makespan(times.events);
  return times;
}

StepTimes times_of(const Plan& plan, const Entry& entry, const Duration& duration) {
  const Entries e{plan, entry};
  const EntryPeers peers = peers_of(e);
  StepTimes times{.classes = classes_alike(e, peers, kinds_of(e))};
  times.events = events_of(e, peers, times.classes, duration);
  times.seconds = makespan(times.events);
  return times;
}

}  // namespace whale
