#include <algorithm>
#include <map>

#include "base/watch.h"
#include "plan/communication.h"

namespace whale {
namespace {

// The peers of a device at one end of a link, in the order in which it serves them.
struct End {
  size_t link = 0;
  bool sends = false;
  std::vector<int32_t> peers;
};

std::vector<std::vector<End>> ends_of(const Entries& e, const Channels& channels) {
  std::vector<std::vector<End>> ends(e.entry.rows.size());
  for (size_t l = 0; l < channels.size(); ++l) {
    std::map<std::pair<int32_t, bool>, std::vector<int32_t>> peers;
    for (const auto& [from, to] : channels[l]) {
      Watch::look();
      peers[{from, true}].push_back(to);
      peers[{to, false}].push_back(from);
    }
    for (auto& [end, list] : peers) ends[static_cast<size_t>(end.first)].push_back({l, end.second, std::move(list)});
  }
  return ends;
}

// Per part of a group, who is in it by class: sorted, with repetitions.
std::vector<std::vector<std::vector<int32_t>>> members_of(const Plan& plan, const std::vector<int32_t>& classes) {
  std::vector<std::vector<std::vector<int32_t>>> out;
  for (const Group& group : plan.groups) {
    out.emplace_back();
    for (const auto& part : group.parts) {
      Watch::look();
      std::vector<int32_t> members;
      for (const int32_t d : part) members.push_back(classes[static_cast<size_t>(d)]);
      std::sort(members.begin(), members.end());
      out.back().push_back(std::move(members));
    }
  }
  return out;
}

// Numbers of equal keys, counted in the order in which they come.
template <class Key>
class Numbers {
 public:
  int32_t of(Key key) { return known_.try_emplace(std::move(key), static_cast<int32_t>(known_.size())).first->second; }
  size_t count() const { return known_.size(); }

 private:
  std::map<Key, int32_t> known_;
};

}  // namespace

std::vector<int32_t> classes_alike(const Entries& e, const PartNumbers& part_of, const Channels& channels,
                                   const std::vector<int32_t>& programs) {
  const size_t n = e.entry.rows.size();
  const std::vector<std::vector<End>> ends = ends_of(e, channels);
  std::vector<int32_t> classes(n);
  size_t count = 0;
  {
    Numbers<int32_t> first;
    for (size_t d = 0; d < n; ++d) classes[d] = first.of(programs[static_cast<size_t>(e.entry.rows[d].program)]);
    count = first.count();
  }
  for (;;) {
    Numbers<std::vector<int32_t>> parts, fresh;
    std::vector<std::vector<int32_t>> number_of_part;
    for (const auto& group : members_of(e.plan, classes)) {
      number_of_part.emplace_back();
      for (const auto& members : group) number_of_part.back().push_back(parts.of(members));
    }
    std::vector<int32_t> next(n);
    for (size_t d = 0; d < n; ++d) {
      Watch::look();
      std::vector<int32_t> key{classes[d]};
      for (size_t g = 0; g < part_of.size(); ++g)
        key.push_back(part_of[g][d] < 0 ? kNone : number_of_part[g][static_cast<size_t>(part_of[g][d])]);
      for (const End& end : ends[d]) {
        key.insert(key.end(), {static_cast<int32_t>(end.link), end.sends, static_cast<int32_t>(end.peers.size())});
        for (const int32_t peer : end.peers) key.push_back(classes[static_cast<size_t>(peer)]);
      }
      next[d] = fresh.of(std::move(key));
    }
    classes = std::move(next);
    if (fresh.count() == count) break;
    count = fresh.count();
  }
  // A channel stands for all that a device has to a class only where it serves them one right after the other: with all
  // devices of a class in step, they are full or empty together.
  for (const auto& list : ends)
    for (const End& end : list) {
      std::vector<int32_t> of;
      for (const int32_t peer : end.peers) of.push_back(classes[static_cast<size_t>(peer)]);
      of.erase(std::unique(of.begin(), of.end()), of.end());
      std::sort(of.begin(), of.end());
      if (std::adjacent_find(of.begin(), of.end()) == of.end()) continue;
      for (size_t d = 0; d < n; ++d) classes[d] = static_cast<int32_t>(d);
      return classes;
    }
  return classes;
}

namespace {

bool communicates(const Instruction& i) {
  return i.kind == InstructionKind::kCollective || i.kind == InstructionKind::kSend ||
         i.kind == InstructionKind::kReceive;
}

// One message or collective of a segment, and how many of each stream must be over before it can begin.
struct Step {
  const Instruction* what = nullptr;
  std::array<size_t, kStreams> needs{};
};
struct Skeleton {
  std::array<std::vector<Step>, kStreams> streams;
};

Skeleton skeleton_of(const Segment& s) {
  Skeleton out;
  const std::vector<StreamClock> clocks = clocks_of(s);
  std::array<std::vector<int64_t>, kStreams> at;  // numbers of the instructions in `streams`
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    const Instruction& i = s.instructions[k];
    if (!communicates(i)) continue;
    Step step{&i, {}};
    for (size_t t = 0; t < kStreams; ++t)
      step.needs[t] = static_cast<size_t>(std::upper_bound(at[t].begin(), at[t].end(), clocks[k][t]) - at[t].begin());
    out.streams[static_cast<size_t>(i.stream)].push_back(step);
    at[static_cast<size_t>(i.stream)].push_back(static_cast<int64_t>(k));
  }
  return out;
}

// Equal numbers for programs whose rows take the same steps.
std::vector<int32_t> alike(const Entry& entry, const std::vector<std::vector<Skeleton>>& skeletons) {
  Numbers<std::vector<int64_t>> segments;
  Numbers<std::vector<int32_t>> programs;
  std::vector<int32_t> out;
  for (size_t p = 0; p < skeletons.size(); ++p) {
    std::vector<int32_t> numbers;
    for (const Skeleton& skeleton : skeletons[p]) {
      Watch::look();
      std::vector<int64_t> key;
      for (const std::vector<Step>& steps : skeleton.streams) {
        key.push_back(std::ssize(steps));
        for (const Step& step : steps) {
          key.insert(key.end(), {static_cast<int64_t>(step.what->kind), step.what->ref});
          key.insert(key.end(), step.needs.begin(), step.needs.end());
        }
      }
      numbers.push_back(segments.of(std::move(key)));
    }
    std::vector<int32_t> rows;
    for (const ScheduleRow& row : watched(entry.programs[p].schedule))
      rows.push_back(numbers[static_cast<size_t>(row.segment)]);
    out.push_back(programs.of(std::move(rows)));
  }
  return out;
}

class Walk {
 public:
  Walk(const Entries& e, const PartNumbers& part_of, const Channels& channels) : e_(e) {
    for (const Program& p : e.entry.programs) {
      skeletons_.emplace_back();
      for (const Segment& s : p.segments) skeletons_.back().push_back(skeleton_of(s));
    }
    const std::vector<int32_t> classes = classes_alike(e, part_of, channels, alike(e.entry, skeletons_));
    for (size_t d = 0; d < classes.size(); ++d)
      if (static_cast<size_t>(classes[d]) == walkers_.size()) walkers_.push_back({.device = d});
    find_meetings(part_of, classes);
    find_channels(channels, classes);
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (Walker& w : walkers_)
        while (advance(w)) moved = true;
    }
    for (const Walker& w : walkers_) {
      const Program& p = e_.program(static_cast<int32_t>(w.device));
      if (w.row == p.schedule.size()) continue;
      const auto segment = static_cast<size_t>(p.schedule[w.row].segment);
      e_.fail(
          fmt::format("device {} never leaves segment '{}' (row {} of its schedule): it waits for '{}' and its "
                      "peers wait for it",
                      w.device, p.segments[segment].name, w.row, waits_for(w, segment)));
    }
  }

 private:
  // The first device of a class.
  struct Walker {
    size_t device = 0;
    size_t row = 0;
    std::array<size_t, kStreams> done{};     // steps of each stream that are over
    std::array<size_t, kStreams> through{};  // channels of its next step that are through
    std::array<bool, kStreams> there{};      // it has reached its next collective
    std::vector<int32_t> meetings{};         // per group: the number of its meeting; -1: none
    std::map<std::pair<size_t, bool>, std::vector<size_t>> channels{};  // (link, sends): their numbers in the link
  };
  // The members of a part of a group, one of each class.
  struct Meeting {
    size_t classes = 0;
    std::vector<std::pair<Walker*, size_t>> there{};  // with the stream
  };

  void find_meetings(const PartNumbers& part_of, const std::vector<int32_t>& classes) {
    const auto members = members_of(e_.plan, classes);
    for (size_t g = 0; g < part_of.size(); ++g) {
      std::map<int32_t, int32_t> known;  // by the first class in it
      for (Walker& w : walkers_) {
        const int32_t part = part_of[g][w.device];
        w.meetings.push_back(kNone);
        if (part < 0) continue;
        const std::vector<int32_t>& of = members[g][static_cast<size_t>(part)];
        const auto [at, fresh] = known.try_emplace(of[0], static_cast<int32_t>(meetings_.size()));
        w.meetings[g] = at->second;
        if (!fresh) continue;
        meetings_.emplace_back();
        for (size_t k = 0; k < of.size(); ++k) meetings_.back().classes += k == 0 || of[k] != of[k - 1];
      }
    }
  }

  void find_channels(const Channels& all, const std::vector<int32_t>& classes) {
    std::vector<Numbers<std::pair<int32_t, int32_t>>> numbers(all.size());
    const auto ends = ends_of(e_, all);
    for (Walker& w : walkers_)
      for (const End& end : ends[w.device]) {
        const int32_t mine = classes[w.device];
        for (const int32_t peer : end.peers) {
          const int32_t other = classes[static_cast<size_t>(peer)];
          const auto channel =
              static_cast<size_t>(numbers[end.link].of(end.sends ? std::pair(mine, other) : std::pair(other, mine)));
          std::vector<size_t>& channels = w.channels[{end.link, end.sends}];
          if (channels.empty() || channels.back() != channel) channels.push_back(channel);
        }
      }
    for (const auto& link : numbers) messages_.emplace_back(link.count());
  }

  const Skeleton& skeleton(const Walker& w, size_t segment) const {
    return skeletons_[static_cast<size_t>(e_.entry.rows[w.device].program)][segment];
  }

  std::string waits_for(const Walker& w, size_t segment) const {
    for (size_t t = 0; t < kStreams; ++t) {
      const auto& steps = skeleton(w, segment).streams[t];
      if (w.done[t] < steps.size()) return steps[w.done[t]].what->name;
    }
    return "";
  }

  bool advance(Walker& w) {
    Watch::look();
    const Program& p = e_.program(static_cast<int32_t>(w.device));
    if (w.row == p.schedule.size()) return false;
    const Skeleton& now = skeleton(w, static_cast<size_t>(p.schedule[w.row].segment));
    bool all = true;
    for (size_t t = 0; t < kStreams; ++t) {
      if (w.done[t] == now.streams[t].size()) continue;
      all = false;
      const Step& step = now.streams[t][w.done[t]];
      bool ready = true;
      for (size_t u = 0; u < kStreams; ++u) ready &= u == t || w.done[u] >= step.needs[u];
      if (ready && take(w, t, *step.what)) return true;
    }
    if (!all) return false;
    w.done.fill(0);
    ++w.row;
    return true;
  }

  static void finish(Walker& w, size_t t) {
    ++w.done[t];
    w.through[t] = 0;
    w.there[t] = false;
  }

  // Does what it can of the step; true when something moved.
  bool take(Walker& w, size_t t, const Instruction& i) {
    if (i.kind == InstructionKind::kCollective) return meet(w, t, static_cast<size_t>(i.ref));
    const bool sends = i.kind == InstructionKind::kSend;
    const auto link = static_cast<size_t>(i.ref);
    const auto mine = w.channels.find({link, sends});
    const size_t count = mine == w.channels.end() ? 0 : mine->second.size(), before = w.through[t];
    for (size_t& through = w.through[t]; through < count; ++through) {
      int64_t& messages = messages_[link][mine->second[through]];
      if (sends ? messages >= e_.entry.links[link].slots : messages == 0) break;
      messages += sends ? 1 : -1;
    }
    if (w.through[t] < count) return w.through[t] > before;
    finish(w, t);
    return true;
  }

  bool meet(Walker& w, size_t t, size_t group) {
    if (w.there[t]) return false;
    Meeting& meeting = meetings_[static_cast<size_t>(w.meetings[group])];
    const auto is_me = [&](const auto& member) { return member.first == &w; };
    if (std::any_of(meeting.there.begin(), meeting.there.end(), is_me)) return false;
    meeting.there.emplace_back(&w, t);
    w.there[t] = true;
    if (meeting.there.size() < meeting.classes) return true;
    for (const auto& [member, stream] : meeting.there) finish(*member, stream);
    meeting.there.clear();
    return true;
  }

  const Entries& e_;
  std::vector<Walker> walkers_;
  std::vector<Meeting> meetings_;
  std::vector<std::vector<Skeleton>> skeletons_;  // [program][segment]
  std::vector<std::vector<int64_t>> messages_;    // [link][channel]: sent and not taken yet
};

}  // namespace

void verify_order(const Entries& e, const PartNumbers& part_of, const Channels& channels) {
  Walk(e, part_of, channels).run();
}

}  // namespace whale
