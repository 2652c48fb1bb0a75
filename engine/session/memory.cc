#include "session/memory.h"

#include <algorithm>

#include "base/error.h"
#include "cluster/devices.h"
#include "run/variable_part.h"

namespace whale {
namespace {

void add(uint64_t& sum, uint64_t bytes) {
  if (__builtin_add_overflow(sum, bytes, &sum)) sum = UINT64_MAX;
}

std::string gigabytes(uint64_t bytes) { return fmt::format("{:.1f} GB", static_cast<double>(bytes) / 1e9); }

// Before its first step.
std::vector<uint64_t> needed_by_device(const Plan& plan) {
  int64_t arena = 0, host = 0;  // areas of the largest entry serve the others
  for (const Entry& entry : plan.entries)
    for (const Program& program : entry.programs) {
      arena = std::max(arena, program.arena_bytes);
      host = std::max(host, program.host_bytes);
    }
  std::vector<uint64_t> needed(plan.devices.size());
  for (uint64_t& bytes : needed) add(bytes, static_cast<uint64_t>(arena)), add(bytes, static_cast<uint64_t>(host));
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

}  // namespace whale
