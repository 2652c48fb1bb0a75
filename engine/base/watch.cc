#include "base/watch.h"

#include <cmath>

namespace whale {

thread_local Watch* Watch::current_ = nullptr;

Watch::Watch(const char* what, const std::atomic<bool>* cancelled, double timeout_seconds)
    : what_(what), cancelled_(cancelled), timeout_seconds_(timeout_seconds), outer_(current_) {
  if (!(timeout_seconds >= 0) || !std::isfinite(timeout_seconds))
    throw invalid("a timeout of {} seconds for {}, expected a number of seconds from 0 (0: none)", timeout_seconds,
                  what);
  start_ = std::chrono::steady_clock::now();
  current_ = this;
}

void Watch::check() const {
  for (const Watch* watch = this; watch != nullptr; watch = watch->outer_) {
    if (watch->looked) watch->looked();
    if (watch->cancelled_ != nullptr && watch->cancelled_->load(std::memory_order_relaxed))
      throw Stopped(error(Code::kCancelled, "{} was cancelled; everything is as before it", watch->what_));
    if (watch->timeout_seconds_ == 0) continue;
    const std::chrono::duration<double> since = std::chrono::steady_clock::now() - watch->start_;
    if (since.count() > watch->timeout_seconds_)
      throw Stopped(
          error(Code::kDeadlineExceeded,
                "{} took longer than its timeout of {} seconds; everything is as before it. Give a longer one, fewer "
                "devices or micro-batches, or a smaller model",
                watch->what_, watch->timeout_seconds_));
  }
}

}  // namespace whale
