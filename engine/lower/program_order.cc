// The segments of a program and the order in which they run: micro-batches one after another, or a pipeline's items.
#include <algorithm>
#include <numeric>

#include "base/watch.h"
#include "lower/program.h"
#include "plan/limits.h"

namespace whale {
namespace {

// While rows are added.
struct Additions {
  std::map<std::pair<int32_t, std::vector<TreeStep>>, int32_t> segments;  // (what makes the values, steps)
  std::map<SegmentKey, size_t> leaves;
};

int32_t add_segment(ProgramOrder& out, SegmentPlan segment) {
  out.segments.push_back(std::move(segment));
  return static_cast<int32_t>(out.segments.size()) - 1;
}

void add_whole(ProgramOrder& out, Region region, const char* name) {
  out.rows.push_back(
      {.segment = add_segment(out, {.name = name, .region = region, .key = {}, .steps = {}}), .whole = true});
}

// `order`: micro-batches as the maker has them.
void plan_sums(const Lowering& low, const SegmentKey& maker, const std::vector<int64_t>& order, ProgramOrder& out) {
  if (low.lg.exact) out.trees[maker] = {plan_tree(low.lg.micro_batches, order), out.segments.size() - 1};
}

// A row of the body; in exact mode behind it the one that adds what it makes to sums.
void add_row(const Lowering& low, const Place& place, const ScheduleRow& row, Additions& added, ProgramOrder& out) {
  out.rows.push_back(row);
  const SegmentPlan& base = out.segments[row.segment];
  const SegmentKey maker{base.key.stage, base.key.kind, -1};
  const auto tree = out.trees.find(maker);
  if (tree == out.trees.end() || low.trees(place.mesh, maker).empty()) return;
  const std::vector<TreeStep>& steps = tree->second.plan.steps[added.leaves[maker]++];
  const auto [at, fresh] = added.segments.try_emplace({row.segment, steps}, 0);
  if (fresh) {
    std::string name = base.name + ".sum";
    for (const TreeStep& s : steps) name += fmt::format(".{}", s.to);
    at->second = add_segment(out, {std::move(name), Region::kBody, base.key, row.segment, steps});
  }
  out.rows.push_back(row);
  out.rows.back().segment = at->second;
  out.rows.back().whole = true;  // nothing here follows the samples
}

std::string name_for_size(const Lowering& low, Place place, int32_t micro_batch, const std::string& name) {
  place.micro_batch = micro_batch;
  return fmt::format("{}/{}", name, low.local.samples(1, place).size());
}

// One micro-batch: the body alone, which then holds all three, so that updates and communication overlap the backward
// pass.
ProgramOrder in_a_row(const Lowering& low, const Place& place) {
  ProgramOrder out;
  Additions added;
  const Interval mine = low.local.micro_batches(place);
  if (low.timed()) {
    add_whole(out, Region::kPrologue, "prologue");
    std::vector<int64_t> order(static_cast<size_t>(mine.size()));
    std::iota(order.begin(), order.end(), mine.begin);
    plan_sums(low, {}, order, out);
  }
  std::map<int32_t, int32_t> segment_of;  // by the first micro-batch of a size
  for (const int64_t u : watched(mine.begin, mine.end)) {
    const int32_t first = low.size_class[u];
    const auto [at, fresh] = segment_of.try_emplace(first, 0);
    if (fresh) {
      std::string name = !low.timed()             ? "step"
                         : segment_of.size() == 1 ? "body"
                                                  : name_for_size(low, place, first, "body");
      at->second =
          add_segment(out, {.name = std::move(name), .region = Region::kBody, .key = {-1, {}, first}, .steps = {}});
    }
    add_row(low, place, {.segment = at->second, .micro_batch = static_cast<int32_t>(u)}, added, out);
  }
  if (low.timed()) add_whole(out, Region::kEpilogue, "epilogue");
  return out;
}

// Values that pass from one virtual stage of the devices to another.
bool between_virtual_stages(const Lowering& low, const Place& place) {
  const Graph& g = low.lg.graph;
  const Site at{.low = low, .place = place, .key = {}};
  for (const OpId i : at.ops()) {
    const Op& op = g.op(i);
    if (op.code == OpCode::k_transfer || !at.here(op.stage)) continue;
    for (const TensorId id : op.inputs)
      if (id != kNone && low.lg.stage(id) != op.stage && low.lg.time_varies(id) &&
          g.tensor(id).kind == TensorKind::kValue)
        return true;
  }
  return false;
}

ProgramOrder pipelined(const Lowering& low, const Place& place) {
  ProgramOrder out;
  const Interval mine = low.local.micro_batches(place);
  const PipelineSchedule& pipeline = low.schedules.at(mine.size());
  constexpr const char* kNames[] = {"forward", "backward", "weight"};
  const auto& order = pipeline.devices[place.mesh];
  const bool between = between_virtual_stages(low, place);
  const std::map<int, int64_t> versions = alive_at_once(order, false);
  if (between && !order.empty()) out.of_all_stages = alive_at_once(order, true).at(0);
  for (const auto& [virtual_stage, n] : versions) check_versions(n, pipeline.name);
  check_versions(between ? mine.size() : 1, pipeline.name);
  add_whole(out, Region::kPrologue, "prologue");
  std::map<SegmentKey, int32_t> segments;
  // In the order of the model, so that a value's buffer is known before it is read.
  for (size_t k = 0; k < 3; ++k)
    for (int32_t stage = 0; stage < static_cast<int32_t>(low.lg.tasks.stages()); ++stage) {
      if (low.lg.tasks.mesh_of_stage[stage] != place.mesh) continue;
      const auto kind = static_cast<WorkKind>(k);
      for (const int64_t u : watched(mine.begin, mine.end)) {
        const int32_t first = low.size_class[u];
        const SegmentKey key{stage, kind, first};
        if (segments.contains(key) || (kind == WorkKind::kWeight && !pipeline.split_backward)) continue;
        std::string name = fmt::format("{}.{}", kNames[k], stage);
        if (first != low.size_class[0]) name = name_for_size(low, place, first, name);
        segments[key] = add_segment(out, {.name = std::move(name), .region = Region::kBody, .key = key, .steps = {}});
      }
      std::vector<int64_t> done;
      for (const WorkItem& item : watched(order))
        if (item.kind == kind && model_stage(pipeline, place.mesh, item.virtual_stage) == stage)
          done.push_back(mine.begin + item.micro_batch);
      plan_sums(low, {stage, kind, -1}, done, out);
    }
  Additions added;
  for (const WorkItem& item : watched(order)) {
    const auto u = static_cast<int32_t>(mine.begin) + item.micro_batch;
    const int32_t segment =
        segments.at({model_stage(pipeline, place.mesh, item.virtual_stage), item.kind, low.size_class[u]});
    const int64_t n = out.versions[segment] = versions.at(item.virtual_stage);
    const int64_t version = between ? item.micro_batch : item.micro_batch % n;
    add_row(low, place, {.segment = segment, .micro_batch = u, .version = static_cast<int32_t>(version)}, added, out);
  }
  add_whole(out, Region::kEpilogue, "epilogue");
  return out;
}

}  // namespace

ProgramOrder order_of(const Lowering& low, const Place& place) {
  return low.schedule ? pipelined(low, place) : in_a_row(low, place);
}

}  // namespace whale
