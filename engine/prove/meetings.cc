#include "prove/meetings.h"

#include <deque>
#include <map>

#include "base/watch.h"
#include "prove/between.h"

namespace whale::proof {
namespace {

// A collective, or an end of a message.
struct Event {
  int32_t instruction = 0;
  int32_t group = kNone, link = kNone;
  bool sends = false;
};
using Events = std::vector<std::vector<Event>>;  // of each segment

// Who is at one place one after the other is on one queue: else either may come first.
Events events_of(const Program& p, int32_t device) {
  Events out;
  std::map<std::array<int32_t, 3>, Queue> queues;
  for (size_t s = 0; s < p.segments.size(); ++s) {
    out.emplace_back();
    const auto& list = p.segments[s].instructions;
    for (size_t k = 0; k < list.size(); ++k) {
      const Instruction& i = list[k];
      if (i.group() == kNone && i.link() == kNone) continue;
      const bool sends = i.kind() == InstructionKind::kSend;
      if (queues.try_emplace({i.group(), i.link(), sends}, i.queue).first->second != i.queue) {
        int32_t row = 0;
        while (p.schedule[row].segment != static_cast<int32_t>(s) && row + 1 < std::ssize(p.schedule)) ++row;
        const char* what = i.group() == kNone ? "message of its link" : "collective of its group";
        throw Stopped{{true, fmt::format("it is on another queue than another {}: either may begin first", what)},
                      {device, row, static_cast<int32_t>(k)},
                      {}};
      }
      out.back().push_back({static_cast<int32_t>(k), i.group(), i.link(), sends});
    }
  }
  return out;
}

class Meetings {
 public:
  Meetings(const Plan& plan, const Entry& entry, const Symmetry& symmetry)
      : plan_(plan), entry_(entry), symmetry_(symmetry), places_(entry.rows.size()), peers_(entry.links.size()) {
    std::map<int32_t, Events> events;
    for (const DeviceRow& row : entry.rows) {
      if (!symmetry.walked(row.device)) continue;
      const Program& p = entry.programs[row.program];
      if (!events_.contains(row.program)) events_.emplace(row.program, events_of(p, row.device));
    }
    for (size_t g = 0; g < plan.groups.size(); ++g) {
      part_of_.emplace_back(entry.rows.size(), kNone);
      for (const auto& part : plan.groups[g].parts) {
        for (const int32_t d : part) part_of_.back()[d] = static_cast<int32_t>(parts_.size());
        parts_.push_back({.awaited = std::ranges::count_if(part, [&](int32_t d) { return symmetry.walked(d); })});
        for (const int32_t d : part)
          if (symmetry.walked(d)) parts_.back().members.push_back(d);
      }
    }
    for (size_t l = 0; l < entry.links.size(); ++l)
      for (const Transfer& t : entry.links[l].transfers) {
        const auto [at, fresh] =
            numbers_.try_emplace({static_cast<int32_t>(l), t.from, t.to}, static_cast<int32_t>(channels_.size()));
        if (!fresh) continue;
        channels_.emplace_back();
        peers_[l][t.from].sends.push_back(at->second);
        peers_[l][t.to].receives.push_back(at->second);
      }
  }

  std::optional<Stopped> run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (int32_t d = 0; d < std::ssize(places_); ++d)
        while (symmetry_.walked(d) && step(d)) moved = true;
    }
    for (int32_t d = 0; d < std::ssize(places_); ++d)
      if (symmetry_.walked(d) && !ended(d))
        return Stopped{{false, "an order of instructions in which devices do not wait for each other"},
                       {d, places_[d].row, event(d).instruction},
                       {}};
    return {};
  }

 private:
  struct Where {
    int32_t row = 0;
    size_t event = 0;
    bool waits = false;  // in a meeting
  };
  struct Part {
    std::vector<int32_t> members = {};  // that are walked
    int64_t awaited = 0, arrived = 0;
    int64_t micro_batch = 0;  // of those who have arrived
  };
  struct Ends {
    std::vector<int32_t> sends, receives;  // channels
  };

  const DeviceRow& row(int32_t d) const { return entry_.rows[d]; }
  const Program& program(int32_t d) const { return entry_.programs[row(d).program]; }
  bool ended(int32_t d) const { return places_[d].row >= std::ssize(program(d).schedule); }
  const ScheduleRow& now(int32_t d) const { return program(d).schedule[places_[d].row]; }
  const std::vector<Event>& events(int32_t d) const { return events_.at(row(d).program)[now(d).segment]; }
  const Event& event(int32_t d) const { return events(d)[places_[d].event]; }

  // Of what is told apart: all rows that are no micro-batch's are alike.
  int64_t micro_batch(int32_t d) const { return now(d).whole ? kNone : now(d).micro_batch; }
  // Where some are left out, those who meet have to be at the same one.
  void compare(int64_t mine, int64_t theirs) const {
    const Runs& runs = symmetry_.micro_batches();
    const auto in_run = [&](int64_t u) { return u >= 0 && runs.long_at(u); };
    if (mine != theirs && (in_run(mine) || in_run(theirs))) throw Uneven{};
  }

  bool step(int32_t d) {
    Where& at = places_[d];
    if (at.waits || ended(d)) return false;
    if (at.event >= events(d).size()) {
      at.event = 0, ++at.row;
      return true;
    }
    Watch::look();
    const Event& e = event(d);
    if (e.group != kNone) return meet(d, e);
    const auto found = peers_[e.link].find(d);
    if (found != peers_[e.link].end()) {
      const std::vector<int32_t>& mine = e.sends ? found->second.sends : found->second.receives;
      const auto room = static_cast<size_t>(entry_.links[e.link].capacity);
      for (const int32_t c : mine) {
        const auto& channel = channels_[c];
        if (e.sends ? channel.size() >= room : channel.empty()) return false;
      }
      for (const int32_t c : mine) {
        auto& channel = channels_[c];
        if (e.sends) {
          channel.push_back(micro_batch(d));
          continue;
        }
        compare(micro_batch(d), channel.front());
        channel.pop_front();
      }
    }
    ++at.event;
    return true;
  }

  bool meet(int32_t d, const Event& e) {
    const int32_t number = part_of_[e.group][d];
    if (number == kNone)
      throw Stopped{{true, "its group has no part with this device"}, {d, places_[d].row, e.instruction}, {}};
    Part& part = parts_[number];
    if (part.arrived == 0) part.micro_batch = micro_batch(d);
    compare(micro_batch(d), part.micro_batch);
    places_[d].waits = true;
    if (++part.arrived < part.awaited) return false;
    part.arrived = 0;
    for (const int32_t m : part.members) {
      Where& member = places_[m];
      member.waits = false, ++member.event;
    }
    return true;
  }

  const Plan& plan_;
  const Entry& entry_;
  const Symmetry& symmetry_;
  std::map<int32_t, Events> events_;           // by program
  std::vector<Where> places_;                  // of devices
  std::vector<std::vector<int32_t>> part_of_;  // [group][device]: of parts_
  std::vector<Part> parts_;
  std::map<std::array<int32_t, 3>, int32_t> numbers_;     // of channels, by link, from, to
  std::vector<std::deque<int64_t>> channels_;             // micro-batches of the messages in them
  std::vector<std::unordered_map<int32_t, Ends>> peers_;  // [link]
};

}  // namespace

std::optional<Stopped> standstill_of(const Plan& plan, const Entry& entry, const Symmetry& symmetry) {
  try {
    return Meetings(plan, entry, symmetry).run();
  } catch (Stopped& stopped) {
    return std::move(stopped);
  }
}

}  // namespace whale::proof
