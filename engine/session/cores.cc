#include "session/cores.h"

#include <algorithm>
#include <tuple>

#include "base/error.h"
#include "cluster/devices.h"

namespace whale {
namespace {

bool contains(const std::vector<int>& cores, int core) {
  return std::find(cores.begin(), cores.end(), core) != cores.end();
}

void check_named(const DeviceSpec& spec, size_t device, const std::vector<int>& allowed) {
  for (const int core : spec.cores)
    if (!contains(allowed, core))
      throw invalid(
          "device {} is {}, and this process may not run on core {}; it may on {}. Name one of these, or write "
          "cpu:N for any",
          device, to_string(spec), core, to_string(DeviceSpec{.cores = allowed}).substr(4));
}

// The `count` least used cores, of equals those of `wanted`, then the lower ones.
std::vector<int> least_used(const std::vector<int>& usable, size_t count, const std::vector<int>& wanted,
                            const CoreUse& use) {
  const auto rank = [&](int core) {
    const auto at = use.find(core);
    return std::tuple(at == use.end() ? 0 : at->second, !contains(wanted, core), core);
  };
  std::vector<int> cores = usable;
  std::sort(cores.begin(), cores.end(), [&](int a, int b) { return rank(a) < rank(b); });
  cores.resize(std::min(count, cores.size()));
  std::sort(cores.begin(), cores.end());
  return cores;
}

}  // namespace

std::vector<DeviceSpec> assign_cores(std::vector<DeviceSpec> specs, const std::vector<int>& usable,
                                     const std::vector<int>& allowed, int threads, CoreUse& use) {
  std::vector<DeviceSpec*> free;
  bool here = true;  // the plan was made for such a machine
  for (size_t d = 0; d < specs.size(); ++d) {
    DeviceSpec& spec = specs[d];
    if (!traits(spec.kind).takes_cores) continue;
    if (spec.named) {
      check_named(spec, d, allowed);
      for (const int core : spec.cores) ++use[core];
      continue;
    }
    free.push_back(&spec);
    here = here && !spec.cores.empty() &&
           std::all_of(spec.cores.begin(), spec.cores.end(), [&](int core) { return contains(usable, core); });
  }
  const size_t n = free.size();
  for (size_t i = 0; i < n; ++i) {
    std::vector<int>& cores = free[i]->cores;
    const size_t share = std::max<size_t>(1, (i + 1) * usable.size() / n - i * usable.size() / n);
    const size_t count = threads > 0 ? static_cast<size_t>(threads) : here ? cores.size() : share;
    cores = least_used(usable, count, here ? cores : std::vector<int>{}, use);
    for (const int core : cores) ++use[core];
  }
  return specs;
}

std::unique_ptr<CoreLeases::Lease> CoreLeases::lease(const std::shared_ptr<CoreLeases>& from,
                                                     std::vector<DeviceSpec> specs, int threads, bool pin) {
  const std::vector<int> usable = usable_cores(), allowed = allowed_cores();
  const std::lock_guard lock(from->mutex_);
  CoreUse use = from->use_;
  auto lease = std::make_unique<Lease>(from, assign_cores(std::move(specs), usable, allowed, threads, use), pin);
  if (pin) from->use_ = std::move(use);
  return lease;
}

CoreLeases::Lease::Lease(std::shared_ptr<CoreLeases> from, std::vector<DeviceSpec> specs, bool counted)
    : from_(std::move(from)), specs_(std::move(specs)), counted_(counted) {}

CoreLeases::Lease::~Lease() {
  if (!counted_) return;
  const std::lock_guard lock(from_->mutex_);
  for (const DeviceSpec& spec : specs_)
    for (const int core : spec.cores)
      if (const auto at = from_->use_.find(core); at != from_->use_.end() && --at->second == 0) from_->use_.erase(at);
}

}  // namespace whale
