#include "schedule/schedule.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "base/watch.h"

namespace whale {

#define WHALE_SCHEDULE(name, function, least, most, placement, split, warmup, doc) \
  WorkOrders function(const PipelineShape&);
#include "schedule/schedules.def"
#undef WHALE_SCHEDULE

std::span<const ScheduleRule> schedule_rules() {
  static constexpr ScheduleRule kRules[] = {
#define WHALE_SCHEDULE(name, function, least, most, placement, split, warmup, doc) \
  {name, function, least, most, VirtualStagePlacement::placement, split, warmup, doc},
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

ScheduleText read_schedule(std::string_view text) {
  const size_t open = std::min(text.find('['), text.size());
  const std::string_view name = text.substr(0, open);
  const auto rules = schedule_rules();
  if (!name.empty() && std::ranges::none_of(rules, [&](const ScheduleRule& rule) { return rule.name == name; }))
    throw invalid("there is no pipeline schedule '{}', expected one of {}", brief(name), schedule_names());
  ScheduleText out{.name = std::string(name), .warmup = {}};
  if (open == text.size()) return out;
  constexpr int64_t kMost = int64_t{1} << 30;
  for (size_t at = open + 1; at <= text.size();) {
    const size_t end = std::min(text.find_first_of(",]", at), text.size());
    const std::optional<int64_t> depth = whole_number(text.substr(at, end - at));
    const bool last = end + 1 >= text.size();
    if (!depth || *depth < 1 || *depth > kMost || end == text.size() || (text[end] == ']') != last)
      throw invalid("'{}', expected whole numbers from 1 to {} in brackets, such as [3,2,1]", brief(text.substr(open)),
                    kMost);
    out.warmup.push_back(*depth);
    at = end + 1;
    if (last) break;
  }
  return out;
}

std::string to_string(const ScheduleText& schedule) {
  return schedule.warmup.empty() ? schedule.name
                                 : fmt::format("{}[{}]", schedule.name, fmt::join(schedule.warmup, ","));
}

const ScheduleRule& schedule_rule(std::string_view text) {
  const std::string name = read_schedule(text).name;
  for (const ScheduleRule& rule : schedule_rules())
    if (rule.name == name) return rule;
  throw invalid("there is no pipeline schedule '{}', expected one of {}", brief(text), schedule_names());
}

void check_warmup(const ScheduleText& schedule, int64_t stages) {
  const std::vector<int64_t>& depths = schedule.warmup;
  if (depths.empty()) return;
  const auto bad = [&](const std::string& what) {
    return invalid("warmup [{}]: {}", brief(fmt::format("{}", fmt::join(depths, ","))), what);
  };
  if (!schedule_rule(schedule.name).takes_warmup) {
    std::string takers;
    for (const ScheduleRule& rule : schedule_rules())
      if (rule.takes_warmup) takers += fmt::format("{}{}", takers.empty() ? "" : " or ", rule.name);
    throw bad(
        fmt::format("schedule '{}' has a warm-up of its own; leave warmup out, or take {}", schedule.name, takers));
  }
  if (std::ssize(depths) != stages)
    throw bad(fmt::format("{} depths for {} stages; give one for each stage", depths.size(), stages));
  for (size_t s = 1; s < depths.size(); ++s)
    if (depths[s] > depths[s - 1])
      throw bad(fmt::format(
          "stage {} would wait for forward pass {} of stage {} before its first backward pass, and stage {} for that "
          "backward pass before it runs it; give depths that do not rise from stage to stage",
          s, depths[s] - 1, s - 1, s - 1));
}

PipelineSchedule make_schedule(std::string_view text, int stages, int micro_batches, int virtual_stages) {
  const ScheduleText asked = read_schedule(text);
  const std::string& name = asked.name;
  const ScheduleRule& rule = schedule_rule(text);
  if (stages < 1) throw invalid("schedule '{}' has {} stages, expected at least 1", name, stages);
  if (micro_batches < 1) throw invalid("schedule '{}' has {} micro-batches, expected at least 1", name, micro_batches);
  if (virtual_stages == 0) virtual_stages = rule.min_virtual_stages;
  if (virtual_stages < rule.min_virtual_stages || virtual_stages > rule.max_virtual_stages) {
    const std::string wanted = rule.min_virtual_stages == rule.max_virtual_stages
                                   ? fmt::format("{}", rule.min_virtual_stages)
                                   : fmt::format("at least {}", rule.min_virtual_stages);
    throw invalid("schedule '{}' has {} virtual stages per device, expected {}", name, virtual_stages, wanted);
  }
  check_warmup(asked, stages);
  std::vector<int> warmup;
  for (const int64_t depth : asked.warmup) warmup.push_back(static_cast<int>(std::min<int64_t>(depth, micro_batches)));
  PipelineSchedule schedule{.name = std::string(text),
                            .shape = {stages, micro_batches, virtual_stages, std::move(warmup)},
                            .placement = rule.placement,
                            .split_backward = rule.split_backward,
                            .devices = {}};
  schedule.devices = rule.orders(schedule.shape);
  return schedule;
}

int model_stage(const PipelineSchedule& schedule, int device, int virtual_stage) {
  const int p = schedule.shape.stages;
  const bool back = schedule.placement == VirtualStagePlacement::kVee && virtual_stage % 2 == 1;
  return virtual_stage * p + (back ? p - 1 - device : device);
}

WorkSite site_at(const PipelineSchedule& schedule, WorkKind kind, int model_stage, int micro_batch) {
  const int p = schedule.shape.stages, virtual_stage = model_stage / p, at = model_stage % p;
  const bool back = schedule.placement == VirtualStagePlacement::kVee && virtual_stage % 2 == 1;
  return {back ? p - 1 - at : at, {kind, virtual_stage, micro_batch}};
}

std::optional<WorkSite> receiver_of(const PipelineSchedule& schedule, const WorkSite& site) {
  const WorkItem& item = site.item;
  if (item.kind == WorkKind::kWeight) return std::nullopt;
  const int to = model_stage(schedule, site.device, item.virtual_stage) + (item.kind == WorkKind::kForward ? 1 : -1);
  if (to < 0 || to >= schedule.shape.total_stages()) return std::nullopt;
  return site_at(schedule, item.kind, to, item.micro_batch);
}

WorkNeeds needs_of(const PipelineSchedule& schedule, const WorkSite& site) {
  const WorkItem& item = site.item;
  const int stage = model_stage(schedule, site.device, item.virtual_stage);
  WorkNeeds needs;
  if (item.kind == WorkKind::kForward) {
    if (stage > 0) needs.push_back(site_at(schedule, WorkKind::kForward, stage - 1, item.micro_batch));
    return needs;
  }
  // What this device kept from its own earlier pass.
  const WorkKind before = item.kind == WorkKind::kBackward ? WorkKind::kForward : WorkKind::kBackward;
  needs.push_back({site.device, {before, item.virtual_stage, item.micro_batch}});
  if (item.kind == WorkKind::kBackward && stage + 1 < schedule.shape.total_stages())
    needs.push_back(site_at(schedule, WorkKind::kBackward, stage + 1, item.micro_batch));
  return needs;
}

std::map<int, int64_t> alive_at_once(const std::vector<WorkItem>& order, bool between) {
  struct VirtualStage {
    std::vector<int> left;  // [micro-batch]: items to come
    std::vector<char> alive;
    size_t first = SIZE_MAX, last = 0;  // that are alive; SIZE_MAX: none is
    int64_t most = 0;
  };
  std::map<int, VirtualStage> stages;
  const auto stage_of = [&](const WorkItem& item) -> VirtualStage& { return stages[between ? 0 : item.virtual_stage]; };
  for (const WorkItem& item : watched(order)) {
    VirtualStage& mine = stage_of(item);
    if (const auto u = static_cast<size_t>(item.micro_batch); u >= mine.left.size()) mine.left.resize(u + 1);
    ++mine.left[item.micro_batch];
  }
  for (auto& [_, mine] : stages) mine.alive.resize(mine.left.size());
  for (const WorkItem& item : watched(order)) {
    VirtualStage& mine = stage_of(item);
    const auto u = static_cast<size_t>(item.micro_batch);
    mine.alive[u] = 1;
    mine.last = mine.first == SIZE_MAX ? u : std::max(mine.last, u);
    mine.first = std::min(mine.first, u);
    mine.most = std::max(mine.most, static_cast<int64_t>(mine.last - mine.first) + 1);
    if (--mine.left[u] > 0) continue;
    mine.alive[u] = 0;
    while (mine.first < mine.last && !mine.alive[mine.first]) ++mine.first;
    while (mine.last > mine.first && !mine.alive[mine.last]) --mine.last;
    if (!mine.alive[mine.first]) mine.first = SIZE_MAX;
  }
  std::map<int, int64_t> versions;
  for (const auto& [virtual_stage, mine] : stages) versions[virtual_stage] = mine.most;
  return versions;
}

std::string to_string(const PipelineSchedule& schedule, const WorkItem& item) {
  const char letter = "FBW"[static_cast<int>(item.kind)];
  if (schedule.shape.virtual_stages == 1) return fmt::format("{}{}", letter, item.micro_batch);
  return fmt::format("{}{}.{}", letter, item.micro_batch, item.virtual_stage);
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
