#include "cluster/device_kinds.h"

#include <algorithm>
#include <map>

#include "base/error.h"

namespace whale {

bool are_alike(const DeviceSpec& one, const DeviceSpec& other) {
  return one.kind == other.kind && one.memory_bytes == other.memory_bytes && one.figures == other.figures &&
         one.links == other.links;
}

std::vector<int32_t> kinds_of(const std::vector<DeviceSpec>& devices) {
  std::vector<const DeviceSpec*> known;
  std::vector<int32_t> out;
  for (const DeviceSpec& d : devices) {
    const auto at = std::ranges::find_if(known, [&](const DeviceSpec* k) { return are_alike(*k, d); });
    out.push_back(static_cast<int32_t>(at - known.begin()));
    if (at == known.end()) known.push_back(&d);
  }
  return out;
}

std::vector<std::string> names_of_kinds(const std::vector<DeviceSpec>& devices) {
  std::map<std::string, std::vector<const DeviceSpec*>> known;
  std::vector<std::string> out;
  for (const DeviceSpec& d : devices) {
    const std::string name = d.type.empty() ? name_of(d.kind) : d.type;
    std::vector<const DeviceSpec*>& list = known[name];
    const auto at = std::ranges::find_if(list, [&](const DeviceSpec* k) { return are_alike(*k, d); });
    const auto number = at - list.begin();
    if (at == list.end()) list.push_back(&d);
    out.push_back(number == 0 ? name : fmt::format("{} ({})", name, number + 1));
  }
  return out;
}

bool are_unlike(const std::vector<DeviceSpec>& devices) {
  const auto rates = [](const DeviceSpec& d) {
    DeviceFigures f = d.figures;
    f.network = f.inside = f.host = {}, f.price_per_hour = 0;
    return f;
  };
  return std::ranges::any_of(devices, [&](const DeviceSpec& d) {
    return rates(d) != rates(devices[0]) || d.memory_bytes != devices[0].memory_bytes;
  });
}

std::vector<int64_t> sharers_of(const std::vector<DeviceSpec>& devices) {
  std::map<std::pair<int, std::vector<int>>, int64_t> known;  // node, cores
  for (const DeviceSpec& d : devices) ++known[{d.node, d.cores}];
  std::vector<int64_t> out;
  for (const DeviceSpec& d : devices) out.push_back(d.cores.empty() ? 1 : known[{d.node, d.cores}]);
  return out;
}

std::vector<DeviceSpec> chosen_of(const std::vector<DeviceSpec>& devices, const std::vector<int32_t>& chosen) {
  std::vector<DeviceSpec> out;
  std::map<int, int> nodes;
  for (const int32_t d : chosen) {
    out.push_back(devices[d]);
    out.back().node = nodes.try_emplace(out.back().node, static_cast<int>(nodes.size())).first->second;
  }
  return out;
}

}  // namespace whale
