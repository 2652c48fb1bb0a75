#include "schedule/walk.h"

#include <algorithm>

#include "base/error.h"
#include "base/watch.h"

namespace whale {

namespace {

constexpr int kKinds = 3;

// Where every item stands and which message of its channel it sends. A channel is named by its sending virtual stage
// and phase, which fix source, destination and chunk.
class Index {
 public:
  explicit Index(const PipelineSchedule& schedule)
      : schedule_(schedule),
        position_(static_cast<size_t>(schedule.shape.virtual_stages()) * kKinds * schedule.shape.micro_batches, -1),
        message_(position_.size(), -1),
        channels_(static_cast<size_t>(schedule.shape.virtual_stages()) * kKinds) {
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
  int stage(const WorkSite& site) const { return virtual_stage(schedule_, site.device, site.item.chunk); }
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
    if (item.chunk < 0 || item.chunk >= shape.chunks) throw bad("no such chunk");
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

struct Cursor {
  int next = 0;          // position in the order
  bool sending = false;  // the item at `next` has ended, its message is not accepted yet
  double free = 0;
};

}  // namespace

OrderWalk walk_orders(const PipelineSchedule& schedule, int slots,
                      const std::function<double(const WorkSite&)>& seconds) {
  const Index index(schedule);
  const int devices = schedule.shape.stages;
  std::vector<Cursor> cursors(devices);
  OrderWalk result;
  for (const auto& order : schedule.devices) result.times.emplace_back(order.size());

  const auto started = [&](const WorkSite& s) {
    const Cursor& c = cursors[s.device];
    const int n = index.position(s);
    return n < c.next || (n == c.next && c.sending);
  };
  const auto time_of = [&](const WorkSite& s) -> WorkTime& { return result.times[s.device][index.position(s)]; };

  // Goes on as far as it can; what it then waits for, or none at the end of the order. For the order of events, an item
  // that has started has also ended.
  const auto advance = [&](int d) -> std::optional<Stuck> {
    Cursor& cursor = cursors[d];
    const auto& order = schedule.devices[d];
    while (cursor.next < static_cast<int>(order.size())) {
      Watch::look();
      const WorkSite site{d, order[cursor.next]};
      WorkTime& time = time_of(site);
      if (!cursor.sending) {
        double start = cursor.free;
        for (const WorkSite& need : needs_of(schedule, site)) {
          if (!started(need)) return Stuck{site, need, false};
          start = std::max(start, time_of(need).end);
        }
        const double end = start + seconds(site);
        time = {start, end, end};
        cursor.sending = true;
      }
      const int j = index.message(site);
      if (j >= 0 && j >= slots) {
        const WorkSite& taker = index.taker(site, j - slots);
        if (!started(taker)) return Stuck{site, taker, true};
        time.released = std::max(time.end, time_of(taker).start);
      }
      cursor.free = time.released;
      cursor.sending = false;
      ++cursor.next;
    }
    return std::nullopt;
  };

  for (bool moved = true; moved;) {
    moved = false;
    result.stuck.clear();
    for (int d = 0; d < devices; ++d) {
      const Cursor before = cursors[d];
      const std::optional<Stuck> stuck = advance(d);
      moved |= before.next != cursors[d].next || before.sending != cursors[d].sending;
      if (stuck) result.stuck.push_back(*stuck);
    }
  }
  return result;
}

}  // namespace whale
