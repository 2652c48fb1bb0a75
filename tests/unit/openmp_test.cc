// The entry points of OpenMP that the CPU back end defines, called as oneDNN calls them.
#include <dlfcn.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "device/cpu/patience.h"

namespace whale::cpu {
namespace {

struct Runtime {
  void* library;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  void (*barrier)();
  int (*number)();
  int (*members)();
  int (*inside)();
  int (*most)();
  void (*want)(int);

  static const Runtime& get() {
    static const Runtime runtime;
    return runtime;
  }

 private:
  Runtime() {
    const char* folder = std::getenv("WHALE_LIBRARY_DIR");
    const std::string path = std::string(folder ? folder : ".") + "/libwhale_cpu.so";
    library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    REQUIRE_MESSAGE(library != nullptr, path);
    take(parallel, "GOMP_parallel"), take(barrier, "GOMP_barrier"), take(number, "omp_get_thread_num");
    take(members, "omp_get_num_threads"), take(inside, "omp_in_parallel"), take(most, "omp_get_max_threads");
    take(want, "omp_set_num_threads");
  }
  template <class F>
  void take(F*& to, const char* name) {
    to = reinterpret_cast<F*>(dlsym(library, name));
    const bool found = to != nullptr;
    REQUIRE_MESSAGE(found, name);
  }
};

template <class Body>
void region(unsigned threads, Body body) {
  Runtime::get().parallel([](void* data) { (*static_cast<Body*>(data))(); }, &body, threads, 0);
}

TEST_CASE("openmp: every member of a region runs once, whatever regions came before") {
  const Runtime& omp = Runtime::get();
  std::atomic<int> wrong{0};
  const auto caller = [&](unsigned seed) {
    for (unsigned i = 0; i < 3000; ++i) {
      const unsigned threads = 1 + (i * 7 + seed) % 5;
      std::array<std::atomic<int>, 8> runs{};
      region(threads, [&] {
        const auto me = static_cast<size_t>(omp.number());
        if (omp.members() != static_cast<int>(threads) || me >= threads || omp.inside() != (threads > 1 ? 1 : 0))
          ++wrong;
        ++runs[me % 8];
      });
      for (unsigned t = 0; t < 8; ++t)
        if (runs[t] != (t < threads ? 1 : 0)) ++wrong;
    }
    if (omp.inside() != 0 || omp.members() != 1 || omp.number() != 0) ++wrong;
  };
  std::vector<std::thread> callers;  // each with a team of its own
  for (unsigned seed = 0; seed < 3; ++seed) callers.emplace_back(caller, seed);
  for (std::thread& thread : callers) thread.join();
  CHECK(wrong == 0);
}

TEST_CASE("openmp: a member that was in no region for long is in the next") {
  std::thread([] {
    std::atomic<int> runs{0};
    region(3, [&] { ++runs; });
    for (int i = 0; i < 530'000; ++i) region(2, [] {});  // half of what a round is counted to
    region(3, [&] { ++runs; });
    CHECK(runs == 6);
  }).join();
}

TEST_CASE("openmp: barriers, regions inside of regions, how many threads are wanted") {
  const Runtime& omp = Runtime::get();
  std::thread([&] {
    omp.want(3);
    CHECK(omp.most() == 3);
    std::array<std::atomic<int>, 3> at{};
    std::atomic<int> wrong{0}, inner{0};
    region(0, [&] {
      const auto me = static_cast<size_t>(omp.number());
      if (omp.members() != 3 || omp.most() != 3) ++wrong;
      for (int phase = 1; phase <= 500; ++phase) {
        ++at[me];
        omp.barrier();
        for (const auto& other : at)
          if (other != phase) ++wrong;
        omp.barrier();
      }
      region(2, [&] {
        if (omp.members() != 1 || omp.number() != 0) ++wrong;
        omp.barrier();
        ++inner;
      });
      if (omp.members() != 3 || omp.number() != static_cast<int>(me)) ++wrong;
    });
    CHECK(wrong == 0);
    CHECK(inner == 3);
    omp.want(0);
    CHECK(omp.most() == 1);
  }).join();
}

TEST_CASE("patience: a crowd is remembered for longer while it stays, and forgotten") {
  constexpr int64_t kMs = 1'000'000;
  Crowd crowd;
  CHECK(!crowd.here(0));
  int64_t now = 1000 * kMs, last = 0;
  for (int hiccup = 0; hiccup < 5; ++hiccup) {
    crowd.seen(now);
    CHECK(!crowd.here(now));
    now += 40 * kMs;
  }
  crowd.seen(now);
  crowd.seen(now + kMs);
  CHECK(!crowd.here(now + kMs));
  for (int i = 0; i < 12; ++i) {
    crowd.seen(now += 2 * kMs);
    CHECK(crowd.here(now));
    int64_t length = 0;
    while (crowd.here(now + length)) length += kMs;
    CHECK(length >= last);
    CHECK(length <= 500 * kMs);
    last = length;
    crowd.seen(now + length / 2);  // in the middle: nothing new
    CHECK(!crowd.here(now + length));
    now += length + kMs;  // and soon seen again
  }
  CHECK(last == 500 * kMs);
  now += 10'000 * kMs;
  for (int i = 0; i < 3; ++i) crowd.seen(now);  // after a long time
  CHECK(crowd.here(now + 99 * kMs));
  CHECK(!crowd.here(now + 101 * kMs));
}

TEST_CASE("patience: who sleeps is woken") {
  for (const bool crowded : {false, true}) {
    Crowd crowd;
    for (int i = 0; i < 3 && crowded; ++i) crowd.seen(monotonic_ns());
    std::atomic<uint32_t> word{0};
    std::thread sleeper([&] {
      for (uint32_t i = 0; i < 200; ++i) wait_while(word, i, 0, crowd);
    });
    for (uint32_t i = 1; i <= 200; ++i) {
      if (i % 20 == 0) usleep(300);
      word.store(i, std::memory_order_release);
      word.notify_all();
    }
    word.store(UINT32_MAX, std::memory_order_release);
    word.notify_all();
    sleeper.join();
    CHECK(word == UINT32_MAX);
  }
}

}  // namespace
}  // namespace whale::cpu
