#include "plan/figures.h"

#include "base/format.h"

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

std::string bytes_text(double bytes) { return scaled(bytes, 1000, "B"); }
std::string count_text(double count) { return scaled(count, 1000, ""); }

MemoryFigures memory_of(const Plan& plan, const Program& program) {
  MemoryFigures m;
  for (const PlanVariable& v : plan.variables) {
    int64_t& to = v.role == Role::kParameter ? m.parameters : v.role == Role::kState ? m.state : m.buffers;
    to += element_count(v.dims) * size_of(v.dtype);
  }
  m.arena = program.arena_bytes;
  return m;
}

StepFigures step_of(const Program& program) {
  StepFigures f;
  for (const ScheduleRow& row : program.schedule)
    for (const Instruction& i : program.segments[static_cast<size_t>(row.segment)].instructions) {
      f.kernels += i.kind == InstructionKind::kKernel;
      f.feeds += i.kind == InstructionKind::kFeed;
      f.fetches += i.kind == InstructionKind::kFetch;
      f.flops += i.flops;
      f.bytes += i.bytes;
      if (i.kind != InstructionKind::kCollective) continue;
      ++f.collectives;
      f.on_the_side += i.stream == Stream::kCommunication;
      for (const BufferId b : i.out) f.communicated += static_cast<double>(program.buffers[static_cast<size_t>(b)].bytes);
    }
  return f;
}

}  // namespace whale
