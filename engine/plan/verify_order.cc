#include <algorithm>
#include <map>

#include "base/watch.h"
#include "plan/walk.h"

namespace whale {
namespace {

// Per part of a group, who is in it by class: sorted, with repetitions.
std::vector<std::vector<std::vector<int32_t>>> members_of(const Plan& plan, const std::vector<int32_t>& classes) {
  std::vector<std::vector<std::vector<int32_t>>> out;
  for (const Group& group : plan.groups) {
    out.emplace_back();
    for (const auto& part : group.parts) {
      Watch::look();
      std::vector<int32_t> members;
      for (const int32_t d : part) members.push_back(classes[d]);
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

EntryPeers peers_of(const Entries& e) {
  EntryPeers peers;
  for (const Group& group : e.plan.groups) {
    peers.parts.emplace_back(e.plan.devices.size(), -1);
    for (size_t p = 0; p < group.parts.size(); ++p)
      for (const int32_t d : group.parts[p]) peers.parts.back()[d] = static_cast<int32_t>(p);
  }
  for (const Link& link : e.entry.links) {
    Watch::look();
    peers.channels.emplace_back();
    for (const Transfer& t : link.transfers) peers.channels.back().emplace(t.from, t.to);
  }
  return peers;
}

std::vector<std::vector<LinkEnd>> ends_of_links(const Entries& e, const Channels& channels) {
  std::vector<std::vector<LinkEnd>> ends(e.entry.rows.size());
  for (size_t l = 0; l < channels.size(); ++l) {
    std::map<std::pair<int32_t, bool>, std::vector<int32_t>> peers;
    for (const auto& [from, to] : channels[l]) {
      Watch::look();
      peers[{from, true}].push_back(to);
      peers[{to, false}].push_back(from);
    }
    for (auto& [end, list] : peers) ends[end.first].push_back({l, end.second, std::move(list)});
  }
  return ends;
}

std::vector<int32_t> classes_alike(const Entries& e, const EntryPeers& peers, const std::vector<int32_t>& kinds) {
  const size_t n = e.entry.rows.size();
  const PartNumbers& part_of = peers.parts;
  const std::vector<std::vector<LinkEnd>> ends = ends_of_links(e, peers.channels);
  std::vector<int32_t> classes(n);
  size_t count = 0;
  {
    Numbers<int32_t> first;
    for (size_t d = 0; d < n; ++d) classes[d] = first.of(kinds[d]);
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
        key.push_back(part_of[g][d] < 0 ? kNone : number_of_part[g][part_of[g][d]]);
      for (const LinkEnd& end : ends[d]) {
        key.insert(key.end(), {static_cast<int32_t>(end.link), end.sends, static_cast<int32_t>(end.peers.size())});
        for (const int32_t peer : end.peers) key.push_back(classes[peer]);
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
    for (const LinkEnd& end : list) {
      std::vector<int32_t> of;
      for (const int32_t peer : end.peers) of.push_back(classes[peer]);
      of.erase(std::unique(of.begin(), of.end()), of.end());
      std::sort(of.begin(), of.end());
      if (std::adjacent_find(of.begin(), of.end()) == of.end()) continue;
      for (size_t d = 0; d < n; ++d) classes[d] = static_cast<int32_t>(d);
      return classes;
    }
  return classes;
}

namespace {

// Equal numbers for devices of which the rows take the same steps.
std::vector<int32_t> alike(const Entry& entry, const PlanSteps& steps) {
  Numbers<Ints> segments;
  Numbers<std::vector<int32_t>> programs;
  std::vector<int32_t> of_program;
  for (size_t p = 0; p < steps.size(); ++p) {
    std::vector<int32_t> numbers;
    for (size_t s = 0; s < steps[p].size(); ++s) {
      Watch::look();
      Ints key;
      for (const PlanStep& step : steps[p][s]) {
        const Instruction& i = entry.programs[p].segments[s].instructions[step.instruction];
        key.insert(key.end(), {static_cast<int64_t>(i.kind()), static_cast<int64_t>(i.queue), i.group(), i.link()});
        key.insert(key.end(), step.needs.begin(), step.needs.end());
      }
      numbers.push_back(segments.of(std::move(key)));
    }
    std::vector<int32_t> rows;
    for (const ScheduleRow& row : watched(entry.programs[p].schedule)) rows.push_back(numbers[row.segment]);
    of_program.push_back(programs.of(std::move(rows)));
  }
  std::vector<int32_t> out;
  for (const DeviceRow& row : entry.rows) out.push_back(of_program[row.program]);
  return out;
}

}  // namespace

void verify_order(const Entries& e, const EntryPeers& peers) {
  const PlanSteps steps = steps_of(e.entry, Walked::kCommunication);
  PlanWalk walk(e, peers, classes_alike(e, peers, alike(e.entry, steps)), steps, Walked::kCommunication, {});
  const PlanWalk::Standstill stuck = walk.run();
  if (stuck.text.empty()) return;
  const auto site_of_visit = [&](const PlanWalk::Visit& v) {
    const Program& p = e.program(v.device);
    return FaultSite{.segment = &p.segments[v.segment],
                     .instruction = static_cast<size_t>(v.instruction),
                     .micro_batch = p.schedule[v.row].micro_batch};
  };
  FaultSite site = site_of_visit(stuck.waits[0]);
  for (size_t k = 1; k < stuck.waits.size(); ++k) {
    const FaultSite other = site_of_visit(stuck.waits[k]);
    site.path.push_back(fmt::format("device {} has not begun instruction {}, micro-batch {}", stuck.waits[k].device,
                                    told(e.plan, *other.segment, other.instruction), other.micro_batch));
  }
  e.fail(stuck.waits[0].device, std::move(site), stuck.text);
}

}  // namespace whale
