#include "run/place.h"

#include <algorithm>
#include <charconv>

#include "base/format.h"

namespace whale {
namespace {

// "forward.2/1" is of stage 2.
int stage_of(const std::string& segment) {
  for (const std::string_view known : {"forward.", "backward.", "weight."}) {
    if (!segment.starts_with(known)) continue;
    int stage = -1;
    std::from_chars(segment.data() + known.size(), segment.data() + segment.size(), stage);
    return stage;
  }
  return -1;
}

std::string name_of_buffers(const Program& program, const BufferIds& ids) {
  std::string first;
  int more = -1;
  for (const BufferId id : ids) {
    if (id == kNone) continue;
    if (++more == 0) first = program.buffers[id].name;
  }
  return more > 0 ? fmt::format("{} and {} more", first, more) : first;
}

std::vector<int32_t> devices_with(const Plan& plan, const Entry& entry, int32_t device, const Instruction& i) {
  std::vector<int32_t> out;
  if (i.group() != kNone)
    for (const std::vector<int32_t>& part : plan.groups[i.group()].parts)
      if (std::find(part.begin(), part.end(), device) != part.end()) out = part;
  if (i.link() != kNone)
    for (const Transfer& t : entry.links[i.link()].transfers) {
      const bool sends = i.kind() == InstructionKind::kSend;
      if ((sends ? t.from : t.to) == device) out.push_back(sends ? t.to : t.from);
    }
  return out;
}

}  // namespace

std::string numbers(std::vector<int32_t> list, const char* one, const char* several) {
  std::sort(list.begin(), list.end());
  list.erase(std::unique(list.begin(), list.end()), list.end());
  std::string text = list.size() == 1 ? one : several;
  for (size_t i = 0, last = 0; i < list.size(); i = last + 1) {
    for (last = i; last + 1 < list.size() && list[last + 1] == list[last] + 1;) ++last;
    text += fmt::format("{}{}", i == 0 ? " " : ",", list[i]);
    if (last > i) text += fmt::format("{}{}", last == i + 1 ? "," : "-", list[last]);
  }
  return text;
}

std::string have_not_begun(const std::vector<int32_t>& ranks, const World& world) {
  if (ranks.size() == 1) return text_of_rank(world, ranks[0]) + " has not begun";
  return numbers(ranks, "rank", "ranks") + " have not begun";
}

QueuePlace place_of(const Plan& plan, const Entry& entry, size_t device, const Recorder::Event& event) {
  const Program& program = entry.programs[entry.rows[device].program];
  const ScheduleRow& row = program.schedule[event.row];
  const Segment& segment = program.segments[row.segment];
  const Instruction& i = segment.instructions[event.instruction];
  QueuePlace place;
  place.instruction = &i;
  place.began = event.begin;
  place.of = i.link() != kNone                     ? entry.links[i.link()].name
             : i.group() != kNone || i.out.empty() ? name_of_buffers(program, i.in)
                                                   : name_of_buffers(program, i.out);
  Graph named;  // the source has the scopes before a strategy was laid over it
  named.scopes = plan.scopes;
  place.scope = named.scope_path(i.scope);
  place.stage = stage_of(segment.name);
  if (!row.whole && plan.micro_batches > 1) place.micro_batch = row.micro_batch;
  place.devices = devices_with(plan, entry, static_cast<int32_t>(device), i);
  return place;
}

const char* phase_text(Phase phase) {
  constexpr const char* kNames[] = {"forward", "backward", "update"};
  return kNames[static_cast<size_t>(phase)];
}

bool waits_for_others(const Instruction& i) {
  return i.group() != kNone || i.link() != kNone || i.kind() == InstructionKind::kCommit;
}

std::string place_text(const QueuePlace& place, const std::vector<int32_t>& ranks) {
  const Instruction& i = *place.instruction;
  if (i.kind() == InstructionKind::kCommit) return "the votes of all devices on the update";
  std::string text(i.verb());
  if (!place.of.empty()) text += " of " + place.of;
  if (!place.scope.empty()) text += " in " + place.scope;
  text += fmt::format(" ({}", phase_text(i.phase));
  if (place.stage >= 0) text += fmt::format(" of stage {}", place.stage);
  if (place.micro_batch >= 0) text += fmt::format(", micro-batch {}", place.micro_batch);
  text += ")";
  if (place.devices.empty()) return text;
  std::vector<int32_t> list;
  for (const int32_t d : place.devices) list.push_back(ranks.empty() ? d : ranks[d]);
  const char* join = i.group() != kNone ? "among" : i.kind() == InstructionKind::kSend ? "to" : "from";
  return text + fmt::format(" {} {}", join,
                            ranks.empty() ? numbers(list, "device", "devices") : numbers(list, "rank", "ranks"));
}

std::string joined_places(const std::vector<RankPlace>& by_rank) {
  std::string text;
  std::vector<bool> told(by_rank.size());
  for (size_t r = 0; r < by_rank.size(); ++r) {
    const RankPlace& place = by_rank[r];
    if (told[r] || place.what.empty()) continue;
    std::vector<int32_t> alike;
    for (size_t other = r; other < by_rank.size(); ++other)
      if (by_rank[other].waits == place.waits && by_rank[other].what == place.what) {
        told[other] = true;
        alike.push_back(static_cast<int32_t>(other));
      }
    const bool one = alike.size() == 1;
    const char* verb = place.waits ? one ? "waits for" : "wait for" : one ? "is" : "are";
    text += fmt::format("{}{} {} {}", text.empty() ? "" : "; ", numbers(alike, "rank", "ranks"), verb, place.what);
  }
  return text;
}

}  // namespace whale
