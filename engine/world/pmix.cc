#include "world/pmix.h"

#include <unistd.h>

#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/default_settings.h"
#include "base/error.h"
#include "base/library.h"
#include "base/no_signals.h"
#include "base/text.h"
#include "base/watch.h"
#include "world/own_address.h"
#include "world/pmix_library.h"

namespace whale {
namespace {

// PMIx sets this variable, to what the launcher says by another one. That setenv may free the list that other threads
// read; where it is there already, it is changed in place, and in a list that the process does not keep.
std::vector<const char*> variables_of_pmix() {
  static const char* const security = std::getenv("PMIX_SECURITY_MODE");  // NOLINT(concurrency-mt-unsafe)
  static const std::string setting = std::string("PMIX_MCA_psec=") + (security == nullptr ? "" : security);
  return security == nullptr ? std::vector<const char*>() : std::vector{setting.c_str()};
}

std::string random_token() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", random(), random(), random(), random());
}

// What rank 0 tells the others.
std::string words_of(const LaunchEnvironment& given, const PmixJob& job) {
  const std::string address = !given.address.empty()       ? given.address
                              : job.local_size == job.size ? "127.0.0.1"
                                                           : own_address(job.host);
  const uint16_t port = given.port != 0 ? given.port : free_port(address);
  return fmt::format("{}\n{}\n{}", address, port, given.token.empty() ? random_token() : given.token);
}

LaunchEnvironment read(const std::string& words, const PmixJob& job, const LaunchEnvironment& given) {
  LaunchEnvironment e{.rank = job.rank, .size = job.size, .local_rank = job.local_rank, .local_size = job.local_size};
  const size_t first = words.find('\n'), second = words.find('\n', first + 1);
  const std::optional<int64_t> port = first == words.npos || second == words.npos
                                          ? std::nullopt
                                          : whole_number(words.substr(first + 1, second - first - 1));
  if (!port || *port < 1 || *port > 65535)
    throw error(Code::kUnavailable,
                "rank 0 says '{}' by PMIx, expected an address, a port and a token: do all ranks run libwhale of one "
                "version?",
                brief(words));
  e.address = words.substr(0, first);
  e.port = static_cast<uint16_t>(*port);
  e.token = given.token.empty() ? words.substr(second + 1) : given.token;
  return e;
}

// One for a process: PMIx's calls wait without an end, and are made on a thread that may be left waiting.
class Conversation {
 public:
  Conversation(const PmixEntry& library, LaunchEnvironment given) : library_(library), given_(std::move(given)) {}

  void hold() noexcept {
    try {
      PmixJob job;
      {
        const DefaultSettings settings(variables_of_pmix());
        job = library_.join();
      }
      {
        const std::lock_guard lock(mutex_);
        joined_ = true;
        job_ = job;
      }
      end(job.size == 1 ? words_of({.address = "127.0.0.1", .port = 1}, job)
                        : library_.share(job, job.rank == 0 ? words_of(given_, job) : ""));
    } catch (const Error& e) {
      fail(e);
    } catch (const std::exception& e) {
      fail(error(Code::kUnavailable, "what PMIx says of this process cannot be read: {}", e.what()));
    }
  }

  LaunchEnvironment wait(const LaunchEnvironment& given, double seconds) {
    std::unique_lock lock(mutex_);
    if (!watched_wait(changed_, lock, seconds, [&] { return ended_; })) {
      if (!joined_)
        throw error(Code::kDeadlineExceeded,
                    "the launcher's server of PMIx on this host (PMIX_SERVER_URI...) has not answered in {} seconds",
                    seconds);
      throw error(
          Code::kDeadlineExceeded,
          "the ranks of this job of PMIx, of which this is {} of {}, have not all come in {} seconds, and PMIx "
          "does not say which one is late. Each has to make its world, and MASTER_ADDR to be set on all or none",
          job_.rank, job_.size, seconds);
    }
    if (failure_) throw Error(*failure_);
    return read(words_, job_, given);
  }

  // Not where a call is still waiting, nor in a child that has none of this process's threads.
  void leave() noexcept {
    const std::lock_guard lock(mutex_);
    if (!joined_ || !ended_ || getpid() != process_) return;
    joined_ = false;
    try {
      library_.leave();
    } catch (const std::exception&) {  // who does not hear the farewell needs none
    }
  }

 private:
  void end(std::string words) {
    const std::lock_guard lock(mutex_);
    words_ = std::move(words);
    ended_ = true;
    changed_.notify_all();
  }
  void fail(Error failure) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    ended_ = true;
    changed_.notify_all();
  }

  const PmixEntry& library_;
  const LaunchEnvironment given_;
  const pid_t process_ = getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  bool joined_ = false, ended_ = false;
  PmixJob job_;
  std::string words_;
  std::optional<Error> failure_;
};

// Never destroyed: its thread may be at it when the process ends.
struct Spoken {
  std::mutex mutex;
  std::shared_ptr<Conversation> conversation;
};
Spoken& spoken() {
  static auto* const all = new Spoken;
  return *all;
}

}  // namespace

std::optional<LaunchEnvironment> ask_pmix(const LaunchEnvironment& given, bool needed, const std::string& folder,
                                          double timeout_seconds) {
  std::shared_ptr<Conversation> conversation;
  {
    const std::lock_guard lock(spoken().mutex);
    if (!spoken().conversation) {
      const PmixEntry* library = nullptr;
      try {
        library = static_cast<const PmixEntry*>(open_library(
            folder, "libwhale_pmix.so", WHALE_PMIX_SYMBOL, "library for PMIx, by which this process was started,",
            "Install it beside libwhale.so, with PMIx 4 or newer (Debian: libpmix2), or set RANK, WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT on each rank (under OpenMPI's mpirun and srun MASTER_ADDR is enough)"));
      } catch (const Error&) {
        if (needed) throw;
        return std::nullopt;
      }
      conversation = std::make_shared<Conversation>(*library, given);
      const NoSignals none;  // PMIx's own thread is made by this one
      std::thread([conversation] { conversation->hold(); }).detach();
      spoken().conversation = conversation;
      // At exit(): a process that has joined and not left has failed, to mpirun.
      static const struct Farewell {
        ~Farewell() { leave_pmix(); }
      } farewell;
    }
    conversation = spoken().conversation;
  }
  return conversation->wait(given, timeout_seconds);
}

void leave_pmix() {
  std::shared_ptr<Conversation> conversation;
  {
    const std::lock_guard lock(spoken().mutex);
    conversation = spoken().conversation;
  }
  if (conversation) conversation->leave();
}

}  // namespace whale
