#include "plan/groups.h"

#include <algorithm>
#include <map>

namespace whale {

std::vector<Group> groups_of(const std::vector<Mesh>& meshes) {
  std::vector<Group> groups;
  for (size_t a = 0; a < meshes[0].axes.size(); ++a) {
    Group group{.axis = meshes[0].axes[a].name, .parts = {}};
    for (const Mesh& mesh : meshes) {
      std::map<Ints, std::vector<int32_t>> parts;
      for (size_t k = 0; k < mesh.devices.size(); ++k) {
        Ints at = mesh.coordinates(static_cast<int64_t>(k));
        at[a] = 0;
        if (mesh.devices[k] >= 0) parts[at].push_back(mesh.devices[k]);
      }
      if (mesh.axes[a].size > 1)
        for (auto& [at, devices] : parts) group.parts.push_back(std::move(devices));
    }
    groups.push_back(std::move(group));
  }
  return groups;
}

bool has_replicas(std::string_view axis) { return axis.find("replica") != axis.npos; }

int64_t most_replicas(const std::vector<Mesh>& meshes) {
  int64_t most = 1;
  for (const Mesh& mesh : meshes) {
    int64_t here = 1;
    for (const MeshAxis& axis : mesh.axes) here *= has_replicas(axis.name) ? axis.size : 1;
    most = std::max(most, here);
  }
  return most;
}

}  // namespace whale
