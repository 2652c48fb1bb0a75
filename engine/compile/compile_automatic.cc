#include <algorithm>

#include "base/text.h"
#include "cluster/devices.h"
#include "compile/automatic.h"
#include "compile/estimate.h"
#include "compile/remedies.h"
#include "plan/figures.h"
#include "report/fit.h"

namespace whale {
namespace {

// What the nearest lacks, and what else would make that one fit.
Error nearest_does_not_fit(const Graph& graph, const std::vector<DeviceSpec>& all, const CompileOptions& options,
                           const Found& found) {
  const Judged& near = found.list.front();
  const std::string what = fmt::format("strategy auto: none of {} strategies will do; nearest is\n{}: {}",
                                       found.list.size() + found.not_tried, whole_text(near), near.lost);
  try {
    CompileOptions with = options;
    static_cast<PlanOptions&>(with) = near.candidate.options;
    if (!near.candidate.strategy.empty()) with.strategy = near.candidate.strategy;
    if (near.candidate.strategy.empty()) with.strategy.clear();
    if (near.candidate.accumulation > 0) with.accumulation = near.candidate.accumulation;
    with.rooms = near.candidate.rooms, with.stages = near.candidate.stages, with.dump = {}, with.verify_passes = false;
    with.search = {};
    const std::vector<DeviceSpec> mine = chosen_of(all, near.candidate.devices);
    const Plan plan = plan_of_step(graph, mine, with, with.memory_price);
    const Shortage shortage = shortage_of(plan);
    if (shortage.bytes == 0) return error(Code::kResourceExhausted, "{}", what);
    RemedyEffort effort;
    effort.search = 0;
    if (mine.size() != all.size()) effort.estimates = 0;  // other devices would have to be given too
    const Error why =
        does_not_fit(plan, plan.entries[0], shortage, remedies_for(graph, mine, with, plan, shortage, effort, true));
    return error(Code::kResourceExhausted, "{}\n{}", what, why.message());
  } catch (const Error&) {
    return error(Code::kResourceExhausted, "{}", what);
  }
}

}  // namespace

Plan compile_automatic(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  const Found found = search(graph, devices, options);
  if (!found.fits()) {
    if (found.list.empty())
      throw found.not_tried > 0
          ? error(Code::kResourceExhausted,
                  "strategy auto: there was no time for any of {} strategies; give it more than {} search_seconds",
                  found.not_tried, options.search.seconds)
          : invalid("strategy auto: no strategy cuts this model for {} device(s)", devices.size());
    const Judged& near = found.list.front();
    if (near.missing > 0) throw nearest_does_not_fit(graph, devices, options, found);
    throw error(Code::kResourceExhausted, "strategy auto: none of {} strategies will do; nearest is {}: {}",
                found.list.size(), whole_text(near), near.lost);
  }
  const Candidate& best = found.winner().candidate;
  CompileOptions with = options;
  static_cast<PlanOptions&>(with) = best.options;
  with.strategy = best.strategy, with.search = {};
  with.rooms = best.rooms, with.stages = best.stages;
  if (best.accumulation > 0) with.accumulation = best.accumulation;
  Plan plan = compile(graph, chosen_of(devices, best.devices), with);
  std::vector<std::string> notes{fmt::format("Strategy auto chose {} of {}: {} a step.", whole_text(found.winner()),
                                             found.list.size() + found.not_tried,
                                             seconds_text(found.winner().seconds))};
  constexpr size_t kShown = 4;
  for (size_t k = 1; k < found.list.size() && k <= kShown; ++k)
    notes.push_back(fmt::format("Instead: {}: {}.", whole_text(found.list[k]), brief(found.list[k].lost, 160)));
  if (best.devices.size() < devices.size()) {
    const auto all =
        std::ranges::find_if(found.list, [&](const Judged& j) { return j.candidate.devices.size() == devices.size(); });
    const std::string why =
        all == found.list.end()
            ? "by counts, strategies of all of them are many times as bad, or there was no time"
            : fmt::format("with all of them the best ({}) is {}", all->candidate.strategy, brief(all->lost, 160));
    notes.push_back(fmt::format("{} device(s) stay idle: {}.", devices.size() - best.devices.size(), why));
  }
  plan.notes.insert(plan.notes.begin(), notes.begin(), notes.end());
  return plan;
}

}  // namespace whale
