// A counter that threads advance and others wait for, on a futex, with an abort that wakes everybody. It orders the
// queues of a device and the members of a collective. Who sleeps is woken when the least that a sleeper waits for is
// there, not by every advance: a queue that waits for another's hundredth instruction sleeps through the others.
#pragma once

#include <atomic>
#include <cstdint>

namespace whale {

// Called now and then by a thread that sleeps in a wait; may abort what it waits for.
class Lookout {
 public:
  virtual ~Lookout() = default;
  virtual void look() = 0;
};

class Counter {
 public:
  // Only while nobody waits: between runs.
  void reset() {
    value_.store(0, std::memory_order_relaxed);
    wanted_.store(kNobody, std::memory_order_relaxed);
  }
  void advance(uint32_t by) {
    const uint32_t now = value_.fetch_add(by, std::memory_order_seq_cst) + by;
    if (now >= wanted_.load(std::memory_order_seq_cst)) wake();
  }
  // After this every wait returns false, until reset().
  void abort() {
    value_.fetch_or(kAborted, std::memory_order_seq_cst);
    wake();
  }

  // Until the counter is at least `target`; false: aborted. Spins for about a microsecond only: devices may share
  // cores.
  bool wait(uint32_t target, Lookout* lookout = nullptr) {
    const uint32_t now = value_.load(std::memory_order_acquire);
    if ((now & kAborted) != 0) return false;
    return now >= target || wait_slowly(target, lookout);
  }

 private:
  static constexpr uint32_t kAborted = 1u << 31, kNobody = UINT32_MAX;
  bool wait_slowly(uint32_t target, Lookout* lookout);
  void wake();

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> wanted_{kNobody};  // the least that somebody sleeps for
  std::atomic<uint32_t> wakes_{0};         // so many; what sleepers sleep on
};

}  // namespace whale
