#include "task/join_replicas.h"

#include <algorithm>

#include "task/axis_links.h"

namespace whale {
namespace {

bool are_even_replicas(const MeshAxis& axis) {
  return axis.name == "replica" && axis.size > 1 && axis.shares.empty() && axis.state_shares.empty() && axis.only < 0;
}

// The axis and the one inside of it.
bool are_one(const TaskGraphs& tasks, size_t a) {
  const std::vector<MeshAxis>& first = tasks.meshes[0].axes;
  return tasks.by_micro_batch[a] == tasks.by_micro_batch[a + 1] && are_even_replicas(first[a]) &&
         are_even_replicas(first[a + 1]) &&
         std::ranges::all_of(
             tasks.meshes,
             [&](const Mesh& mesh) { return mesh.axes[a] == first[a] && mesh.axes[a + 1] == first[a + 1]; }) &&
         std::ranges::all_of(tasks.tasks, [&](const TaskGraph& task) { return task.roles[a] == task.roles[a + 1]; });
}

// Devices are row-major over the axes, so that they stay where they are.
void join(TaskGraphs& tasks, size_t a) {
  const auto inner = static_cast<std::ptrdiff_t>(a) + 1;
  for (Mesh& mesh : tasks.meshes) {
    mesh.axes[a].size *= mesh.axes[a + 1].size;
    mesh.axes.erase(mesh.axes.begin() + inner);
  }
  for (TaskGraph& task : tasks.tasks) {
    task.roles.erase(task.roles.begin() + inner);
    task.factors.erase(task.factors.begin() + inner);
  }
  tasks.by_micro_batch.erase(tasks.by_micro_batch.begin() + inner);
}

}  // namespace

void join_replicas(TaskGraphs& tasks, const std::vector<DeviceSpec>& devices) {
  const size_t axes = tasks.meshes[0].axes.size();
  for (size_t a = axes - 1; a-- > 0;)
    if (are_one(tasks, a)) join(tasks, a);
  if (tasks.meshes[0].axes.size() < axes) tasks.links = axis_links(tasks.meshes, devices, tasks.cost);
}

}  // namespace whale
