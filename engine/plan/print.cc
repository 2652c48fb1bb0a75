// The whole Plan as stable text: one line an instruction. Golden tests compare it.
#include "base/format.h"
#include "cluster/devices.h"
#include "plan/plan.h"

namespace whale {
namespace {

const char* name_of(BufferKind kind) {
  constexpr const char* kNames[] = {"arena", "variable", "input", "step"};
  return kNames[static_cast<size_t>(kind)];
}
const char* name_of(OutputMerge merge) {
  constexpr const char* kNames[] = {"same", "concat", "sum"};
  return kNames[static_cast<size_t>(merge)];
}
const char* name_of(Stream stream) {
  constexpr const char* kNames[] = {"compute", "comm", "copy"};
  return kNames[static_cast<size_t>(stream)];
}

std::string buffers_text(const Program& p, const std::vector<BufferId>& ids) {
  std::string text;
  for (const BufferId id : ids) {
    if (!text.empty()) text += ", ";
    text += id == kNone ? "_" : fmt::format("%{}", id);
    if (id != kNone) text += ":" + p.buffers[static_cast<size_t>(id)].name;
  }
  return text;
}

std::string instruction_text(const Program& p, const Instruction& i) {
  std::string text = fmt::format("[{}] ", name_of(i.stream));
  if (!i.out.empty()) text += buffers_text(p, i.out) + " = ";
  const bool is_op = i.kind == InstructionKind::kKernel || i.kind == InstructionKind::kCollective;
  text += is_op ? def(i.op).name : i.kind == InstructionKind::kFeed ? "feed" : "fetch";
  text += "(" + buffers_text(p, i.in) + ")";
  for (const auto& [name, value] : i.attrs) text += fmt::format(" {}={}", name, to_string(value));
  if (i.kind != InstructionKind::kKernel) text += fmt::format(" ref={}", i.ref);
  if (i.whole_batch) text += " whole_batch";
  if (i.key) text += fmt::format(" key={}", i.key);
  if (!i.box.global.empty()) {
    text += fmt::format(" box={} of {}", to_string(i.box.origin), to_string(i.box.global));
    if (i.box.batch.present())
      text += fmt::format(" batch=({},{},{})", i.box.batch.dim, i.box.batch.outer, i.box.batch.inner);
  }
  for (const WaitPoint& w : i.waits) text += fmt::format(" after {}:{}", name_of(w.stream), w.index);
  return text;
}

void print_program(std::string& text, const Program& p, size_t number) {
  text += fmt::format("  program {}: arena {} bytes (at least {}), variables {} bytes\n", number, p.arena_bytes,
                      p.peak_live_bytes, p.variable_bytes);
  for (size_t b = 0; b < p.buffers.size(); ++b) {
    const Buffer& buffer = p.buffers[b];
    text += fmt::format("    %{} {} {}{} {}", b, buffer.name, name_of(buffer.dtype), to_string(buffer.dims),
                        name_of(buffer.kind));
    if (buffer.ref >= 0) text += fmt::format(" {}", buffer.ref);
    if (buffer.offset >= 0) text += fmt::format(" @{}+{}", buffer.offset, buffer.bytes);
    if (buffer.alias != kNone) text += fmt::format(" in %{}", buffer.alias);
    text += '\n';
  }
  for (const Segment& s : p.segments) {
    text += fmt::format("    segment {}\n", s.name);
    for (size_t k = 0; k < s.instructions.size(); ++k)
      text += fmt::format("      {:3} {}\n", k, instruction_text(p, s.instructions[k]));
  }
  text += "    schedule";
  for (const ScheduleRow& row : p.schedule)
    text += fmt::format(" {}:{}", p.segments[static_cast<size_t>(row.segment)].name, row.micro_batch);
  text += '\n';
}

}  // namespace

std::string print(const Plan& plan) {
  std::string text = fmt::format("plan {}: {} on {}, {} micro-batch(es)\n", plan.model, plan.strategy,
                                 to_string(plan.devices), plan.micro_batches);
  for (const MeshAxis& axis : plan.mesh) {
    text += fmt::format("  axis {} {}", axis.name, axis.size);
    if (!axis.shares.empty()) text += fmt::format(" shares [{}]", fmt::join(axis.shares, ","));
    text += '\n';
  }
  for (size_t g = 0; g < plan.groups.size(); ++g)
    text += fmt::format("  group {} {}: [{}]\n", g, plan.groups[g].axis, fmt::join(plan.groups[g].devices, ","));
  for (size_t v = 0; v < plan.variables.size(); ++v) {
    const PlanVariable& variable = plan.variables[v];
    constexpr const char* kRoles[] = {"parameter", "state", "buffer"};
    text += fmt::format("  variable {} {} {}{} {}", v, variable.name, name_of(variable.dtype), to_string(variable.dims),
                        kRoles[static_cast<size_t>(variable.role)]);
    if (!variable.owner.empty()) text += fmt::format(" of {} ({})", variable.owner, variable.slot);
    text += '\n';
  }
  for (const Entry& e : plan.entries) {
    text += fmt::format("entry {}: batch {}\n", e.name, e.batch);
    for (size_t i = 0; i < e.inputs.size(); ++i)
      text += fmt::format("  input {} {} {}{} batch_dim {}\n", i, e.inputs[i].name, name_of(e.inputs[i].dtype),
                          to_string(e.inputs[i].dims), e.inputs[i].batch_dim);
    for (size_t o = 0; o < e.outputs.size(); ++o)
      text += fmt::format("  output {} {} {}{} {}\n", o, e.outputs[o].name, name_of(e.outputs[o].dtype),
                          to_string(e.outputs[o].dims), name_of(e.outputs[o].merge));
    for (const DeviceRow& row : e.rows) {
      text += fmt::format("  device {} at {}: program {}, samples [{}, {})", row.device, to_string(row.coordinates),
                          row.program, row.samples.begin, row.samples.end);
      if (row.micro_batches.size() > 1)
        for (const Interval& m : row.micro_batches) text += fmt::format(" {}-{}", m.begin, m.end);
      text += '\n';
    }
    for (size_t p = 0; p < e.programs.size(); ++p) print_program(text, e.programs[p], p);
  }
  for (const std::string& note : plan.notes) text += "note: " + note + "\n";
  return text;
}

}  // namespace whale
