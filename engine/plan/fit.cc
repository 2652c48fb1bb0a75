#include "plan/fit.h"

#include <algorithm>

#include "cluster/devices.h"

namespace whale {
namespace {

void look(const Plan& plan, int32_t device, const MemoryClasses& needed, const std::string& entry, Shortage& most) {
  const int64_t memory = plan.devices[static_cast<size_t>(device)].memory_bytes;
  if (memory > 0 && needed.total() - memory > most.bytes) most = {needed.total() - memory, device, needed, entry};
}

bool has_replicas(const Plan& plan) {
  return std::any_of(plan.meshes.begin(), plan.meshes.end(), [](const PlanMesh& mesh) {
    return std::any_of(mesh.axes.begin(), mesh.axes.end(), [](const MeshAxis& axis) {
      return axis.size > 1 && axis.name.find("replica") != axis.name.npos;
    });
  });
}

// What is not in use yet and makes less of what there is most of.
std::vector<std::string> advice(const Plan& plan, const MemoryClasses& m) {
  std::vector<std::string> out;
  const int64_t lasting = m.parameters + m.state + m.gradients;
  if (m.activations > m.total() / 8 && plan.recompute < 2 && plan.stage_recompute.empty())
    out.emplace_back("recompute 'full' (activations)");
  if (m.activations > m.total() / 8 && plan.micro_batches == 1) out.emplace_back("micro-batches (activations)");
  if (lasting > m.total() / 8 && plan.zero < 3 && has_replicas(plan))
    out.push_back(fmt::format("ZeRO level {} (optimizer state{})", plan.zero + 1,
                              plan.zero == 0   ? ""
                              : plan.zero == 1 ? " and gradients"
                                               : ", gradients and parameters"));
  if (plan.offload == 0) out.emplace_back("offload 'state' to the host");
  out.emplace_back("more devices in a split or a pipeline");
  return out;
}

}  // namespace

Shortage shortage_of(const Plan& plan) {
  Shortage most;
  const bool limited = std::any_of(plan.devices.begin(), plan.devices.end(),
                                   [](const DeviceSpec& device) { return device.memory_bytes > 0; });
  if (!limited) return most;
  if (plan.entries.empty()) {
    for (size_t d = 0; d < plan.devices.size(); ++d)
      look(plan, static_cast<int32_t>(d), variables_of_device(plan, static_cast<int32_t>(d)), "", most);
    return most;
  }
  for (const Entry& entry : plan.entries) {
    std::vector<MemoryClasses> needed;
    for (size_t p = 0; p < entry.programs.size(); ++p) needed.push_back(memory_of(plan, entry, p).device);
    for (const DeviceRow& row : entry.rows)
      look(plan, row.device, needed[static_cast<size_t>(row.program)], entry.name, most);
  }
  return most;
}

Error does_not_fit(const Plan& plan, const Shortage& s) {
  const MemoryClasses& m = s.needed;
  const auto text = [](int64_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  const DeviceSpec& device = plan.devices[static_cast<size_t>(s.device)];
  return error(
      Code::kResourceExhausted,
      "the plan '{}' does not fit: device {} ({}) would need {}, {} more than it has (parameters {}, gradients "
      "{}, optimizer state {}, activations {}; entry '{}'), though cuts that hold less were taken where there were "
      "any; it becomes less with {}",
      plan.strategy, s.device, to_string(device), text(m.total()), text(s.bytes), text(m.parameters), text(m.gradients),
      text(m.state), text(m.activations), s.entry, fmt::join(advice(plan, m), ", "));
}

}  // namespace whale
