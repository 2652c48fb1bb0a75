#include "task/axis_links.h"

#include <algorithm>
#include <map>
#include <set>

#include "cost/links.h"

namespace whale {
namespace {

using Part = std::vector<const DeviceSpec*>;

// Those along the axis that share all other coordinates.
std::vector<Part> parts_along(const Mesh& mesh, size_t axis, const std::vector<DeviceSpec>& devices) {
  int64_t inner = 1;
  for (size_t b = axis + 1; b < mesh.axes.size(); ++b) inner *= mesh.axes[b].size;
  const int64_t n = mesh.axes[axis].size;
  std::vector<Part> out(mesh.devices.size() / static_cast<size_t>(n));
  for (size_t p = 0; p < mesh.devices.size(); ++p) {
    const auto at = static_cast<int64_t>(p);
    if (const int32_t d = mesh.devices[p]; d >= 0)
      out[static_cast<size_t>(at / (inner * n) * inner + at % inner)].push_back(&devices[static_cast<size_t>(d)]);
  }
  return out;
}

// How many parts leave each place (a node, a zone).
std::map<int, int64_t> leaving(const std::vector<Part>& parts, int DeviceSpec::*place) {
  std::map<int, int64_t> out;
  for (const Part& part : parts) {
    std::set<int> places;
    for (const DeviceSpec* d : part) places.insert(d->*place);
    if (places.size() > 1)
      for (const int at : places) ++out[at];
  }
  return out;
}

}  // namespace

std::vector<std::vector<LinkRates>> axis_links(const std::vector<Mesh>& meshes, const std::vector<DeviceSpec>& devices,
                                               const CostModel& cost) {
  if (std::ranges::all_of(devices, [](const DeviceSpec& d) { return d.figures == DeviceFigures{}; })) return {};
  const size_t axes = meshes[0].axes.size();
  std::vector<std::vector<LinkRates>> out(meshes.size(), std::vector<LinkRates>(axes, cost.link));
  for (size_t a = 0; a < axes; ++a) {
    std::vector<std::vector<Part>> of_mesh;
    std::vector<Part> all;
    for (const Mesh& mesh : meshes) {
      of_mesh.push_back(parts_along(mesh, a, devices));
      all.insert(all.end(), of_mesh.back().begin(), of_mesh.back().end());
    }
    std::map<int, int64_t> of_node = leaving(all, &DeviceSpec::node), of_zone = leaving(all, &DeviceSpec::zone);
    for (size_t m = 0; m < meshes.size(); ++m) {
      bool first = true;
      for (const Part& part : of_mesh[m])
        for (size_t k = 0; k < part.size() && part.size() > 1; ++k) {
          const DeviceSpec &from = *part[k], &to = *part[(k + 1) % part.size()];
          const LinkRates here = cost.between(from, to, std::max(of_node[from.node], of_node[to.node]),
                                              std::max(of_zone[from.zone], of_zone[to.zone]));
          out[m][a] = first ? here : slower(out[m][a], here);
          first = false;
        }
    }
  }
  return out;
}

}  // namespace whale
