#include "device/cpu/team.h"

#include <omp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "device/cpu/openmp.h"

namespace whale::cpu {
namespace {

constexpr size_t kThreadAddresses = size_t{80} << 20;  // a stack, and the area that malloc gives each thread

// Of the stacks of OpenMP's threads, as libgomp reads it: a number of KiB, or with a letter B, K, M or G. 0: the
// default.
size_t stack_of_team() {
  for (const char* name : {"OMP_STACKSIZE", "GOMP_STACKSIZE"}) {
    const char* text = std::getenv(name);
    if (text == nullptr) continue;
    char* end = nullptr;
    const double number = std::strtod(text, &end);
    while (*end == ' ') ++end;
    constexpr std::string_view kUnits = "BKMG";
    const size_t unit = *end == 0 ? 1 : kUnits.find(static_cast<char>(std::toupper(*end)));
    const double bytes = std::ldexp(number, static_cast<int>(10 * unit));
    if (unit != kUnits.npos && bytes > 0 && bytes < 0x1p62) return static_cast<size_t>(bytes);
  }
  return 0;
}

// Threads that only exist, with the stacks of OpenMP's. Made all at once and ended together, they show that so many can
// be made.
class Trial {
 public:
  explicit Trial(int count) : seats_(static_cast<size_t>(count)) {
    threads_.reserve(seats_.size());
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    const size_t stack = stack_of_team();
    if (stack != 0)
      pthread_attr_setstacksize(&attributes, stack);  // one that is too small is not taken, nor is it there
    int failed = 0;
    for (Seat& seat : seats_) {
      seat.over = &over_;
      pthread_t thread;
      failed = pthread_create(&thread, &attributes, &wait, &seat);
      if (failed != 0) break;
      threads_.push_back(thread);
    }
    pthread_attr_destroy(&attributes);
    const size_t made = threads_.size();
    end();
    if (failed != 0)
      throw error(
          Code::kResourceExhausted,
          "a cpu device needs {} threads{}, the system gives {} ({}). Use fewer threads or devices, {}raise the "
          "limit of threads (RLIMIT_NPROC, pids.max) or of addresses (RLIMIT_AS)",
          count + 1, stack == 0 ? "" : fmt::format(" with stacks of {} MiB (OMP_STACKSIZE)", stack >> 20), made + 1,
          std::strerror(failed), stack == 0 ? "or " : "a smaller OMP_STACKSIZE, or ");
  }

 private:
  struct Seat {
    std::atomic<pid_t> id{0};
    std::atomic<bool>* over = nullptr;
  };
  static void* wait(void* seat) {
    Seat& mine = *static_cast<Seat*>(seat);
    mine.id.store(static_cast<pid_t>(syscall(SYS_gettid)), std::memory_order_release);
    mine.over->wait(false, std::memory_order_acquire);
    return nullptr;
  }

  // A thread counts until the kernel has forgotten it, which is a little after it was joined.
  void end() {
    over_.store(true, std::memory_order_release);
    over_.notify_all();
    for (const pthread_t thread : threads_) pthread_join(thread, nullptr);
    constexpr int kLooks = 10000;
    for (const Seat& seat : seats_)
      for (int i = 0; i < kLooks && seat.id != 0 && syscall(SYS_tgkill, getpid(), seat.id.load(), 0) == 0; ++i)
        sched_yield();
  }

  std::vector<pthread_t> threads_;
  std::vector<Seat> seats_;
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
  // What a host's OMP_DYNAMIC, OMP_NUM_THREADS and OMP_MAX_ACTIVE_LEVELS say does not hold here.
  omp_set_dynamic(0);
  omp_set_num_threads(threads);
  omp_set_max_active_levels(1);
  need_addresses(static_cast<size_t>(threads) * kThreadAddresses);
  if (threads <= 1) return;
  if (own_openmp()) return make_workers(threads);
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
