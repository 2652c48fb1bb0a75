#include "run/recorder.h"

#include <algorithm>

namespace whale {

Recorder::Seen Recorder::see() const {
  Seen seen;
  const uint64_t last = count_.load(std::memory_order_acquire);
  const uint64_t oldest = last - std::min(last, kEvents);
  for (uint64_t n = oldest; n < last; ++n) {
    const Slot& slot = slots_[n % kEvents];
    const uint64_t place = slot.place.load(std::memory_order_acquire);
    seen.events.push_back({static_cast<uint32_t>(place >> 32), static_cast<int32_t>(place & UINT32_MAX),
                           slot.step.load(std::memory_order_acquire), slot.begin.load(std::memory_order_acquire),
                           slot.end.load(std::memory_order_acquire)});
  }
  // What has been written over meanwhile is mixed of two events.
  const uint64_t now = count_.load(std::memory_order_acquire);
  const uint64_t kept = now - std::min(now, kEvents);
  if (kept > oldest)
    seen.events.erase(seen.events.begin(),
                      seen.events.begin() + static_cast<std::ptrdiff_t>(std::min(kept - oldest, last - oldest)));
  seen.in_run = last > first_.load(std::memory_order_acquire);
  return seen;
}

}  // namespace whale
