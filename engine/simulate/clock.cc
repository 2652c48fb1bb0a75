#include "simulate/clock.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <tuple>

#include "base/error.h"

namespace whale {
namespace {

struct DeviceState {
  const Program* program = nullptr;
  size_t row = 0;
  std::array<size_t, kStreams> next{};  // instruction of this segment that the stream looks at
  std::array<double, kStreams> free{};  // when the stream is done with the one before
  std::vector<double> end;              // per instruction of this segment; negative: not done
  std::vector<Event> events;            // per instruction of all rows, in order
  size_t base = 0;                      // of this row in events
  std::map<int32_t, int64_t> arrivals;  // collectives reached so far, per group
  bool done() const { return row >= program->schedule.size(); }
  const Segment& segment() const { return program->segments[static_cast<size_t>(program->schedule[row].segment)]; }
};

// One meeting of the members of a part of a group.
struct Meeting {
  struct Member {
    size_t device, instruction;
    double ready;
  };
  std::vector<Member> there;
  double longest = 0;
};

// The messages of one channel so far: when each was complete, when each was taken.
struct Channel {
  std::vector<double> sent, taken;
};

class Walk {
 public:
  Walk(const Plan& plan, const Entry& entry, const Duration& duration)
      : plan_(plan), entry_(entry), duration_(duration), devices_(entry.rows.size()), channels_(entry.links.size()) {
    for (const Group& group : plan.groups) {
      parts_.emplace_back(devices_.size(), -1);
      for (size_t p = 0; p < group.parts.size(); ++p)
        for (const int32_t d : group.parts[p]) parts_.back()[static_cast<size_t>(d)] = static_cast<int32_t>(p);
    }
    for (size_t l = 0; l < entry.links.size(); ++l)
      for (const Transfer& t : entry.links[l].transfers) channels_[l][{t.from, t.to}];
    for (size_t d = 0; d < devices_.size(); ++d) {
      devices_[d].program = &entry.programs[static_cast<size_t>(entry.rows[d].program)];
      enter_row(d);
    }
  }

  std::vector<Event> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t d = 0; d < devices_.size(); ++d)
        while (advance(d)) moved = true;
    }
    std::vector<Event> all;
    for (size_t d = 0; d < devices_.size(); ++d) {
      if (!devices_[d].done())
        throw error(Code::kFailedPrecondition,
                    "device {} never leaves segment '{}': its streams or its peers wait for each other", d,
                    devices_[d].segment().name);
      all.insert(all.end(), devices_[d].events.begin(), devices_[d].events.end());
    }
    return all;
  }

 private:
  void enter_row(size_t d) {
    DeviceState& s = devices_[d];
    if (s.done()) return;
    s.base = s.events.size();
    s.next.fill(0);
    s.end.assign(s.segment().instructions.size(), -1);
    for (size_t k = 0; k < s.end.size(); ++k)
      s.events.push_back({static_cast<int32_t>(d), static_cast<int32_t>(s.row), s.program->schedule[s.row].segment,
                          static_cast<int32_t>(k), s.segment().instructions[k].stream, 0, 0});
  }

  void finish(size_t d, size_t k, double start, double end) {
    DeviceState& s = devices_[d];
    s.end[k] = end;
    s.events[s.base + k].start = start;
    s.events[s.base + k].end = end;
    const auto stream = static_cast<size_t>(s.segment().instructions[k].stream);
    s.free[stream] = end;
    s.next[stream] = k + 1;
  }

  // One step of one device: an instruction, or the join at the end of a segment.
  bool advance(size_t d) {
    DeviceState& s = devices_[d];
    if (s.done()) return false;
    const std::vector<Instruction>& list = s.segment().instructions;
    bool all = true;
    for (size_t t = 0; t < kStreams; ++t) {
      size_t& k = s.next[t];
      while (k < list.size() && static_cast<size_t>(list[k].stream) != t) ++k;
      if (k == list.size()) continue;
      all = false;
      double ready = s.free[t];
      bool waits = false;
      for (const WaitPoint& w : list[k].waits) {
        const double end = s.end[static_cast<size_t>(w.index)];
        waits |= end < 0;
        ready = std::max(ready, end);
      }
      if (waits) continue;
      if (take(d, k, ready, duration_(list[k], static_cast<int32_t>(d)))) return true;
    }
    if (!all) return false;
    const double joined = *std::max_element(s.free.begin(), s.free.end());
    s.free.fill(joined);
    ++s.row;
    enter_row(d);
    return true;
  }

  bool take(size_t d, size_t k, double ready, double seconds) {
    const Instruction& i = devices_[d].segment().instructions[k];
    if (i.kind == InstructionKind::kCollective) return meet(d, k, ready, seconds);
    const bool sends = i.kind == InstructionKind::kSend;
    if (sends || i.kind == InstructionKind::kReceive) {
      const auto link = static_cast<size_t>(i.ref), slots = static_cast<size_t>(entry_.links[link].slots);
      std::vector<Channel*> mine;
      for (auto& [ends, channel] : channels_[link])
        if ((sends ? ends.first : ends.second) == static_cast<int32_t>(d)) mine.push_back(&channel);
      for (const Channel* c : mine) {
        if (sends && c->sent.size() < slots) continue;
        // A send needs the slot of the message `slots` before it, a receive the message itself.
        const std::vector<double>& wanted = sends ? c->taken : c->sent;
        const size_t message = sends ? c->sent.size() - slots : c->taken.size();
        if (message >= wanted.size()) return false;
        ready = std::max(ready, wanted[message]);
      }
      for (Channel* c : mine) (sends ? c->sent : c->taken).push_back(ready + seconds);
    }
    finish(d, k, ready, ready + seconds);
    return true;
  }

  bool meet(size_t d, size_t k, double ready, double seconds) {
    if (!waiting_.emplace(d, k).second) return false;  // there already
    const int32_t group = devices_[d].segment().instructions[k].ref;
    const int32_t part = parts_[static_cast<size_t>(group)][d];
    if (part < 0) throw internal("device {} is no member of group {}", d, group);
    const std::tuple key{group, part, devices_[d].arrivals[group]++};
    Meeting& meeting = meetings_[key];
    meeting.there.push_back({d, k, ready});
    meeting.longest = std::max(meeting.longest, seconds);
    if (meeting.there.size() < plan_.groups[static_cast<size_t>(group)].parts[static_cast<size_t>(part)].size())
      return false;
    double start = 0;
    for (const auto& member : meeting.there) start = std::max(start, member.ready);
    for (const auto& member : meeting.there) {
      finish(member.device, member.instruction, start, start + meeting.longest);
      waiting_.erase({member.device, member.instruction});
    }
    meetings_.erase(key);
    return true;
  }

  const Plan& plan_;
  const Entry& entry_;
  const Duration& duration_;
  std::vector<DeviceState> devices_;
  std::vector<std::vector<int32_t>> parts_;                               // [group][device]
  std::vector<std::map<std::pair<int32_t, int32_t>, Channel>> channels_;  // per link, by (from, to)
  std::map<std::tuple<int32_t, int32_t, int64_t>, Meeting> meetings_;     // by group, part and number
  std::set<std::pair<size_t, size_t>> waiting_;                           // devices' instructions that wait for peers
};

}  // namespace

std::vector<Event> simulate(const Plan& plan, const Entry& entry, const Duration& duration) {
  return Walk(plan, entry, duration).run();
}

double makespan(const std::vector<Event>& events) {
  double end = 0;
  for (const Event& e : events) end = std::max(end, e.end);
  return end;
}

}  // namespace whale
