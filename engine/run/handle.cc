#include "run/handle.h"

#include <chrono>

namespace whale {

namespace {

constexpr double kForever = 1e9;
bool is_forever(double seconds) { return !(seconds >= 0) || seconds > kForever; }

// One gate at all of them, as long as somebody waits.
class Gated {
 public:
  explicit Gated(std::vector<RunState*> states) : states_(std::move(states)) {
    for (RunState* state : states_) state->add(gate);
  }
  ~Gated() {
    for (RunState* state : states_) state->remove(gate);
  }
  Gate gate;

 private:
  std::vector<RunState*> states_;
};

}  // namespace

void Gate::wait(double timeout_seconds) {
  std::unique_lock lock(mutex_);
  const auto opened = [&] { return opened_; };
  if (is_forever(timeout_seconds)) return changed_.wait(lock, opened);
  changed_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), opened);
}

void RunState::add(Gate& gate) {
  const std::lock_guard lock(mutex_);
  gates_.push_back(&gate);
  if (done()) gate.open();
}

void RunState::remove(Gate& gate) {
  const std::lock_guard lock(mutex_);
  std::erase(gates_, &gate);
}

std::optional<size_t> RunHandle::wait_any(const std::vector<const RunHandle*>& runs, double timeout_seconds) {
  const auto ended = [&]() -> std::optional<size_t> {
    for (size_t i = 0; i < runs.size(); ++i)
      if (runs[i]->done()) return i;
    return std::nullopt;
  };
  if (const auto now = ended()) return now;
  std::vector<RunState*> states;
  for (const RunHandle* run : runs) states.push_back(run->state_.get());
  Gated gated(std::move(states));
  gated.gate.wait(timeout_seconds);
  return ended();
}

bool RunState::wait(double timeout_seconds) const {
  if (done()) return true;
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return done_.load(std::memory_order_relaxed); };
  if (is_forever(timeout_seconds)) {
    ended_.wait(lock, ended);
    return true;
  }
  return ended_.wait_for(lock, std::chrono::duration<double>(timeout_seconds), ended);
}

}  // namespace whale
