#include "report/fit.h"

#include <algorithm>
#include <map>
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

// The samples of a micro-batch that a replica has, at most.
int64_t samples_together(const Plan& plan, const Shortage& s) {
  int64_t batch = 1;
  for (const Entry& entry : plan.entries)
    if (entry.name == s.entry) batch = entry.batch;
  const int64_t parts = most_replicas(plan.meshes) * plan.micro_batches;
  return (batch + parts - 1) / parts;
}

// What makes it less: what was tried and does, least first, and what is no option of a plan.
std::vector<std::string> advice(const Plan& plan, const Shortage& s, std::vector<Tried> tried) {
  constexpr double kWorth = 0.01;  // of what is missing
  std::vector<std::string> out;
  std::vector<std::string> untried;
  for (const Tried& t : tried)
    if (!t.missing) untried.push_back(t.remedy);
  std::erase_if(tried, [&](const Tried& t) {
    return !t.missing || static_cast<double>(*t.missing) > (1 - kWorth) * static_cast<double>(s.bytes);
  });
  std::ranges::stable_sort(tried, {}, &Tried::missing);
  for (const Tried& t : tried)
    out.push_back(*t.missing <= 0
                      ? t.remedy + " (fits)"
                      : fmt::format("{} (lacks {} at most)", t.remedy, bytes_text(static_cast<double>(*t.missing))));
  if (!untried.empty()) out.push_back(fmt::format("perhaps, for lack of time not tried, {}", fmt::join(untried, ", ")));
  if (s.batch > 0) out.emplace_back("batches of the plan's own size alone");
  if (s.needed.activations > s.needed.total() / 8 && s.batch == 0 && samples_together(plan, s) > 1)
    out.emplace_back("a smaller batch, or more micro-batches of it");
  out.emplace_back("a split or a pipeline over more devices");
  return out;
}

std::string classes_text(const MemoryClasses& m) {
  const auto text = [](int64_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  std::string out = fmt::format("parameters {}, gradients {}, optimizer state {}, activations {}", text(m.parameters),
                                text(m.gradients), text(m.state), text(m.activations));
  if (m.buffers > 0) out += fmt::format(", buffers {}", text(m.buffers));
  if (m.copies > 0) out += fmt::format(", copies of what the host holds {}", text(m.copies));
  return out;
}

// Those besides the one that lacks most, by program and memory.
std::string others_that_lack(const Plan& plan, const Shortage& s) {
  constexpr size_t kTold = 3;
  const auto entry = std::ranges::find(plan.entries, s.entry, &Entry::name);
  if (entry == plan.entries.end() || s.batch > 0) return {};
  std::map<std::pair<int32_t, int64_t>, std::vector<int32_t>> devices;
  for (const DeviceRow& row : entry->rows) {
    const int64_t memory = plan.devices[static_cast<size_t>(row.device)].memory_bytes;
    if (row.device != s.device && memory > 0) devices[{row.program, memory}].push_back(row.device);
  }
  std::string out;
  size_t told = 0;
  for (const auto& [key, list] : devices) {
    const MemoryClasses m = memory_of(plan, *entry, static_cast<size_t>(key.first)).device;
    if (m.total() <= key.second) continue;
    if (++told > kTold) return out + "; and others";
    out +=
        fmt::format("; {} {} ({}) {}, {} more ({})", list.size() > 1 ? "devices" : "device", devices_text(list, 4),
                    to_string(plan.devices[static_cast<size_t>(list[0])]), bytes_text(static_cast<double>(m.total())),
                    bytes_text(static_cast<double>(m.total() - key.second)), classes_text(m));
  }
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

std::vector<Remedy> remedies_of(const Plan& plan) {
  const PlanOptions& now = plan.options;
  std::vector<Remedy> out;
  const auto with = [&](std::string text, const auto& set) {
    PlanOptions options = now;
    set(options);
    out.push_back({std::move(text), std::move(options)});
  };
  const bool trains = std::ranges::any_of(plan.entries, [](const Entry& e) { return e.name == "train"; });
  if (trains && now.stage_recompute.empty()) {
    if (now.recompute == Recompute::kNone)
      with("recompute 'selective'", [](PlanOptions& o) { o.recompute = Recompute::kSelective; });
    if (now.recompute != Recompute::kFull)
      with("recompute 'full'", [](PlanOptions& o) { o.recompute = Recompute::kFull; });
  }
  if (trains && most_replicas(plan.meshes) > 1)
    for (int level = now.zero + 1; level <= 3; ++level)
      with(fmt::format("ZeRO level {}", level), [&](PlanOptions& o) { o.zero = level; });
  for (const OffloadClass each : {kOffloadState, kOffloadGradients, kOffloadParameters, kOffloadActivations})
    if (!(now.offload & each) && (trains || each == kOffloadParameters))
      with(fmt::format("offload '{}'", offload_text(each)), [&](PlanOptions& o) { o.offload |= each; });
  return out;
}

Error does_not_fit(const Plan& plan, const Shortage& s, std::vector<Tried> tried) {
  const MemoryClasses& m = s.needed;
  const auto text = [](int64_t bytes) { return bytes_text(static_cast<double>(bytes)); };
  const DeviceSpec& device = plan.devices[static_cast<size_t>(s.device)];
  // Fewer samples may be cut into unlike micro-batches, and take more.
  const std::string other = s.batch > 0 ? fmt::format(" fits, but a batch of {} samples in its place", s.batch) : "";
  return error(
      Code::kResourceExhausted,
      "the plan '{}'{} does not fit: device {} ({}) would need {}, {} more than it has ({}; entry '{}'){}. What "
      "makes it less: {}",
      plan.strategy, other, s.device, to_string(device), text(m.total()), text(s.bytes), classes_text(m), s.entry,
      others_that_lack(plan, s), fmt::join(advice(plan, s, std::move(tried)), ", "));
}

}  // namespace whale
