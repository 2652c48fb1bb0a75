#include "simulate/clock.h"

#include <algorithm>
#include <array>
#include <map>

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

// One meeting of a group's members.
struct Meeting {
  std::vector<std::pair<int32_t, double>> there;  // device, when
  double longest = 0;
};

class Walk {
 public:
  Walk(const Plan& plan, const Entry& entry, const Duration& duration)
      : plan_(plan), duration_(duration), devices_(entry.rows.size()) {
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
      const double seconds = duration_(list[k], static_cast<int32_t>(d));
      if (list[k].kind != InstructionKind::kCollective) {
        finish(d, k, ready, ready + seconds);
        return true;
      }
      if (meet(d, k, ready, seconds)) return true;
    }
    if (!all) return false;
    const double joined = *std::max_element(s.free.begin(), s.free.end());
    s.free.fill(joined);
    ++s.row;
    waiting_.erase(d);
    enter_row(d);
    return true;
  }

  bool meet(size_t d, size_t k, double ready, double seconds) {
    const int32_t group = devices_[d].segment().instructions[k].ref;
    if (const auto at = waiting_.find(d); at != waiting_.end() && at->second == k) return false;  // there already
    const int64_t number = devices_[d].arrivals[group]++;
    Meeting& meeting = meetings_[{group, number}];
    meeting.there.emplace_back(static_cast<int32_t>(d), ready);
    meeting.longest = std::max(meeting.longest, seconds);
    waiting_[d] = k;
    if (meeting.there.size() < plan_.groups[static_cast<size_t>(group)].devices.size()) return false;
    double start = 0;
    for (const auto& [device, when] : meeting.there) start = std::max(start, when);
    for (const auto& [device, when] : meeting.there) {
      const auto member = static_cast<size_t>(device);
      finish(member, waiting_.at(member), start, start + meeting.longest);
      waiting_.erase(member);
    }
    meetings_.erase({group, number});
    return true;
  }

  const Plan& plan_;
  const Duration& duration_;
  std::vector<DeviceState> devices_;
  std::map<std::pair<int32_t, int64_t>, Meeting> meetings_;
  std::map<size_t, size_t> waiting_;  // device -> its instruction that waits for peers
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
