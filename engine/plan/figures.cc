#include "plan/figures.h"

#include <algorithm>
#include <set>

#include "base/format.h"
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

int64_t value_limit(const Graph& graph, TensorId input) {
  // Which operand is looked up with, and which dimension of which operand bounds it.
  struct Row {
    OpCode code;
    size_t index, table;
    int dim;
  };
  constexpr Row kRows[] = {
      {OpCode::k_embedding, 1, 0, 0}, {OpCode::k_embedding_bag, 1, 0, 0}, {OpCode::k_cross_entropy, 1, 0, -1}};
  int64_t limit = 0;
  for (const Op& op : graph.ops)
    for (const Row& row : kRows) {
      if (op.code != row.code || op.inputs.size() <= row.index || op.inputs[row.index] != input ||
          op.inputs[row.table] == kNone)
        continue;
      const Dims& dims = graph.tensor(op.inputs[row.table]).dims;
      if (dims.empty()) continue;
      const int64_t bound = row.dim < 0 ? dims.back() : dims[static_cast<size_t>(row.dim)];
      limit = limit == 0 ? bound : std::min(limit, bound);
    }
  return limit;
}

std::string bytes_text(double bytes) { return scaled(bytes, 1000, "B"); }
std::string count_text(double count) { return scaled(count, 1000, ""); }

// Rows of a ragged axis are divided by semicolons.
static std::string shares_text(const MeshAxis& axis) {
  std::string text;
  for (size_t i = 0; i < axis.shares.size(); ++i)
    if (axis.shares[i] != kNoDevice)
      text += fmt::format("{}{}", i == 0 ? "" : i % static_cast<size_t>(axis.size) ? "," : "; ", axis.shares[i]);
  return text;
}

std::string devices_text(const Mesh& mesh, size_t most) {
  std::vector<std::pair<int32_t, int32_t>> runs;
  int64_t there = 0;
  for (const int32_t d : mesh.devices) {
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

Dims local_dims(const Plan& plan, const PlanVariable& variable, int32_t device) {
  const PlanMesh& mesh = plan.meshes[static_cast<size_t>(variable.mesh)];
  const auto at = std::find(mesh.devices.begin(), mesh.devices.end(), device);
  if (at == mesh.devices.end()) return {0};
  return local_dims(variable.dims, cuts_of(variable.dims, variable.home, mesh.axes,
                                           mesh.coordinates(static_cast<int64_t>(at - mesh.devices.begin()))));
}

MemoryFigures memory_of(const Plan& plan, const Entry& entry, size_t program) {
  MemoryFigures m;
  m.arena = entry.programs[program].arena_bytes;
  const auto row = std::find_if(entry.rows.begin(), entry.rows.end(),
                                [&](const DeviceRow& r) { return r.program == static_cast<int32_t>(program); });
  if (row == entry.rows.end()) return m;
  for (const PlanVariable& v : plan.variables) {
    int64_t& to = v.role == Role::kParameter ? m.parameters : v.role == Role::kState ? m.state : m.buffers;
    to += element_count(local_dims(plan, v, row->device)) * size_of(v.dtype);
  }
  return m;
}

int64_t samples_of(const Entry& entry, const DeviceRow& row) {
  if (row.samples.empty()) return 0;
  std::set<int32_t> runs;
  for (const ScheduleRow& r : entry.programs[static_cast<size_t>(row.program)].schedule)
    if (!r.whole) runs.insert(r.micro_batch);
  int64_t samples = 0;
  for (const int32_t u : runs)
    if (static_cast<size_t>(u) < row.samples[0].micro_batches.size())
      samples += row.samples[0].micro_batches[static_cast<size_t>(u)].size();
  return samples;
}

StepFigures step_of(const Program& program) {
  StepFigures f;
  for (const ScheduleRow& row : program.schedule)
    for (const Instruction& i : program.segments[static_cast<size_t>(row.segment)].instructions) {
      f.kernels += i.kind == InstructionKind::kKernel;
      f.feeds += i.kind == InstructionKind::kFeed;
      f.fetches += i.kind == InstructionKind::kFetch;
      f.messages += i.kind == InstructionKind::kSend;
      f.flops += i.flops;
      f.bytes += i.bytes;
      if (i.kind != InstructionKind::kCollective) continue;
      ++f.collectives;
      f.on_the_side += i.stream == Stream::kCommunication;
      for (const BufferId b : i.out)
        f.communicated += static_cast<double>(program.buffers[static_cast<size_t>(b)].bytes);
    }
  return f;
}

}  // namespace whale
