#include "base/side_by_side.h"

#include <sched.h>

#include <doctest/doctest.h>
#include <atomic>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/watch.h"
#include "cluster/devices.h"
#include "compile/automatic.h"
#include "trained.h"

using namespace whale;

namespace {

// On one core for the life of the object.
class OneCore {
 public:
  OneCore() {
    sched_getaffinity(0, sizeof before_, &before_);
    cpu_set_t one;
    CPU_ZERO(&one);
    for (size_t c = 0; c < CPU_SETSIZE; ++c)
      if (CPU_ISSET(c, &before_)) {
        CPU_SET(c, &one);
        break;
      }
    sched_setaffinity(0, sizeof one, &one);
  }
  ~OneCore() { sched_setaffinity(0, sizeof before_, &before_); }
  OneCore(const OneCore&) = delete;
  OneCore& operator=(const OneCore&) = delete;

 private:
  cpu_set_t before_{};
};

}  // namespace

TEST_CASE("pieces side by side: each once, over as many threads as are asked for") {
  for (const size_t threads : {size_t{1}, size_t{3}, size_t{64}})
    for (const size_t count : {size_t{0}, size_t{1}, size_t{100}}) {
      std::vector<std::atomic<int>> calls(count);
      std::mutex mutex;
      std::set<std::thread::id> who;
      const double more = side_by_side(count, threads, [&](size_t k, double spent) {
        ++calls[k];
        CHECK(spent >= 0);
        const std::lock_guard lock(mutex);
        who.insert(std::this_thread::get_id());
      });
      for (const auto& c : calls) CHECK(c == 1);
      CHECK(who.size() <= std::min(threads, count));
      CHECK(more >= 0);
    }
}

TEST_CASE("of pieces side by side the first that fails is told, and none begins after it") {
  std::atomic<int> begun{0};
  try {
    side_by_side(1000, 4, [&](size_t k, double) {
      ++begun;
      if (k >= 5) throw invalid("piece {}", k);
    });
    FAIL("nothing was thrown");
  } catch (const Error& e) {
    CHECK(e.message() == "piece 5");
  }
  CHECK(begun >= 6);
  CHECK(begun <= 5 + 4 + 1);
}

TEST_CASE("the caller's watch stops pieces on all threads") {
  std::atomic<bool> cancelled{false};
  const Watch watch("planning", &cancelled, 0);
  CHECK_THROWS_AS(side_by_side(64, 4,
                               [&](size_t k, double) {
                                 CHECK(Watch::current() == &watch);
                                 if (k == 7) cancelled = true;
                                 while (k >= 8) Watch::look();
                               }),
                  Stopped);
  CHECK(Watch::current() == &watch);
}

TEST_CASE("strategy auto finds the same on one core as on all") {
  const small::Model m = small::gpt(8);
  const auto devices = parse_devices("2xV100-32GB + 2xP100-16GB", {0});
  const auto found = [&] {
    std::vector<std::string> out;
    for (const Judged& j : search(m.g, devices, {}).list)
      out.push_back(fmt::format("{} {} {}", whole_text(j), j.seconds, j.bytes));
    return out;
  };
  const std::vector<std::string> all = found();
  const OneCore one;
  CHECK(found() == all);
  CHECK(all.size() > 8);
}
