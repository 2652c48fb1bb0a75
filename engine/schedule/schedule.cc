#include "schedule/schedule.h"

#include <algorithm>

#include "base/error.h"
#include "base/watch.h"

namespace whale {

#define WHALE_SCHEDULE(name, function, least, most, placement, split, doc) DeviceOrders function(const PipelineShape&);
#include "schedule/schedules.def"
#undef WHALE_SCHEDULE

std::span<const ScheduleRule> schedule_rules() {
  static constexpr ScheduleRule kRules[] = {
#define WHALE_SCHEDULE(name, function, least, most, placement, split, doc) \
  {name, function, least, most, ChunkPlacement::placement, split, doc},
#include "schedule/schedules.def"
#undef WHALE_SCHEDULE
  };
  return kRules;
}

std::string schedule_names() {
  std::string names;
  for (const ScheduleRule& rule : schedule_rules()) names += fmt::format("{}{}", names.empty() ? "" : ", ", rule.name);
  return names;
}

const ScheduleRule& schedule_rule(std::string_view name) {
  for (const ScheduleRule& rule : schedule_rules())
    if (rule.name == name) return rule;
  throw invalid("there is no pipeline schedule '{}', expected one of {}", name, schedule_names());
}

PipelineSchedule make_schedule(std::string_view name, int stages, int micro_batches, int chunks) {
  const ScheduleRule& rule = schedule_rule(name);
  if (stages < 1) throw invalid("schedule '{}' has {} stages, expected at least 1", name, stages);
  if (micro_batches < 1) throw invalid("schedule '{}' has {} micro-batches, expected at least 1", name, micro_batches);
  if (chunks == 0) chunks = rule.min_chunks;
  if (chunks < rule.min_chunks || chunks > rule.max_chunks) {
    const std::string wanted = rule.min_chunks == rule.max_chunks ? fmt::format("{}", rule.min_chunks)
                                                                  : fmt::format("at least {}", rule.min_chunks);
    throw invalid("schedule '{}' has {} chunks per device, expected {}", name, chunks, wanted);
  }
  PipelineSchedule schedule{.name = std::string(name),
                            .shape = {stages, micro_batches, chunks},
                            .placement = rule.placement,
                            .split_backward = rule.split_backward,
                            .devices = {}};
  schedule.devices = rule.orders(schedule.shape);
  return schedule;
}

int virtual_stage(const PipelineSchedule& schedule, int device, int chunk) {
  const int p = schedule.shape.stages;
  const bool back = schedule.placement == ChunkPlacement::kVee && chunk % 2 == 1;
  return chunk * p + (back ? p - 1 - device : device);
}

WorkSite site_at(const PipelineSchedule& schedule, WorkKind kind, int virtual_stage, int micro_batch) {
  const int p = schedule.shape.stages, chunk = virtual_stage / p, at = virtual_stage % p;
  const bool back = schedule.placement == ChunkPlacement::kVee && chunk % 2 == 1;
  return {back ? p - 1 - at : at, {kind, chunk, micro_batch}};
}

std::optional<WorkSite> receiver_of(const PipelineSchedule& schedule, const WorkSite& site) {
  const WorkItem& item = site.item;
  if (item.kind == WorkKind::kWeight) return std::nullopt;
  const int to = virtual_stage(schedule, site.device, item.chunk) + (item.kind == WorkKind::kForward ? 1 : -1);
  if (to < 0 || to >= schedule.shape.virtual_stages()) return std::nullopt;
  return site_at(schedule, item.kind, to, item.micro_batch);
}

std::vector<WorkSite> needs_of(const PipelineSchedule& schedule, const WorkSite& site) {
  const WorkItem& item = site.item;
  const int stage = virtual_stage(schedule, site.device, item.chunk);
  std::vector<WorkSite> needs;
  if (item.kind == WorkKind::kForward) {
    if (stage > 0) needs.push_back(site_at(schedule, WorkKind::kForward, stage - 1, item.micro_batch));
    return needs;
  }
  // What this device kept from its own earlier pass.
  const WorkKind before = item.kind == WorkKind::kBackward ? WorkKind::kForward : WorkKind::kBackward;
  needs.push_back({site.device, {before, item.chunk, item.micro_batch}});
  if (item.kind == WorkKind::kBackward && stage + 1 < schedule.shape.virtual_stages())
    needs.push_back(site_at(schedule, WorkKind::kBackward, stage + 1, item.micro_batch));
  return needs;
}

std::map<int, int64_t> alive_at_once(const std::vector<WorkItem>& order, bool between) {
  const auto chunk_of = [&](const WorkItem& item) { return between ? 0 : item.chunk; };
  std::map<int, int64_t> slots;
  std::map<std::pair<int, int>, int> left;  // (chunk, u) -> items to come
  std::map<int, std::map<int, int>> alive;  // chunk -> u -> items to come
  for (const WorkItem& item : watched(order)) ++left[{chunk_of(item), item.micro_batch}];
  for (const WorkItem& item : watched(order)) {
    const int chunk = chunk_of(item);
    auto& mine_alive = alive[chunk];
    int& to_come = mine_alive.try_emplace(item.micro_batch, left[{chunk, item.micro_batch}]).first->second;
    const int64_t span = mine_alive.rbegin()->first - mine_alive.begin()->first + 1;
    slots[chunk] = std::max(slots[chunk], span);
    if (--to_come == 0) mine_alive.erase(item.micro_batch);
  }
  return slots;
}

std::string to_string(const PipelineSchedule& schedule, const WorkItem& item) {
  const char letter = "FBW"[static_cast<int>(item.kind)];
  if (schedule.shape.chunks == 1) return fmt::format("{}{}", letter, item.micro_batch);
  return fmt::format("{}{}.{}", letter, item.micro_batch, item.chunk);
}

std::string to_string(const PipelineSchedule& schedule) {
  std::string text;
  for (size_t d = 0; d < schedule.devices.size(); ++d) {
    text += fmt::format("{}:", d);
    for (const WorkItem& item : schedule.devices[d]) text += " " + to_string(schedule, item);
    text += "\n";
  }
  return text;
}

}  // namespace whale
