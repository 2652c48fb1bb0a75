#include "simulate/rates.h"

#include <algorithm>
#include <set>

#include "cost/links.h"

namespace whale {

PlanRates::PlanRates(const CostModel& cost, const Plan& plan, const Entry& entry)
    : cost_(cost),
      plan_(plan),
      entry_(entry),
      parts_(peers_of({plan, entry}).parts),
      vote_(cost.between(plan.devices.front(), plan.devices.back())),
      links_(entry.links.size()) {
  for (const DeviceSpec& d : plan.devices) {
    uniform_ &= d.figures == DeviceFigures{};
    for (const bool half : {false, true}) rates_[half ? 1 : 0].push_back(cost.rates_of(d, half));
    host_.push_back(cost.host_of(d));
  }
  for (const Group& group : plan.groups)
    groups_.push_back(uniform_ ? std::vector<LinkRates>(group.parts.size(), cost.link)
                               : links_of_parts(group.parts, plan.devices, cost));
}

LinkRates PlanRates::group(int32_t group, int32_t device) const {
  return of(of(groups_, group), of(of(parts_, group), device));
}

int64_t PlanRates::members(int32_t group, int32_t device) const {
  return std::ssize(of(plan_.groups, group).parts[of(of(parts_, group), device)]);
}

std::map<int32_t, LinkRates> PlanRates::rates_of_link(const Link& link) const {
  const auto spec = [&](int32_t d) -> const DeviceSpec& { return plan_.devices[d]; };
  std::map<int, std::set<int32_t>> leaving, leaving_zone;  // node, zone -> its devices that send to others
  for (const Transfer& t : link.transfers) {
    if (spec(t.from).node != spec(t.to).node) leaving[spec(t.from).node].insert(t.from);
    if (spec(t.from).zone != spec(t.to).zone) leaving_zone[spec(t.from).zone].insert(t.from);
  }
  std::map<int32_t, LinkRates> out;
  for (const Transfer& t : link.transfers) {
    if (t.from == t.to) continue;
    const LinkRates here = cost_.between(spec(t.from), spec(t.to), std::ssize(leaving[spec(t.from).node]),
                                         std::ssize(leaving_zone[spec(t.from).zone]));
    const auto [at, fresh] = out.try_emplace(t.from, here);
    if (!fresh && here.bytes_per_second < at->second.bytes_per_second) at->second = here;
  }
  return out;
}

LinkRates PlanRates::link(int32_t link, int32_t device) const {
  if (uniform_) return cost_.link;
  std::map<int32_t, LinkRates>& known = links_[link];
  if (known.empty()) known = rates_of_link(entry_.links[link]);
  const auto at = known.find(device);
  return at == known.end() ? cost_.link : at->second;
}

std::vector<int32_t> PlanRates::kinds() const {
  std::vector<int32_t> out(plan_.devices.size());
  const auto work_alike = [&](size_t a, size_t b) {
    const DeviceRates &one = rates_[0][a], &other = rates_[0][b];
    return one.measured == other.measured && one.flops_per_second == other.flops_per_second;
  };
  bool alike = uniform_;
  for (size_t d = 1; d < out.size(); ++d) alike &= work_alike(d, 0);
  if (alike) return out;
  using Key = std::pair<size_t, std::vector<LinkRates>>;
  std::vector<Key> known;
  for (size_t d = 0; d < plan_.devices.size(); ++d) {
    Key key{d, {}};
    for (size_t g = 0; g < groups_.size(); ++g)
      key.second.push_back(parts_[g][d] < 0 ? LinkRates{} : of(groups_[g], parts_[g][d]));
    for (size_t l = 0; l < entry_.links.size(); ++l)
      key.second.push_back(link(static_cast<int32_t>(l), static_cast<int32_t>(d)));
    const auto at = std::ranges::find_if(known, [&](const Key& k) {
      return plan_.devices[k.first].figures == plan_.devices[d].figures && work_alike(k.first, d) &&
             k.second == key.second;
    });
    out[d] = static_cast<int32_t>(at - known.begin());
    if (at == known.end()) known.push_back(std::move(key));
  }
  return out;
}

}  // namespace whale
