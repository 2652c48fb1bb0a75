#include "compile/faster_pipeline.h"

#include <utility>

#include "compile/prepare.h"
#include "plan/figures.h"
#include "report/fit.h"
#include "simulate/simulate.h"
#include "task/refine_cuts.h"

namespace whale {
namespace {

constexpr size_t kMostSteps = 2'000'000;

std::optional<Faster> deepened(const Graph& graph, const CompileOptions& options, const Plan& plan,
                               const MakePlan& make) {
  std::optional<DeeperWarmup> found = deeper_warmup(plan);
  if (!found || !with_warmup(graph, options, found->depths)) return std::nullopt;
  const auto before = times_of(plan, plan.entries[0], kMostSteps);
  if (!before) return std::nullopt;
  for (; found->is_deeper(); found->halve()) {
    std::optional<WithWarmup> with = with_warmup(graph, options, found->depths);
    with->options.dump = {};
    Plan deeper = make(with->graph, with->options);
    if (shortage_of(deeper).bytes > 0) continue;
    const auto after = times_of(deeper, deeper.entries[0], kMostSteps);
    if (!after || after->seconds > (1 - kWorthDeeper) * before->seconds) break;
    return Faster{std::move(deeper),
                  fmt::format("{}. A step takes {} instead of {}.", found->why, seconds_text(after->seconds),
                              seconds_text(before->seconds)),
                  std::move(*with)};
  }
  return std::nullopt;
}

}  // namespace

Ints begins_by_clock(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                     double memory_price, const Ints& usual) {
  if (usual.empty() || !options.stages.begins.empty() || !options.stages.rooms.empty() ||
      !knows_devices(devices, options.profile))
    return {};
  CompileOptions with = options;
  with.stages.by_clock = true, with.dump = {};
  Ints out = prepare(graph, devices, with, memory_price).scoped.tasks.stage_begins;
  return out == usual ? Ints{} : out;
}

std::optional<Faster> faster_pipeline(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                      const CompileOptions& options, const Plan& plan, const MakePlan& make,
                                      const MakePlan& step) {
  std::optional<Faster> deeper = deepened(graph, options, plan, make);
  CompileOptions cut = options;
  if (plan.meshes.size() > 1 && plan.micro_batches > 1 && !plan.entries.empty())
    cut.stages.begins = begins_by_clock(graph, devices, options, plan.memory_price,
                                        prepare(graph, devices, options, plan.memory_price).scoped.tasks.stage_begins);
  if (cut.stages.begins.empty()) return deeper;
  cut.dump = {};
  const Plan& best = deeper ? deeper->plan : plan;
  const auto before = times_of(best, best.entries[0], kMostSteps);
  if (!before) return deeper;
  // By steps alone whether it is worth making.
  const Plan other = step(graph, cut);
  if (shortage_of(other).bytes > 0) return deeper;
  const std::optional<Faster> other_deeper = deepened(graph, cut, other, step);
  const Plan& walked = other_deeper ? other_deeper->plan : other;
  const auto after = times_of(walked, walked.entries[0], kMostSteps);
  if (!after || after->seconds > kWorthOtherCuts * before->seconds) return deeper;
  Plan made = make(graph, cut);
  if (shortage_of(made).bytes > 0) return deeper;
  std::optional<Faster> both = deepened(graph, cut, made, make);
  const std::string why =
      fmt::format("Stages are cut by how the pipeline goes, not for even work: a step takes {} instead of {}.",
                  seconds_text(after->seconds), seconds_text(before->seconds));
  if (both) return Faster{std::move(both->plan), fmt::format("{} {}", why, both->why), std::move(both->made_of)};
  return Faster{std::move(made), why, {graph, cut}};
}

}  // namespace whale
