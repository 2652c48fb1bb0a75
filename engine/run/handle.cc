#include "run/handle.h"

#include <chrono>

namespace whale {

bool RunState::wait(double timeout_seconds) const {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return done_.load(std::memory_order_relaxed); };
  constexpr double kForever = 1e9;
  if (!(timeout_seconds >= 0) || timeout_seconds > kForever) {
    ended_.wait(lock, ended);
    return true;
  }
  return ended_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), ended);
}

}  // namespace whale
