#include "run/team.h"

#include <exception>
#include <optional>
#include <system_error>

#include "base/error.h"
#include "base/float_env.h"
#include "base/no_signals.h"
#include "base/watch.h"

namespace whale {

Error as_error(const std::exception& e, const std::string& purpose) {
  if (const auto* known = dynamic_cast<const Error*>(&e)) return *known;
  if (const auto* stopped = dynamic_cast<const Stopped*>(&e)) return stopped->error();
  if (dynamic_cast<const std::bad_alloc*>(&e) != nullptr)
    return error(Code::kResourceExhausted,
                 "the process has too little memory to {}; raise its limit (ulimit -v), or use fewer devices or a "
                 "smaller batch",
                 purpose);
  return internal("cannot {}: {}", purpose, e.what());
}

Team::Team(std::vector<Device*> devices) : devices_(std::move(devices)) {
  try {
    for (size_t d = 0; d < devices_.size(); ++d)
      if (devices_[d] != nullptr) add_queue(static_cast<int>(d), Queue::kCompute);
  } catch (...) {
    end();
    throw;
  }
}

Team::~Team() { end(); }

void Team::end() {
  wait_idle();
  quit_.store(true, std::memory_order_release);
  round_.fetch_add(1, std::memory_order_acq_rel);
  round_.notify_all();
  for (auto& worker : workers_) worker->thread.join();
  workers_.clear();
}

void Team::abandon() {
  for (auto& worker : workers_) (void)worker.release();
  workers_.clear();
  busy_.store(0);
}

bool Team::has_queue(int device, Queue queue) const {
  for (const auto& worker : workers_)
    if (worker->device == device && worker->queue == queue) return true;
  return false;
}

void Team::add_queue(int device, Queue queue) {
  if (has_queue(device, queue)) return;
  std::atomic<int> entered{0};
  std::exception_ptr failure;
  const uint32_t seen = round_.load(std::memory_order_acquire);
  auto worker = std::make_unique<Worker>(Worker{device, queue, {}});
  try {
    const NoSignals quiet;
    worker->thread =
        std::thread([this, device, queue, seen, &entered, &failure] { loop(device, queue, seen, entered, failure); });
  } catch (const std::system_error& e) {
    throw error(
        Code::kResourceExhausted,
        "no thread could be made for the device ({}); there are {} of this session. Use fewer devices, or raise "
        "the limit of threads (RLIMIT_NPROC, pids.max) or of addresses (RLIMIT_AS)",
        e.what(), workers_.size())
        .at_device(device);
  }
  entered.wait(0, std::memory_order_acquire);
  if (entered.load(std::memory_order_acquire) < 0) {
    worker->thread.join();
    try {
      std::rethrow_exception(failure);
    } catch (Error& e) {
      throw Error(e.at_device(device));
    }
  }
  workers_.push_back(std::move(worker));
}

void Team::loop(int device, Queue queue, uint32_t seen, std::atomic<int>& entered, std::exception_ptr& failure) {
  use_default_float_env();  // a new thread has its maker's
  try {
    devices_[device]->enter_thread(queue);
  } catch (...) {
    failure = std::current_exception();
    entered.store(-1, std::memory_order_release);
    entered.notify_one();
    return;
  }
  entered.store(1, std::memory_order_release);
  entered.notify_one();
  for (;;) {
    round_.wait(seen, std::memory_order_acquire);
    seen = round_.load(std::memory_order_acquire);
    if (quit_.load(std::memory_order_acquire)) return;
    Job* job = job_;
    job->run(device, queue);
    if (remaining_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      job->finished();
      busy_.store(0, std::memory_order_release);
      busy_.notify_all();
    }
  }
}

void Team::start(Job& job) {
  wait_idle();  // who learned of the last job's end from its finished() may be a moment early
  job_ = &job;
  busy_.store(1, std::memory_order_relaxed);
  remaining_.store(static_cast<uint32_t>(workers_.size()), std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_acq_rel);
  round_.notify_all();
}

void Team::wait_idle() const { busy_.wait(1, std::memory_order_acquire); }

void Team::on_each(const std::string& purpose, const std::function<void(int)>& body) {
  struct Each final : Job {
    const std::function<void(int)>* body = nullptr;
    std::vector<std::exception_ptr> failures;
    void run(int device, Queue queue) noexcept override {
      if (queue != Queue::kCompute) return;
      try {
        (*body)(device);
      } catch (...) {  // told apart by the caller: where memory is short, nothing can be made here
        failures[device] = std::current_exception();
      }
    }
    void finished() noexcept override {}
  } each;
  each.body = &body;
  each.failures.resize(devices_.size());
  start(each);
  wait_idle();
  for (size_t device = 0; device < each.failures.size(); ++device) {
    if (!each.failures[device]) continue;
    try {
      std::rethrow_exception(each.failures[device]);
    } catch (Error& e) {
      throw Error(e.at_device(static_cast<int>(device)));
    } catch (const std::exception& e) {
      throw as_error(e, purpose).at_device(static_cast<int>(device));
    }
  }
}

}  // namespace whale
