#include "cluster/mesh.h"

namespace whale {

std::vector<std::vector<int32_t>> lines_along(const Mesh& mesh, size_t axis) {
  size_t inner = 1;
  for (size_t b = axis + 1; b < mesh.axes.size(); ++b) inner *= static_cast<size_t>(mesh.axes[b].size);
  const auto n = static_cast<size_t>(mesh.axes[axis].size);
  std::vector<std::vector<int32_t>> out(mesh.devices.size() / n);
  for (size_t at = 0; at < mesh.devices.size(); ++at)
    if (mesh.devices[at] >= 0) out[at / (inner * n) * inner + at % inner].push_back(mesh.devices[at]);
  std::erase_if(out, [](const std::vector<int32_t>& line) { return line.empty(); });
  return out;
}

}  // namespace whale
