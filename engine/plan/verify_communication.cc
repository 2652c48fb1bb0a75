#include <algorithm>
#include <map>
#include <set>

#include "base/watch.h"
#include "plan/verify.h"

namespace whale {
namespace {

bool communicates(const Instruction& i) {
  return i.kind == InstructionKind::kCollective || i.kind == InstructionKind::kSend ||
         i.kind == InstructionKind::kReceive;
}

struct Entries {
  const Plan& plan;
  const Entry& entry;
  [[noreturn]] void fail(const std::string& what) const {
    throw error(Code::kDataLoss, "plan '{}', entry '{}': {}", plan.model, entry.name, what);
  }
  const Program& program(int32_t device) const {
    return entry.programs[static_cast<size_t>(entry.rows[static_cast<size_t>(device)].program)];
  }
};

// Which part of each group a device belongs to; -1: none.
std::vector<std::vector<int32_t>> parts_of(const Entries& e) {
  std::vector<std::vector<int32_t>> of;
  for (size_t g = 0; g < e.plan.groups.size(); ++g) {
    std::vector<int32_t> part(e.plan.devices.size(), -1);
    for (size_t p = 0; p < e.plan.groups[g].parts.size(); ++p)
      for (const int32_t d : e.plan.groups[g].parts[p]) {
        if (d < 0 || d >= static_cast<int32_t>(part.size())) e.fail(fmt::format("group {} names device {}", g, d));
        if (part[static_cast<size_t>(d)] >= 0) e.fail(fmt::format("group {} names device {} twice", g, d));
        part[static_cast<size_t>(d)] = static_cast<int32_t>(p);
      }
    of.push_back(std::move(part));
  }
  return of;
}

// ---- collectives: members of a part run the same ones in the same order, of the same sizes
std::string collectives_of(const Program& p, int32_t group) {
  std::vector<std::string> texts;  // per segment
  for (const Segment& s : p.segments) {
    std::string text;
    for (const Instruction& i : s.instructions) {
      if (i.kind != InstructionKind::kCollective || i.ref != group) continue;
      text += fmt::format("{} {}", static_cast<int>(i.op), i.name);
      const bool gathers = i.op == OpCode::k_all_gather;
      if (gathers || i.op == OpCode::k_all_reduce || i.op == OpCode::k_reduce_scatter)
        for (const BufferId b : gathers ? i.out : i.in) {
          const Buffer& whole = p.buffers[static_cast<size_t>(b)];
          text += fmt::format(" {} {} {}", whole.name, name_of(whole.dtype), to_string(whole.dims));
        }
      for (const char* cuts : {"combine", "cuts", "to_cuts"})
        if (const auto at = i.attrs.find(cuts); at != i.attrs.end()) text += ' ' + to_string(at->second);
      text += ';';
    }
    texts.push_back(std::move(text));
  }
  std::string all;
  for (const ScheduleRow& row : watched(p.schedule)) all += texts[static_cast<size_t>(row.segment)];
  return all;
}

// A device begins the collectives of a group one after another, also where they are on different streams.
void check_order(const Entries& e) {
  for (const Program& p : e.entry.programs)
    for (const Segment& s : p.segments) {
      const std::vector<StreamClock> clocks = clocks_of(s);
      std::map<int32_t, size_t> last;  // per group
      for (size_t k = 0; k < s.instructions.size(); ++k) {
        const Instruction& i = s.instructions[k];
        if (i.kind != InstructionKind::kCollective) continue;
        const auto [at, fresh] = last.try_emplace(i.ref, k);
        if (fresh) continue;
        const Instruction& before = s.instructions[at->second];
        if (before.stream != i.stream &&
            clocks[k][static_cast<size_t>(before.stream)] < static_cast<int64_t>(at->second))
          e.fail(fmt::format("segment '{}': '{}' and '{}' of group {} may begin in either order", s.name, before.name,
                             i.name, i.ref));
        at->second = k;
      }
    }
}

void check_collectives(const Entries& e, const std::vector<std::vector<int32_t>>& part_of) {
  for (size_t g = 0; g < e.plan.groups.size(); ++g) {
    std::map<int32_t, std::string> known;  // per program
    const auto text_of = [&](int32_t device) -> const std::string& {
      const int32_t program = e.entry.rows[static_cast<size_t>(device)].program;
      const auto at = known.find(program);
      if (at != known.end()) return at->second;
      return known[program] = collectives_of(e.program(device), static_cast<int32_t>(g));
    };
    for (const auto& part : e.plan.groups[g].parts)
      for (const int32_t device : part) {
        Watch::look();
        if (text_of(device) != text_of(part[0]))
          e.fail(fmt::format("devices {} and {} of group {} run different collectives", part[0], device, g));
      }
    for (size_t d = 0; d < e.entry.rows.size(); ++d)
      if (part_of[g][d] < 0 && !text_of(static_cast<int32_t>(d)).empty())
        e.fail(fmt::format("device {} runs collectives of group {}, which it is no member of", d, g));
  }
}

// ---- links: boxes inside the local tensors of both ends
struct Ends {
  std::map<std::pair<int32_t, int32_t>, int64_t> sends, receives;  // (link, device) -> how often in a step
};

void check_box(const Entries& e, const Link& link, const std::vector<Interval>& box, const Buffer& b) {
  bool fits = box.size() == b.dims.size();
  for (size_t d = 0; fits && d < box.size(); ++d)
    fits = box[d].begin >= 0 && box[d].end >= box[d].begin && box[d].end <= b.dims[d];
  if (!fits)
    e.fail(fmt::format("a transfer of link '{}' does not lie inside '{}' of shape {}", link.name, b.name,
                       to_string(b.dims)));
}

// Transfers of every link, by the device at one of their ends.
std::vector<std::map<int32_t, std::vector<const Transfer*>>> transfers_by(const Entries& e, int32_t Transfer::*end) {
  std::vector<std::map<int32_t, std::vector<const Transfer*>>> out;
  for (const Link& link : e.entry.links) {
    Watch::look();
    out.emplace_back();
    for (const Transfer& t : link.transfers) out.back()[t.*end].push_back(&t);
  }
  return out;
}

Ends check_ends(const Entries& e) {
  Ends ends;
  const auto sent = transfers_by(e, &Transfer::from), taken = transfers_by(e, &Transfer::to);
  std::map<int32_t, DType> dtypes;
  for (size_t d = 0; d < e.entry.rows.size(); ++d) {
    Watch::look();
    const auto device = static_cast<int32_t>(d);
    const Program& p = e.program(device);
    std::vector<int64_t> runs(p.segments.size());
    for (const ScheduleRow& row : watched(p.schedule)) ++runs[static_cast<size_t>(row.segment)];
    for (size_t s = 0; s < p.segments.size(); ++s)
      for (const Instruction& i : p.segments[s].instructions) {
        const bool sends = i.kind == InstructionKind::kSend;
        if (!sends && i.kind != InstructionKind::kReceive) continue;
        const Link& link = e.entry.links[static_cast<size_t>(i.ref)];
        const Buffer& b = p.buffers[static_cast<size_t>(sends ? i.in[0] : i.out[0])];
        const auto [known, fresh] = dtypes.try_emplace(i.ref, b.dtype);
        if (known->second != b.dtype) e.fail(fmt::format("the ends of link '{}' differ in their dtype", link.name));
        const auto& of_link = (sends ? sent : taken)[static_cast<size_t>(i.ref)];
        if (const auto mine = of_link.find(device); mine != of_link.end())
          for (const Transfer* t : mine->second) check_box(e, link, sends ? t->source : t->target, b);
        (sends ? ends.sends : ends.receives)[{i.ref, device}] += runs[s];
      }
  }
  return ends;
}

// The channels of one link, (from, to) in order, and their numbers by device at either end.
struct LinkChannels {
  std::set<std::pair<int32_t, int32_t>> list;
  std::map<int32_t, std::vector<size_t>> from, to;
  void index() {
    size_t number = 0;
    for (const auto& [a, b] : list) from[a].push_back(number), to[b].push_back(number), ++number;
  }
  // In the order of the devices at the other end.
  const std::vector<size_t>& of(int32_t device, bool sends) const {
    static const std::vector<size_t> kNothing;
    const auto at = (sends ? from : to).find(device);
    return at == (sends ? from : to).end() ? kNothing : at->second;
  }
};
using Channels = std::vector<LinkChannels>;

Channels check_links(const Entries& e) {
  const Ends ends = check_ends(e);
  const auto count = [](const auto& map, int32_t link, int32_t device) {
    const auto at = map.find({link, device});
    return at == map.end() ? int64_t{0} : at->second;
  };
  Channels channels(e.entry.links.size());
  for (size_t l = 0; l < e.entry.links.size(); ++l) {
    Watch::look();
    const Link& link = e.entry.links[l];
    if (link.slots < 1) e.fail(fmt::format("link '{}' has {} slots", link.name, link.slots));
    for (const Transfer& t : link.transfers) {
      for (const int32_t d : {t.from, t.to})
        if (d < 0 || d >= static_cast<int32_t>(e.entry.rows.size()))
          e.fail(fmt::format("link '{}' names device {}", link.name, d));
      bool same = t.source.size() == t.target.size();
      for (size_t d = 0; same && d < t.source.size(); ++d) same = t.source[d].size() == t.target[d].size();
      if (!same) e.fail(fmt::format("a transfer of link '{}' has two sizes", link.name));
      if (!channels[l].list.emplace(t.from, t.to).second) continue;
      const int64_t sent = count(ends.sends, static_cast<int32_t>(l), t.from);
      const int64_t taken = count(ends.receives, static_cast<int32_t>(l), t.to);
      if (sent != taken)
        e.fail(fmt::format("link '{}': device {} sends {} time(s), device {} receives {} time(s)", link.name, t.from,
                           sent, t.to, taken));
    }
  }
  for (LinkChannels& link : channels) link.index();
  return channels;
}

// ---- order: a walk of all devices through what they say to each other --------------------------------------------
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

class Walk {
 public:
  Walk(const Entries& e, const std::vector<std::vector<int32_t>>& part_of, const Channels& channels)
      : e_(e), part_of_(part_of), channels_(channels), devices_(e.entry.rows.size()) {
    for (const LinkChannels& link : channels) messages_.emplace_back(link.list.size());
    for (const Program& p : e.entry.programs) {
      skeletons_.emplace_back();
      for (const Segment& s : p.segments) skeletons_.back().push_back(skeleton_of(s));
    }
  }

  void run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t d = 0; d < devices_.size(); ++d)
        while (advance(d)) moved = true;
    }
    for (size_t d = 0; d < devices_.size(); ++d) {
      const Program& p = e_.program(static_cast<int32_t>(d));
      if (devices_[d].row == p.schedule.size()) continue;
      const auto segment = static_cast<size_t>(p.schedule[devices_[d].row].segment);
      e_.fail(
          fmt::format("device {} never leaves segment '{}' (row {} of its schedule): it waits for '{}' and its "
                      "peers wait for it",
                      d, p.segments[segment].name, devices_[d].row, waits_for(d, segment)));
    }
  }

 private:
  struct State {
    size_t row = 0;
    std::array<size_t, kStreams> done{};     // steps of each stream that are over
    std::array<size_t, kStreams> through{};  // channels of its next step that are through
    std::array<bool, kStreams> there{};      // it has reached its next collective
  };

  const Skeleton& skeleton(size_t d, size_t segment) const {
    return skeletons_[static_cast<size_t>(e_.entry.rows[d].program)][segment];
  }

  std::string waits_for(size_t d, size_t segment) const {
    for (size_t t = 0; t < kStreams; ++t) {
      const auto& steps = skeleton(d, segment).streams[t];
      if (devices_[d].done[t] < steps.size()) return steps[devices_[d].done[t]].what->name;
    }
    return "";
  }

  bool advance(size_t d) {
    Watch::look();
    State& s = devices_[d];
    const Program& p = e_.program(static_cast<int32_t>(d));
    if (s.row == p.schedule.size()) return false;
    const Skeleton& now = skeleton(d, static_cast<size_t>(p.schedule[s.row].segment));
    bool all = true;
    for (size_t t = 0; t < kStreams; ++t) {
      if (s.done[t] == now.streams[t].size()) continue;
      all = false;
      const Step& step = now.streams[t][s.done[t]];
      bool ready = true;
      for (size_t u = 0; u < kStreams; ++u) ready &= u == t || s.done[u] >= step.needs[u];
      if (ready && take(d, t, *step.what)) return true;
    }
    if (!all) return false;
    s.done.fill(0);
    ++s.row;
    return true;
  }

  void finish(size_t d, size_t t) {
    ++devices_[d].done[t];
    devices_[d].through[t] = 0;
    devices_[d].there[t] = false;
  }

  // Does what it can of the step; true when something moved.
  bool take(size_t d, size_t t, const Instruction& i) {
    if (i.kind == InstructionKind::kCollective) return meet(d, t, i.ref);
    const bool sends = i.kind == InstructionKind::kSend;
    const auto link = static_cast<size_t>(i.ref);
    const std::vector<size_t>& mine = channels_[link].of(static_cast<int32_t>(d), sends);
    size_t& through = devices_[d].through[t];
    const size_t before = through;
    for (; through < mine.size(); ++through) {
      int64_t& messages = messages_[link][mine[through]];
      if (sends ? messages >= e_.entry.links[link].slots : messages == 0) break;
      messages += sends ? 1 : -1;
    }
    const bool moved = through > before;
    if (through < mine.size()) return moved;
    finish(d, t);
    return true;
  }

  bool meet(size_t d, size_t t, int32_t group) {
    if (devices_[d].there[t]) return false;
    const int32_t part = part_of_[static_cast<size_t>(group)][d];
    auto& there = meetings_[{group, part}];  // device -> stream
    if (!there.emplace(d, t).second) return false;
    devices_[d].there[t] = true;
    if (there.size() < e_.plan.groups[static_cast<size_t>(group)].parts[static_cast<size_t>(part)].size()) return true;
    for (const auto& [member, stream] : there) finish(member, stream);
    there.clear();
    return true;
  }

  const Entries& e_;
  const std::vector<std::vector<int32_t>>& part_of_;
  const Channels& channels_;
  std::vector<State> devices_;
  std::vector<std::vector<Skeleton>> skeletons_;  // [program][segment]
  std::vector<std::vector<int64_t>> messages_;    // [link][channel]: sent and not taken yet
  std::map<std::pair<int32_t, int32_t>, std::map<size_t, size_t>> meetings_;
};

}  // namespace

void verify_communication(const Plan& plan, const Entry& entry) {
  const Entries e{plan, entry};
  const auto parts = parts_of(e);
  check_order(e);
  check_collectives(e, parts);
  const Channels channels = check_links(e);
  Walk(e, parts, channels).run();
}

}  // namespace whale
