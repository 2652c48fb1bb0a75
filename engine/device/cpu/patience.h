// How the threads of a device wait for each other. Waking a thread that sleeps takes longer than most kernels; one that
// spins on a core that others want keeps them, and whoever waits for those, from working. So threads spin while their
// cores are theirs, and sleep at once for a while after one of them was kept from its core.
#pragma once

#include <atomic>
#include <cstdint>

namespace whale::cpu {

// Whether others run on the cores that teams run on. From any thread.
class Crowd {
 public:
  bool here(int64_t now) const { return now < until_.load(std::memory_order_relaxed); }
  // A thread of the team was kept from its core. A few times in a short time, or soon after the last spell, begin one.
  void seen(int64_t now);

 private:
  std::atomic<int64_t> until_{0};
  std::atomic<int64_t> first_{0};  // of the signs that may come together
  std::atomic<int> signs_{0};
  std::atomic<int64_t> length_{0};  // of the present or last spell; longer from one to the next while they follow soon
};

int64_t monotonic_ns();

// Until `word` is not `value`: spins for at most `patience_ns`, as long as there is no crowd, and then sleeps. Who
// changes the word calls notify_all().
void wait_while(const std::atomic<uint32_t>& word, uint32_t value, int64_t patience_ns, Crowd& crowd);

// A stretch of work of this thread. end() says how long it took, and tells the crowd when the thread could not run for
// a part of it.
class Stretch {
 public:
  Stretch();
  int64_t end(Crowd& crowd) const;

 private:
  int64_t wall_, cpu_;
};

}  // namespace whale::cpu
