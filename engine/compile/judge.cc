#include "compile/judge.h"

#include <algorithm>
#include <cmath>

#include "base/watch.h"
#include "cluster/device_kinds.h"
#include "compile/estimate.h"
#include "compile/faster_pipeline.h"
#include "compile/remedies.h"
#include "report/fit.h"
#include "simulate/simulate.h"

namespace whale {
namespace {

bool are_limited(const std::vector<DeviceSpec>& devices) {
  return std::ranges::any_of(devices, [](const DeviceSpec& d) { return d.memory_bytes > 0; });
}

}  // namespace

CompileOptions Judge::options_of(const Candidate& c) const {
  CompileOptions out = options_;
  static_cast<PlanOptions&>(out) = c.options;
  out.strategy = c.strategy, out.search = {};
  if (c.accumulation > 0) out.accumulation = c.accumulation;
  out.verify_passes = false, out.dump = {};
  return out;
}

void Judge::judge(Judged& j, const std::vector<DeviceSpec>& mine, SavingsSeen* seen) const {
  CompileOptions options = options_of(j.candidate);
  const double price = options.memory_price;
  Fitted found;
  if (are_unlike(mine) && are_limited(mine)) {
    found = fitted(graph_, mine, options, price, Rooms(mine), Care::kQuick);
    j.candidate.rooms = std::move(found.options.rooms), j.candidate.stages = std::move(found.options.stages);
  } else {
    found.estimate = estimate_at(graph_, mine, options, price, Care::kQuick);
  }
  j.missing = missing_bytes(found.estimate, mine);
  for (const Estimate::Class& c : found.estimate.classes) j.bytes = std::max(j.bytes, c.memory.device.total());
  set_seconds(j, found.estimate.seconds);
  if (seen != nullptr) seen->see(j.candidate.options, found.estimate, mine);
}

Judged Judge::as_written(Candidate candidate, bool by_plan) const {
  Judged out{.candidate = std::move(candidate), .lost = {}};
  try {
    const std::vector<DeviceSpec> mine = chosen_of(devices_, out.candidate.devices);
    if (by_plan) {
      const Plan plan = plan_of(out.candidate, mine);
      out.missing = shortage_of(plan).bytes;
      if (walk(out, plan)) return out;
    }
    judge(out, mine, nullptr);
  } catch (const Stopped&) {
    throw;
  } catch (const Error& e) {
    out.lost = e.message();
  }
  return out;
}

std::optional<Judged> Judge::first_that_fits(const Shape& shape, double seconds) const {
  std::optional<Judged> best;  // that fits; none yet: that lacks least
  const auto fits = [&] { return best && best->missing == 0; };
  SavingsSeen seen(shape.set->unlike, shape.stages > 1 || shape.split > 1 || shape.cut > 0);
  std::vector<PlanOptions> looked;
  const std::vector<DeviceSpec>& mine = shape.set->specs;
  const auto memory = static_cast<double>(shape.set->memory);
  for (const Saving& saving : kSavings) {
    Watch::look();
    Judged judged{.candidate = shape.candidate, .lost = {}};
    PlanOptions& options = judged.candidate.options;
    options = saved(options, saving, shape.replicas > 1);
    if (std::ranges::any_of(
            looked, [&](const PlanOptions& o) { return saves_as_much(o, options) && saves_as_much(options, o); }))
      continue;
    looked.push_back(options);
    const double least_seconds = seen.least_seconds(options);
    if (fits() && (saves_as_much(options, best->candidate.options) || least_seconds >= best->seconds)) continue;
    if (least_seconds > seconds) continue;
    const double least = memory > 0 ? least_bytes(counts_, shape, options) - memory : 0;
    const int64_t missing =
        std::max(static_cast<int64_t>(least), seen.least_missing(options, static_cast<double>(shape.replicas)));
    const bool last = &saving == std::end(kSavings) - 1 && !best;
    if (missing > 0 && !last) {
      judged.bytes = shape.set->memory + missing, judged.missing = missing, judged.at_least = true;
      if (!best || (best->at_least && missing < best->missing)) best = std::move(judged);
      continue;
    }
    try {
      judge(judged, mine, &seen);
    } catch (const Stopped&) {
      throw;
    } catch (const Error& e) {
      if (best) continue;
      judged.lost = e.message();
      return judged;
    }
    const bool nearer = !best || best->at_least || judged.missing < best->missing;
    if (judged.missing == 0 ? !fits() || judged.seconds < best->seconds : nearer) best = std::move(judged);
  }
  return best;
}

Plan Judge::plan_of(const Candidate& candidate, const std::vector<DeviceSpec>& mine) const {
  CompileOptions options = options_of(candidate);
  options.rooms = candidate.rooms, options.stages = candidate.stages;
  return plan_of_step(graph_, mine, options, options.memory_price);
}

bool Judge::walk(Judged& j, const Plan& plan) const {
  const Entry& entry = plan.entries[0];
  const auto times = times_of(plan, entry);
  if (!times) return false;
  j.bytes = 0;
  for (size_t p = 0; p < entry.programs.size(); ++p)
    j.bytes = std::max(j.bytes, memory_of(plan, entry, p).device.total());
  set_seconds(j, times->seconds), j.simulated = true;
  return true;
}

bool Judge::simulate(Judged& j) const {
  const std::vector<DeviceSpec> mine = chosen_of(devices_, j.candidate.devices);
  CompileOptions options = options_of(j.candidate);
  Plan plan = plan_of(j.candidate, mine);
  if (shortage_of(plan).bytes > 0) {  // at other prices of memory, or with other cuts
    j.candidate.rooms = {}, j.candidate.stages = {};
    const std::optional<Plan> other = plan_that_fits(graph_, mine, options, true);
    if (!other) throw error(Code::kResourceExhausted, "does not fit, by its plan");
    return walk(j, *other);
  }
  options.rooms = j.candidate.rooms, options.stages = j.candidate.stages;
  const MakePlan step = [&](const Graph& g, const CompileOptions& with) {
    return plan_of_step(g, mine, with, plan.memory_price);
  };
  const std::optional<Faster> faster = faster_pipeline(graph_, mine, options, plan, step);
  return walk(j, faster ? faster->plan : plan);
}

void Judge::set_seconds(Judged& j, double seconds) const {
  constexpr double kHour = 3600;
  double an_hour = 0;
  for (const int32_t d : j.candidate.devices) an_hour += devices_[d].figures.price_per_hour;
  j.seconds = seconds, j.price = an_hour / kHour * seconds;
}

bool Judge::is_too_slow(const Judged& j) const {
  return static_cast<double>(counts_.batch) < options_.search.least_throughput * j.seconds;
}

double Judge::times_over(const Judged& j) const {
  const SearchOptions& asked = options_.search;
  double out = 1;
  if (std::isfinite(asked.most_price) && asked.most_price > 0) out = std::max(out, j.price / asked.most_price);
  return std::max(out, asked.least_throughput * j.seconds / static_cast<double>(counts_.batch));
}

bool Judge::is_allowed(const Judged& j) const {
  return j.seconds > 0 && j.missing == 0 && j.lost.empty() && j.price <= options_.search.most_price && !is_too_slow(j);
}

bool Judge::would_be_allowed(const Judged& j, double off) const {
  Judged faster = j;
  faster.seconds *= off, faster.price *= off;
  return is_allowed(faster);
}

double Judge::worth(const Judged& j) const {
  return options_.search.objective == Objective::kPrice ? j.price : j.seconds;
}

}  // namespace whale
