// The flight recorder of a queue: where in its list it is, and its last instructions. Always on. The queue's thread
// writes it, with times that it has read anyway and without taking memory; any thread reads it at any time.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <vector>

namespace whale {

class Recorder {
 public:
  static constexpr uint64_t kEvents = 64;  // that are kept
  struct Event {
    uint32_t row = 0;         // of the program's schedule
    int32_t instruction = 0;  // in the row's segment
    int64_t step = 0;
    int64_t begin = 0;  // nanoseconds of the steady clock; 0: it waits for other queues of its device
    int64_t end = 0;    // likewise; 0: it has not ended
  };

  // On the queue's thread. `begin`: 0: not yet.
  void reach(uint32_t row, int32_t instruction, int64_t step, int64_t begin) {
    const uint64_t n = count_.load(std::memory_order_relaxed);
    // Before the event's words: who reads one of these then reads this too (release stores are plain ones on x86).
    count_.store(n + 1, std::memory_order_relaxed);
    now_ = &slots_[n % kEvents];
    now_->place.store(uint64_t{row} << 32 | static_cast<uint32_t>(instruction), std::memory_order_release);
    now_->step.store(step, std::memory_order_release);
    now_->begin.store(begin, std::memory_order_release);
    now_->end.store(0, std::memory_order_release);
  }
  void begin(int64_t now) { now_->begin.store(now, std::memory_order_release); }
  void end(int64_t now) { now_->end.store(now, std::memory_order_release); }
  // Between runs: what comes is of another one.
  void start_run() { first_.store(count_.load(std::memory_order_relaxed), std::memory_order_relaxed); }

  struct Seen {
    std::vector<Event> events;  // oldest first
    bool in_run = false;        // the last one is of the run that was started last
  };
  Seen see() const;

 private:
  struct Slot {
    std::atomic<uint64_t> place{0};
    std::atomic<int64_t> step{0}, begin{0}, end{0};
  };
  std::atomic<uint64_t> count_{0}, first_{0};
  std::array<Slot, kEvents> slots_;
  Slot* now_ = &slots_[0];
};

}  // namespace whale
