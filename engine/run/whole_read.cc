#include "run/whole_read.h"

#include <mutex>
#include <optional>

#include "base/philox.h"

namespace whale {
namespace {

class Reading final : private Ear::Listener {
 public:
  Reading(Machine& machine, uint64_t subject) : machine_(machine), subject_(subject) {
    machine_.team().wait_idle();
    machine_.ear()->listen(this, [this] { machine_.transport().reset(); });
  }
  ~Reading() override { machine_.ear()->listen(nullptr); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  void share(Sharing& sharing, void* to) {
    Wire& wire = *machine_.wire();
    try {
      wire.tell({.kind = Notice::kBegun, .subject = subject_});
      if (begun_.wait(static_cast<uint32_t>(wire.size() - 1)) && sharing.run({to}, nullptr)) return;
    } catch (const std::exception& e) {
      wire.tell(notice_of(Notice::kStopped, unexpected(e, "read a variable with the other ranks")));
      throw;
    }
    const std::lock_guard lock(mutex_);
    throw Error(*error_);
  }

 private:
  void hear(const Notice& notice) noexcept override {
    if (notice.kind == Notice::kBegun && notice.subject == subject_) return begun_.advance(1);
    if (notice.kind == Notice::kAt) return;
    {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = error_of(notice, machine_.wire()->rank());
    }
    begun_.abort();
    machine_.transport().abort();
  }

  Machine& machine_;
  const uint64_t subject_;
  Counter begun_;  // other ranks that read the same
  std::mutex mutex_;
  std::optional<Error> error_;
};

}  // namespace

void read_whole(Machine& machine, size_t index, size_t copy, void* to, size_t bytes) {
  machine.read_variable(index, copy, 0, to, bytes);
  Sharing sharing(*machine.wire(), [&] {
    std::vector<std::vector<ByteRuns>> parts;
    for (ByteRuns& bytes_of_rank : machine.parts_by_rank(index, copy)) parts.push_back({std::move(bytes_of_rank)});
    return parts;
  }());
  Reading(machine, mix64(mix64(hash_name("read") + index) + copy)).share(sharing, to);
}

}  // namespace whale
