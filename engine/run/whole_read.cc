#include "run/whole_read.h"

#include <mutex>
#include <optional>

#include "base/philox.h"
#include "base/watch.h"
#include "run/beginners.h"
#include "run/place.h"
#include "run/timeline.h"

namespace whale {
namespace {

class Reading final : private Ear::Listener, private Lookout {
 public:
  Reading(Machine& machine, uint64_t subject)
      : machine_(machine), subject_(subject), begun_(machine.wire()->size(), machine.wire()->rank()) {
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
      if (begun_.wait(this) && sharing.run({to}, this)) return;
    } catch (const std::exception& e) {
      wire.tell(notice_of(Notice::kStopped, as_error(e, "read a variable with the other ranks")));
      throw;
    }
    const std::lock_guard lock(mutex_);
    if (own_) wire.tell(notice_of(Notice::kStopped, *error_));
    throw Error(*error_);
  }

 private:
  void hear(const Notice& notice) noexcept override {
    if (notice.kind == Notice::kBegun && notice.subject == subject_) return begun_.add(notice.rank);
    if (notice.kind >= Notice::kAt && notice.kind <= Notice::kMoves) return;
    end(error_of(notice, *machine_.world()), false);
  }
  // On the thread that waits. All that a read does is to wait for others.
  void look() override {
    try {
      Watch::look();
    } catch (const Stopped& stopped) {
      return end(stopped.error(), true);
    }
    const double patience = machine_.world()->patience;
    const auto waited = static_cast<double>(now_nanoseconds() - began_) * 1e-9;
    if (waited < kSecondsOnTheWay) return;
    const std::vector<int32_t> late = begun_.late();
    if (const int left = who_left(*machine_.world(), late); left >= 0)
      return end(has_left(*machine_.world(), left), true);
    if (patience <= 0 || waited < patience) return;
    Error why = late.empty() ? error(Code::kDeadlineExceeded, "the other ranks' parts of the variable do not come")
                             : error(Code::kDeadlineExceeded, "{} to read the variable, as rank {} has",
                                     have_not_begun(late, *machine_.world()), machine_.wire()->rank());
    end(late.empty() ? why : why.at_rank(late[0]), true);
  }
  void end(Error why, bool own) noexcept {
    {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::move(why), own_ = own;
    }
    begun_.abort();
    machine_.transport().abort();
  }

  Machine& machine_;
  const uint64_t subject_;
  const int64_t began_ = now_nanoseconds();
  Beginners begun_;  // other ranks that read the same
  std::mutex mutex_;
  std::optional<Error> error_;  // the first, and whether it is this rank's
  bool own_ = false;
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
