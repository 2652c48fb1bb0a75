#include "device/cpu/team.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"

namespace whale::cpu {
namespace {

constexpr size_t kThreadAddresses = size_t{80} << 20;  // a stack, and the area that malloc gives each thread

// Threads that only exist. Made all at once and ended together, they show that so many can be made.
class Trial {
 public:
  explicit Trial(int count) {
    threads_.reserve(static_cast<size_t>(count));
    ids_ = std::vector<std::atomic<pid_t>>(static_cast<size_t>(count));
    try {
      for (std::atomic<pid_t>& id : ids_)
        threads_.emplace_back([this, &id] {
          id.store(static_cast<pid_t>(syscall(SYS_gettid)), std::memory_order_release);
          over_.wait(false, std::memory_order_acquire);
        });
    } catch (const std::system_error& e) {
      const size_t made = threads_.size();
      end();
      throw error(Code::kResourceExhausted,
                  "a cpu device needs {} threads, the system gives {} ({}). Use fewer threads or devices, or raise the "
                  "limit of threads (RLIMIT_NPROC, pids.max) or of addresses (RLIMIT_AS)",
                  count + 1, made + 1, e.what());
    }
    end();
  }

 private:
  // A thread counts until the kernel has forgotten it, which is a little after it was joined.
  void end() {
    over_.store(true, std::memory_order_release);
    over_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    constexpr int kLooks = 10000;
    for (const std::atomic<pid_t>& id : ids_)
      for (int i = 0; i < kLooks && id.load() != 0 && syscall(SYS_tgkill, getpid(), id.load(), 0) == 0; ++i)
        sched_yield();
  }

  std::vector<std::thread> threads_;
  std::vector<std::atomic<pid_t>> ids_;
  std::atomic<bool> over_{false};
};

}  // namespace

void need_addresses(size_t bytes) {
  void* trial = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (trial == MAP_FAILED)
    throw error(Code::kResourceExhausted,
                "a cpu device needs {} MiB more of addresses, and the system does not give them ({}): raise the limit "
                "(RLIMIT_AS), or use fewer threads or devices",
                bytes >> 20, std::strerror(errno));
  munmap(trial, bytes);
}

void prepare_thread_exit() {
  pthread_t thread;
  if (pthread_create(
          &thread, nullptr, [](void*) -> void* { pthread_exit(nullptr); }, nullptr) == 0)
    pthread_join(thread, nullptr);
}

void make_team(int threads) {
  // What OMP_DYNAMIC, OMP_NUM_THREADS and OMP_MAX_ACTIVE_LEVELS say does not hold here.
  omp_set_dynamic(0);
  omp_set_num_threads(threads);
  omp_set_max_active_levels(1);
  need_addresses(static_cast<size_t>(threads) * kThreadAddresses);
  if (threads <= 1) return;
  if (omp_get_thread_limit() < threads)
    throw error(Code::kResourceExhausted,
                "a cpu device needs {} threads, OMP_THREAD_LIMIT of the environment permits {}", threads,
                omp_get_thread_limit());
  Trial trial(threads - 1);
  std::atomic<int> there{0};
#pragma omp parallel num_threads(threads)
  there.fetch_add(1, std::memory_order_relaxed);
  if (there.load() != threads)
    throw error(Code::kResourceExhausted, "a cpu device needs {} threads, OpenMP gives {}", threads, there.load());
}

}  // namespace whale::cpu
