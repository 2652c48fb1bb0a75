#include "schedule/walk.h"

#include <algorithm>

#include "base/error.h"
#include "base/watch.h"
#include "schedule/clock.h"

namespace whale {

namespace {

constexpr int kKinds = 3;

// Where every item stands and which message of its channel it sends. A channel is named by its sending virtual stage
// and phase, which fix source, destination and virtual stage.
class Index {
 public:
  explicit Index(const PipelineSchedule& schedule)
      : schedule_(schedule),
        position_(static_cast<size_t>(schedule.shape.total_stages()) * kKinds * schedule.shape.micro_batches, -1),
        message_(position_.size(), -1),
        channels_(static_cast<size_t>(schedule.shape.total_stages()) * kKinds) {
    const PipelineShape& shape = schedule.shape;
    if (static_cast<int>(schedule.devices.size()) != shape.stages)
      throw invalid("schedule '{}' has orders for {} devices, expected {}", schedule.name, schedule.devices.size(),
                    shape.stages);
    size_t found = 0;
    for (int d = 0; d < shape.stages; ++d) {
      for (const int n : watched(0, static_cast<int>(schedule.devices[d].size()))) place(d, n);
      found += schedule.devices[d].size();
    }
    const size_t wanted = position_.size() / kKinds * (schedule.split_backward ? 3 : 2);
    if (found != wanted) throw invalid("schedule '{}' has {} items, expected {}", schedule.name, found, wanted);
  }

  int position(const WorkSite& site) const { return position_[key(site)]; }
  int message(const WorkSite& site) const { return message_[key(site)]; }  // -1: sends nothing to another device
  // The item that takes message j of the channel on which `site` sends.
  const WorkSite& taker(const WorkSite& site, int j) const { return channels_[channel(site)][j]; }

 private:
  int stage(const WorkSite& site) const { return model_stage(schedule_, site.device, site.item.virtual_stage); }
  size_t channel(const WorkSite& site) const {
    return static_cast<size_t>(stage(site)) * kKinds + static_cast<int>(site.item.kind);
  }
  size_t key(const WorkSite& site) const {
    return channel(site) * schedule_.shape.micro_batches + site.item.micro_batch;
  }

  void place(int device, int n) {
    const PipelineShape& shape = schedule_.shape;
    const WorkSite site{device, schedule_.devices[device][n]};
    const WorkItem& item = site.item;
    const auto bad = [&](const char* why) {
      return invalid("schedule '{}', device {}, item {} ({}): {}", schedule_.name, device, n,
                     to_string(schedule_, item), why);
    };
    if (item.virtual_stage < 0 || item.virtual_stage >= shape.virtual_stages) throw bad("no such virtual stage");
    if (item.micro_batch < 0 || item.micro_batch >= shape.micro_batches) throw bad("no such micro-batch");
    if (item.kind == WorkKind::kWeight && !schedule_.split_backward) throw bad("its backward is not split");
    if (position_[key(site)] >= 0) throw bad("is there twice");
    position_[key(site)] = n;
    const std::optional<WorkSite> to = receiver_of(schedule_, site);
    if (!to || to->device == device) return;
    message_[key(site)] = static_cast<int>(channels_[channel(site)].size());
    channels_[channel(site)].push_back(*to);
  }

  const PipelineSchedule& schedule_;
  std::vector<int> position_, message_;
  std::vector<std::vector<WorkSite>> channels_;  // by sending virtual stage and phase: the takers, in order of sending
};

}  // namespace

OrderWalk walk_orders(const PipelineSchedule& schedule, int capacity,
                      const std::function<double(const WorkSite&)>& seconds) {
  const Index index(schedule);
  // Of every position, in the order of devices: its work, and what holds its device until its message is accepted.
  struct Item {
    WorkSite site;
    Clock::Item work = 0, accepted = 0;
  };
  Clock clock;
  std::vector<Item> items;
  std::vector<size_t> first;  // per device
  for (int d = 0; d < schedule.shape.stages; ++d) {
    first.push_back(items.size());
    const size_t device = clock.resource();
    for (const WorkItem& work : watched(schedule.devices[d])) {
      const WorkSite site{d, work};
      Item item{site, clock.work(device, seconds(site))};
      item.accepted = index.message(site) >= 0 && index.message(site) >= capacity ? clock.work(device, 0) : item.work;
      items.push_back(item);
    }
  }
  const auto item_of = [&](const WorkSite& s) -> const Item& {
    return items[first[s.device] + static_cast<size_t>(index.position(s))];
  };
  for (const Item& item : watched(items)) {
    for (const WorkSite& need : needs_of(schedule, item.site))
      if (need.device != item.site.device || index.position(need) > index.position(item.site))
        clock.after(item.work, item_of(need).work);
    if (item.accepted != item.work)
      clock.after_begin(item.accepted, item_of(index.taker(item.site, index.message(item.site) - capacity)).work);
  }

  OrderWalk result;
  const Clock::Stuck stuck = clock.run();
  for (const auto& order : schedule.devices) result.times.emplace_back().reserve(order.size());
  for (const Item& item : items)
    result.times[item.site.device].push_back({clock.begin(item.work), clock.end(item.work), clock.end(item.accepted)});
  // Those in the circle who wait for more than the item before them on the same device.
  const auto site_of = [&](Clock::Item i) -> const Item& {
    return *std::partition_point(items.begin(), items.end(), [&](const Item& item) { return item.accepted < i; });
  };
  for (size_t k = 0; k < stuck.items.size(); ++k) {
    const Clock::Item at = stuck.items[k], next = stuck.items[(k + 1) % stuck.items.size()];
    const Item &here = site_of(at), &wanted = site_of(next);
    if (next + 1 != at || here.site.device != wanted.site.device)
      result.stuck.push_back({here.site, wanted.site, at != here.work});
  }
  const auto least = std::min_element(result.stuck.begin(), result.stuck.end(),
                                      [](const Stuck& x, const Stuck& y) { return x.at.device < y.at.device; });
  std::rotate(result.stuck.begin(), least, result.stuck.end());
  return result;
}

}  // namespace whale
