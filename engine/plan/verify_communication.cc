#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "base/watch.h"
#include "plan/communication.h"

namespace whale {
namespace {

// No device is in two parts of a group.
void check_groups(const Entries& e) {
  for (size_t g = 0; g < e.plan.groups.size(); ++g) {
    std::vector<char> found(e.plan.devices.size());
    for (const auto& part : e.plan.groups[g].parts)
      for (const int32_t d : part) {
        if (d < 0 || d >= static_cast<int32_t>(found.size()))
          e.fail(d, {}, fmt::format("group {} names device {}", g, d));
        if (found[d]++) e.fail(d, {}, fmt::format("group {} names device {} twice", g, d));
      }
  }
}

std::string cuts_text(const std::vector<Interval>& cuts) {
  std::string text;
  for (const Interval& cut : cuts) text += fmt::format(" {}:{}", cut.begin, cut.end);
  return text + ";";
}

// ---- collectives: members of a part run the same ones in the same order, of the same sizes
std::string text_of(const Program& p, const Instruction& i) {
  const auto& c = *i.as<work::Collective>();
  std::string text = fmt::format("{} '{}' {}", def(c.op).name, i.name, name_of(c.combine));
  const bool gathers = c.op == OpCode::k_all_gather;
  if (gathers || c.op == OpCode::k_all_reduce || c.op == OpCode::k_reduce_scatter)
    for (const BufferId b : gathers ? i.out : i.in) {
      const Buffer& whole = p.buffers[b];
      text += fmt::format(" {} {} {}", whole.name, name_of(whole.dtype), to_string(whole.dims));
    }
  if (!c.weights.empty()) text += fmt::format(" weights {};", fmt::join(c.weights, ","));
  for (const SubAxisCuts& each : c.cuts) text += cuts_text(each.cuts);
  text += cuts_text(c.to.cuts);
  return text;
}

// Per group, the collectives of a program as numbers of their texts.
using Collectives = std::vector<std::vector<int32_t>>;
Collectives collectives_of(const Program& p, size_t groups, std::map<std::string, int32_t>& numbers) {
  Collectives all(groups);
  std::vector<Collectives> of;
  for (const Segment& s : p.segments) {
    of.emplace_back(groups);
    for (const Instruction& i : s.instructions)
      if (i.group() != kNone)
        of.back()[i.group()].push_back(
            numbers.try_emplace(text_of(p, i), static_cast<int32_t>(numbers.size())).first->second);
  }
  for (const ScheduleRow& row : watched(p.schedule))
    for (size_t g = 0; g < groups; ++g) {
      const std::vector<int32_t>& mine = of[row.segment][g];
      all[g].insert(all[g].end(), mine.begin(), mine.end());
    }
  return all;
}

// Of those of a group, counted as a step runs them; behind the last: the last.
FaultSite nth_collective(const Program& p, size_t group, size_t n) {
  FaultSite site;
  for (const ScheduleRow& row : watched(p.schedule)) {
    const Segment& s = p.segments[row.segment];
    for (size_t k = 0; k < s.instructions.size(); ++k) {
      if (s.instructions[k].group() != static_cast<int32_t>(group)) continue;
      site.segment = &s, site.instruction = k, site.micro_batch = row.micro_batch;
      if (n-- == 0) return site;
    }
  }
  return site;
}

// A device begins the collectives of a group one after another, in all rows, and so its ends of a link: each are on one
// queue.
void check_queues(const Entries& e) {
  for (size_t n = 0; n < e.entry.programs.size(); ++n) {
    const Program& p = e.entry.programs[n];
    std::map<std::tuple<int32_t, int32_t, bool>, const Instruction*> first;  // by group, link and end
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions) {
        Watch::look();
        if (i.group() == kNone && i.link() == kNone) continue;
        const Instruction& other =
            *first.try_emplace({i.group(), i.link(), i.kind() == InstructionKind::kSend}, &i).first->second;
        if (other.queue != i.queue)
          VerifyContext{e.plan, e.entry, n, p}.fail(
              s, static_cast<size_t>(&i - s.instructions.data()),
              fmt::format("'{}' and '{}' of {} {} are on two queues and may begin in either order", other.name, i.name,
                          i.group() != kNone ? "group" : "link", i.group() != kNone ? i.group() : i.link()));
      }
  }
}

void check_collectives(const Entries& e, const PartNumbers& part_of) {
  std::map<std::string, int32_t> numbers;
  std::set<Collectives> different;
  std::vector<const Collectives*> of_program;
  for (const Program& p : e.entry.programs)
    of_program.push_back(&*different.insert(collectives_of(p, e.plan.groups.size(), numbers)).first);
  const auto of = [&](size_t device) { return of_program[e.entry.rows[device].program]; };
  for (size_t g = 0; g < e.plan.groups.size(); ++g) {
    for (const auto& part : e.plan.groups[g].parts)
      for (const int32_t device : part) {
        Watch::look();
        const Collectives *mine = of(static_cast<size_t>(device)), *first = of(static_cast<size_t>(part[0]));
        if (mine == first || (*mine)[g] == (*first)[g]) continue;
        const auto differ = std::ranges::mismatch((*first)[g], (*mine)[g]);
        const auto text = [&](const std::vector<int32_t>& list, auto at) -> std::string {
          if (at == list.end()) return "none";
          return std::ranges::find(numbers, *at, [](const auto& each) { return each.second; })->first;
        };
        e.fail(device, nth_collective(e.program(device), g, static_cast<size_t>(differ.in2 - (*mine)[g].begin())),
               fmt::format("devices {} and {} of group {} run different collectives: number {} of the first is {}, of "
                           "the second {}",
                           part[0], device, g, differ.in1 - (*first)[g].begin() + 1, text((*first)[g], differ.in1),
                           text((*mine)[g], differ.in2)));
      }
    for (size_t d = 0; d < e.entry.rows.size(); ++d)
      if (part_of[g][d] < 0 && !(*of(d))[g].empty())
        e.fail(static_cast<int32_t>(d), nth_collective(e.program(static_cast<int32_t>(d)), g, 0),
               fmt::format("device {} runs collectives of group {}, which it is no member of", d, g));
  }
}

// What a shift brings is what the member before holds: of each program and group, the sizes of one end of its shifts.
Collectives shifts_of(const Program& p, size_t groups, bool sent, std::map<std::string, int32_t>& numbers) {
  Collectives all(groups);
  for (const ScheduleRow& row : watched(p.schedule))
    for (const Instruction& i : p.segments[row.segment].instructions) {
      const auto* c = i.as<work::Collective>();
      if (c == nullptr || c->op != OpCode::k_shift) continue;
      for (const BufferId b : sent ? i.in : i.out) {
        const Buffer& x = p.buffers[b];
        const std::string text = fmt::format("{} {}", name_of(x.dtype), to_string(x.dims));
        all[c->group].push_back(numbers.try_emplace(text, static_cast<int32_t>(numbers.size())).first->second);
      }
    }
  return all;
}

void check_shifts(const Entries& e) {
  std::map<std::string, int32_t> numbers;
  std::vector<Collectives> sent, taken;
  for (const Program& p : e.entry.programs) {
    sent.push_back(shifts_of(p, e.plan.groups.size(), true, numbers));
    taken.push_back(shifts_of(p, e.plan.groups.size(), false, numbers));
  }
  if (numbers.empty()) return;
  for (size_t g = 0; g < e.plan.groups.size(); ++g)
    for (const auto& part : e.plan.groups[g].parts)
      for (size_t k = 0; k < part.size(); ++k) {
        Watch::look();
        const int32_t from = part[(k + part.size() - 1) % part.size()];
        const auto program = [&](int32_t d) { return static_cast<size_t>(e.entry.rows[d].program); };
        if (taken[program(part[k])][g] != sent[program(from)][g])
          e.fail(
              part[k],
              site_of(e.program(part[k]),
                      [&](const Instruction& i) {
                        return i.group() == static_cast<int32_t>(g) && i.as<work::Collective>()->op == OpCode::k_shift;
                      }),
              fmt::format("device {} takes by a shift of group {} other sizes than device {} has", part[k], g, from));
      }
}

// ---- links: boxes inside the local tensors of both ends
struct Ends {
  std::map<std::pair<int32_t, int32_t>, int64_t> sends, receives;  // (link, device) -> how often in a step
};

// What `device` does at an end of a link.
FaultSite site_of_end(const Entries& e, int32_t device, size_t link, InstructionKind end) {
  return site_of(e.program(device),
                 [&](const Instruction& i) { return i.kind() == end && i.link() == static_cast<int32_t>(link); });
}

void check_box(const Entries& e, int32_t device, const Instruction& i, const Link& link,
               const std::vector<Interval>& box, const Buffer& b) {
  bool fits = box.size() == b.dims.size();
  for (size_t d = 0; fits && d < box.size(); ++d)
    fits = box[d].begin >= 0 && box[d].end >= box[d].begin && box[d].end <= b.dims[d];
  if (!fits)
    e.fail(device, site_of(e.program(device), [&](const Instruction& each) { return &each == &i; }),
           fmt::format("a transfer of link '{}' does not lie inside '{}' of shape {}", link.name, b.name,
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

// Sends and receives of a program, each with how often it runs in a step.
using Messages = std::vector<std::pair<const Instruction*, int64_t>>;
Messages messages_of(const Program& p) {
  std::vector<int64_t> runs(p.segments.size());
  for (const ScheduleRow& row : watched(p.schedule)) ++runs[row.segment];
  Messages out;
  for (size_t s = 0; s < p.segments.size(); ++s)
    for (const Instruction& i : p.segments[s].instructions)
      if (i.link() != kNone) out.emplace_back(&i, runs[s]);
  return out;
}

Ends check_ends(const Entries& e) {
  Ends ends;
  const auto sent = transfers_by(e, &Transfer::from), taken = transfers_by(e, &Transfer::to);
  std::map<int32_t, DType> dtypes;
  std::vector<Messages> messages;
  for (const Program& p : e.entry.programs) messages.push_back(messages_of(p));
  for (size_t d = 0; d < e.entry.rows.size(); ++d) {
    Watch::look();
    const auto device = static_cast<int32_t>(d);
    const Program& p = e.program(device);
    for (const auto& [message, runs] : messages[e.entry.rows[d].program]) {
      const Instruction& i = *message;
      const bool sends = i.kind() == InstructionKind::kSend;
      const Link& link = e.entry.links[i.link()];
      const Buffer& b = p.buffers[sends ? i.in[0] : i.out[0]];
      const auto [known, fresh] = dtypes.try_emplace(i.link(), b.dtype);
      if (known->second != b.dtype)
        e.fail(device, site_of(p, [&](const Instruction& each) { return &each == &i; }),
               fmt::format("the ends of link '{}' differ in their dtype: {} and {}", link.name, name_of(known->second),
                           name_of(b.dtype)));
      const auto& of_link = (sends ? sent : taken)[i.link()];
      if (const auto mine = of_link.find(device); mine != of_link.end())
        for (const Transfer* t : mine->second) check_box(e, device, i, link, sends ? t->source : t->target, b);
      (sends ? ends.sends : ends.receives)[{i.link(), device}] += runs;
    }
  }
  return ends;
}

void check_links(const Entries& e) {
  const Ends ends = check_ends(e);
  const auto count = [](const auto& map, int32_t link, int32_t device) {
    const auto at = map.find({link, device});
    return at == map.end() ? int64_t{0} : at->second;
  };
  for (size_t l = 0; l < e.entry.links.size(); ++l) {
    Watch::look();
    const Link& link = e.entry.links[l];
    std::set<std::pair<int32_t, int32_t>> channels;
    if (link.capacity < 1)
      e.fail(link.transfers.empty() ? kNone : link.transfers[0].from, {},
             fmt::format("link '{}' has capacity {}", link.name, link.capacity));
    for (const Transfer& t : link.transfers) {
      for (const int32_t d : {t.from, t.to})
        if (d < 0 || d >= static_cast<int32_t>(e.entry.rows.size()))
          e.fail(d, {}, fmt::format("link '{}' names device {}", link.name, d));
      bool same = t.source.size() == t.target.size();
      for (size_t d = 0; same && d < t.source.size(); ++d) same = t.source[d].size() == t.target[d].size();
      if (!same)
        e.fail(t.from, site_of_end(e, t.from, l, InstructionKind::kSend),
               fmt::format("a transfer of link '{}' to device {} has two sizes", link.name, t.to));
      if (!channels.emplace(t.from, t.to).second) continue;
      const int64_t sent = count(ends.sends, static_cast<int32_t>(l), t.from);
      const int64_t taken = count(ends.receives, static_cast<int32_t>(l), t.to);
      if (sent == taken) continue;
      FaultSite site =
          site_of_end(e, sent > 0 ? t.from : t.to, l, sent > 0 ? InstructionKind::kSend : InstructionKind::kReceive);
      const FaultSite other = site_of_end(e, t.to, l, InstructionKind::kReceive);
      if (sent > 0 && other.segment != nullptr)
        site.path.push_back(
            fmt::format("device {} takes it by instruction {}", t.to, told(e.plan, *other.segment, other.instruction)));
      e.fail(sent > 0 ? t.from : t.to, std::move(site),
             fmt::format("link '{}': device {} sends {} time(s), device {} receives {} time(s)", link.name, t.from,
                         sent, t.to, taken));
    }
  }
}

}  // namespace

void verify_communication(const Plan& plan, const Entry& entry) {
  const Entries e{plan, entry};
  check_groups(e);
  const EntryPeers peers = peers_of(e);
  check_queues(e);
  check_collectives(e, peers.parts);
  check_shifts(e);
  check_links(e);
  verify_order(e, peers);
}

}  // namespace whale
