#include "report/fit.h"

#include <algorithm>
#include <optional>

#include "cluster/devices.h"
#include "plan/groups.h"

namespace whale {
namespace {

// More than the device that lacked most so far: noted.
bool lacks(const Plan& plan, int32_t device, int64_t needed, Shortage& most) {
  const int64_t memory = plan.devices[static_cast<size_t>(device)].memory_bytes;
  if (memory == 0 || needed - memory <= most.bytes) return false;
  most.bytes = needed - memory, most.device = device;
  return true;
}

// What is not in use yet and makes less of what there is much of.
std::vector<std::string> advice(const Plan& plan, const Shortage& s) {
  const MemoryClasses& m = s.needed;
  const std::string& entry = s.entry;
  std::vector<std::string> out;
  const auto much = [&](int64_t bytes) { return bytes > m.total() / 8; };
  const bool trains = entry == "train";
  if (much(m.activations) && trains) {
    if (plan.options.recompute != Recompute::kFull && plan.options.stage_recompute.empty())
      out.emplace_back("recompute 'full' (activations)");
    if (!(plan.options.offload & kOffloadActivations)) out.emplace_back("offload 'activations'");
  }
  if (s.batch > 0) out.emplace_back("batches of the plan's own size alone");
  if (much(m.activations) && s.batch == 0)
    out.emplace_back("a smaller batch, or more micro-batches of it (activations)");
  if (trains && has_replicas(plan.meshes)) {
    const char* levels[] = {"ZeRO level 1 (optimizer state)", "ZeRO level 2 (gradients)", "ZeRO level 3 (parameters)"};
    const int64_t classes[] = {m.state, m.gradients, m.parameters};
    for (int level = plan.options.zero; level < 3; ++level)
      if (much(classes[level])) out.emplace_back(levels[level]);
  }
  if (much(m.state) && !(plan.options.offload & kOffloadState)) out.emplace_back("offload 'state'");
  if (much(m.parameters) && !(plan.options.offload & kOffloadParameters)) out.emplace_back("offload 'parameters'");
  out.emplace_back("a split or a pipeline over more devices");
  return out;
}

bool limited(const Plan& plan) {
  return std::any_of(plan.devices.begin(), plan.devices.end(),
                     [](const DeviceSpec& device) { return device.memory_bytes > 0; });
}

}  // namespace

Shortage shortage_of(const Plan& plan, const Entry& entry) {
  Shortage most;
  if (!limited(plan)) return most;
  most.entry = entry.name;
  std::vector<std::optional<int64_t>> needed(entry.programs.size());
  int32_t program = 0;  // of the device that lacks most
  for (const DeviceRow& row : entry.rows) {
    const int64_t arena = entry.programs[static_cast<size_t>(row.program)].arena_bytes;
    std::optional<int64_t>& mine = needed[static_cast<size_t>(row.program)];
    if (!mine) mine = variables_of_device(plan, row.device).total() + arena;
    if (lacks(plan, row.device, *mine, most)) program = row.program;
  }
  if (most.bytes > 0) most.needed = memory_of(plan, entry, static_cast<size_t>(program)).device;
  return most;
}

Shortage shortage_of(const Plan& plan) {
  Shortage most;
  if (!limited(plan)) return most;
  for (int32_t d = 0; plan.entries.empty() && d < std::ssize(plan.devices); ++d)
    if (const MemoryClasses needed = variables_of_device(plan, d); lacks(plan, d, needed.total(), most))
      most.needed = needed;
  for (const Entry& entry : plan.entries)
    if (const Shortage mine = shortage_of(plan, entry); mine.bytes > most.bytes) most = mine;
  return most;
}

Error does_not_fit(const Plan& plan, const Shortage& s) {
  const MemoryClasses& m = s.needed;
  const auto text = [](int64_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  const DeviceSpec& device = plan.devices[static_cast<size_t>(s.device)];
  // Fewer samples may be cut into unlike micro-batches, and take more.
  const std::string other = s.batch > 0 ? fmt::format(" fits, but a batch of {} samples in its place", s.batch) : "";
  std::string seldom;
  if (m.buffers > 0) seldom += fmt::format(", buffers {}", text(m.buffers));
  if (m.copies > 0) seldom += fmt::format(", copies of what the host holds {}", text(m.copies));
  return error(
      Code::kResourceExhausted,
      "the plan '{}'{} does not fit: device {} ({}) would need {}, {} more than it has (parameters {}, gradients "
      "{}, optimizer state {}, activations {}{}; entry '{}'). What may make it less: {}",
      plan.strategy, other, s.device, to_string(device), text(m.total()), text(s.bytes), text(m.parameters),
      text(m.gradients), text(m.state), text(m.activations), seldom, s.entry, fmt::join(advice(plan, s), ", "));
}

}  // namespace whale
