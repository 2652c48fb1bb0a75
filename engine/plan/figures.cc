#include "plan/figures.h"

#include <algorithm>
#include <map>
#include <optional>

#include "base/format.h"
#include "base/watch.h"
#include "plan/fullest.h"
#include "plan/groups.h"
#include "plan/lives.h"
#include "plan/part.h"

namespace whale {
namespace {

std::string scaled(double value, double base, const char* unit) {
  const char* prefix = "";
  for (const char* next : {"k", "M", "G", "T"}) {
    if (value < base * 0.9995) break;
    value /= base, prefix = next;
  }
  return *prefix ? fmt::format("{:.1f} {}{}", value, prefix, unit) : fmt::format("{:.0f} {}", value, unit);
}

}  // namespace

int64_t value_limit(const PlanInput& input) {
  int64_t limit = 0;
  for (const IndexRange& range : input.indices)
    if (range.limit > 0) limit = limit == 0 ? range.limit : std::min(limit, range.limit);
  return limit;
}

std::optional<int64_t> value_ignored(const PlanInput& input) {
  const std::vector<IndexRange>& all = input.indices;
  if (all.empty() || !all[0].ignored) return std::nullopt;
  const int64_t value = *all[0].ignored;
  const bool everywhere = std::ranges::all_of(all, [&](const IndexRange& range) { return range.permits(value); });
  return everywhere && (value < 0 || value >= value_limit(input)) ? std::optional(value) : std::nullopt;
}

std::string bytes_text(double bytes) { return scaled(bytes, 1000, "B"); }
std::string count_text(double count) { return scaled(count, 1000, ""); }

// Rows of a ragged axis are divided by semicolons.
static std::string shares_text(const MeshAxis& axis) {
  std::string text;
  for (size_t i = 0; i < axis.shares.size(); ++i)
    if (axis.shares[i] != kNoDevice)
      text += fmt::format("{}{:.6g}", i == 0 ? "" : i % static_cast<size_t>(axis.size) ? "," : "; ", axis.shares[i]);
  return text;
}

std::string devices_text(const std::vector<int32_t>& devices, size_t most) {
  std::vector<std::pair<int32_t, int32_t>> runs;
  int64_t there = 0;
  for (const int32_t d : devices) {
    if (d == kNone) continue;
    ++there;
    if (!runs.empty() && runs.back().second + 1 == d)
      runs.back().second = d;
    else
      runs.emplace_back(d, d);
  }
  std::string text;
  for (size_t r = 0; r < runs.size() && r < most; ++r) {
    const auto [first, last] = runs[r];
    text += fmt::format("{}{}", text.empty() ? "" : ",", first);
    if (last > first) text += fmt::format("{}{}", last == first + 1 ? "," : "-", last);
  }
  return runs.size() > most ? fmt::format("{},... ({} together)", text, there) : text;
}

std::string axes_text(const std::vector<MeshAxis>& axes) {
  std::string text;
  for (const MeshAxis& axis : axes) {
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", axis.name, axis.size);
    if (!axis.shares.empty()) text += fmt::format(" shares ({})", shares_text(axis));
    if (!axis.state_shares.empty()) text += fmt::format(" state shares ({})", fmt::join(axis.state_shares, ","));
  }
  return text;
}

// None: the device is not in the mesh.
static std::optional<Ints> coordinates_of(const PlanMesh& mesh, int32_t device) {
  const auto at = std::find(mesh.devices.begin(), mesh.devices.end(), device);
  if (at == mesh.devices.end()) return std::nullopt;
  return mesh.coordinates(static_cast<int64_t>(at - mesh.devices.begin()));
}

Dims local_dims(const Plan& plan, const PlanVariable& variable, int32_t device) {
  const PlanMesh& mesh = plan.meshes[variable.mesh];
  const auto place = coordinates_of(mesh, device);
  if (!place) return {0};
  return local_dims(variable.dims, cuts_of(variable.dims, variable.storage_sharding, mesh.axes, *place));
}

std::vector<Holds> contents_of(const Program& p, const std::vector<Group>& groups) {
  std::vector<Holds> out(p.buffers.size());
  const auto at = [&](BufferId b) { return static_cast<size_t>(storage_of(p, b)); };
  std::vector<char> made(p.buffers.size());  // by the backward pass
  for (const Segment& s : p.segments)
    for (const Instruction& i : s.instructions)
      for (const BufferId b : i.out)
        if (b != kNone && i.phase == Phase::kBackward) made[at(b)] = 1;
  for (const Segment& s : p.segments)
    for (const Instruction& i : s.instructions) {
      // Norms, and updates that are several ops, read gradients too.
      for (const BufferId b : i.in)
        if (b != kNone && i.phase == Phase::kUpdate && made[at(b)]) out[at(b)] = Holds::kGradient;
      // What is gathered in the backward pass are parameters.
      const bool reduced = i.group() != kNone && i.op() != OpCode::k_all_gather && i.phase != Phase::kForward &&
                           has_replicas(groups[i.group()].axis);
      const bool update = i.kernel() != nullptr && has_flag(i.kernel()->op, kUpdateOp);
      const bool sum = i.op() == OpCode::k_accumulate && i.phase != Phase::kForward;
      const bool stored = i.copies_to(Memory::kHost) && i.phase != Phase::kForward;
      if (reduced || update || sum || stored)
        for (const auto* list : {&i.in, &i.out})
          for (const BufferId b : *list)
            if (b != kNone) out[at(b)] = Holds::kGradient;
    }
  for (const Segment& s : p.segments)
    for (const Instruction& i : s.instructions)
      for (size_t n = 0; i.copies_to(Memory::kDevice) && n < i.out.size(); ++n) {
        const bool stored = p.buffers[at(i.in[n])].kind == BufferKind::kVariable;
        out[at(i.out[n])] = stored ? Holds::kCopy : out[at(i.in[n])];
      }
  return out;
}

namespace {

// Splits up an arena by what is alive where most is.
void add_arena(MemoryClasses& m, const Program& p, const std::vector<Group>& groups, Memory memory) {
  const std::vector<Holds> holds = contents_of(p, groups);
  for (const BufferId id : fullest_of(p, memory).storages) {
    const auto b = static_cast<size_t>(id);
    if (holds[b] == Holds::kGradient) m.gradients += bytes_of_versions(p.buffers[b]);
    if (holds[b] == Holds::kCopy) m.copies += bytes_of_versions(p.buffers[b]);
  }
  m.activations = (memory == Memory::kHost ? p.host_bytes : p.arena_bytes) - m.gradients - m.copies;
}

void add_variables(const Plan& plan, int32_t device, MemoryFigures& m) {
  std::vector<std::optional<Ints>> places;  // of the device in each mesh
  for (const PlanMesh& mesh : plan.meshes) places.push_back(coordinates_of(mesh, device));
  for (const PlanVariable& v : plan.variables) {
    const auto mesh = static_cast<size_t>(v.mesh);
    if (!places[mesh]) continue;
    m.in(v.memory).of(v.role) +=
        element_count(local_dims(v.dims, cuts_of(v.dims, v.storage_sharding, plan.meshes[mesh].axes, *places[mesh]))) *
        size_of(v.dtype);
  }
}

}  // namespace

MemoryFigures memory_of(const Plan& plan, const Entry& entry, size_t program) {
  MemoryFigures m;
  add_arena(m.device, entry.programs[program], plan.groups, Memory::kDevice);
  add_arena(m.host, entry.programs[program], plan.groups, Memory::kHost);
  const auto row = std::find_if(entry.rows.begin(), entry.rows.end(),
                                [&](const DeviceRow& r) { return r.program == static_cast<int32_t>(program); });
  if (row != entry.rows.end()) add_variables(plan, row->device, m);
  return m;
}

MemoryClasses variables_of_device(const Plan& plan, int32_t device) {
  MemoryFigures m;
  add_variables(plan, device, m);
  return m.device;
}

int64_t samples_of(const Entry& entry, const DeviceRow& row) {
  if (row.samples.empty()) return 0;
  const std::vector<SampleRange>& ranges = row.samples[0].micro_batches;
  std::vector<char> counted(ranges.size());
  int64_t samples = 0;
  for (const ScheduleRow& r : watched(entry.programs[row.program].schedule)) {
    const auto u = static_cast<size_t>(r.micro_batch);
    if (r.whole || u >= ranges.size() || counted[u]) continue;
    counted[u] = 1;
    samples += ranges[u].size();
  }
  return samples;
}

StepFigures step_of(const Program& program) {
  StepFigures f;
  for (const ScheduleRow& row : watched(program.schedule))
    for (const Instruction& i : program.segments[row.segment].instructions) {
      f.kernels += i.kind() == InstructionKind::kKernel;
      f.feeds += i.kind() == InstructionKind::kFeed;
      f.fetches += i.kind() == InstructionKind::kFetch;
      f.messages += i.kind() == InstructionKind::kSend;
      f.flops += i.flops;
      f.bytes += i.bytes;
      if (i.kind() != InstructionKind::kCollective) continue;
      ++f.collectives;
      f.on_the_side += i.queue != Queue::kCompute;
      for (const BufferId b : i.out) f.communicated += static_cast<double>(program.buffers[b].bytes);
    }
  return f;
}

std::string seconds_text(double s) {
  if (s < 1e-3) return fmt::format("{:.1f} us", s * 1e6);
  if (s < 1) return fmt::format("{:.2f} ms", s * 1e3);
  return s < 1e4 ? fmt::format("{:.2f} s", s) : s < 1e7 ? fmt::format("{:.0f} s", s) : fmt::format("{:.2g} s", s);
}

const char* name_of(Phase phase) {
  constexpr const char* kNames[] = {"forward", "backward", "update"};
  return kNames[static_cast<size_t>(phase)];
}

}  // namespace whale
