// A counter that one thread advances and others wait for, on a futex, with an abort that wakes everybody. It orders the
// streams of a device and the members of a collective.
#pragma once

#include <atomic>
#include <cstdint>

namespace whale {

class Counter {
 public:
  enum class Result : uint8_t { kReached, kAborted, kCancelled };

  // Only while nobody waits: between runs.
  void reset() { value_.store(0, std::memory_order_relaxed); }
  // By one thread at a time.
  void advance(uint32_t by) {
    value_.fetch_add(by, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake();
  }
  // After this every wait that has not reached its target returns kAborted, until reset().
  void abort() {
    value_.fetch_or(kAborted, std::memory_order_seq_cst);
    wake();
  }
  bool aborted() const { return (value_.load(std::memory_order_acquire) & kAborted) != 0; }
  uint32_t value() const { return value_.load(std::memory_order_acquire) & ~kAborted; }

  // Until the counter is at least `target`. Spins for about a microsecond only: devices may share cores. `cancel`, when given,
  // is looked at now and then, so that even a wait that nothing will end can be cancelled.
  Result wait(uint32_t target, const std::atomic<bool>* cancel = nullptr) {
    const uint32_t now = value_.load(std::memory_order_acquire);
    if ((now & kAborted) != 0) return Result::kAborted;
    if (now >= target) return Result::kReached;
    return wait_slowly(target, cancel);
  }

 private:
  static constexpr uint32_t kAborted = 1u << 31;
  Result wait_slowly(uint32_t target, const std::atomic<bool>* cancel);
  void wake();

  alignas(64) std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace whale
