// A Plan as JSON, for pictures in the SDKs: devices, memory, and per program the instructions with queue, op, sizes
// and cost.
#include "base/json.h"
#include "base/philox.h"
#include "cluster/devices.h"
#include "plan/figures.h"
#include "schema/graph_file.h"
#include "simulate/timeline.h"

namespace whale {
namespace {

constexpr const char* kKinds[] = {"kernel", "collective", "feed", "fetch", "send", "receive", "copy", "vote", "commit"};
constexpr const char* kBuffers[] = {"arena", "variable", "input", "step"};
constexpr const char* kMerges[] = {"same", "concat", "sum"};
constexpr const char* kRoles[] = {"parameter", "state", "buffer"};
constexpr const char* kMemories[] = {"device", "host"};

template <class E, size_t N>
const char* pick(const char* const (&names)[N], E value) {
  return names[static_cast<size_t>(value)];
}

template <class List, class Write>
Json list_of(const List& list, Write write) {
  Json out = Json::array();
  for (const auto& item : list) out.push_back(write(item));
  return out;
}
Json json_of(const Interval& i) { return Json::array({i.begin, i.end}); }
Json json_of(const std::vector<Interval>& list) {
  return list_of(list, [](const Interval& i) { return json_of(i); });
}

Json json_of(const Instruction& i) {
  return {{"kind", pick(kKinds, i.kind())},
          {"queue", name_of(i.queue)},
          {"op", i.verb()},
          {"name", i.name},
          {"phase", name_of(i.phase)},
          {"in", i.in},
          {"out", i.out},
          {"flops", i.flops},
          {"bytes", i.bytes},
          {"waits", list_of(i.waits, [](const Wait& w) { return w.index; })}};
}

Json json_of(const Buffer& b) {
  return {{"name", b.name},
          {"kind", pick(kBuffers, b.kind)},
          {"dtype", name_of(b.dtype)},
          {"dims", b.dims},
          {"offset", b.offset},
          {"bytes", b.bytes},
          {"versions", b.versions},
          {"alias", b.alias},
          {"at", b.at},
          {"memory", pick(kMemories, b.memory)}};
}

Json json_of(const MemoryClasses& m) {
  return {{"parameters", m.parameters}, {"state", m.state},         {"buffers", m.buffers},
          {"arena", m.arena()},         {"gradients", m.gradients}, {"activations", m.activations},
          {"copies", m.copies}};
}

Json json_of(const Segment& s) {
  return {{"name", s.name}, {"instructions", list_of(s.instructions, [](const Instruction& i) { return json_of(i); })}};
}

Json program(const Plan& plan, const Entry& e, size_t number) {
  const Program& p = e.programs[number];
  const MemoryFigures m = memory_of(plan, e, number);
  return {{"arena_bytes", p.arena_bytes},
          {"host_bytes", p.host_bytes},
          {"peak_live_bytes", p.peak_live_bytes},
          {"memory", json_of(m.device)},
          {"host_memory", json_of(m.host)},
          {"buffers", list_of(p.buffers, [](const Buffer& b) { return json_of(b); })},
          {"segments", list_of(p.segments, [](const Segment& s) { return json_of(s); })},
          {"schedule", list_of(p.schedule, [](const ScheduleRow& r) {
             return Json{{"segment", r.segment}, {"micro_batch", r.micro_batch}, {"version", r.version}};
           })}};
}

Json json_of(const PlanInput& i) {
  const std::optional<int64_t> ignored = value_ignored(i);
  return {{"name", i.name},           {"dtype", name_of(i.dtype)}, {"dims", i.dims},
          {"batch_dim", i.batch_dim}, {"limit", value_limit(i)},   {"ignored", ignored ? Json(*ignored) : Json()}};
}

Json json_of(const PlanOutput& o) {
  return {{"name", o.name}, {"dtype", name_of(o.dtype)}, {"dims", o.dims}, {"merge", pick(kMerges, o.merge)}};
}

Json json_of(const DeviceRow& r) {
  const SampleCut cut = r.samples.empty() ? SampleCut{} : r.samples[0];
  return {
      {"device", r.device},           {"program", r.program},          {"mesh", r.mesh},
      {"coordinates", r.coordinates}, {"samples", json_of(cut.whole)}, {"micro_batches", json_of(cut.micro_batches)}};
}

Json json_of(const Transfer& t) {
  return {{"from", t.from}, {"to", t.to}, {"source", json_of(t.source)}, {"target", json_of(t.target)}};
}
Json json_of(const Link& l) {
  return {{"name", l.name},
          {"capacity", l.capacity},
          {"transfers", list_of(l.transfers, [](const Transfer& t) { return json_of(t); })}};
}

Json entry(const Plan& plan, const Entry& e) {
  Json programs = Json::array();
  for (size_t p = 0; p < e.programs.size(); ++p) programs.push_back(program(plan, e, p));
  return {{"name", e.name},
          {"batch", e.batch},
          {"inputs", list_of(e.inputs, [](const PlanInput& i) { return json_of(i); })},
          {"outputs", list_of(e.outputs, [](const PlanOutput& o) { return json_of(o); })},
          {"rows", list_of(e.rows, [](const DeviceRow& r) { return json_of(r); })},
          {"links", list_of(e.links, [](const Link& l) { return json_of(l); })},
          {"programs", std::move(programs)},
          {"timeline", timeline_json(plan, e)}};
}

Json json_of(const DeviceSpec& d) {
  Json out{{"kind", name_of(d.kind)}, {"name", to_string(d)}, {"node", d.node}, {"memory_bytes", d.memory_bytes}};
  if (d.zone != 0) out["zone"] = d.zone;
  if (!d.links.empty()) {
    out["place"] = d.place;
    for (const NodeLink& l : d.links)
      out["links"].push_back({{"place", l.place},
                              {"bytes_per_second", l.rates.bytes_per_second},
                              {"latency_seconds", l.rates.latency_seconds}});
  }
  if (!d.type.empty()) out["type"] = d.type;
  if (d.figures != DeviceFigures{}) {
    Json figures = Json::object();
    each_figure_of_device(d.figures, [&](const char* name, double figure) {
      if (figure > 0) figures[name] = json_value(figure);
    });
    out["figures"] = std::move(figures);
  }
  return out;
}
Json json_of(const PlanMesh& m) {
  return {{"axes", list_of(m.axes,
                           [](const MeshAxis& a) {
                             Json axis{{"name", a.name}, {"size", a.size}};
                             if (!a.shares.empty()) axis["shares"] = json_value(a.shares);
                             return axis;
                           })},
          {"devices", m.devices}};
}
Json variable(const Plan& plan, const PlanVariable& v) {
  const int32_t first = plan.meshes[v.mesh].devices[0];
  return {{"name", v.name},
          {"dtype", name_of(v.dtype)},
          {"dims", v.dims},
          {"role", pick(kRoles, v.role)},
          {"mesh", v.mesh},
          {"local", local_dims(plan, v, first)},
          {"memory", pick(kMemories, v.memory)}};
}

// Of the model that the plan keeps, and makes the plans of smaller batches from: equal in all plans of a model, since
// what options change in it is left out, and what is the plan's own too (check_source).
uint64_t source_hash(const Plan& plan) {
  Graph source = plan.source;
  source.training.accumulation = 1;
  source.training.precision = Precision::kFloat32;
  source.training.optimizer = {};
  source.training.lr_schedule = {};
  source.default_strategy.clear();
  std::erase_if(source.outputs, [&](const NamedTensor& o) { return source.tensor(o.tensor).name == o.name; });
  const std::vector<uint8_t> file = serialize(source);
  return hash_name({reinterpret_cast<const char*>(file.data()), file.size()});
}

}  // namespace

std::string to_json(const Plan& plan) {
  const auto dtype = [](const std::optional<DType>& given) { return given ? Json(name_of(*given)) : Json(); };
  return text_of(Json{{"model", plan.model},
                      {"strategy", plan.strategy},
                      {"micro_batches", plan.micro_batches},
                      {"precision", pick(kPrecisions, plan.precision)},
                      {"model_hash", fmt::format("{:016x}", plan.model_hash)},
                      {"source_hash", fmt::format("{:016x}", source_hash(plan))},
                      {"gradient_dtype", dtype(plan.options.gradient_dtype)},
                      {"accumulate_dtype", dtype(plan.options.accumulate_dtype)},
                      {"adasum", plan.options.adasum},
                      {"zero", plan.options.zero},
                      {"devices", list_of(plan.devices, [](const DeviceSpec& d) { return json_of(d); })},
                      {"meshes", list_of(plan.meshes, [](const PlanMesh& m) { return json_of(m); })},
                      {"groups", list_of(plan.groups,
                                         [](const Group& g) {
                                           return Json{{"axis", g.axis}, {"parts", g.parts}};
                                         })},
                      {"variables", list_of(plan.variables, [&](const PlanVariable& v) { return variable(plan, v); })},
                      {"entries", list_of(plan.entries, [&](const Entry& e) { return entry(plan, e); })},
                      {"notes", plan.notes}});
}

}  // namespace whale
