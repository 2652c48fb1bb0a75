#include "world/process.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <tuple>

#include "base/default_settings.h"
#include "base/library.h"
#include "base/read_memory.h"
#include "base/watch.h"
#include "comm/courier_library.h"
#include "comm/post.h"
#include "world/meeting.h"
#include "world/pmix.h"

namespace whale {
namespace {

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

// The same for all processes that can share memory: one boot of one machine, one place for shared memory.
std::string host_identity() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  std::array<char, 256> space{};
  const ssize_t n = readlink("/proc/self/ns/ipc", space.data(), space.size() - 1);
  return host_name() + " " + boot + " " + std::string(space.data(), n > 0 ? static_cast<size_t>(n) : 0);
}

// UCX reads its environment when it is loaded: without these it puts handlers of its own in the place of the process's
// (of SIGHUP too), rewrites functions of the C library, and prints.
const CourierEntry& courier_library(const std::string& folder) {
  static std::mutex mutex;
  static std::map<std::string, const CourierEntry*> opened;  // by folder
  const std::lock_guard lock(mutex);
  const CourierEntry*& entry = opened[folder];
  if (entry == nullptr) {
    const DefaultSettings settings({"UCX_HANDLE_ERRORS=none", "UCX_DEBUG_SIGNO=0", "UCX_MEM_EVENTS=n",
                                    "UCX_LOG_LEVEL=fatal", "UCX_WARN_UNUSED_ENV_VARS=n"});
    entry = static_cast<const CourierEntry*>(
        open_library(folder, "libwhale_ucx.so", WHALE_COURIER_SYMBOL, "library between processes",
                     "Install it beside libwhale.so, with UCX 1.12 or newer (libucx), or use one process"));
  }
  return *entry;
}

// Where a process shows that its memory can be read, and what stands there.
std::string shown() {
  static const uint64_t secret = (uint64_t{std::random_device{}()} << 32) | std::random_device{}();
  return fmt::format("{} {} {}", getpid(), reinterpret_cast<uintptr_t>(&secret), secret);
}
// The process, or 0.
pid_t readable(const std::string& shown) {
  std::istringstream text(shown);
  pid_t process = 0;
  uint64_t address = 0, secret = 0, found = 0;
  text >> process >> address >> secret;
  return read_memory(process, address, reinterpret_cast<char*>(&found), sizeof found) && found == secret ? process : 0;
}

std::string key(const char* what, int rank) { return fmt::format("{} {}", what, rank); }

// Who tells the post of ranks that are lost, whichever of the two is there first, or longer.
struct News {
  std::mutex mutex;
  std::vector<std::pair<int, std::string>> early;
  std::weak_ptr<Post> post;

  void lost(int rank, const std::string& why) {
    std::shared_ptr<Post> to;
    {
      const std::lock_guard lock(mutex);
      to = post.lock();
      if (!to) early.emplace_back(rank, why);
    }
    if (to) to->give_up(rank, why);
  }
  void opened(const std::shared_ptr<Post>& opened) {
    const std::lock_guard lock(mutex);
    post = opened;
    for (const auto& [rank, why] : early) opened->give_up(rank, why);
  }
};

// A rank in a meeting, which a process is once at a time: a second world of it would wait for the first one's end, or
// be taken for another process.
class Seat {
 public:
  explicit Seat(const ProcessOptions& o) : seat_(getpid(), o.address, o.port, o.rank) {
    const std::lock_guard lock(mutex());
    if (taken().insert(seat_).second) return;
    throw error(Code::kFailedPrecondition,
                "this process is rank {} at {}:{} already: a world that it has made there, or a session of it, still "
                "lives. Release both before you make it again (whale_session_release, whale_world_release; in Python "
                "job.close() and world.close()), or use that one: it serves any number of jobs",
                o.rank, o.address, o.port)
        .at_rank(o.rank);
  }
  ~Seat() {
    const std::lock_guard lock(mutex());
    taken().erase(seat_);
  }
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

 private:
  using Key = std::tuple<pid_t, std::string, uint16_t, int>;  // a child after fork() is another process
  static std::mutex& mutex() {
    static std::mutex one;
    return one;
  }
  static std::set<Key>& taken() {
    static std::set<Key> all;
    return all;
  }
  const Key seat_;
};

// The meeting, at which this process has its seat for as long.
std::shared_ptr<MeetingStore> meet_seated(const ProcessOptions& options, const MeetingOptions& with) {
  auto seat = std::make_shared<Seat>(options);
  std::shared_ptr<MeetingStore> meeting = meet(with);
  MeetingStore* const store = meeting.get();
  return {store, [meeting = std::move(meeting), seat = std::move(seat)](MeetingStore*) mutable {
            meeting.reset();
            seat.reset();
          }};
}

// Sessions keep the store and their wire, and those the post, for longer than this.
class ProcessWorlds final : public Worlds {
 public:
  explicit ProcessWorlds(const ProcessOptions& options)
      : rank_(options.rank),
        size_(options.size),
        warns_after_(options.timeout_seconds),
        patience_(options.run_timeout_seconds) {
    const auto news = std::make_shared<News>();
    MeetingOptions with{.rank = options.rank,
                        .size = options.size,
                        .address = options.address,
                        .port = options.port,
                        .token = options.token,
                        .timeout_seconds = options.timeout_seconds,
                        .self = fmt::format("host '{}', process {}", host_name(), getpid())};
    with.lost = [news](int rank, const std::string& why) { news->lost(rank, why); };
    with.at = [whereabouts = whereabouts_] { return whereabouts->text(); };
    const std::shared_ptr<MeetingStore> meeting = meet_seated(options, with);
    store_ = meeting, meeting_ = meeting;
    try {
      open(options, meeting, *news);
    } catch (const Error& e) {
      meeting->leaves_for(e);
      throw;
    } catch (const Stopped& stopped) {
      meeting->leaves_for(stopped.error());
      throw;
    }
    ++open_;
  }
  // Some programs end without exit()'s handlers (Go's), and after a farewell alone.
  ~ProcessWorlds() override {
    if (--open_ == 0) leave_pmix();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  World next() override {
    const std::lock_guard lock(mutex_);
    World world{store_, post_->next_wire(), {}, sessions_++, warns_after_, patience_, whereabouts_};
    world.doubt = [meeting = meeting_](int rank, const std::string& why, double seconds, std::function<bool()> stands) {
      if (const auto here = meeting.lock()) here->doubt(rank, why, seconds, std::move(stands));
    };
    world.has_left = [meeting = meeting_](int rank) {
      const auto here = meeting.lock();
      return here && here->has_left(rank);
    };
    world.hosts = hosts_;
    world.near_0 = near_0_;
    return world;
  }

 private:
  void open(const ProcessOptions& options, const std::shared_ptr<MeetingStore>& meeting, News& news) {
    store_->put(key("host", rank_), host_identity());
    store_->put(key("memory", rank_), shown());
    // Of the store the courier must not be the last to let go: the thread that tells of lost ranks, which holds the
    // post for as long, is the store's own.
    const auto get = [weak = std::weak_ptr(meeting), size = size_, patience = options.timeout_seconds](const char* what,
                                                                                                       int rank) {
      const std::shared_ptr<MeetingStore> store = weak.lock();
      if (!store) throw error(Code::kUnavailable, "rank {} cannot be asked for: the world has been left", rank);
      try {
        return store->get(key(what, rank), rank, patience);
      } catch (const Error& e) {
        if (e.code() != Code::kDeadlineExceeded) throw;
        const size_t away = store->turned_away();
        throw error(Code::kDeadlineExceeded, "rank {} of {} has not come in {} seconds{}", rank, size, patience,
                    away == 0 ? ""
                              : fmt::format("; {} turned away for the token (WHALE_JOB_TOKEN), which is another one "
                                            "than rank 0's",
                                            away == 1 ? "a connection was" : fmt::format("{} connections were", away)))
            .at_rank(rank);
      }
    };
    CourierOptions courier;
    courier.rank = rank_, courier.size = size_;
    for (int r = 0; r < size_; ++r) {
      const std::string host = get("host", r);
      hosts_.push_back(host.substr(0, host.find(' ')));
      courier.near.push_back(host == host_identity());
      courier.readable.push_back(courier.near.back() ? readable(get("memory", r)) : 0);
    }
    near_0_ = courier.near[0];
    if (std::all_of(courier.near.begin(), courier.near.end(), [](bool near) { return near; })) hosts_.clear();
    courier.publish = [this](std::string address) { store_->put(key("address", rank_), std::move(address)); };
    courier.address_of = [get](int rank) {
      const Watch::None all_of_it;  // who is told that this rank stops has to be reached
      return get("address", rank);
    };
    courier.doubt = [weak = std::weak_ptr(meeting)](int rank, const std::string& why) {
      const auto meeting = weak.lock();
      return meeting && meeting->doubt(rank, why);
    };
    courier.has_left = [weak = std::weak_ptr(meeting)](int rank) {
      const auto meeting = weak.lock();
      return meeting && meeting->has_left(rank);
    };
    const CourierEntry& library = courier_library(options.folder);
    post_ = Post::open(size_, [&](Courier::Receiver& receiver) { return library.create(courier, receiver); });
    news.opened(post_);
  }

  static inline std::atomic<int> open_{0};  // of this process
  const int rank_, size_;
  const double warns_after_, patience_;
  bool near_0_ = false;
  const std::shared_ptr<Whereabouts> whereabouts_ = std::make_shared<Whereabouts>();
  std::mutex mutex_;
  uint64_t sessions_ = 0;
  std::vector<std::string> hosts_;  // World::hosts
  std::shared_ptr<Store> store_;
  std::weak_ptr<MeetingStore> meeting_;  // the same
  std::shared_ptr<Post> post_;
};

}  // namespace

std::shared_ptr<Worlds> join_processes(const ProcessOptions& options) {
  if (options.size == 1) return make_inproc_ranks(1)[0];
  return std::make_shared<ProcessWorlds>(options);
}

}  // namespace whale
