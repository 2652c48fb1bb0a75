// Cancel: a token that stops runs. RunHandle: a run that has been started.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.h"

namespace whale {

// Triggered once, from any thread; stops every run that was given it, also one that starts later.
class Cancel {
 public:
  void trigger() { flag_.store(true, std::memory_order_release); }
  bool triggered() const { return flag_.load(std::memory_order_acquire); }
  const std::atomic<bool>& flag() const { return flag_; }

 private:
  std::atomic<bool> flag_{false};
};

// Opened by the first of several runs that ends.
class Gate {
 public:
  void open() {
    const std::lock_guard lock(mutex_);
    opened_ = true;
    changed_.notify_all();
  }
  void wait(double timeout_seconds);  // negative: forever

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool opened_ = false;
};

// How a run ended; written once, by the executor.
class RunState {
 public:
  void finish(std::optional<Error> error) {
    const std::lock_guard lock(mutex_);
    error_ = std::move(error);
    done_.store(true, std::memory_order_release);
    ended_.notify_all();
    for (Gate* gate : gates_) gate->open();
  }
  bool done() const { return done_.load(std::memory_order_acquire); }
  bool wait(double timeout_seconds) const;                      // negative: forever. false: not yet
  const std::optional<Error>& error() const { return error_; }  // once done
  void add(Gate& gate);  // opened when the run has ended, at once if it has; until remove()
  void remove(Gate& gate);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable ended_;
  std::atomic<bool> done_{false};
  std::optional<Error> error_;
  std::vector<Gate*> gates_;
};

class RunHandle {
 public:
  RunHandle() = default;
  explicit RunHandle(std::shared_ptr<RunState> state) : state_(std::move(state)) {}
  bool done() const { return !state_ || state_->done(); }
  // Waits until the run has ended, at most timeout_seconds (negative: forever). false: not yet. Throws the run's Error
  // once it has ended with one (each time it is asked).
  bool wait(double timeout_seconds = -1) const {
    if (!state_) return true;
    if (!state_->wait(timeout_seconds)) return false;
    if (state_->error()) throw Error(*state_->error());
    return true;
  }
  // Waits until one of them has ended. The first that has; none: not yet.
  static std::optional<size_t> wait_any(const std::vector<const RunHandle*>& runs, double timeout_seconds);
  // The same without throwing: for release.
  void settle() const noexcept {
    if (state_) state_->wait(-1);
  }

 private:
  std::shared_ptr<RunState> state_;
};

}  // namespace whale
