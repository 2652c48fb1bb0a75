// How late the queues of `lag` are.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>

#include "plan/plan.h"

namespace whale::lag {

// Devices are opened one after the other, those of a session together.
struct Opened {
  std::atomic<uint64_t> ever{0}, now{0};
};

// Of one device: which of its queues comes last, and where that stands among the last of all devices. The seeds go
// through them, but for one of some.
class Turn {
 public:
  static constexpr uint64_t kOneOf = 5;
  Turn(Opened& opened, uint64_t seed)
      : opened_(opened), number_(opened.ever.fetch_add(1)), seed_(seed - seed / kOneOf) {
    opened_.now.fetch_add(1);
  }
  ~Turn() { opened_.now.fetch_sub(1); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  uint64_t number() const { return number_; }
  void use(Queue queue) { queues_.fetch_or(1u << static_cast<int>(queue)); }
  Queue last() const {
    auto skip = static_cast<int>(seed_ % count());
    for (int queue = 0;; ++queue)
      if ((queues_.load() >> queue & 1) != 0 && skip-- == 0) return static_cast<Queue>(queue);
  }
  uint64_t place() const { return (number_ + seed_ / count()) % opened_.now.load(); }  // the largest is last of all

 private:
  uint64_t count() const { return static_cast<uint64_t>(std::popcount(queues_.load())); }
  Opened& opened_;
  const uint64_t number_, seed_;
  std::atomic<uint32_t> queues_{0};  // in use, as bits
};

// The calling thread is that queue's of a device from here on.
void become_queue(Queue queue, const Turn& turn, uint64_t seed);

// Around what a queue does, when it is time for it. `copies`: of many that an instruction may consist of.
class UnderWay {
 public:
  explicit UnderWay(bool copies);
  ~UnderWay();
  UnderWay(const UnderWay&) = delete;
  UnderWay& operator=(const UnderWay&) = delete;
};

}  // namespace whale::lag
