#include "session/memory.h"

#include <algorithm>

#include "base/error.h"
#include "cluster/devices.h"
#include "data/variable_part.h"

namespace whale {
namespace {

void add(uint64_t& sum, uint64_t bytes) {
  if (__builtin_add_overflow(sum, bytes, &sum)) sum = UINT64_MAX;
}

std::string gigabytes(uint64_t bytes) { return fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9); }

// Before its first step.
std::vector<uint64_t> needed_by_device(const Plan& plan) {
  std::vector<uint64_t> needed(plan.devices.size());
  for (size_t d = 0; d < needed.size(); ++d) {
    const AreaBytes areas = areas_of(plan, d);
    add(needed[d], areas.device), add(needed[d], areas.host);
  }
  for (const PlanVariable& variable : plan.variables)
    for (const HeldPart& held : held_parts(plan, variable))
      for (const size_t device : held.devices) add(needed[device], held.part.bytes());
  for (size_t d = 0; d < needed.size(); ++d)
    if (!traits(plan.devices[d].kind).computes) needed[d] = 0;
  return needed;
}

}  // namespace

void check_memory(const Plan& plan, const HostMemory& found, const std::vector<int32_t>& ranks, int rank) {
  std::vector<uint64_t> needed = needed_by_device(plan);
  for (size_t d = 0; d < ranks.size(); ++d)
    if (ranks[d] != rank) needed[d] = 0;
  uint64_t sum = 0;
  for (const uint64_t bytes : needed) add(sum, bytes);
  if (sum <= found.bytes) return;
  const auto most = std::max_element(needed.begin(), needed.end()) - needed.begin();
  const auto d = static_cast<size_t>(most);
  throw error(
      Code::kResourceExhausted,
      "the {} devices of the plan of '{}' need {} of this machine's memory together, the most device {} ('{}') "
      "with {}; {} are there ({}). Nothing was taken. Cut parameters and state over devices (zero 1 to 3, a split "
      "or a pipeline), compute activations again (recompute), take smaller micro-batches or fewer samples, or run "
      "on a larger machine",
      plan.devices.size(), plan.model, gigabytes(sum), d, to_string(plan.devices[d]), gigabytes(needed[d]),
      gigabytes(found.bytes), found.where)
      .at_device(static_cast<int>(d));
}

void check_memory(Machine& machine, const Plan& plan, const Entry& entry, const HostMemory& found) {
  uint64_t sum = 0;
  for (size_t d = 0; d < machine.size(); ++d) {
    if (!machine.is_here(d) || !traits(plan.devices[d].kind).computes) continue;
    const Program& program = entry.programs.at(static_cast<size_t>(entry.rows.at(d).program));
    const DeviceMemory& memory = machine.memory(d);
    const auto more = [&](int64_t bytes, Memory where) {
      return static_cast<size_t>(bytes) > memory.largest_area(where) ? static_cast<uint64_t>(bytes) : 0;
    };
    const uint64_t arena = more(program.arena_bytes, Memory::kDevice);
    add(sum, arena), add(sum, more(program.host_bytes, Memory::kHost));
    const int64_t limit = plan.devices[d].memory_bytes;
    uint64_t all = arena;
    for (size_t v = 0; v < plan.variables.size(); ++v)
      if (plan.variables[v].memory == Memory::kDevice) add(all, memory.variable_bytes(v));
    add(all, memory.arena_bytes());
    if (limit > 0 && arena > 0 && all > static_cast<uint64_t>(limit))
      throw error(Code::kResourceExhausted,
                  "a batch of {} samples ('{}') takes a larger area of device {} ('{}'), beside those of the sizes "
                  "before: {} of {} bytes. Ask for all sizes when the plan is made, or for the largest first",
                  entry.batch, entry.name, d, to_string(plan.devices[d]), all, limit)
          .at_device(static_cast<int>(d));
  }
  if (sum > found.bytes)
    throw error(Code::kResourceExhausted,
                "a batch of {} samples ('{}') takes {} more of this machine's memory; {} are there ({}). Nothing was "
                "taken. Take fewer samples, or run on a larger machine",
                entry.batch, entry.name, gigabytes(sum), gigabytes(found.bytes), found.where);
}

}  // namespace whale
