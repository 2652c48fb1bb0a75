#include "task/axis_links.h"

#include <algorithm>

#include "cost/links.h"

namespace whale {

std::vector<std::vector<LinkRates>> axis_links(const std::vector<Mesh>& meshes, const std::vector<DeviceSpec>& devices,
                                               const CostModel& cost) {
  if (std::ranges::all_of(devices, [](const DeviceSpec& d) { return d.figures == DeviceFigures{}; })) return {};
  const size_t axes = meshes[0].axes.size();
  std::vector<std::vector<LinkRates>> out(meshes.size(), std::vector<LinkRates>(axes, cost.link));
  for (size_t a = 0; a < axes; ++a) {
    std::vector<std::vector<int32_t>> lines;
    std::vector<size_t> mesh_of;  // [line]
    for (size_t m = 0; m < meshes.size(); ++m)
      for (std::vector<int32_t>& line : lines_along(meshes[m], a))
        if (line.size() > 1) lines.push_back(std::move(line)), mesh_of.push_back(m);
    const std::vector<LinkRates> links = links_of_parts(lines, devices, cost);
    for (size_t k = 0; k < lines.size(); ++k) {
      LinkRates& slowest = out[mesh_of[k]][a];
      slowest = k == 0 || mesh_of[k] != mesh_of[k - 1] ? links[k] : slower(slowest, links[k]);
    }
  }
  return out;
}

}  // namespace whale
