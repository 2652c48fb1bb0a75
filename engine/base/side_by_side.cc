#include "base/side_by_side.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/no_signals.h"
#include "base/thread_seconds.h"
#include "base/watch.h"

namespace whale {
double side_by_side(size_t count, size_t threads, const std::function<void(size_t k, double spent)>& work) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  size_t failed = count;
  double busiest = 0;
  const auto run = [&] {
    const double began = thread_seconds();
    for (size_t k = next.fetch_add(1); k < count; k = next.fetch_add(1)) {
      try {
        work(k, thread_seconds() - began);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (k < failed) failed = k, failure = std::current_exception();
        next.store(count);
      }
    }
    return thread_seconds() - began;
  };
  Watch* const watch = Watch::current();
  std::vector<std::thread> helpers;
  try {
    const NoSignals quiet;
    const size_t wanted = std::min(threads, count);
    helpers.reserve(wanted);
    while (helpers.size() + 1 < wanted)
      helpers.emplace_back([&] {
        const Watch::Of of(watch);
        const double mine = run();
        const std::lock_guard lock(mutex);
        busiest = std::max(busiest, mine);
      });
  } catch (const std::system_error&) {  // those that there are do it
  }
  const double mine = run();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
  return std::max(0.0, busiest - mine);
}

}  // namespace whale
