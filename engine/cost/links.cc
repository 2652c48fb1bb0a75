#include "cost/links.h"

#include <map>
#include <set>

namespace whale {
namespace {

using Parts = std::vector<std::vector<int32_t>>;

// How many parts leave each place (a node, a zone).
std::map<int, int64_t> leaving(const Parts& parts, const std::vector<DeviceSpec>& devices, int DeviceSpec::*place) {
  std::map<int, int64_t> out;
  for (const std::vector<int32_t>& part : parts) {
    std::set<int> places;
    for (const int32_t d : part) places.insert(devices[d].*place);
    if (places.size() > 1)
      for (const int at : places) ++out[at];
  }
  return out;
}

}  // namespace

std::vector<LinkRates> links_of_parts(const Parts& parts, const std::vector<DeviceSpec>& devices,
                                      const CostModel& cost) {
  std::map<int, int64_t> of_node = leaving(parts, devices, &DeviceSpec::node),
                         of_zone = leaving(parts, devices, &DeviceSpec::zone);
  std::vector<LinkRates> out;
  for (const std::vector<int32_t>& part : parts) {
    LinkRates slowest = cost.link;
    for (size_t k = 0; k < part.size() && part.size() > 1; ++k) {
      const DeviceSpec& from = devices[part[k]];
      const DeviceSpec& to = devices[part[(k + 1) % part.size()]];
      const LinkRates here = cost.between(from, to, std::max(of_node[from.node], of_node[to.node]),
                                          std::max(of_zone[from.zone], of_zone[to.zone]));
      slowest = k == 0 ? here : slower(slowest, here);
    }
    out.push_back(slowest);
  }
  return out;
}

}  // namespace whale
