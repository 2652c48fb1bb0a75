#include "device/cpu/openmp.h"

#include <dlfcn.h>
#include <omp.h>

#include <algorithm>
#include <climits>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "device/cpu/patience.h"

#define WHALE_EXPORT __attribute__((visibility("default")))

namespace whale::cpu {
namespace {

constexpr int64_t kIdle = 5'000'000;      // ns that a thread spins for the next region
constexpr int64_t kTogether = 2'000'000;  // ns that one spins for the others, beside what its own part took
constexpr uint32_t kMost = 4095;          // threads of a team

class Workers;

struct Seat {  // of a thread, in the region that it is in
  int number = 0, members = 1;
  Workers* team = nullptr;
};
thread_local Seat seat;
thread_local int wanted = 1;  // of a region that does not say how many
Crowd crowd;                  // of all teams: what keeps one from its cores keeps others, and each would learn anew

class Workers {
 public:
  using Body = void (*)(void*);

  // Throws std::system_error when the system does not give as many.
  explicit Workers(int size) : taken_(static_cast<size_t>(size)) {
    try {
      for (int number = 1; number < size; ++number) threads_.emplace_back([this, number] { serve(number); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Workers() { end(); }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  int size() const { return static_cast<int>(threads_.size()) + 1; }

  void run(Body body, void* data, int members) {
    body_ = body, data_ = data;
    open_.store(static_cast<uint32_t>(members), std::memory_order_relaxed);
    const uint32_t before = ended_.load(std::memory_order_relaxed);
    // One word says that a region has begun and for whom: a thread that is in none may be late to read it.
    const uint32_t round = begun_.load(std::memory_order_relaxed) / (kMost + 1) + 1;
    for (size_t other = static_cast<size_t>(members); other < taken_.size(); ++other)
      taken_[other].store(round & kRounds, std::memory_order_relaxed);  // in none of this round: not left behind
    begun_.store(round * (kMost + 1) + static_cast<uint32_t>(members), std::memory_order_release);
    begun_.notify_all();
    const int64_t took = take(0, round) ? part(0, members) : 0;
    // In a crowd parts that nobody has begun by now are taken too: their threads have no core. The members of a region
    // that meet at a barrier are all in their parts before any is done.
    for (int number = 1; number < members && crowd.here(monotonic_ns()); ++number)
      if (take(number, round)) part(number, members);
    wait_while(ended_, before, took + kTogether, crowd);
  }

  void barrier() {
    const uint32_t now = met_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(seat.members)) {
      arrived_.store(0, std::memory_order_relaxed);
      met_.store(now + 1, std::memory_order_release);
      met_.notify_all();
    } else {
      wait_while(met_, now, kTogether, crowd);
    }
  }

 private:
  // Whether the part is this thread's to do: nobody has begun it in this round, nor is the round over.
  bool take(int number, uint32_t round) {
    std::atomic<uint32_t>& last = taken_[number];
    uint32_t known = last.load(std::memory_order_relaxed);
    do {
      if (((round - known) & kRounds) - 1 >= kRounds / 2) return false;  // as late as that, or later
    } while (!last.compare_exchange_weak(known, round & kRounds, std::memory_order_acq_rel));
    return true;
  }

  int64_t part(int number, int members) {
    const Seat outside = std::exchange(seat, Seat{number, members, this});
    const Stretch stretch;
    body_(data_);
    const int64_t took = stretch.end(crowd);
    seat = outside;
    if (open_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      ended_.fetch_add(1, std::memory_order_release);
      ended_.notify_all();
    }
    return took;
  }

  void serve(int number) {
    wanted = size_of_team_;
    for (uint32_t seen = 0;;) {
      wait_while(begun_, seen, kIdle, crowd);
      seen = begun_.load(std::memory_order_acquire);
      const auto members = static_cast<int>(seen % (kMost + 1));
      if (members == 0) return;
      if (number < members && take(number, seen / (kMost + 1))) part(number, members);
    }
  }

  void end() {
    begun_.store((begun_.load() / (kMost + 1) + 1) * (kMost + 1), std::memory_order_release);
    begun_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  static constexpr uint32_t kRounds = UINT32_MAX / (kMost + 1);  // a mask: they are counted beside the members

  Body body_ = nullptr;
  void* data_ = nullptr;
  int size_of_team_ = wanted;
  alignas(64) std::atomic<uint32_t> begun_{0};  // regions, times kMost + 1, and the members of the last; none: the end
  alignas(64) std::atomic<uint32_t> open_{0};   // parts of the region that are not done
  alignas(64) std::atomic<uint32_t> ended_{0};  // regions
  alignas(64) std::atomic<uint32_t> arrived_{0};  // at the barrier
  std::atomic<uint32_t> met_{0};                  // barriers
  std::vector<std::atomic<uint32_t>> taken_;      // by member: the round that its last part was of
  std::vector<std::thread> threads_;              // last: they use the rest
};

thread_local std::unique_ptr<Workers> workers;

void run(Workers::Body body, void* data, int members) {
  if (members > 1 && seat.team == nullptr) {
    try {
      make_workers(members);
      return workers->run(body, data, members);
    } catch (const Error&) {  // one member then; a device's team has been made before
    }
  }
  const Seat outside = std::exchange(seat, Seat{.team = seat.team});
  body(data);
  seat = outside;
}

}  // namespace

void make_workers(int threads) {
  if (threads <= 1 || (workers != nullptr && workers->size() >= threads)) return;
  workers.reset();
  try {
    workers = std::make_unique<Workers>(threads);
  } catch (const std::system_error& e) {
    throw error(Code::kResourceExhausted,
                "a cpu device needs {} threads, the system does not give them ({}). Use fewer threads or devices, or "
                "raise the limit of threads (RLIMIT_NPROC, pids.max) or of addresses (RLIMIT_AS)",
                threads, e.what());
  }
}

}  // namespace whale::cpu

using whale::cpu::seat;
using whale::cpu::wanted;

extern "C" {
// libgomp's name for it is an alias, so that who defines that one can be seen.
void whale_parallel(void (*body)(void*), void* data, unsigned threads, unsigned /*binding*/) {
  whale::cpu::run(body, data, threads == 0 ? wanted : static_cast<int>(std::min(threads, whale::cpu::kMost)));
}
WHALE_EXPORT void GOMP_parallel(void (*)(void*), void*, unsigned, unsigned) __attribute__((alias("whale_parallel")));
WHALE_EXPORT void GOMP_barrier() {
  if (seat.team != nullptr && seat.members > 1) seat.team->barrier();
}
WHALE_EXPORT int omp_get_max_threads() noexcept { return wanted; }
WHALE_EXPORT int omp_get_num_threads() noexcept { return seat.members; }
WHALE_EXPORT int omp_get_thread_num() noexcept { return seat.number; }
WHALE_EXPORT int omp_in_parallel() noexcept { return seat.team != nullptr ? 1 : 0; }
WHALE_EXPORT int omp_get_thread_limit() noexcept { return INT_MAX; }
WHALE_EXPORT void omp_set_num_threads(int threads) noexcept {
  wanted = std::clamp(threads, 1, static_cast<int>(whale::cpu::kMost));
}
WHALE_EXPORT void omp_set_dynamic(int) noexcept {}
WHALE_EXPORT void omp_set_max_active_levels(int) noexcept {}
}

bool whale::cpu::own_openmp() {
  return dlsym(RTLD_DEFAULT, "GOMP_parallel") == reinterpret_cast<void*>(&whale_parallel);
}
