// A Plan as JSON, for pictures in the SDKs: devices, memory, and per program the instructions with stream, op, sizes
// and cost.
#include "base/format.h"
#include "cluster/devices.h"
#include "plan/figures.h"

namespace whale {
namespace {

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      out += '\\', out += c;
    else if (static_cast<unsigned char>(c) < 0x20)
      out += fmt::format("\\u{:04x}", static_cast<int>(c));
    else
      out += c;
  }
  return out + '"';
}

template <class List, class Write>
std::string array(const List& list, Write write) {
  std::string out = "[";
  for (const auto& item : list) out += (out.size() > 1 ? "," : "") + write(item);
  return out + "]";
}
std::string numbers(const std::vector<int64_t>& list) {
  return array(list, [](int64_t v) { return fmt::format("{}", v); });
}
std::string interval(const Interval& i) { return fmt::format("[{},{}]", i.begin, i.end); }

std::string instruction(const Instruction& i) {
  constexpr const char* kKinds[] = {"kernel", "collective", "feed", "fetch"};
  constexpr const char* kStreamNames[] = {"compute", "communication", "copy"};
  constexpr const char* kPhases[] = {"forward", "backward", "update"};
  const bool is_op = i.kind == InstructionKind::kKernel || i.kind == InstructionKind::kCollective;
  return fmt::format(
      "{{\"kind\":\"{}\",\"stream\":\"{}\",\"op\":{},\"name\":{},\"phase\":\"{}\",\"in\":{},\"out\":{},\"flops\":{},"
      "\"bytes\":{},\"waits\":{}}}",
      kKinds[static_cast<size_t>(i.kind)], kStreamNames[static_cast<size_t>(i.stream)],
      quoted(is_op ? def(i.op).name : kKinds[static_cast<size_t>(i.kind)]), quoted(i.name),
      kPhases[static_cast<size_t>(i.phase)], array(i.in, [](BufferId b) { return fmt::format("{}", b); }),
      array(i.out, [](BufferId b) { return fmt::format("{}", b); }), i.flops, i.bytes,
      array(i.waits, [](const WaitPoint& w) { return fmt::format("{}", w.index); }));
}

std::string program(const Plan& plan, const Program& p) {
  const MemoryFigures m = memory_of(plan, p);
  std::string out = fmt::format(
      "{{\"arena_bytes\":{},\"peak_live_bytes\":{},\"memory\":{{\"parameters\":{},\"state\":{},\"buffers\":{},"
      "\"arena\":{}}},",
      p.arena_bytes, p.peak_live_bytes, m.parameters, m.state, m.buffers, m.arena);
  out += "\"buffers\":" + array(p.buffers, [](const Buffer& b) {
           constexpr const char* kKinds[] = {"arena", "variable", "input", "step"};
           return fmt::format(
               "{{\"name\":{},\"kind\":\"{}\",\"dtype\":\"{}\",\"dims\":{},\"offset\":{},\"bytes\":{},\"alias\":{}}}",
               quoted(b.name), kKinds[static_cast<size_t>(b.kind)], name_of(b.dtype), numbers(b.dims), b.offset,
               b.bytes, b.alias);
         });
  out += ",\"segments\":" + array(p.segments, [&](const Segment& s) {
           return fmt::format("{{\"name\":{},\"instructions\":{}}}", quoted(s.name),
                              array(s.instructions, [&](const Instruction& i) { return instruction(i); }));
         });
  out += ",\"schedule\":" + array(p.schedule, [](const ScheduleRow& r) {
           return fmt::format("{{\"segment\":{},\"micro_batch\":{}}}", r.segment, r.micro_batch);
         });
  return out + "}";
}

std::string entry(const Plan& plan, const Entry& e) {
  std::string out = fmt::format("{{\"name\":{},\"batch\":{},", quoted(e.name), e.batch);
  out += "\"inputs\":" + array(e.inputs, [&plan](const PlanInput& i) {
           int64_t limit = 0;
           for (const TensorId id : plan.source.inputs)
             if (plan.source.tensor(id).name == i.name) limit = value_limit(plan.source, id);
           return fmt::format("{{\"name\":{},\"dtype\":\"{}\",\"dims\":{},\"batch_dim\":{},\"limit\":{}}}",
                              quoted(i.name), name_of(i.dtype), numbers(i.dims), i.batch_dim, limit);
         });
  out += ",\"outputs\":" + array(e.outputs, [](const PlanOutput& o) {
           constexpr const char* kMerge[] = {"same", "concat", "sum"};
           return fmt::format("{{\"name\":{},\"dtype\":\"{}\",\"dims\":{},\"merge\":\"{}\"}}", quoted(o.name),
                              name_of(o.dtype), numbers(o.dims), kMerge[static_cast<size_t>(o.merge)]);
         });
  out += ",\"rows\":" + array(e.rows, [](const DeviceRow& r) {
           return fmt::format("{{\"device\":{},\"program\":{},\"coordinates\":{},\"samples\":{},\"micro_batches\":{}}}",
                              r.device, r.program, numbers(r.coordinates), interval(r.samples),
                              array(r.micro_batches, interval));
         });
  out += ",\"programs\":" + array(e.programs, [&](const Program& p) { return program(plan, p); });
  return out + "}";
}

}  // namespace

std::string to_json(const Plan& plan) {
  std::string out = fmt::format("{{\"model\":{},\"strategy\":{},\"micro_batches\":{},\"precision\":\"{}\",",
                                quoted(plan.model), quoted(plan.strategy), plan.micro_batches,
                                plan.precision == Precision::kBFloat16  ? "bf16"
                                : plan.precision == Precision::kFloat64 ? "f64"
                                                                        : "f32");
  out += "\"devices\":" + array(plan.devices, [](const DeviceSpec& d) {
           return fmt::format("{{\"kind\":\"{}\",\"name\":{}}}", name_of(d.kind), quoted(to_string(d)));
         });
  out += ",\"mesh\":" + array(plan.mesh, [](const MeshAxis& a) {
           return fmt::format("{{\"name\":{},\"size\":{}}}", quoted(a.name), a.size);
         });
  out += ",\"groups\":" + array(plan.groups, [](const Group& g) {
           return fmt::format("{{\"axis\":{},\"devices\":{}}}", quoted(g.axis),
                              array(g.devices, [](int32_t d) { return fmt::format("{}", d); }));
         });
  out += ",\"variables\":" + array(plan.variables, [](const PlanVariable& v) {
           constexpr const char* kRoles[] = {"parameter", "state", "buffer"};
           return fmt::format("{{\"name\":{},\"dtype\":\"{}\",\"dims\":{},\"role\":\"{}\"}}", quoted(v.name),
                              name_of(v.dtype), numbers(v.dims), kRoles[static_cast<size_t>(v.role)]);
         });
  out += ",\"entries\":" + array(plan.entries, [&](const Entry& e) { return entry(plan, e); });
  out += ",\"notes\":" + array(plan.notes, [](const std::string& n) { return quoted(n); });
  return out + "}";
}

}  // namespace whale
