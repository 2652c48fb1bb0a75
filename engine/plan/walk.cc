#include "plan/walk.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/watch.h"
#include "plan/lives.h"

namespace whale {
namespace {

bool agrees(const Instruction& i) { return i.kind() == InstructionKind::kVote || i.kind() == InstructionKind::kCommit; }
bool communicates(const Instruction& i) { return i.group() != kNone || i.link() != kNone || agrees(i); }

std::vector<PlanStep> steps_of(const Segment& s, Walked walked) {
  std::vector<PlanStep> out;
  const RowClock clock = clock_of(s);
  std::array<std::vector<std::pair<int64_t, int32_t>>, kQueues> of;  // instructions and their steps
  std::array<std::array<int32_t, kQueues>, kQueues> known;           // what the last step of each queue needed
  for (auto& needs : known) needs.fill(kNone);
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    const Instruction& i = s.instructions[k];
    if (walked == Walked::kCommunication && !communicates(i)) continue;
    PlanStep step{static_cast<int32_t>(k), {}};
    for (size_t t = 0; t < kQueues; ++t) {
      const auto end =
          std::partition_point(of[t].begin(), of[t].end(), [&](auto& x) { return x.first <= clock.begun(k)[t]; });
      step.needs[t] = end == of[t].begin() || static_cast<size_t>(i.queue) == t ? kNone : std::prev(end)->second;
      int32_t& before = known[static_cast<size_t>(i.queue)][t];
      if (step.needs[t] == before)
        step.needs[t] = kNone;
      else
        before = step.needs[t];
    }
    of[static_cast<size_t>(i.queue)].emplace_back(k, static_cast<int32_t>(out.size()));
    out.push_back(step);
  }
  return out;
}

// Puts devices on a clock.
struct Walker {
  const Entries& e;
  const EntryPeers& peers;
  const std::vector<int32_t>& classes;
  Clock& clock;
  std::map<std::tuple<size_t, int32_t>, size_t> places = {};              // by group and the first class in a part
  std::map<std::tuple<int32_t, int32_t, int32_t>, size_t> channels = {};  // by link and the classes at its ends

  // Of one device: where it meets others of each group, as which member; its messages of each link, sent and taken.
  struct Ends {
    std::vector<std::pair<size_t, size_t>> places;
    std::map<std::pair<int32_t, bool>, std::vector<size_t>> channels;
  };

  Ends ends_of(size_t device, const std::vector<LinkEnd>& links) {
    Ends ends;
    for (size_t g = 0; g < peers.parts.size(); ++g) {
      ends.places.emplace_back();
      if (peers.parts[g][device] < 0) continue;
      std::vector<int32_t> members;
      for (const int32_t d : e.plan.groups[g].parts[peers.parts[g][device]]) members.push_back(classes[d]);
      std::sort(members.begin(), members.end());
      members.erase(std::unique(members.begin(), members.end()), members.end());
      const auto [at, fresh] = places.try_emplace({g, members[0]});
      if (fresh) at->second = clock.place(members.size());
      const auto me = std::lower_bound(members.begin(), members.end(), classes[device]) - members.begin();
      ends.places.back() = {at->second, static_cast<size_t>(me)};
    }
    for (const LinkEnd& end : links)
      for (const int32_t peer : end.peers) {
        const auto link = static_cast<int32_t>(end.link);
        const int32_t mine = classes[device], other = classes[peer];
        const auto [at, fresh] = channels.try_emplace({link, end.sends ? mine : other, end.sends ? other : mine});
        if (fresh) at->second = clock.channel(e.entry.links[end.link].capacity);
        std::vector<size_t>& of_link = ends.channels[{link, end.sends}];
        if (of_link.empty() || of_link.back() != at->second) of_link.push_back(at->second);
      }
    return ends;
  }

  // The first and the last item.
  std::pair<Clock::Item, Clock::Item> add(const Instruction& i, const Ends& ends, size_t resource, double seconds) {
    if (i.group() != kNone) {
      const auto& [place, member] = ends.places[i.group()];
      const Clock::Item item = clock.meet(place, member, resource, seconds);
      return {item, item};
    }
    const bool sends = i.kind() == InstructionKind::kSend;
    const auto mine = ends.channels.find({i.link(), sends});
    if (mine == ends.channels.end()) {
      const Clock::Item item = clock.work(resource, seconds);
      return {item, item};
    }
    std::vector<Clock::Item> items;
    const double each = seconds / static_cast<double>(mine->second.size());
    for (const size_t c : mine->second)
      items.push_back(sends ? clock.send(c, resource, each) : clock.take(c, resource, each));
    return {items.front(), items.back()};
  }
};

// The last items of each queue up to a row.
struct RowEnd {
  std::array<Clock::Item, kQueues> last;
  RowEnd() { last.fill(kNone); }
};

std::array<bool, kQueues> used_by(const Program& p, const std::vector<std::vector<PlanStep>>& steps) {
  std::array<bool, kQueues> used{};
  for (size_t s = 0; s < steps.size(); ++s)
    for (const PlanStep& step : steps[s])
      used[static_cast<size_t>(p.segments[s].instructions[step.instruction].queue)] = true;
  return used;
}

}  // namespace

PlanSteps steps_of(const Entry& entry, Walked walked) {
  PlanSteps out;
  for (const Program& p : entry.programs) {
    out.emplace_back();
    for (const Segment& s : p.segments) out.back().push_back(steps_of(s, walked));
  }
  return out;
}

PlanWalk::PlanWalk(const Entries& e, const EntryPeers& peers, const std::vector<int32_t>& classes,
                   const PlanSteps& steps, Walked walked, const Duration& seconds, const Besides& besides)
    : e_(e) {
  static const RowWaits kNothing;
  const std::vector<std::vector<LinkEnd>> links = ends_of_links(e, peers.channels);
  Walker walker{e, peers, classes, clock_};
  const Clock::Item agreed = clock_.join({});  // all have voted
  int32_t known = 0;
  for (size_t d = 0; d < classes.size(); ++d) {
    if (classes[d] != known) continue;  // not the first of its class
    ++known;
    const auto device = static_cast<int32_t>(d);
    const Walker::Ends ends = walker.ends_of(d, links[d]);
    const Program& p = e.program(device);
    const auto& of_program = steps[e.entry.rows[d].program];
    std::array<size_t, kQueues> queues{};
    std::vector<size_t> joined;
    const std::array<bool, kQueues> used = used_by(p, of_program);
    for (size_t t = 0; t < kQueues; ++t)
      if (used[t]) joined.push_back(queues[t] = clock_.resource());
    const Clock::Rates* rates = besides.rates.empty() ? nullptr : besides.rates[d];
    const size_t machine = rates != nullptr ? clock_.machine(*rates) : 0;
    const bool joins = walked == Walked::kCommunication && joined.size() > 1;
    RowEnd before, now;  // all rows but the last, and all
    size_t last_base = 0;
    for (size_t row = 0; row < p.schedule.size(); ++row) {
      Watch::look();
      const int32_t segment = p.schedule[row].segment;
      const size_t base = visits_.size();
      RowEnd end = now;
      std::array<bool, kQueues> begun{};
      const int32_t list = p.schedule[row].waits;
      const RowWaits& waits = list == kNone ? kNothing : p.row_waits[list];
      auto wait = waits.begin();
      for (const PlanStep& step : of_program[segment]) {
        visits_.push_back({device, static_cast<int32_t>(row), segment, step.instruction});
        Visit& v = visits_.back();
        const Instruction& i = instruction(v);
        std::tie(v.first, v.last) =
            walker.add(i, ends, queues[static_cast<size_t>(i.queue)], seconds ? seconds(i, device) : 0);
        if (const int kind = rates != nullptr ? besides.kind(i, device) : kNone; kind != kNone)
          for (Clock::Item item = v.first; item <= v.last; ++item) clock_.runs_on(item, machine, kind);
        if (i.kind() == InstructionKind::kVote) clock_.after(agreed, v.last);
        if (i.kind() == InstructionKind::kCommit) clock_.after(v.first, agreed);
        for (const int32_t need : step.needs)
          if (need != kNone) clock_.after(v.first, visits_[base + static_cast<size_t>(need)].last);
        if (walked == Walked::kCommunication) continue;
        const auto queue = static_cast<size_t>(i.queue);
        for (size_t t = 0; t < kQueues && !begun[queue]; ++t)
          if (t != queue && before.last[t] != kNone) clock_.after(v.first, before.last[t]);
        begun[queue] = true;
        for (; wait != waits.end() && wait->at <= step.instruction; ++wait)
          clock_.after(v.first, visits_[last_base + static_cast<size_t>(wait->on.index)].last);
        end.last[queue] = v.last;
      }
      if (joins && visits_.size() > base) clock_.join(joined);
      before = now, now = end, last_base = base;
    }
  }
}

const Instruction& PlanWalk::instruction(const Visit& v) const {
  return e_.program(v.device).segments[v.segment].instructions[v.instruction];
}

PlanWalk::Standstill PlanWalk::run() {
  const Clock::Stuck stuck = clock_.run();
  return stuck.items.empty() ? Standstill{} : standstill(stuck);
}

PlanWalk::Standstill PlanWalk::standstill(const Clock::Stuck& stuck) const {
  // A collective is its first member's.
  std::vector<const Visit*> chain;
  for (const Clock::Item item : stuck.items) {
    const auto is_it = [&](const Visit& v) { return v.first <= item && item <= v.last; };
    if (const auto at = std::find_if(visits_.begin(), visits_.end(), is_it); at != visits_.end()) chain.push_back(&*at);
  }
  // Of each device that the circle goes through: what the one before waits for, and what that stands behind.
  struct Wait {
    const Visit *wanted, *held;
  };
  const auto changes = [](const Visit* a, const Visit* b) { return a->device != b->device; };
  if (const auto at = std::adjacent_find(chain.begin(), chain.end(), changes); stuck.circle && at != chain.end())
    std::rotate(chain.begin(), at + 1, chain.end());
  std::vector<Wait> waits;
  for (const Visit* v : chain) {
    if (waits.empty() || changes(waits.back().held, v)) waits.push_back({v, v});
    waits.back().held = v;
  }
  if (stuck.circle)
    std::rotate(waits.begin(), std::ranges::min_element(waits, {}, [](const Wait& w) { return w.held->device; }),
                waits.end());
  else
    waits = {waits.back()};
  const Visit& held = *waits.front().held;
  std::string text = fmt::format("device {} never leaves segment '{}' (row {} of its schedule): '{}'", held.device,
                                 e_.program(held.device).segments[held.segment].name, held.row, instruction(held).name);
  if (!stuck.circle)
    return {text + " waits for a message, free capacity or a member of its group that never comes", {held}};
  waits.push_back(waits.front());
  std::vector<Visit> of{held};
  for (size_t k = 1; k < waits.size(); ++k) {
    of.push_back(*waits[k].wanted);
    text += fmt::format(
        "{} waits for '{}' of device {}{}", k == 1 ? "" : ", which", instruction(*waits[k].wanted).name,
        waits[k].wanted->device,
        waits[k].wanted == waits[k].held ? "" : fmt::format(" behind '{}'", instruction(*waits[k].held).name));
  }
  return {std::move(text), std::move(of)};
}

}  // namespace whale
