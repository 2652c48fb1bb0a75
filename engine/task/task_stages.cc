#include <algorithm>
#include <limits>
#include <map>
#include <numeric>
#include <span>

#include "base/error.h"
#include "base/text.h"
#include "cost/interference.h"
#include "schedule/schedule.h"
#include "schedule/warmup.h"
#include "task/stages.h"
#include "task/strategy.h"
#include "task/task_parts.h"

namespace whale {
namespace {

// As many as there are devices for.
int64_t stages_left(const TaskLeaf& leaf, int64_t devices) {
  bool complete = true;
  const int64_t others =
      product(leaf.nest, 0, leaf.outer(), complete) * product(leaf.nest, leaf.inner(), leaf.nest.size(), complete);
  return std::max<int64_t>(1, devices / others);
}

// Ops outside every written stage join the stage of what they read; those that read nothing, of who reads them.
void join(const Graph& graph, std::vector<int32_t>& stage) {
  std::vector<char> given(stage.size());
  for (size_t i = 0; i < stage.size(); ++i) given[i] = stage[i] >= 0;
  for (size_t i = 0; i < stage.size(); ++i) {
    if (given[i]) continue;
    for (const TensorId id : graph.ops[i].inputs)
      if (id != kNone && graph.tensor(id).producer != kNone)
        stage[i] = std::max(stage[i], stage[graph.tensor(id).producer]);
  }
  constexpr int32_t kNobody = std::numeric_limits<int32_t>::max();
  std::vector<int32_t> first(stage.size(), kNobody);  // stage of those who read its results
  for (size_t i = stage.size(); i-- > 0;) {
    if (stage[i] < 0) stage[i] = first[i] == kNobody ? 0 : first[i];
    for (const TensorId id : graph.ops[i].inputs)
      if (id != kNone && graph.tensor(id).producer != kNone) {
        int32_t& reader = first[graph.tensor(id).producer];
        reader = std::min(reader, stage[i]);
      }
  }
}

// Data goes forward only.
void check_order(const Graph& graph, const std::vector<int32_t>& stage) {
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const Op& op = graph.ops[i];
    for (const TensorId id : op.inputs) {
      const OpId made = id == kNone ? kNone : graph.tensor(id).producer;
      if (made != kNone && stage[made] > stage[i])
        throw invalid("op '{}' in stage {} reads '{}', which a later stage ({}) makes; stages pass data forward only",
                      op.name, stage[i], graph.tensor(id).name, stage[made])
            .at_op(op.name)
            .at_scope(graph.scope_path(op.scope));
    }
  }
}

// One pipeline of those side by side.
struct Part {
  const TaskLeaf* leaf = nullptr;
  std::vector<OpId> ops;
  std::map<ScopeId, int32_t> written;  // stage scopes in the order of their first op
};

}  // namespace

std::string empty_stages(const Graph& graph) {
  std::vector<char> used(graph.scopes.size());
  for (const Op& op : graph.ops)
    for (ScopeId id = op.scope; id != kNone && !used[id]; id = graph.scopes[id].parent) used[id] = 1;
  std::vector<int> empty;
  int stages = 0;
  for (size_t i = 0; i < graph.scopes.size(); ++i) {
    if (graph.scopes[i].kind != ScopeKind::kStage) continue;
    if (!used[i]) empty.push_back(stages);
    ++stages;
  }
  if (empty.empty()) return {};
  const bool one = empty.size() == 1;
  return fmt::format("; of the {} stages written, counted from 0, {} {} no op that a result needs, and {} left out",
                     stages, one ? "stage" : "stages",
                     fmt::format("{} {}", fmt::join(empty, ", "), one ? "has" : "have"), one ? "is" : "are");
}

namespace {

StageBorder::Sender sender_of(const DeviceSpec& device, bool leaves) {
  // Done of each in a second of both.
  const auto [compute, link, to_device, to_host] =
      progress_rates({true, true, false, false}, interference_of(device), leaves);
  return {(1 - compute) / link, 1 / link};
}

StageBorder border_of(const DeviceSpec& from, const DeviceSpec& to, int64_t beside, const CostModel& cost) {
  const bool leaves = from.node != to.node;
  return {cost.between(from, to, beside), sender_of(from, leaves), sender_of(to, leaves)};
}

// What is known of the devices of stages of equal numbers of devices, one after the other in each pipeline; nothing:
// all are alike, or not so.
struct StageDevices {
  std::vector<DeviceRates> rates = {};    // of the slowest of each
  std::vector<StageBorder> borders = {};  // of the slowest links
};
StageDevices devices_of_stages(const TaskLeaf& leaf, const std::vector<DeviceSpec>& devices, int64_t count,
                               int64_t virtual_stages, const CostModel& cost) {
  bool complete = true;
  const int64_t pipelines = product(leaf.nest, 0, leaf.outer(), complete);
  const int64_t there = std::ssize(devices) / std::max<int64_t>(1, pipelines * count);
  if (!cost.measured && !cost.has_unlike_cores() &&
      std::ranges::none_of(devices, [](const DeviceSpec& d) { return d.figures.known(); }))
    return {};
  if (!complete || virtual_stages > 1 || there * pipelines * count != std::ssize(devices)) return {};
  const std::vector<int32_t> order = likely_order(leaf, devices);
  const auto device = [&](int64_t s, int64_t p, int64_t k) -> const DeviceSpec& {
    return devices[order[(p * count + s) * there + k]];
  };
  StageDevices out;
  for (int64_t s = 0; s < count; ++s)
    for (int64_t p = 0; p < pipelines; ++p) {
      int64_t beside = 0;
      for (int64_t k = 0; k < there; ++k) beside += device(s, p, k).node == device(s, p, 0).node ? 1 : 0;
      for (int64_t k = 0; k < there; ++k) {
        const DeviceRates mine = cost.rates_of(device(s, p, k));
        if (std::ssize(out.rates) == s) out.rates.push_back(mine);
        out.rates.back() = slower(out.rates.back(), mine);
        if (s + 1 == count) continue;
        const StageBorder border = border_of(device(s, p, k), device(s + 1, p, k), beside, cost);
        if (std::ssize(out.borders) == s) out.borders.push_back(border);
        if (link_seconds(1, 0, border.link) > link_seconds(1, 0, out.borders.back().link)) out.borders.back() = border;
      }
    }
  return out;
}

// Where the schedule is one that the clock walks.
std::optional<StageClock> clock_of(const Scope& pipeline, StageDevices known, int64_t devices, int64_t count,
                                   int64_t micro_batches, CutsBy cuts) {
  if (known.rates.empty() || count < 2 || micro_batches < 2) return std::nullopt;
  const ScheduleText schedule = read_schedule(pipeline.schedule);
  if (!schedule.name.empty() && schedule.name != "1f1b") return std::nullopt;
  StageClock out{.micro_batches = static_cast<int>(micro_batches),
                 .senders = static_cast<double>(devices) / static_cast<double>(count),
                 .borders = std::move(known.borders)};
  out.warmups = {usual_warmup(static_cast<int>(count), out.micro_batches)};
  std::vector<int>& usual = out.warmups[0];
  for (size_t s = 0; s < schedule.warmup.size() && s < usual.size(); ++s)
    usual[s] = static_cast<int>(std::min(schedule.warmup[s], micro_batches));
  if (!schedule.warmup.empty() || cuts == CutsBy::kClock) return out;
  out.finds_warmup = true;
  std::vector<int> deeper = usual;  // as a plan may have it (compile/deeper_warmup.h)
  for (size_t s = 0; s < deeper.size(); ++s)
    deeper[s] = std::min(out.micro_batches, usual[s] + static_cast<int>(deeper.size() - 1 - s));
  if (deeper != usual) out.warmups.push_back(std::move(deeper));
  return out;
}

// In how many the batch goes through a stage.
double parts_of(int64_t devices, int64_t count, int64_t micro_batches) {
  const auto batch = static_cast<double>(std::max<int64_t>(1, micro_batches));
  return batch * std::max(1.0, static_cast<double>(devices) / static_cast<double>(std::max<int64_t>(1, count)));
}

// The stages of these ops where they begin at `begins`, of which the first ones are taken.
std::vector<int32_t> stages_from(std::span<const int64_t>& begins, const std::vector<OpId>& ops, int64_t stages) {
  std::vector<int32_t> out;
  int32_t stage = 0;
  for (const OpId op : ops) {
    while (stage + 1 < stages && !begins.empty() && begins[0] == op) ++stage, begins = begins.subspan(1);
    out.push_back(stage);
  }
  if (stage + 1 != stages || ops.empty() || out.front() != 0)
    throw invalid("{} of {} stages begin at one of {} ops in the order that is given", stage + 1, stages, ops.size());
  return out;
}

}  // namespace

TaskStages find_stages(const Graph& graph, const TaskLeaves& leaves, const TaskPipeline& pipeline,
                       const std::vector<DeviceSpec>& devices, const CostModel& cost, bool exact,
                       const StageLimits& limits) {
  const auto& siblings = pipeline.siblings;
  const bool one = siblings.size() < 2;  // which has the ops outside, too
  std::vector<Part> parts(one ? 1 : siblings.size(),
                          Part{.leaf = &leaves.list[pipeline.leaf], .ops = {}, .written = {}});
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    const TaskLeaf& leaf = leaves.of(graph.ops[i]);
    if (!one && leaf.pipeline == SIZE_MAX) continue;
    Part& part =
        one ? parts[0] : parts[std::find(siblings.begin(), siblings.end(), leaf.ids[leaf.pipeline]) - siblings.begin()];
    part.ops.push_back(static_cast<OpId>(i));
    if (!one) part.leaf = &leaf;
    if (leaf.stage != SIZE_MAX)
      part.written.try_emplace(leaf.ids[leaf.stage], static_cast<int32_t>(part.written.size()));
  }
  const int64_t virtual_stages = pipeline.scope.virtual_stages / std::ssize(parts);
  const int64_t micro_batches =
      pipeline.scope.micro_batches > 0 ? pipeline.scope.micro_batches : graph.training.accumulation;
  int64_t count = pipeline.scope.count;
  for (const Part& part : parts) {
    const int64_t there = std::ssize(part.written);
    if (there == 0) continue;
    if (there % virtual_stages || (count && there != count * virtual_stages))
      refuse(*part.leaf, fmt::format("has {} stages written in it, expected {} stages of {} virtual stage(s) each{}{}",
                                     there, count ? fmt::format("{}", count) : "a number of", virtual_stages,
                                     one ? "" : ", as the pipeline beside it has", empty_stages(graph)));
    count = there / virtual_stages;
  }
  if (!count) count = stages_left(*parts[0].leaf, std::ssize(devices));
  const int64_t own = count * virtual_stages, stages = own * std::ssize(parts);
  TaskStages out{.of_op = std::vector<int32_t>(graph.ops.size(), -1),
                 .mesh = {},
                 .meshes = static_cast<size_t>(count),
                 .begins = {}};
  std::span<const int64_t> begins(limits.begins.data(), limits.begins.size());
  for (size_t k = 0; k < parts.size(); ++k) {
    const Part& part = parts[k];
    std::vector<int32_t> cut(part.ops.size(), -1);
    if (part.written.empty()) {
      if (own > (1 << 16)) refuse(*part.leaf, "wants too many stages");
      try {
        const StageDevices known = devices_of_stages(*part.leaf, devices, count, virtual_stages, cost);
        const auto clock = limits.cuts == CutsBy::kWork ? std::nullopt
                                                        : clock_of(pipeline.scope, known, std::ssize(devices), count,
                                                                   micro_batches, limits.cuts);
        const double pieces = clock ? parts_of(std::ssize(devices), count, micro_batches) : 1;
        const auto cut_by = [&](const StageRooms& rooms) {
          return cut_stages(graph, part.ops, own, virtual_stages, cost, exact, known.rates, rooms, pieces, clock);
        };
        cut = limits.begins.empty() ? cut_by({}) : stages_from(begins, part.ops, own);
        if (limits.begins.empty() && std::ssize(limits.rooms) == stages) {
          const auto mine = limits.rooms.begin() + own * static_cast<int64_t>(k);
          std::vector<int32_t> roomy = cut_by({mine, mine + own});
          out.by_room |= roomy != cut;
          cut = std::move(roomy);
        }
      } catch (const Error& e) {
        throw invalid("scope '{}' ({}): {}", brief(to_string(part.leaf->nest)), part.leaf->path, e.message())
            .at_scope(part.leaf->path);
      }
    }
    if (part.written.empty())
      for (size_t i = 1; i < cut.size(); ++i)
        if (cut[i] != cut[i - 1]) out.begins.push_back(part.ops[i]);
    for (size_t i = 0; i < cut.size(); ++i) {
      const auto op = static_cast<size_t>(part.ops[i]);
      const TaskLeaf& leaf = leaves.of(graph.ops[op]);
      const int32_t stage = leaf.stage != SIZE_MAX ? part.written.at(leaf.ids[leaf.stage]) : cut[i];
      if (stage >= 0) out.of_op[op] = static_cast<int32_t>(own * static_cast<int64_t>(k)) + stage;
    }
  }
  if (!begins.empty())
    throw invalid("{} ops are given that stages begin at, the {} stages have {}", limits.begins.size(), stages,
                  limits.begins.size() - begins.size());
  join(graph, out.of_op);
  check_order(graph, out.of_op);
  const PipelineSchedule shape{.name = {},
                               .shape = {static_cast<int>(count), 1, static_cast<int>(pipeline.scope.virtual_stages)},
                               .placement = schedule_rule(pipeline.scope.schedule).placement,
                               .split_backward = false,
                               .devices = {}};
  for (int v = 0; v < static_cast<int>(stages); ++v)
    out.mesh.push_back(site_at(shape, WorkKind::kForward, v, 0).device);
  return out;
}

void write_stages(const TaskStages& stages, Graph& graph, TaskLeaves& leaves, TaskGraphs& tasks) {
  std::map<std::pair<ScopeId, int32_t>, ScopeId> made;
  tasks.mesh_of_stage = stages.mesh;
  tasks.stage_of_scope.assign(graph.scopes.size(), -1);
  tasks.written.resize(graph.scopes.size());
  std::iota(tasks.written.begin(), tasks.written.end(), 0);
  graph.scopes.reserve(2 * graph.scopes.size() + stages.mesh.size());
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    Op& op = graph.ops[i];
    op.stage = stages.of_op[i];
    const size_t leaf = leaves.of_scope.at(op.scope);
    if (leaves.list[leaf].stage == SIZE_MAX) {
      const auto [at, fresh] = made.try_emplace({op.scope, op.stage}, static_cast<ScopeId>(graph.scopes.size()));
      if (fresh) {
        Scope scope;
        scope.kind = ScopeKind::kStage;
        scope.parent = op.scope;
        graph.scopes.push_back(std::move(scope));
        tasks.stage_of_scope.push_back(op.stage);
        tasks.written.push_back(op.scope);
        leaves.of_scope.add(at->second, leaf);
      }
      op.scope = at->second;
    }
    tasks.stage_of_scope[op.scope] = op.stage;
  }
}

}  // namespace whale
