// A Plan as JSON, for pictures in the SDKs: devices, memory, and per program the instructions with stream, op, sizes
// and cost.
#include <numeric>

#include "base/format.h"
#include "cluster/devices.h"
#include "plan/figures.h"
#include "simulate/timeline.h"

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

constexpr const char* kKinds[] = {"kernel", "collective", "feed", "fetch", "send", "receive", "move"};
constexpr const char* kStreamNames[] = {"compute", "communication", "copy"};

std::string_view op_of(const Instruction& i) {
  using enum InstructionKind;
  const bool is_op = i.kind == kKernel || i.kind == kCollective || i.kind == kMove;
  return is_op ? def(i.op).name : kKinds[static_cast<size_t>(i.kind)];
}

std::string instruction(const Instruction& i) {
  return fmt::format(
      "{{\"kind\":\"{}\",\"stream\":\"{}\",\"op\":{},\"name\":{},\"phase\":\"{}\",\"in\":{},\"out\":{},\"flops\":{},"
      "\"bytes\":{},\"waits\":{}}}",
      kKinds[static_cast<size_t>(i.kind)], kStreamNames[static_cast<size_t>(i.stream)], quoted(op_of(i)),
      quoted(i.name), name_of(i.phase), array(i.in, [](BufferId b) { return fmt::format("{}", b); }),
      array(i.out, [](BufferId b) { return fmt::format("{}", b); }), i.flops, i.bytes,
      array(i.waits, [](const WaitPoint& w) { return fmt::format("{}", w.index); }));
}

std::string devices(const std::vector<int32_t>& list) {
  return array(list, [](int32_t d) { return fmt::format("{}", d); });
}

std::string memory(const MemoryClasses& m) {
  return fmt::format(
      "{{\"parameters\":{},\"state\":{},\"buffers\":{},\"arena\":{},\"gradients\":{},\"activations\":{},"
      "\"copies\":{}}}",
      m.parameters, m.state, m.buffers, m.arena(), m.gradients, m.activations, m.copies);
}

std::string program(const Plan& plan, const Entry& e, size_t number) {
  const Program& p = e.programs[number];
  const MemoryFigures m = memory_of(plan, e, number);
  std::string out =
      fmt::format("{{\"arena_bytes\":{},\"host_bytes\":{},\"peak_live_bytes\":{},\"memory\":{},\"host_memory\":{},",
                  p.arena_bytes, p.host_bytes, p.peak_live_bytes, memory(m.device), memory(m.host));
  out += "\"buffers\":" + array(p.buffers, [](const Buffer& b) {
           constexpr const char* kKinds[] = {"arena", "variable", "input", "step"};
           return fmt::format(
               "{{\"name\":{},\"kind\":\"{}\",\"dtype\":\"{}\",\"dims\":{},\"offset\":{},\"bytes\":{},\"slots\":{},"
               "\"alias\":{},\"at\":{},\"memory\":\"{}\"}}",
               quoted(b.name), kKinds[static_cast<size_t>(b.kind)], name_of(b.dtype), numbers(b.dims), b.offset,
               b.bytes, b.slots, b.alias, b.at, b.memory == Memory::kHost ? "host" : "device");
         });
  out += ",\"segments\":" + array(p.segments, [&](const Segment& s) {
           return fmt::format("{{\"name\":{},\"instructions\":{}}}", quoted(s.name),
                              array(s.instructions, [&](const Instruction& i) { return instruction(i); }));
         });
  out += ",\"schedule\":" + array(p.schedule, [](const ScheduleRow& r) {
           return fmt::format("{{\"segment\":{},\"micro_batch\":{},\"slot\":{}}}", r.segment, r.micro_batch, r.slot);
         });
  return out + "}";
}

std::string entry(const Plan& plan, const Entry& e) {
  std::string out = fmt::format("{{\"name\":{},\"batch\":{},", quoted(e.name), e.batch);
  out +=
      "\"inputs\":" + array(e.inputs, [](const PlanInput& i) {
        const std::optional<int64_t> ignored = value_ignored(i);
        return fmt::format("{{\"name\":{},\"dtype\":\"{}\",\"dims\":{},\"batch_dim\":{},\"limit\":{},\"ignored\":{}}}",
                           quoted(i.name), name_of(i.dtype), numbers(i.dims), i.batch_dim, value_limit(i),
                           ignored ? fmt::to_string(*ignored) : "null");
      });
  out += ",\"outputs\":" + array(e.outputs, [](const PlanOutput& o) {
           constexpr const char* kMerge[] = {"same", "concat", "sum"};
           return fmt::format("{{\"name\":{},\"dtype\":\"{}\",\"dims\":{},\"merge\":\"{}\"}}", quoted(o.name),
                              name_of(o.dtype), numbers(o.dims), kMerge[static_cast<size_t>(o.merge)]);
         });
  out += ",\"rows\":" + array(e.rows, [](const DeviceRow& r) {
           const SampleCut cut = r.samples.empty() ? SampleCut{} : r.samples[0];
           return fmt::format(
               "{{\"device\":{},\"program\":{},\"mesh\":{},\"coordinates\":{},\"samples\":{},\"micro_batches\":{}}}",
               r.device, r.program, r.mesh, numbers(r.coordinates), interval(cut.whole),
               array(cut.micro_batches, interval));
         });
  out += ",\"links\":" + array(e.links, [](const Link& l) {
           return fmt::format("{{\"name\":{},\"slots\":{},\"transfers\":{}}}", quoted(l.name), l.slots,
                              array(l.transfers, [](const Transfer& t) {
                                return fmt::format("{{\"from\":{},\"to\":{},\"source\":{},\"target\":{}}}", t.from,
                                                   t.to, array(t.source, interval), array(t.target, interval));
                              }));
         });
  std::vector<size_t> numbers_of_programs(e.programs.size());
  std::iota(numbers_of_programs.begin(), numbers_of_programs.end(), size_t{0});
  out += ",\"programs\":" + array(numbers_of_programs, [&](size_t p) { return program(plan, e, p); });
  return out + ",\"timeline\":" + timeline_json(plan, e) + "}";
}

}  // namespace

std::string to_json(const Plan& plan) {
  std::string out = fmt::format("{{\"model\":{},\"strategy\":{},\"micro_batches\":{},\"precision\":\"{}\",",
                                quoted(plan.model), quoted(plan.strategy), plan.micro_batches,
                                plan.precision == Precision::kBFloat16  ? "bf16"
                                : plan.precision == Precision::kFloat64 ? "f64"
                                : plan.precision == Precision::kFloat16 ? "f16"
                                                                        : "f32");
  out += fmt::format("\"model_hash\":\"{:016x}\",\"gradient_dtype\":{},\"adasum\":{},\"zero\":{},", plan.model_hash,
                     plan.options.gradient_dtype ? quoted(name_of(*plan.options.gradient_dtype)) : "null",
                     plan.options.adasum, plan.options.zero);
  out += "\"devices\":" + array(plan.devices, [](const DeviceSpec& d) {
           return fmt::format("{{\"kind\":\"{}\",\"name\":{},\"node\":{},\"memory_bytes\":{}}}", name_of(d.kind),
                              quoted(to_string(d)), d.node, d.memory_bytes);
         });
  out +=
      ",\"meshes\":" + array(plan.meshes, [](const PlanMesh& m) {
        return fmt::format(
            "{{\"axes\":{},\"devices\":{}}}",
            array(m.axes,
                  [](const MeshAxis& a) { return fmt::format("{{\"name\":{},\"size\":{}}}", quoted(a.name), a.size); }),
            devices(m.devices));
      });
  out += ",\"groups\":" + array(plan.groups, [](const Group& g) {
           return fmt::format("{{\"axis\":{},\"parts\":{}}}", quoted(g.axis), array(g.parts, devices));
         });
  out += ",\"variables\":" + array(plan.variables, [&plan](const PlanVariable& v) {
           constexpr const char* kRoles[] = {"parameter", "state", "buffer"};
           const int32_t first = plan.meshes[static_cast<size_t>(v.mesh)].devices[0];
           return fmt::format(
               "{{\"name\":{},\"dtype\":\"{}\",\"dims\":{},\"role\":\"{}\",\"mesh\":{},\"local\":{},"
               "\"memory\":\"{}\"}}",
               quoted(v.name), name_of(v.dtype), numbers(v.dims), kRoles[static_cast<size_t>(v.role)], v.mesh,
               numbers(local_dims(plan, v, first)), v.memory == Memory::kHost ? "host" : "device");
         });
  out += ",\"entries\":" + array(plan.entries, [&](const Entry& e) { return entry(plan, e); });
  out += ",\"notes\":" + array(plan.notes, [](const std::string& n) { return quoted(n); });
  return out + "}";
}

}  // namespace whale
