#include "simulate/simulate.h"

#include <algorithm>
#include <numeric>

#include "base/error.h"

namespace whale {
namespace {

std::vector<int32_t> numbers(size_t n) {
  std::vector<int32_t> all(n);
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<Event> events_of(const Entries& e, const EntryPeers& peers, const std::vector<int32_t>& classes,
                             const Duration& duration) {
  PlanWalk walk(e, peers, classes, steps_of(e.entry, Walked::kAll), Walked::kAll, duration);
  if (const std::string stuck = walk.run(); !stuck.empty()) throw error(Code::kFailedPrecondition, "{}", stuck);
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

double makespan(const std::vector<Event>& events) {
  double end = 0;
  for (const Event& e : events) end = std::max(end, e.end);
  return end;
}

Duration seconds_by(const CostModel& cost, const Plan& plan, const Entry& entry) {
  return
      [&cost, e = Entries{plan, entry}, parts = peers_of({plan, entry}).parts](const Instruction& i, int32_t device) {
        const auto bytes = [&](const BufferIds& list) {
          double sum = 0;
          for (const BufferId b : list)
            if (b != kNone) sum += static_cast<double>(e.program(device).buffers[static_cast<size_t>(b)].bytes);
          return sum;
        };
        switch (i.kind()) {
          case InstructionKind::kSend: return link_seconds(bytes(i.in), 1, cost.link);
          case InstructionKind::kCopy: return link_seconds(bytes(i.in), 1, cost.host);
          case InstructionKind::kReceive: return op_seconds({0, bytes(i.out)}, cost.device);
          case InstructionKind::kVote: return link_seconds(bytes(i.in), 1, cost.link);
          case InstructionKind::kCommit: return 0.0;
          case InstructionKind::kCollective: break;
          default: return op_seconds({i.flops, i.bytes}, cost.device);
        }
        const auto& collective = *i.as<work::Collective>();
        const auto group = static_cast<size_t>(collective.group);
        const auto n =
            std::ssize(e.plan.groups[group].parts[static_cast<size_t>(parts[group][static_cast<size_t>(device)])]);
        if (collective.op == OpCode::k_all_reduce || collective.op == OpCode::k_adasum)
          return all_reduce_seconds(bytes(i.in), n, cost.link);
        return all_gather_seconds(std::max(bytes(i.in), bytes(i.out)), n, cost.link);
      };
}

std::optional<StepTimes> times_of(const Plan& plan, const Entry& entry, size_t most) {
  const Entries e{plan, entry};
  const EntryPeers peers = peers_of(e);
  StepTimes times{.classes = classes_alike(e, peers, numbers(entry.programs.size()))};
  size_t steps = 0;
  int32_t known = 0;
  for (size_t d = 0; d < times.classes.size(); ++d) {
    if (times.classes[d] != known) continue;
    ++known;
    const Program& p = e.program(static_cast<int32_t>(d));
    for (const ScheduleRow& row : p.schedule) steps += p.segments[static_cast<size_t>(row.segment)].instructions.size();
  }
  if (steps > most) return std::nullopt;
  const CostModel cost = cost_of(plan);
  times.events = events_of(e, peers, times.classes, seconds_by(cost, plan, entry));
  times.seconds = makespan(times.events);
  return times;
}

}  // namespace whale
