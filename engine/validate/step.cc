#include "validate/step.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <tuple>

#include "base/error.h"
#include "cluster/devices.h"
#include "compile/compile.h"

namespace whale {
namespace {

std::vector<DeviceSpec> devices_of(const StepRun& run) {
  const int64_t d = run.cuts.replicas, t = run.cuts.ways, p = std::ssize(run.cuts.layers);
  std::vector<DeviceSpec> types, out;
  for (const std::string& type : run.types) {
    types.push_back(parse_devices(type + ":1", {}).front());
    types.back().memory_bytes = 0;  // it fitted
    if (run.inside.bytes_per_second > 0) types.back().figures.inside = run.inside;
  }
  for (int64_t replica = 0; replica < d; ++replica)
    for (int64_t stage = 0; stage < p; ++stage)
      for (int64_t way = 0; way < t; ++way) {
        const int64_t node = ((stage * d + replica) * t + way) / run.devices_of_node;
        out.push_back(types[std::min<int64_t>(node, std::ssize(types) - 1)]);
        out.back().node = static_cast<int>(node);
      }
  return out;
}

bool of_block(const Plan& plan, const Instruction& i) {
  for (ScopeId s = i.scope; s > 0 && static_cast<size_t>(s) < plan.scopes.size(); s = plan.scopes[s].parent)
    if (plan.scopes[s].name.starts_with("block")) return true;
  return false;
}

// Before a stage goes back, it computes its blocks again.
void repeat_blocks(Plan& plan) {
  for (Program& program : plan.entries[0].programs)
    for (Segment& back : program.segments) {
      const bool whole = back.name == "step";  // of one micro-batch: forward and backward
      if (!whole && !back.name.starts_with("backward.")) continue;
      const std::string name = "forward." + back.name.substr(std::min(back.name.size(), size_t{9}));
      const auto forward = whole ? program.segments.begin() + (&back - program.segments.data())
                                 : std::ranges::find(program.segments, name, &Segment::name);
      if (forward == program.segments.end()) throw internal("a stage of the plan has no forward pass");
      const auto goes_back = [](const Instruction& i) { return i.phase == Phase::kBackward; };
      std::vector<Instruction> again;
      for (const Instruction& i : forward->instructions) {
        if (i.link() != kNone || !of_block(plan, i) || goes_back(i)) continue;
        again.push_back(i);
        again.back().waits.clear(), again.back().phase = Phase::kBackward;
      }
      // Behind what comes from the next stage.
      const auto first = std::ranges::find_if(
          back.instructions, [&](const Instruction& i) { return i.link() == kNone && (!whole || goes_back(i)); });
      const auto at = static_cast<int32_t>(first - back.instructions.begin());
      back.instructions.insert(first, again.begin(), again.end());
      for (Instruction& i : back.instructions)
        for (Wait& w : i.waits)
          if (w.index >= at) w.index += static_cast<int32_t>(again.size());
    }
}

// Sums of what is alike: [how, times, numbers]; how: 0 of links, 1 before the commit, 2 behind it.
struct Parts {
  std::vector<std::tuple<int, int64_t, std::vector<double>>> sums = {};

  void add(int how, const StackWork& w) {
    std::vector<double> numbers;
    each_work_of_stack(w, [&](const char*, double x) { numbers.push_back(x); });
    for (auto& [h, times, known] : sums)
      if (h == how && known == numbers) {
        ++times;
        return;
      }
    sums.emplace_back(how, 1, std::move(numbers));
  }
  Json json(StepPart part) const {
    constexpr const char* kNames[] = {"prologue", "forward", "backward", "epilogue"};
    Json all = Json::array({kNames[static_cast<size_t>(part)]});
    for (const auto& [how, times, numbers] : sums) all.push_back(Json::array({how, times, numbers}));
    return all;
  }
};

}  // namespace

Plan plan_of(const StepRun& run) {
  CompileOptions options;
  options.overlap = false;
  options.update = UpdateForm::kWhole;
  options.matmul_chunks = 1;
  options.bucket_bytes = int64_t{1} << 50;
  if (run.half)
    options.gradient_dtype = options.accumulate_dtype = DType::kBF16;
  else
    options.precision = Precision::kFloat32;
  options.verify_passes = false;
  Plan plan = compile(gpt_graph(run.sizes, run.cuts), devices_of(run), options);
  if (run.repeat_blocks) repeat_blocks(plan);
  return plan;
}

double seconds_of(const Plan& plan, const std::function<Stack(const std::string& type)>& stack_of) {
  const Entry& entry = plan.entries[0];
  std::vector<Stack> stacks;
  for (const DeviceSpec& d : plan.devices) stacks.push_back(stack_of(d.type));
  return times_of(plan, entry, seconds_by(stacks, plan, entry)).seconds;
}

Json work_json(const Plan& plan) {
  const Entry& entry = plan.entries[0];
  const WorkOf work = work_of(plan, entry);
  Json classes = Json::array();
  std::set<std::pair<int32_t, std::string>> seen;
  for (const DeviceRow& row : entry.rows) {
    const std::string& type = plan.devices[row.device].type;
    if (!seen.emplace(row.program, type).second) continue;
    const Program& p = entry.programs[row.program];
    Json segments = Json::array(), schedule = Json::array();
    std::map<int32_t, std::vector<size_t>> parts;  // of a segment: its parts, which stand in `segments`
    for (size_t k = 0; k < p.segments.size(); ++k) {
      const Segment& s = p.segments[k];
      std::optional<StepPart> last;
      Parts sums;
      bool committed = false;
      for (const StackRun& run : runs_of(plan, s)) {
        if (last && *last != run.part) {
          parts[static_cast<int32_t>(k)].push_back(segments.size());
          segments.push_back(sums.json(*last)), sums = {};
        }
        last = run.part;
        StackWork links, rest;
        for (size_t n = run.begin; n < run.end; ++n) {
          const Instruction& i = s.instructions[n];
          if (i.kind() == InstructionKind::kCommit) sums.add(1, rest), rest = {}, committed = true;
          StackWork w = work(i, row.device);
          if (!run.issued()) w.issued = w.meetings = 0;
          (i.link() != kNone ? links : rest) += w;
        }
        sums.add(0, links), sums.add(committed ? 2 : 1, rest);
      }
      parts[static_cast<int32_t>(k)].push_back(segments.size());
      segments.push_back(sums.json(last.value_or(StepPart::kPrologue)));
    }
    for (const ScheduleRow& r : p.schedule)
      for (const size_t part : parts[r.segment]) schedule.push_back(part);
    classes.push_back(
        {{"stage", row.mesh}, {"type", type}, {"segments", std::move(segments)}, {"schedule", std::move(schedule)}});
  }
  return classes;
}

}  // namespace whale
