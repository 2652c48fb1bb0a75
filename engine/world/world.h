// The ranks (processes, or parts of one) that run one plan together: which of them this is, which devices of the plan
// are here, a store to meet by, and the wire between them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/wire.h"
#include "plan/plan.h"

namespace whale {

// Keys and values that all ranks of a world see. Thread-safe.
class Store {
 public:
  virtual ~Store() = default;
  virtual void put(const std::string& key, std::string value) = 0;
  // Waits until rank `from` has put it; throws deadline_exceeded, unavailable where that rank is lost or has left, and
  // Stopped (base/watch.h).
  virtual std::string get(const std::string& key, int from, double timeout_seconds) = 0;
};
std::shared_ptr<Store> make_inproc_store();

// What the sessions of a rank are at, which the others are told when it is lost. Thread-safe.
class Whereabouts {
 public:
  struct Place {
    bool in_run = false;
    std::string text;  // "in step 7, at matmul of h in block.3 (forward)"
  };
  using Ask = std::function<Place()>;
  void add(uint64_t session, Ask ask);
  void remove(uint64_t session);  // it is not asked any more when this returns
  std::string text() const;       // of the newest that is in a run, or the newest; empty: there is none

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, Ask> sessions_;
};

// Of one session.
struct World {
  std::shared_ptr<Store> store;
  std::shared_ptr<Wire> wire;
  std::vector<int32_t> ranks = {};  // of each device of the plan, once it is known
  uint64_t number = 0;              // of the session, among those of its rank
  // Seconds for which nothing moves in a run, until that is warned of, and until it ends. 0: for ever.
  double warns_after = 0, patience = 0;
  std::shared_ptr<Whereabouts> whereabouts = {};  // null: nobody is told
  // Of ranks that are processes. That rank does not answer for so many seconds: if nobody knows better, it is lost
  // soon, where the doubt still stands then (asked on any thread; calls nobody). It has left: it runs nothing any more.
  std::function<void(int rank, const std::string& why, double seconds, std::function<bool()> stands)> doubt = {};
  std::function<bool(int rank)> has_left = {};
  std::vector<std::string> hosts = {};  // by rank, where they are on several
  bool near_0 = true;                   // rank 0 is on this host: what it makes in a directory is there at once

  int rank() const { return wire->rank(); }
  int size() const { return wire->size(); }
};

// "rank 1 (host 'a')"; without the host where all are on one.
std::string text_of_rank(const World& world, int rank);
// The first of these ranks that has left the world, which runs nothing any more; -1: none, as far as is known. What it
// sent before may still be on its way.
int who_left(const World& world, const std::vector<int32_t>& ranks);
inline constexpr double kSecondsOnTheWay = 1;  // of a short letter, at most
std::vector<int32_t> all_ranks(const World& world);

// The rank of each device of a plan: even runs of devices. Throws invalid where a rank would have none.
std::vector<int32_t> ranks_of_devices(int ranks, size_t devices);

// All ranks have put the same text for their session: else throws failed_precondition, on every rank, naming the first
// that differs from most others (of two, from rank 0) and what it differs in. Texts are "word value" lines.
void agree(const World& world, const std::string& text, double timeout_seconds);
// Instead of agree(), where a rank opens no session: the others' agree() throws why.
void refuse(const World& world, const Error& why) noexcept;

// The worlds of one rank, for as long as it runs plans with the others: the n-th session of every rank is in the n-th.
// Thread-safe.
class Worlds {
 public:
  virtual ~Worlds() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual World next() = 0;  // of this rank's next session
};

// Of `ranks` parts of this process, by rank; they share a store and wires and nothing else.
std::vector<std::shared_ptr<Worlds>> make_inproc_ranks(int ranks);
std::vector<World> make_inproc_worlds(int ranks);  // the first of such

}  // namespace whale
