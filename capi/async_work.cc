#include "async_work.h"

#include <unistd.h>

#include "base/no_signals.h"
#include "guard.h"

namespace whale::capi {
namespace {

// As the status that guard() would make.
Error error_of(const whale_status* status) {
  Error out(static_cast<Code>(status->code), status->message);
  return out.at_op(status->where.op)
      .at_scope(status->where.scope)
      .at_device(status->where.device)
      .at_rank(status->where.rank)
      .with_damage(static_cast<Damage>(status->damage));
}

void run(const std::function<void()>& f, RunState& state, const char* call) noexcept {
  whale_status* status = guard(f, call);
  std::optional<Error> error;
  for (int attempt = 0; status != nullptr && !error && attempt < 2; ++attempt) {
    try {
      error = error_of(status);
    } catch (...) {  // no memory for its text: the constant status has a short one
      whale_status_release(status);
      status = out_of_memory();
    }
  }
  whale_status_release(status);
  state.finish(std::move(error));
}

}  // namespace

AsyncWork::AsyncWork() : process_(::getpid()) {}

std::shared_ptr<AsyncWork> AsyncWork::start(std::function<void()> f, const char* call) {
  std::shared_ptr<AsyncWork> work(new AsyncWork);
  try {
    const NoSignals quiet;
    work->thread_ = std::make_unique<std::thread>([f = std::move(f), state = work->state_, call]() mutable {
      run(f, *state, call);
      f = nullptr;  // what it held goes with the thread
    });
  } catch (const std::system_error& e) {
    throw error(Code::kResourceExhausted,
                "no thread could be made for {} ({}); raise the limit of threads (RLIMIT_NPROC, pids.max) or of "
                "addresses (RLIMIT_AS)",
                call, e.what());
  }
  return work;
}

AsyncWork::~AsyncWork() {
  if (thread_ == nullptr) return;
  if (process_ == static_cast<int64_t>(::getpid()))
    thread_->join();
  else
    (void)thread_.release();  // NOLINT(bugprone-unused-return-value): the child's loss
}

}  // namespace whale::capi
