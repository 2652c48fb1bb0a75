#include "simulate/timeline.h"

#include <algorithm>

#include "base/format.h"
#include "plan/figures.h"
#include "simulate/simulate.h"

namespace whale {
namespace {

// Neighbours on a queue that do the same kind of work.
struct Stretch {
  std::string_view kind;
  int32_t device = 0;
  double start = 0, end = 0;
  std::vector<std::string_view> ops;
};

std::string_view kind_of(const Instruction& i) {
  if (i.kind() == InstructionKind::kFeed || i.kind() == InstructionKind::kFetch) return "feed";
  return i.group() != kNone || i.link() != kNone || i.kind() == InstructionKind::kVote ? "communication"
                                                                                       : name_of(i.phase);
}

std::vector<Stretch> stretches_of(const Entry& e, const StepTimes& times, Queue queue) {
  constexpr size_t kMostOps = 12;
  constexpr double kGap = 1.0 / 2000;  // of the step: a shorter one is not seen
  std::vector<Stretch> list;
  for (const Event& event : times.events) {
    if (event.queue != queue) continue;
    const Program& p = e.programs[e.rows[event.device].program];
    const Instruction& i = p.segments[event.segment].instructions[event.instruction];
    if (list.empty() || list.back().device != event.device || list.back().kind != kind_of(i) ||
        event.start - list.back().end > kGap * times.seconds)
      list.push_back({kind_of(i), event.device, event.start, 0, {}});
    Stretch& now = list.back();
    now.end = event.end;
    if (now.ops.size() < kMostOps && std::find(now.ops.begin(), now.ops.end(), i.verb()) == now.ops.end())
      now.ops.push_back(i.verb());
  }
  return list;
}

}  // namespace

Json timeline_json(const Plan& plan, const Entry& entry) {
  constexpr size_t kMost = 1 << 20;
  const std::optional<StepTimes> times = times_of(plan, entry, kMost);
  if (!times) return nullptr;
  Json queues = Json::object();
  for (size_t t = 0; t < kQueues; ++t) {
    Json rows = Json::array();
    for (const Stretch& s : stretches_of(entry, *times, static_cast<Queue>(t)))
      rows.push_back(
          Json::array({times->classes[s.device], s.kind, s.start, s.end, fmt::format("{}", fmt::join(s.ops, ", "))}));
    if (!rows.empty()) queues[kQueueDefs[t].name] = std::move(rows);
  }
  return {{"seconds", times->seconds}, {"classes", times->classes}, {"queues", std::move(queues)}};
}

}  // namespace whale
