// Splitting a kernel's work over the device's OpenMP threads. Results must not depend on the split: kernels cut
// reductions into chunks fixed by shape and let threads take whole chunks.
#pragma once

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace whale::cpu {

// oneDNN and our kernels choose their blocking by the OpenMP thread count of the calling thread.
class ThreadCount {
 public:
  explicit ThreadCount(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~ThreadCount() { omp_set_num_threads(before_); }
  ThreadCount(const ThreadCount&) = delete;

 private:
  int before_;
};

// f(begin, end) over contiguous pieces of [0, count), from `least` on each. A thread takes the pieces of its own part,
// the same from kernel to kernel, then what others have left: one whose core is taken from it holds up nobody for
// longer than a piece.
template <class F>
void parallel_for(int threads, int64_t count, int64_t least, F&& f) {
  if (count <= 0) return;
  if (threads <= 1 || count < 2 * least) return f(int64_t{0}, count);
  constexpr int64_t kPieces = 4;  // of a part
  constexpr int kMostParts = 128;
  const int parts = std::min(threads, kMostParts);
  const int64_t pieces = std::clamp<int64_t>(count / (std::max<int64_t>(1, least) * parts), 1, kPieces);
  const int64_t all = parts * pieces;
  std::atomic<int32_t> taken[kMostParts] = {};
#pragma omp parallel num_threads(threads)
  for (int p = 0, t = omp_get_thread_num(); p < parts; ++p) {
    const int64_t part = (t + p) % parts;
    std::atomic<int32_t>& next = taken[part];
    while (next.load(std::memory_order_relaxed) < pieces) {
      const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      const int64_t at = part * pieces + i, begin = count * at / all, end = count * (at + 1) / all;
      if (i < pieces && begin < end) f(begin, end);
    }
  }
}

// f(task, thread) for each task; threads take the next one when they are done. For tasks of unequal cost.
template <class F>
void parallel_tasks(int threads, int64_t count, F&& f) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i, 0);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) f(i, omp_get_thread_num());
}

}  // namespace whale::cpu
