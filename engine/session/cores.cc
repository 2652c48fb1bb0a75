#include "session/cores.h"

#include <algorithm>

namespace whale {

std::vector<DeviceSpec> assign_cores(std::vector<DeviceSpec> specs, const std::vector<int>& usable, int threads) {
  std::vector<DeviceSpec*> devices;
  bool named = true;
  for (DeviceSpec& spec : specs) {
    if (spec.kind != DeviceKind::kCpu) continue;
    devices.push_back(&spec);
    named = named && !spec.cores.empty() && std::all_of(spec.cores.begin(), spec.cores.end(), [&](int core) {
              return std::find(usable.begin(), usable.end(), core) != usable.end();
            });
  }
  const size_t n = devices.size();
  for (size_t i = 0; i < n; ++i) {
    std::vector<int>& cores = devices[i]->cores;
    if (!named) {
      const size_t begin = i * usable.size() / n, end = std::max((i + 1) * usable.size() / n, begin + 1);
      cores.assign(usable.begin() + static_cast<ptrdiff_t>(begin), usable.begin() + static_cast<ptrdiff_t>(end));
    }
    if (threads <= 0) continue;
    const size_t first = static_cast<size_t>(std::find(usable.begin(), usable.end(), cores[0]) - usable.begin());
    cores.clear();
    for (size_t k = 0; k < std::min(static_cast<size_t>(threads), usable.size()); ++k)
      cores.push_back(usable[(first + k) % usable.size()]);
  }
  return specs;
}

}  // namespace whale
