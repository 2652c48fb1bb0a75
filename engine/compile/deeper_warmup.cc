#include "compile/deeper_warmup.h"

#include <algorithm>
#include <limits>
#include <set>

#include "cost/interference.h"
#include "plan/figures.h"
#include "plan/lives.h"
#include "schedule/warmup.h"
#include "simulate/simulate.h"
#include "task/strategy.h"

namespace whale {
namespace {

// 1F1B with its own warm-up.
bool is_open(const Scope& pipeline) {
  const ScheduleText schedule = read_schedule(pipeline.schedule);
  return pipeline.virtual_stages <= 1 && schedule.warmup.empty() && (schedule.name.empty() || schedule.name == "1f1b");
}

bool set_warmup(Scope& pipeline, const std::vector<int>& depths) {
  if (!is_open(pipeline)) return false;
  ScheduleText schedule = read_schedule(pipeline.schedule);
  schedule.warmup.assign(depths.begin(), depths.end());
  pipeline.schedule = to_string(schedule);
  return true;
}

// Of a stage: its passes, what it sends, and how many micro-batches more it has room for.
struct Stage {
  StageTimes times;
  LinkTimes sends;  // forward: to the stage behind it; backward: to the one before
  int more = std::numeric_limits<int>::max();
};

class Stages {
 public:
  explicit Stages(const Plan& plan)
      : plan_(plan), entry_(plan.entries[0]), seconds_(seconds_by(cost_of(plan), plan, entry_)) {}

  std::vector<Stage> all() const {
    std::vector<Stage> out(plan_.meshes.size());
    for (size_t s = 0; s < out.size(); ++s) {
      std::vector<std::pair<int32_t, const DeviceSpec*>> known;  // programs on devices that are alike
      for (const int32_t d : plan_.meshes[s].devices) {
        if (d < 0) continue;
        const DeviceSpec& device = plan_.devices[d];
        const int32_t program = entry_.rows[d].program;
        const bool again = std::ranges::any_of(known, [&](const auto& k) {
          return k.first == program && k.second->figures == device.figures && k.second->node == device.node &&
                 k.second->memory_bytes == device.memory_bytes;
        });
        if (again) continue;
        known.emplace_back(program, &device);
        add(d, out[s]);
      }
    }
    return out;
  }

 private:
  void add(int32_t d, Stage& stage) const {
    const int32_t number = entry_.rows[d].program;
    const Program& program = entry_.programs[number];
    // While a device sends it computes more slowly, and it sends more slowly while it computes.
    const auto [compute, link, to_device, to_host] =
        progress_rates({true, true, false, false}, interference_of(plan_.devices[d]), true);
    const double takes = (1 - compute) / link, longer = 1 / link;
    std::set<int32_t> passes;
    for (const ScheduleRow& row : program.schedule)
      if (!row.whole) passes.insert(row.segment);
    for (const int32_t pass : passes) {
      const Segment& segment = program.segments[pass];
      const bool forward = segment.name.starts_with("forward");
      double work = 0, sent = 0;
      for (const Instruction& i : segment.instructions)
        if (i.kind() != InstructionKind::kReceive) (i.kind() == InstructionKind::kSend ? sent : work) += seconds_(i, d);
      work += takes * sent, sent *= longer;
      double& longest = forward ? stage.times.forward : stage.times.backward;
      double& message = forward ? stage.sends.forward : stage.sends.backward;
      longest = std::max(longest, work), message = std::max(message, sent);
    }
    const int64_t has = plan_.devices[d].memory_bytes;
    if (has == 0) return;
    int64_t each = 0;  // of one micro-batch more
    for (const Buffer& b : program.buffers)
      if (b.versions > 1 && b.alias == kNone && b.memory == Memory::kDevice) each += version_stride(b);
    const int64_t room = has - memory_of(plan_, entry_, static_cast<size_t>(number)).device.total();
    if (each > 0) stage.more = static_cast<int>(std::min<int64_t>(stage.more, std::max<int64_t>(room, 0) / each));
  }

  const Plan& plan_;
  const Entry& entry_;
  Duration seconds_;
};

}  // namespace

std::optional<WithWarmup> with_warmup(const Graph& graph, const CompileOptions& options,
                                      const std::vector<int>& depths) {
  WithWarmup out{graph, options};
  int written = 0;
  for (Scope& scope : out.graph.scopes) {
    if (!scope.nests.empty()) return std::nullopt;
    if (scope.kind == ScopeKind::kPipeline && (++written > 1 || !set_warmup(scope, depths))) return std::nullopt;
  }
  if (written > 0) return out;
  std::vector<StrategyClause> clauses =
      parse_clauses(options.strategy.empty() ? graph.default_strategy : options.strategy);
  std::vector<std::string> texts;
  for (StrategyClause& clause : clauses) {
    for (Scope& scope : clause.nest) {
      if (!scope.nests.empty()) return std::nullopt;
      if (scope.kind == ScopeKind::kPipeline && (++written > 1 || !set_warmup(scope, depths))) return std::nullopt;
    }
    texts.push_back((clause.name.empty() ? "" : clause.name + ": ") + to_string(clause.nest));
  }
  if (written == 0) return std::nullopt;
  out.options.strategy = fmt::format("{}", fmt::join(texts, "; "));
  return out;
}

bool knows_devices(const std::vector<DeviceSpec>& devices, const Profile& profile) {
  return profile.measured != nullptr ||
         std::ranges::any_of(devices, [](const DeviceSpec& d) { return d.figures.known(); });
}

void DeeperWarmup::halve() {
  for (size_t s = 0; s < depths.size(); ++s) depths[s] = usual[s] + (depths[s] - usual[s]) / 2;
}

PipelineTimes times_of_stages(const Plan& plan) {
  const std::vector<Stage> stages = Stages(plan).all();
  const auto micro_batches = static_cast<int>(plan.micro_batches);
  const std::vector<int> usual = usual_warmup(static_cast<int>(stages.size()), micro_batches);
  PipelineTimes out;
  for (size_t s = 0; s < stages.size(); ++s) {
    out.stages.push_back(stages[s].times);
    if (s + 1 < stages.size()) out.links.push_back({stages[s].sends.forward, stages[s + 1].sends.backward});
    out.most.push_back(stages[s].more > micro_batches ? micro_batches : usual[s] + stages[s].more);
  }
  return out;
}

std::optional<DeeperWarmup> deeper_warmup(const Plan& plan) {
  if (!knows_devices(plan.devices, plan.profile) || plan.meshes.size() < 2 || plan.micro_batches < 2 ||
      plan.entries.empty())
    return std::nullopt;
  const auto [times, links, most] = times_of_stages(plan);
  const std::vector<int> usual = usual_warmup(static_cast<int>(times.size()), static_cast<int>(plan.micro_batches));
  const Warmup found = find_warmup(static_cast<int>(plan.micro_batches), times, links, most, kWorthDeeper);
  if (found.depths == usual) return std::nullopt;
  size_t slowest = 0;
  for (size_t s = 1; s < links.size(); ++s)
    if (links[s].forward > links[slowest].forward) slowest = s;
  return DeeperWarmup{
      .depths = found.depths,
      .usual = usual,
      .why = fmt::format("messages from stage {} to {} take {} beside forward passes of {}", slowest, slowest + 1,
                         seconds_text(links[slowest].forward), seconds_text(times[slowest + 1].forward))};
}

}  // namespace whale
