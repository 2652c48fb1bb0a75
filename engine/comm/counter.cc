#include "comm/counter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <climits>
#include <ctime>

namespace whale {
namespace {

constexpr int kSpins = 64;
constexpr long kLookoutNanoseconds = 50'000'000;

void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

bool Counter::wait_slowly(uint32_t target, Lookout* lookout) {
  for (int spin = 0;; ++spin) {
    const uint32_t now = value_.load(std::memory_order_acquire);
    if ((now & kAborted) != 0) return false;
    if (now >= target) return true;
    if (spin < kSpins) {
      pause_briefly();
      continue;
    }
    // Either advance() sees what is wanted, or the value it left is seen here (both sides are sequentially consistent).
    // Who is forgotten in a wake() between the two finds another number of wakes, and does not sleep.
    const uint32_t wakes = wakes_.load(std::memory_order_seq_cst);
    uint32_t least = wanted_.load(std::memory_order_seq_cst);
    while (target < least && !wanted_.compare_exchange_weak(least, target, std::memory_order_seq_cst)) {
    }
    if (value_.load(std::memory_order_seq_cst) < target) {
      const timespec poll{0, kLookoutNanoseconds};
      syscall(SYS_futex, reinterpret_cast<uint32_t*>(&wakes_), FUTEX_WAIT_PRIVATE, wakes, &poll, nullptr, 0);
    }
    if (lookout != nullptr) lookout->look();
  }
}

// Those who wait for more say so again.
void Counter::wake() {
  wanted_.store(kNobody, std::memory_order_seq_cst);
  wakes_.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&wakes_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace whale
