// Planning, saving and loading beside the caller: a thread for each, and the state that its event waits for.
#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "run/handle.h"

namespace whale::capi {

class AsyncWork {
 public:
  // f on a thread of its own, which blocks all signals; what it throws is the state's error, made as guard() would. It
  // holds everything that it needs. call: the function of the C ABI.
  static std::shared_ptr<AsyncWork> start(std::function<void()> f, const char* call);
  ~AsyncWork();  // waits; in a child after fork(), where the thread is not, leaves it alone
  AsyncWork(const AsyncWork&) = delete;
  AsyncWork& operator=(const AsyncWork&) = delete;

  const std::shared_ptr<RunState>& state() const { return state_; }
  bool under_way() const { return !state_->done(); }
  void settle() const { state_->wait(-1); }

 private:
  AsyncWork();
  std::shared_ptr<RunState> state_ = std::make_shared<RunState>();
  int64_t process_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace whale::capi
