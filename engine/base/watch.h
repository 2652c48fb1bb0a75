// What stops work that only computes: a cancel flag and a deadline, looked at in every loop that may run long. The
// watch in force is the thread's, and no pass has to hand it on; side_by_side() (base/side_by_side.h) does to other
// threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <iterator>
#include <mutex>
#include <utility>

#include "base/error.h"

namespace whale {

inline constexpr std::chrono::milliseconds kWatchEvery{50};  // where work waits

// Thrown by look(). No Error, so that whoever adds to the errors of a pass leaves it alone.
class Stopped : public std::exception {
 public:
  explicit Stopped(Error error) : error_(std::move(error)) {}  // NOLINT(bugprone-throw-keyword-missing): it is a member
  const char* what() const noexcept override { return error_.what(); }
  const Error& error() const { return error_; }  // CANCELLED or DEADLINE_EXCEEDED

 private:
  Error error_;
};

// In force on this thread for the life of the object, beside those around it: each of them stops the work.
class Watch {
 public:
  // what: the work, for messages ("planning"). cancelled: null: not to be cancelled. timeout_seconds: 0: no deadline.
  Watch(const char* what, const std::atomic<bool>* cancelled, double timeout_seconds);
  ~Watch() { current_ = outer_; }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // Throws Stopped when the work is to stop; some 30 ns under a watch with a deadline, 2 without a watch.
  static void look() {
    if (current_ != nullptr) current_->check();
  }

  std::function<void()> looked;  // called at each look, of any thread that it is in force on; may throw Stopped

  static Watch* current() { return current_; }
  // Another one, or none, is in force on this thread for the life of the object.
  class Of {
   public:
    explicit Of(Watch* watch) : before_(std::exchange(current_, watch)) {}
    ~Of() { current_ = before_; }
    Of(const Of&) = delete;
    Of& operator=(const Of&) = delete;

   private:
    Watch* before_;
  };
  // For what ends soon, and has to be done.
  class None : Of {
   public:
    None() : Of(nullptr) {}
  };

 private:
  void check() const;

  const char* what_;
  const std::atomic<bool>* cancelled_;
  double timeout_seconds_;
  std::chrono::steady_clock::time_point start_;
  Watch* outer_;
  static thread_local Watch* current_;
};

// wait_for(), and a look twenty times a second.
template <class Ready>
bool watched_wait(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, double seconds, Ready ready) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  while (!changed.wait_for(lock, std::min<Clock::duration>(kWatchEvery, end - Clock::now()), ready)) {
    if (Clock::now() >= end) return false;
    Watch::look();
  }
  return true;
}

// A look at every 1024th call: for steps that are shorter than a look, of which there may be one for each micro-batch.
class Glance {
 public:
  void operator()() {
    if (++calls_ % 1024 == 0) Watch::look();
  }

 private:
  uint32_t calls_ = 0;
};

// for (const ScheduleRow& row : watched(program.schedule)): every loop over as many elements as there are
// micro-batches. The list, where it is no temporary, must outlive the loop. No std::views: they are long to compile,
// and clang 14 has none with libstdc++ 12.
template <class List>
class Watched {
  List list_;  // a reference where the list is no temporary

 public:
  explicit Watched(List&& list) : list_(std::forward<List>(list)) {}
  template <class At>
  class Iterator {
   public:
    explicit Iterator(At at) : at_(std::move(at)) {}
    decltype(auto) operator*() const { return *at_; }
    Iterator& operator++() {
      glance_();
      ++at_;
      return *this;
    }
    bool operator==(const Iterator& other) const { return at_ == other.at_; }

   private:
    At at_;
    Glance glance_;
  };
  auto begin() { return Iterator<decltype(std::begin(list_))>(std::begin(list_)); }
  auto end() { return Iterator<decltype(std::end(list_))>(std::end(list_)); }
};
template <class List>
Watched<List> watched(List&& list) {
  return Watched<List>(std::forward<List>(list));
}
// The numbers from begin to end - 1.
template <class Number>
auto watched(Number begin, Number end) {
  struct At {
    Number value;
    Number operator*() const { return value; }
    At& operator++() {
      ++value;
      return *this;
    }
    bool operator==(const At& other) const { return value == other.value; }
  };
  struct Numbers {
    Number first, last;
    At begin() const { return {first}; }
    At end() const { return {last}; }
  };
  return watched(Numbers{begin, std::max(begin, end)});
}

// The outermost call of work that looks: what it returns; Stopped becomes its Error.
template <class F>
auto stoppable(F&& work) {
  try {
    return work();
  } catch (const Stopped& stopped) {
    throw Error(stopped.error());
  }
}

}  // namespace whale
