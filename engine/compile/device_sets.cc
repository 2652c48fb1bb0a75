#include "compile/device_sets.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include "base/text.h"
#include "cluster/device_kinds.h"

namespace whale {
namespace {

int64_t node_size(const std::vector<DeviceSpec>& devices) {
  std::map<int, int64_t> sizes;
  for (const DeviceSpec& d : devices) ++sizes[d.node];
  int64_t common = 0;
  for (const auto& [node, size] : sizes) common = std::gcd(common, size);
  return common;
}

class Sets {
 public:
  Sets(const std::vector<DeviceSpec>& devices, const CompileOptions& options, Precision precision)
      : devices_(devices), options_(options), precision_(precision), types_(names_of_kinds(devices)) {}

  std::vector<DeviceSet> run() {
    DeviceSet all;
    std::map<std::string, std::vector<int32_t>> of_type;
    for (size_t d = 0; d < devices_.size(); ++d) {
      all.devices.push_back(static_cast<int32_t>(d));
      of_type[types_[d]].push_back(all.devices.back());
    }
    add(all);
    if (options_.search.ranks == 1) {
      for (const auto& [type, list] : of_type) add_of_type(of_type.size() > 1 ? type + " alone" : "", list);
      if (of_type.size() > 2)
        for (const auto& [type, list] : of_type) add_without(type, all);
      add_zones(all);
      add_without_some(all);
      add_mixes(of_type);
      if (are_unlike(devices_)) add_sorted(all);
    }
    leave_one_of_twins();
    for (DeviceSet& set : out_) measure(set);
    return std::move(out_);
  }

 private:
  const DeviceSpec& device(int32_t d) const { return devices_[d]; }

  void add(DeviceSet set) {
    if (!set.devices.empty() &&
        std::ranges::none_of(out_, [&](const DeviceSet& s) { return s.devices == set.devices; }))
      out_.push_back(std::move(set));
  }

  void add_of_type(const std::string& name, const std::vector<int32_t>& list) {
    add({.name = name, .devices = list});
    std::vector<int> nodes;
    for (const int32_t d : list)
      if (nodes.empty() || nodes.back() != device(d).node) nodes.push_back(device(d).node);
    for (size_t keep = nodes.size() / 2; keep > 0; keep /= 2) {
      DeviceSet some{.name = fmt::format("{} of {} nodes", keep, nodes.size()), .devices = {}};
      for (const int32_t d : list)
        if (device(d).node <= nodes[keep - 1]) some.devices.push_back(d);
      add(std::move(some));
    }
    size_t first = 0;
    while (first < list.size() && device(list[first]).node == nodes[0]) ++first;
    for (size_t keep = first; keep > 0; keep /= 2)
      add({.name = fmt::format("{} of {} devices", keep, devices_.size()),
           .devices = {list.begin(), list.begin() + static_cast<std::ptrdiff_t>(keep)}});
  }

  void add_without(const std::string& type, const DeviceSet& all) {
    DeviceSet others{.name = "without " + type, .devices = {}};
    for (const int32_t d : all.devices)
      if (types_[d] != type) others.devices.push_back(d);
    add(std::move(others));
  }

  // Some of each type, the first of the list; in all no more than are looked at in seconds.
  void add_mixes(const std::map<std::string, std::vector<int32_t>>& of_type) {
    constexpr size_t kMost = 256, kAnyOf = 4;
    struct Type {
      std::string name;
      const std::vector<int32_t>* list;
      std::vector<size_t> counts;  // falling: all of them first
    };
    std::vector<Type> types;
    for (const auto& [name, list] : of_type) {
      Type type{name, &list, {}};
      for (size_t n = list.size(); n > 0; n = list.size() <= kAnyOf ? n - 1 : n / 2) type.counts.push_back(n);
      type.counts.push_back(0);
      types.push_back(std::move(type));
    }
    const auto mixes = [&] {
      return std::accumulate(types.begin(), types.end(), size_t{1},
                             [](size_t n, const Type& t) { return n * t.counts.size(); });
    };
    while (mixes() > kMost) {  // the fewest of the type with most counts are left out
      Type& most = *std::ranges::max_element(types, {}, [](const Type& t) { return t.counts.size(); });
      if (most.counts.size() == 2) return;
      most.counts.erase(most.counts.end() - 2);
    }
    for (size_t k = 0; k < mixes(); ++k) {
      DeviceSet some;
      std::vector<std::string> names;
      size_t rest = k;
      for (const Type& type : types) {
        const size_t n = type.counts[rest % type.counts.size()];
        rest /= type.counts.size();
        if (n > 0) names.push_back(fmt::format("{}x{}", n, type.name));
        some.devices.insert(some.devices.end(), type.list->begin(),
                            type.list->begin() + static_cast<std::ptrdiff_t>(n));
      }
      some.name = fmt::format("{}", fmt::join(names, " + "));
      std::ranges::sort(some.devices);
      add(std::move(some));
    }
  }

  void add_zones(const DeviceSet& all) {
    std::map<int, DeviceSet> zones;
    for (const int32_t d : all.devices) zones[device(d).zone].devices.push_back(d);
    for (auto& [zone, set] : zones) {
      set.name = fmt::format("zone {} alone", zone);
      add(std::move(set));
    }
  }

  // Of 63 devices 60.
  void add_without_some(const DeviceSet& all) {
    constexpr double kLeast = 0.8, kMore = 1.25;  // of all; of what many ways are worth
    const auto n = std::ssize(all.devices);
    const auto worth = [](int64_t count) {
      return static_cast<double>(count) * std::log2(1 + std::ssize(divisors(count)));
    };
    int64_t best = n;
    for (int64_t count = n - 1; count >= kLeast * static_cast<double>(n); --count)
      if (worth(count) > kMore * worth(n) && worth(count) > worth(best)) best = count;
    std::vector<int32_t> slowest = all.devices;
    std::ranges::stable_sort(slowest, {}, [&](int32_t d) { return device(d).figures.f32_flops_per_second; });
    DeviceSet some{.name = fmt::format("{} of {} devices", best, n),
                   .devices = {slowest.begin() + (n - best), slowest.end()}};
    std::ranges::sort(some.devices);
    add(std::move(some));
  }

  void add_sorted(const DeviceSet& all) {
    std::map<int, double> room;  // of a node, and how fast it is where rooms are alike
    for (const DeviceSpec& d : devices_)
      room[d.node] =
          std::max(room[d.node], static_cast<double>(d.memory_bytes) + 1e-6 * d.figures.f32_flops_per_second);
    for (const bool rising : {false, true}) {
      DeviceSet sorted{
          .name = rising ? "smallest memory first" : "largest memory first", .devices = all.devices, .ordered = true};
      std::ranges::stable_sort(sorted.devices, {},
                               [&](int32_t d) { return (rising ? 1 : -1) * room.at(device(d).node); });
      add(std::move(sorted));
    }
  }

  // Two zones of the same devices, say: whatever is found for one is as good on the other.
  void leave_one_of_twins() {
    std::vector<std::vector<DeviceSpec>> seen;
    std::erase_if(out_, [&](const DeviceSet& set) {
      std::vector<DeviceSpec> mine = chosen_of(devices_, set.devices);
      std::map<int, int> zones;
      for (DeviceSpec& d : mine) {
        if (!d.links.empty()) return false;
        d.zone = zones.try_emplace(d.zone, static_cast<int>(zones.size())).first->second, d.place = 0;
      }
      if (std::ranges::find(seen, mine) != seen.end()) return true;
      seen.push_back(std::move(mine));
      return false;
    });
  }

  void measure(DeviceSet& set) const {
    set.specs = chosen_of(devices_, set.devices);
    set.cost.emplace(set.specs, 1, options_.profile, precision_);
    set.unlike = are_unlike(set.specs), set.node = node_size(set.specs);
    std::set<std::string> types;
    for (const int32_t d : set.devices) types.insert(types_[d]);
    set.types = fmt::format("{}", fmt::join(types, " "));
    for (const DeviceSpec& d : set.specs) {
      set.memory = std::max(set.memory, d.memory_bytes);
      set.flops += set.cost->rates_of(d).flops_per_second, set.price_hour += d.figures.price_per_hour;
    }
  }

  const std::vector<DeviceSpec>& devices_;
  const CompileOptions& options_;
  Precision precision_;
  std::vector<std::string> types_;
  std::vector<DeviceSet> out_;
};

}  // namespace

std::vector<DeviceSet> device_sets(const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                                   Precision precision) {
  return Sets(devices, options, precision).run();
}

Ints divisors(int64_t n) {
  Ints out;
  for (int64_t d = 1; d <= n; ++d)
    if (n % d == 0) out.push_back(d);
  return out;
}

}  // namespace whale
