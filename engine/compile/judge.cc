#include "compile/judge.h"

#include <algorithm>

#include "base/watch.h"
#include "cluster/device_kinds.h"
#include "compile/estimate.h"
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
  out.strategy = c.strategy, out.search.present.clear();
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

Judged Judge::as_written(Candidate candidate) const {
  Judged out{.candidate = std::move(candidate), .lost = {}};
  try {
    judge(out, chosen_of(devices_, out.candidate.devices), nullptr);
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
      if (!best || missing < best->missing) {
        judged.bytes = shape.set->memory + missing, judged.missing = missing, judged.at_least = true;
        best = std::move(judged);
      }
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
    if (judged.missing == 0 ? !fits() || judged.seconds < best->seconds : !best || judged.missing < best->missing)
      best = std::move(judged);
  }
  return best;
}

bool Judge::simulate(Judged& j) const {
  constexpr size_t kMostSteps = 2'000'000;
  const std::vector<DeviceSpec> mine = chosen_of(devices_, j.candidate.devices);
  CompileOptions options = options_of(j.candidate);
  options.rooms = j.candidate.rooms, options.stages = j.candidate.stages;
  Plan plan = plan_of_step(graph_, mine, options, options.memory_price);
  if (shortage_of(plan).bytes > 0) plan = compile(graph_, mine, options_of(j.candidate));
  const auto times = times_of(plan, plan.entries[0], kMostSteps);
  if (times) set_seconds(j, times->seconds), j.simulated = true;
  return times.has_value();
}

void Judge::set_seconds(Judged& j, double seconds) const {
  constexpr double kHour = 3600;
  double an_hour = 0;
  for (const int32_t d : j.candidate.devices) an_hour += devices_[static_cast<size_t>(d)].figures.price_per_hour;
  j.seconds = seconds, j.price = an_hour / kHour * seconds;
}

bool Judge::is_too_slow(const Judged& j) const {
  return static_cast<double>(counts_.batch) < options_.search.least_throughput * j.seconds;
}

bool Judge::is_allowed(const Judged& j) const {
  return j.seconds > 0 && j.missing == 0 && j.lost.empty() && j.price <= options_.search.most_price && !is_too_slow(j);
}

double Judge::worth(const Judged& j) const {
  return options_.search.objective == Objective::kPrice ? j.price : j.seconds;
}

}  // namespace whale
