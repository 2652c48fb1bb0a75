// A schedule on the clock: every device goes through its order, starts an item when everything it needs has ended, and
// goes on when the item's message has been accepted.
//
// Sends block. A channel (source, destination, phase, virtual stage) has capacity k: the send of its message j is
// accepted once message j - k was consumed, that is, once the item that takes it has started. k = 0 is a rendezvous.
#pragma once

#include <functional>
#include <limits>
#include <vector>

#include "schedule/schedule.h"

namespace whale {

inline constexpr int kUnlimitedCapacity = std::numeric_limits<int>::max();

struct WorkTime {
  double start = 0;
  double end = 0;
  double released = 0;  // when the device may go on: `end`, or later where the send had to wait
};

// A device that cannot go on: `at` waits for `wanted`, to end (a need), or to start (so that it frees a place).
struct Stuck {
  WorkSite at;
  WorkSite wanted;
  bool sending = false;
};

struct OrderWalk {
  std::vector<std::vector<WorkTime>> times;  // [device][position], complete only when nothing is stuck
  // Devices that wait for each other, each for the next one, the last for the first; empty: all orders end.
  std::vector<Stuck> stuck;
};

// Throws invalid unless `schedule` holds every item of its shape exactly once, each on the device of its virtual stage.
OrderWalk walk_orders(const PipelineSchedule& schedule, int capacity,
                      const std::function<double(const WorkSite&)>& seconds);

}  // namespace whale
