#include "plan/groups.h"

#include <algorithm>

namespace whale {

std::vector<Group> groups_of(const std::vector<Mesh>& meshes) {
  std::vector<Group> groups;
  for (size_t a = 0; a < meshes[0].axes.size(); ++a) {
    Group group{.axis = meshes[0].axes[a].name, .parts = {}};
    for (const Mesh& mesh : meshes)
      if (mesh.axes[a].size > 1)
        for (std::vector<int32_t>& line : lines_along(mesh, a)) group.parts.push_back(std::move(line));
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
