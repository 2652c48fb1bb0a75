#include "session/wire_peers.h"

#include <cstring>

#include "base/philox.h"
#include "base/watch.h"
#include "run/place.h"

namespace whale {
namespace {

constexpr uint64_t kTag = (~uint64_t{0} >> 1) - 1;  // that of no collective, of no link, and not Sharing's
constexpr double kSecondsToMeet = 300;              // until all ranks have begun
constexpr double kSecondsToAnswer = 3600;           // until one has written or read its part

constexpr double kSecondsOnOneHost = 1;  // until a directory shows what another process has made there

struct Aborted {};

}  // namespace

WirePeers::WirePeers(Machine& machine, std::string_view what)
    : machine_(machine),
      wire_(*machine.wire()),
      what_(what),
      subject_(hash_name(what)),
      begun_(wire_.size(), wire_.rank()) {
  ways_.resize(static_cast<size_t>(size()));
  for (int r = 0; r < size(); ++r) {
    if (r == rank() || (r != 0 && rank() != 0)) continue;
    ways_[r] = {wire_.open_sender(r, kTag, 2), wire_.open_receiver(r, kTag)};
  }
  machine_.team().wait_idle();
  machine_.ear()->listen(this, [this] { machine_.transport().reset(); });
  try {
    const double patience = machine.world()->patience;
    within(patience > 0 ? patience : kSecondsToMeet, true, [&] {
      wire_.tell({.kind = Notice::kBegun, .subject = subject_});
      if (!begun_.wait(this)) throw Aborted{};
    });
  } catch (...) {
    machine_.ear()->listen(nullptr);
    throw;
  }
}

WirePeers::~WirePeers() { machine_.ear()->listen(nullptr); }

// The others are told what ended it here, unless one of them has told this rank.
template <class Body>
std::invoke_result_t<Body> WirePeers::within(double seconds, bool cancellable, Body body) {
  cancellable_now_ = cancellable && cancellable_;
  since_ = std::chrono::steady_clock::now();
  until_ =
      since_ + std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds));
  try {
    return body();
  } catch (const Aborted&) {
    const std::lock_guard lock(mutex_);
    if (own_) wire_.tell(notice_of(Notice::kStopped, *error_));
    throw Error(*error_);
  } catch (const std::exception& e) {
    wire_.tell(notice_of(Notice::kStopped, as_error(e, "save or load with the other ranks")));
    throw;
  }
}

void WirePeers::send(int rank, const std::string& text) {
  Wire::Sender& to = *ways_[rank].to;
  const uint64_t bytes = text.size();
  for (const auto& [from, n] : {std::pair<const void*, size_t>(&bytes, sizeof bytes), {text.data(), text.size()}}) {
    if (n == 0) continue;
    char* const at = to.begin(n, this);
    if (at == nullptr) throw Aborted{};
    std::memcpy(at, from, n);
    to.end();
  }
}

std::string WirePeers::receive(int rank) {
  Wire::Receiver& from = *ways_[rank].from;
  uint64_t bytes = 0;
  const auto next = [&](void* to, size_t n) {
    const char* const at = from.begin(n, this);
    if (at == nullptr) throw Aborted{};
    std::memcpy(to, at, n);
    from.end();
  };
  next(&bytes, sizeof bytes);
  std::string text(bytes, '\0');
  if (bytes > 0) next(text.data(), bytes);
  return text;
}

std::vector<std::string> WirePeers::collect(const std::string& mine) {
  return within(kSecondsToAnswer, true, [&] {
    std::vector<std::string> all;
    if (rank() != 0) send(0, mine);
    for (int r = 0; rank() == 0 && r < size(); ++r) all.push_back(r == 0 ? mine : receive(r));
    return all;
  });
}

std::string WirePeers::spread(const std::string& rank_0s) {
  return within(kSecondsToAnswer, false, [&] {
    if (rank() != 0) return receive(0);
    for (int r = 1; r < size(); ++r) send(r, rank_0s);
    return rank_0s;
  });
}

double WirePeers::patience() const { return machine_.world()->near_0 ? kSecondsOnOneHost : Peers::patience(); }

void WirePeers::hear(const Notice& notice) noexcept {
  if (notice.kind == Notice::kBegun && notice.subject == subject_) return begun_.add(notice.rank);
  if (notice.kind >= Notice::kAt && notice.kind <= Notice::kMoves) return;
  end(error_of(notice, *machine_.world()), false);
}

// On the thread that waits, which looks now and then.
void WirePeers::look() {
  try {
    if (cancellable_now_) Watch::look();
    const World& world = *machine_.world();
    const auto now = std::chrono::steady_clock::now();
    const double waited = std::chrono::duration<double>(now - since_).count();
    const std::vector<int32_t> late = begun_.late();
    if (waited >= kSecondsOnTheWay) {
      const bool is_long = world.warns_after > 0 && waited >= world.warns_after;
      if (const int left = who_left(world, is_long ? all_ranks(world) : late); left >= 0)
        return end(has_left(world, left), true);
    }
    if (now <= until_) return;
    if (late.empty())
      end(error(Code::kDeadlineExceeded, "one of the other ranks does not answer, with which this one wants to {}",
                what_),
          true);
    else
      end(error(Code::kDeadlineExceeded, "{} to {}, as rank {} has", have_not_begun(late, world), what_, rank())
              .at_rank(late[0]),
          true);
  } catch (const Stopped& stopped) {
    end(stopped.error(), true);
  }
}

void WirePeers::end(Error why, bool own) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(why), own_ = own;
  }
  begun_.abort();
  machine_.transport().abort();
}

}  // namespace whale
