#include "device/cpu/patience.h"

#include <time.h>

#include <algorithm>

namespace whale::cpu {
namespace {

constexpr int64_t kKept = 500'000;  // ns off its core: a task of somebody's, rather than the kernel's own
constexpr int kSigns = 3;           // so many times in so short a time: not a hiccup of the machine's
constexpr int64_t kTogether = 30'000'000;
constexpr int64_t kShortestSpell = 100'000'000, kLongestSpell = 500'000'000;
constexpr int kLooks = 32;  // at the word, between two at the clock

int64_t ns(clockid_t clock) {
  timespec t{};
  clock_gettime(clock, &t);
  return t.tv_sec * 1'000'000'000 + t.tv_nsec;
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

int64_t monotonic_ns() { return ns(CLOCK_MONOTONIC); }

void Crowd::seen(int64_t now) {
  const int64_t before = until_.load(std::memory_order_relaxed);
  if (now < before) return;
  const int64_t last = length_.load(std::memory_order_relaxed);
  const bool soon = last > 0 && now < before + last;
  if (!soon) {
    const int64_t first = first_.load(std::memory_order_relaxed);
    if (now - first > kTogether) {
      first_.store(now, std::memory_order_relaxed);
      signs_.store(1, std::memory_order_relaxed);
      return;
    }
    if (signs_.fetch_add(1, std::memory_order_relaxed) + 1 < kSigns) return;
  }
  const int64_t length = soon ? std::min(2 * last, kLongestSpell) : kShortestSpell;
  length_.store(length, std::memory_order_relaxed);
  until_.store(now + length, std::memory_order_relaxed);
}

void wait_while(const std::atomic<uint32_t>& word, uint32_t value, int64_t patience_ns, Crowd& crowd) {
  int64_t now = monotonic_ns();
  for (const int64_t end = now + patience_ns;;) {
    for (int i = 0; i < kLooks; ++i) {
      if (word.load(std::memory_order_acquire) != value) return;
      relax();
    }
    const int64_t before = now;
    now = monotonic_ns();
    if (now - before > kKept) crowd.seen(now);
    if (now >= end || crowd.here(now)) break;
  }
  while (word.load(std::memory_order_acquire) == value) word.wait(value, std::memory_order_acquire);
}

Stretch::Stretch() : wall_(monotonic_ns()), cpu_(ns(CLOCK_THREAD_CPUTIME_ID)) {}

int64_t Stretch::end(Crowd& crowd) const {
  const int64_t now = monotonic_ns(), took = now - wall_;
  if (took > kKept && took - (ns(CLOCK_THREAD_CPUTIME_ID) - cpu_) > kKept) crowd.seen(now);
  return took;
}

}  // namespace whale::cpu
