#include "compile/savings.h"

#include <algorithm>

namespace whale {
namespace {

// At least what is held with `to`, of what is held with `from`: what no saving of `to` touches stays.
double least_held(const MemoryClasses& held, const PlanOptions& from, const PlanOptions& to, double replicas) {
  const auto part = [&](int64_t bytes, int level, uint32_t offload) {
    if ((to.offload & offload) != 0 && (from.offload & offload) == 0) return 0.0;
    return static_cast<double>(bytes) / (to.zero >= level && from.zero < level ? replicas : 1);
  };
  const bool copied = to.offload != from.offload || to.zero != from.zero;
  const bool made_again =
      to.recompute > from.recompute || ((to.offload & ~from.offload) & kOffloadActivations) != 0 || copied;
  return part(held.parameters, 3, kOffloadParameters) + part(held.state, 1, kOffloadState) +
         part(held.gradients, 2, kOffloadGradients) + static_cast<double>(held.buffers) +
         (copied ? 0 : static_cast<double>(held.copies)) + (made_again ? 0 : static_cast<double>(held.activations));
}

}  // namespace

PlanOptions saved(PlanOptions asked, const Saving& saving, bool replicas) {
  asked.zero = std::max(asked.zero, replicas ? saving.zero : 0);
  asked.recompute = std::max(asked.recompute, saving.recompute);
  asked.offload |= saving.offload;
  return asked;
}

bool saves_as_much(const PlanOptions& more, const PlanOptions& less) {
  return more.zero >= less.zero && more.recompute >= less.recompute && (less.offload & ~more.offload) == 0;
}

void SavingsSeen::see(const PlanOptions& options, const Estimate& estimate, const std::vector<DeviceSpec>& devices) {
  Seen seen{options, estimate.seconds, {}};
  for (const Estimate::Class& c : estimate.classes) {
    int64_t least = INT64_MAX;
    for (const int32_t d : c.devices) least = std::min(least, devices[d].memory_bytes);
    seen.classes.push_back({c.memory.device, static_cast<double>(least), static_cast<double>(c.devices.size())});
  }
  if (std::ranges::any_of(seen.classes, [](const Class& c) { return c.has == 0; })) seen.classes.clear();
  seen_.push_back(std::move(seen));
}

int64_t SavingsSeen::least_missing(const PlanOptions& options, double replicas) const {
  double missing = 0;
  for (const Seen& seen : seen_) missing = std::max(missing, least_missing(seen, options, replicas));
  return static_cast<int64_t>(missing);
}

double SavingsSeen::least_missing(const Seen& seen, const PlanOptions& options, double replicas) const {
  constexpr double kSure = 1.02;  // estimates are as good as this
  double missing = 0, needed = 0, there = 0, devices = 0;
  for (const Class& c : seen.classes) {
    const double held = least_held(c.held, seen.options, options, replicas);
    needed += c.devices * held, there += c.devices * c.has, devices += c.devices;
    if (unlike_ && cut_) continue;
    MemoryClasses fixed = c.held;
    if (unlike_) fixed.activations = 0;
    missing = std::max(missing, least_held(fixed, seen.options, options, replicas) - kSure * c.has);
  }
  return devices > 0 ? std::max(missing, (needed - kSure * there) / devices) : 0;
}

double SavingsSeen::least_seconds(const PlanOptions& options) const {
  constexpr double kAgain = 1.1;  // that all is computed once more, at least, where there is also communication
  double least = 0;
  for (const Seen& seen : seen_)
    if (saves_as_much(options, seen.options)) {
      const bool again = options.recompute == Recompute::kFull && seen.options.recompute != Recompute::kFull;
      least = std::max(least, seen.seconds * (again ? kAgain : 1));
    }
  return least;
}

}  // namespace whale
