// Splitting a kernel's work over the device's OpenMP threads. Results must not depend on the split: kernels cut
// reductions into chunks fixed by shape and let threads take whole chunks.
#pragma once

#include <omp.h>

#include <algorithm>
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

// f(begin, end) over contiguous parts of [0, count), one a thread. A region has either all threads or none: libgomp
// rebuilds its pool when the number changes.
template <class F>
void parallel_for(int threads, int64_t count, int64_t least, F&& f) {
  if (count <= 0) return;
  if (threads <= 1 || count < 2 * least) return f(int64_t{0}, count);
#pragma omp parallel num_threads(threads)
  {
    const int64_t n = omp_get_num_threads(), t = omp_get_thread_num();
    const int64_t begin = count * t / n, end = count * (t + 1) / n;
    if (begin < end) f(begin, end);
  }
}

// f(task, thread) for each task; threads take the next one when they are done. For tasks of unequal cost.
template <class F>
void parallel_tasks(int threads, int64_t count, F&& f) {
  if (threads <= 1 || count <= 1) {
    for (int64_t i = 0; i < count; ++i) f(i, 0);
    return;
  }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
  for (int64_t i = 0; i < count; ++i) f(i, omp_get_thread_num());
}

}  // namespace whale::cpu
