#include "compile/faster_pipeline.h"

#include <algorithm>
#include <utility>

#include "compile/prepare.h"
#include "plan/figures.h"
#include "report/fit.h"
#include "simulate/simulate.h"
#include "task/refine_cuts.h"

namespace whale {
namespace {

std::optional<Faster> deepened(const Graph& graph, const CompileOptions& options, const Plan& plan,
                               const MakePlan& make) {
  std::optional<DeeperWarmup> found = deeper_warmup(plan);
  if (!found || !with_warmup(graph, options, found->depths)) return std::nullopt;
  const auto before = times_of(plan, plan.entries[0]);
  if (!before) return std::nullopt;
  for (; found->is_deeper(); found->halve()) {
    std::optional<WithWarmup> with = with_warmup(graph, options, found->depths);
    with->options.dump = {};
    Plan deeper = make(with->graph, with->options);
    if (shortage_of(deeper).bytes > 0) continue;
    const auto after = times_of(deeper, deeper.entries[0]);
    if (!after || after->seconds > (1 - kWorthDeeper) * before->seconds) break;
    return Faster{std::move(deeper),
                  fmt::format("{}. A step takes {} instead of {}.", found->why, seconds_text(after->seconds),
                              seconds_text(before->seconds)),
                  std::move(*with)};
  }
  return std::nullopt;
}

}  // namespace

std::vector<Ints> begins_by_clock(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                  const CompileOptions& options, double memory_price, const Ints& usual) {
  if (usual.empty() || !options.stages.begins.empty() || !options.stages.rooms.empty() ||
      !knows_devices(devices, options.profile))
    return {};
  std::vector<Ints> out;
  for (const CutsBy by : {CutsBy::kClock, CutsBy::kDeeperClock}) {
    CompileOptions with = options;
    with.stages.cuts = by, with.dump = {};
    Ints begins = prepare(graph, devices, with, memory_price).scoped.tasks.stage_begins;
    if (begins != usual && std::ranges::find(out, begins) == out.end()) out.push_back(std::move(begins));
  }
  return out;
}

std::optional<Faster> faster_pipeline(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                      const CompileOptions& options, const Plan& plan, const MakePlan& make,
                                      const MakePlan& step) {
  std::optional<Faster> deeper = deepened(graph, options, plan, make);
  if (plan.meshes.size() < 2 || plan.micro_batches < 2 || plan.entries.empty()) return deeper;
  const std::vector<Ints> others =
      begins_by_clock(graph, devices, options, plan.memory_price,
                      prepare(graph, devices, options, plan.memory_price).scoped.tasks.stage_begins);
  const Plan& usual = deeper ? deeper->plan : plan;
  const auto before = others.empty() ? std::nullopt : times_of(usual, usual.entries[0]);
  if (!before) return deeper;
  // By steps alone whether one is worth making.
  double best = kWorthOtherCuts * before->seconds;
  std::optional<CompileOptions> cut;
  for (const Ints& begins : others) {
    CompileOptions with = options;
    with.stages.begins = begins, with.dump = {};
    const Plan other = step(graph, with);
    if (shortage_of(other).bytes > 0) continue;
    const std::optional<Faster> other_deeper = deepened(graph, with, other, step);
    const Plan& walked = other_deeper ? other_deeper->plan : other;
    const auto after = times_of(walked, walked.entries[0]);
    if (after && after->seconds <= best) best = after->seconds, cut = std::move(with);
  }
  if (!cut) return deeper;
  Plan made = make(graph, *cut);
  if (shortage_of(made).bytes > 0) return deeper;
  std::optional<Faster> both = deepened(graph, *cut, made, make);
  const std::string why =
      fmt::format("Stages are cut by how the pipeline goes, not for even work: a step takes {} instead of {}.",
                  seconds_text(best), seconds_text(before->seconds));
  if (both) return Faster{std::move(both->plan), fmt::format("{} {}", why, both->why), std::move(both->made_of)};
  return Faster{std::move(made), why, {graph, *cut}};
}

}  // namespace whale
