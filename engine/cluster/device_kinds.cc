#include "cluster/device_kinds.h"

#include <algorithm>

namespace whale {

std::vector<int32_t> kinds_of(const std::vector<DeviceSpec>& devices) {
  std::vector<const DeviceSpec*> known;
  std::vector<int32_t> out;
  for (const DeviceSpec& d : devices) {
    const auto alike = [&](const DeviceSpec* k) {
      return k->kind == d.kind && k->memory_bytes == d.memory_bytes && k->figures == d.figures;
    };
    const auto at = std::ranges::find_if(known, alike);
    out.push_back(static_cast<int32_t>(at - known.begin()));
    if (at == known.end()) known.push_back(&d);
  }
  return out;
}

}  // namespace whale
