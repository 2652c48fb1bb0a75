// The whole Plan as stable text: one line an instruction. Golden tests compare it.
#include <map>
#include <set>

#include "base/format.h"
#include "cluster/devices.h"
#include "plan/figures.h"

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

// "split dim 1" or, of a part of a dimension, "split dim 1 (3,64)": what cuts a variable.
std::string storage_sharding_text(const Plan& plan, const PlanVariable& v) {
  std::string text;
  const PlanMesh& mesh = plan.meshes[v.mesh];
  if (plan.meshes.size() > 1) text += fmt::format(" of mesh {}", v.mesh);
  bool cut = false;
  for (size_t a = 0; a < v.storage_sharding.axes.size(); ++a) {
    const AxisSharding& l = v.storage_sharding.axes[a];
    if (l.placement != Placement::kShard) continue;
    cut = true;
    text += fmt::format(", {} {}dim {}", mesh.axes[a].name, l.state ? "state " : "", l.sub_axis.dim);
    if (l.sub_axis.outer != 1 || l.sub_axis.inner != 1)
      text += fmt::format(" ({},{})", l.sub_axis.outer, l.sub_axis.inner);
  }
  if (cut) text += fmt::format(": {} on device {}", to_string(local_dims(plan, v, mesh.devices[0])), mesh.devices[0]);
  return text;
}

std::string cut_text(const SampleCut& cut) {
  std::string text = fmt::format("[{}, {})", cut.whole.begin, cut.whole.end);
  if (cut.micro_batches.size() > 1)
    for (const Interval& m : cut.micro_batches) text += fmt::format(" {}-{}", m.begin, m.end);
  return text;
}

std::string intervals_text(const std::vector<Interval>& list) {
  std::string text;
  for (const Interval& i : list) text += fmt::format("{}{}:{}", text.empty() ? "" : ",", i.begin, i.end);
  return "[" + text + "]";
}

// A pipeline's rows as "F0", "B0", "W0" (with several stages "F2.0"), others as "body:0".
struct RowNames {
  std::set<std::string> stages;
  static bool split(const std::string& name, std::string& stage, char& letter) {
    for (const char* known : {"forward.", "backward.", "weight."}) {
      if (name.rfind(known, 0) != 0) continue;
      stage = name.substr(std::string_view(known).size());
      letter = static_cast<char>(known[0] - 'a' + 'A');
      return true;
    }
    return false;
  }
  explicit RowNames(const Program& p) {
    std::string stage;
    char letter = 0;
    for (const Segment& s : p.segments)
      if (split(s.name, stage, letter)) stages.insert(stage.substr(0, stage.find('/')));
  }
  std::string of(const Program& p, const ScheduleRow& row) const {
    const std::string& name = p.segments[row.segment].name;
    std::string stage, text;
    char letter = 0;
    if (!split(name, stage, letter))
      text = fmt::format("{}:{}", name, row.micro_batch);
    else if (stages.size() == 1)
      text = fmt::format("{}{}", letter, row.micro_batch);
    else
      text = fmt::format("{}{}.{}", letter, stage, row.micro_batch);
    if (row.version != 0) text += fmt::format("@{}", row.version);
    return row.waits == kNone ? text : text + fmt::format("^{}", row.waits);
  }
};

std::string buffers_text(const Program& p, const BufferIds& ids) {
  std::string text;
  for (const BufferId id : ids) {
    if (!text.empty()) text += ", ";
    text += id == kNone ? "_" : fmt::format("%{}", id);
    if (id != kNone) text += ":" + p.buffers[id].name;
  }
  return text;
}

// Numbers, or "@3" where rows fill hole 3.
class Numbers {
 public:
  explicit Numbers(const Program& p) {
    for (size_t k = 0; k < p.holes.size(); ++k) number_.emplace(p.holes[k], k);
  }
  bool placed(const Hole& hole) const { return number_.contains(hole); }
  std::string of(const Hole& hole, const std::string& otherwise) const {
    const auto at = number_.find(hole);
    return at == number_.end() ? otherwise : fmt::format("@{}", at->second);
  }

 private:
  std::map<Hole, size_t> number_;
};

std::string sub_axis_text(const SubAxis& d) { return fmt::format("({},{},{})", d.dim, d.outer, d.inner); }

// number(kind, attribute, index, otherwise): what a row fills in there, or `otherwise`.
template <class Number>
std::string kernel_text(const work::Kernel& k, Number number) {
  std::string text;
  for (const auto& [name, value] : k.attrs)
    text += fmt::format(" {}={}", name, number(HoleKind::kAttribute, name, 0, to_string(value)));
  if (k.key) text += fmt::format(" key={}", k.key);
  if (k.box.global.empty()) return text;
  std::vector<std::string> origin;
  for (size_t d = 0; d < k.box.origin.size(); ++d)
    origin.push_back(number(HoleKind::kOrigin, "", d, fmt::to_string(k.box.origin[d])));
  text += fmt::format(" box=[{}] of {}", fmt::join(origin, ", "), to_string(k.box.global));
  if (k.box.batch.present()) text += fmt::format(" batch={}", sub_axis_text(k.box.batch));
  for (size_t n = 0; n < k.box.cuts.size(); ++n) {
    const BoxCut& c = k.box.cuts[n];
    text += fmt::format(" cut={} {}+{} of {}", sub_axis_text(c.sub_axis),
                        number(HoleKind::kCut, "", n, fmt::to_string(c.begin)), c.size, c.extent);
  }
  return text;
}

std::string collective_text(const work::Collective& c) {
  std::string text = fmt::format(" group={}", c.group);
  if (c.combine != Combine::kSum) text += fmt::format(" combine={}", name_of(c.combine));
  for (const SubAxisCuts& each : c.cuts)
    text += fmt::format(" cut={}{}", sub_axis_text(each.sub_axis), intervals_text(each.cuts));
  if (c.to.sub_axis.present()) text += fmt::format(" to={}{}", sub_axis_text(c.to.sub_axis), intervals_text(c.to.cuts));
  if (!c.weights.empty()) text += fmt::format(" weights=[{}]", fmt::join(c.weights, ", "));
  return text;
}

const char* whole(bool batch) { return batch ? " whole_batch" : ""; }

std::string instruction_text(const Program& p, size_t segment, size_t index, const Numbers& numbers) {
  const Instruction& i = p.segments[segment].instructions[index];
  std::string text = fmt::format("[{}] ", name_of(i.queue));
  if (!i.out.empty()) text += buffers_text(p, i.out) + " = ";
  text += fmt::format("{}({})", i.verb(), buffers_text(p, i.in));
  if (const auto* k = i.kernel())
    text += kernel_text(*k, [&](HoleKind kind, std::string attribute, size_t n, const std::string& otherwise) {
      return numbers.of({kind, kNone, static_cast<int32_t>(segment), static_cast<int32_t>(index), std::move(attribute),
                         static_cast<int32_t>(n)},
                        otherwise);
    });
  if (const auto* c = i.as<work::Collective>()) text += collective_text(*c);
  if (const auto* f = i.as<work::Feed>()) text += fmt::format(" input={}{}", f->input, whole(f->whole_batch));
  if (const auto* f = i.as<work::Fetch>()) text += fmt::format(" output={}{}", f->output, whole(f->whole_batch));
  if (i.link() != kNone) text += fmt::format(" link={}", i.link());
  if (i.samples() != 0) text += fmt::format(" samples={}", i.samples());
  for (const Wait& w : i.waits) text += fmt::format(" after {}:{}", name_of(w.queue), w.index);
  return text;
}

void print_program(std::string& text, const Program& p, size_t number) {
  text += fmt::format("  program {}: arena {} bytes (at least {}), variables {} bytes", number, p.arena_bytes,
                      p.peak_live_bytes, p.variable_bytes);
  if (p.host_bytes) text += fmt::format(", arena of the host {} bytes", p.host_bytes);
  text += '\n';
  const Numbers numbers(p);
  for (size_t b = 0; b < p.buffers.size(); ++b) {
    const Buffer& buffer = p.buffers[b];
    text += fmt::format("    %{} {} {}{} {}", b, buffer.name, name_of(buffer.dtype), to_string(buffer.dims),
                        name_of(buffer.kind));
    if (buffer.ref >= 0) text += fmt::format(" {}", buffer.ref);
    if (buffer.memory == Memory::kHost) text += " host";
    if (buffer.offset >= 0) text += fmt::format(" @{}+{}", buffer.offset, buffer.bytes);
    if (buffer.versions != 1) text += fmt::format(" x{}", buffer.versions);
    if (buffer.alias != kNone) text += fmt::format(" in %{}", buffer.alias);
    const Hole at{HoleKind::kAt, static_cast<BufferId>(b), 0, 0, "", 0};
    if (buffer.at != 0 || numbers.placed(at)) text += " +" + numbers.of(at, fmt::to_string(buffer.at));
    text += '\n';
  }
  for (size_t s = 0; s < p.segments.size(); ++s) {
    text += fmt::format("    segment {}\n", p.segments[s].name);
    for (size_t k = 0; k < p.segments[s].instructions.size(); ++k)
      text += fmt::format("      {:3} {}\n", k, instruction_text(p, s, k, numbers));
  }
  for (size_t l = 0; l < p.row_waits.size(); ++l) {
    text += fmt::format("    waits ^{}, for the row before:", l);
    for (const RowWait& w : p.row_waits[l])
      text += fmt::format(" {} after {}:{};", w.at, name_of(w.on.queue), w.on.index);
    text += '\n';
  }
  text += "    schedule";
  const RowNames names(p);
  for (const ScheduleRow& row : p.schedule) text += " " + names.of(p, row);
  text += '\n';
}

}  // namespace

std::string print(const Plan& plan) {
  std::string text = fmt::format("plan {}: {} on {}, {} micro-batch(es)\n", plan.model, plan.strategy,
                                 to_string(plan.devices), plan.micro_batches);
  for (size_t m = 0; m < plan.meshes.size(); ++m) {
    const PlanMesh& mesh = plan.meshes[m];
    text += plan.meshes.size() == 1 ? fmt::format("  mesh [{}]\n", axes_text(mesh.axes))
                                    : fmt::format("  mesh {} [{}] of devices {}\n", m, axes_text(mesh.axes),
                                                  devices_text(mesh.devices, SIZE_MAX));
  }
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    text += fmt::format("  group {} {}:", g, plan.groups[g].axis);
    for (const auto& part : plan.groups[g].parts) text += fmt::format(" [{}]", fmt::join(part, ","));
    text += '\n';
  }
  for (size_t v = 0; v < plan.variables.size(); ++v) {
    const PlanVariable& variable = plan.variables[v];
    constexpr const char* kRoles[] = {"parameter", "state", "buffer"};
    text += fmt::format("  variable {} {} {}{} {}", v, variable.name, name_of(variable.dtype), to_string(variable.dims),
                        kRoles[static_cast<size_t>(variable.role)]);
    if (!variable.owner.empty()) text += fmt::format(" of {} ({})", variable.owner, variable.state_name);
    text += storage_sharding_text(plan, variable);
    if (variable.memory == Memory::kHost) text += ", in the host's memory";
    text += '\n';
  }
  for (const Entry& e : plan.entries) {
    text += fmt::format("entry {}: batch {}\n", e.name, e.batch);
    for (size_t i = 0; i < e.inputs.size(); ++i)
      text += fmt::format("  input {} {} {}{} batch_dim {}\n", i, e.inputs[i].name, name_of(e.inputs[i].dtype),
                          to_string(e.inputs[i].dims), e.inputs[i].batch_dim);
    for (size_t o = 0; o < e.outputs.size(); ++o)
      text += fmt::format(
          "  output {} {} {}{} {}{}\n", o, e.outputs[o].name, name_of(e.outputs[o].dtype), to_string(e.outputs[o].dims),
          name_of(e.outputs[o].merge),
          plan.meshes.size() > 1
              ? fmt::format(" from {}",
                            e.outputs[o].mesh == kNone ? "all meshes" : fmt::format("mesh {}", e.outputs[o].mesh))
              : "");
    for (size_t l = 0; l < e.links.size(); ++l) {
      text += fmt::format("  link {} {}, capacity {}\n", l, e.links[l].name, e.links[l].capacity);
      for (const Transfer& t : e.links[l].transfers)
        text += fmt::format("    {} {} -> {} {}\n", t.from, intervals_text(t.source), t.to, intervals_text(t.target));
    }
    for (const DeviceRow& row : e.rows) {
      text += fmt::format("  device {} at {}{}: program {}, samples ", row.device, to_string(row.coordinates),
                          plan.meshes.size() > 1 ? fmt::format(" of mesh {}", row.mesh) : "", row.program);
      for (size_t s = 0; s < row.samples.size(); ++s) text += (s ? " | " : "") + cut_text(row.samples[s]);
      for (size_t k = 0; k < row.placed.size(); ++k)
        text += fmt::format("{}@{}={}", k == 0 ? ", places " : " ", k, row.placed[k]);
      text += '\n';
    }
    for (size_t p = 0; p < e.programs.size(); ++p) print_program(text, e.programs[p], p);
  }
  for (const std::string& note : plan.notes) text += "note: " + note + "\n";
  return text;
}

std::string print(const Program& program) {
  std::string text;
  print_program(text, program, 0);
  return text;
}

}  // namespace whale
