// A wire carries flat byte ranges between the ranks that run a plan together, and short notices about a run. A
// transport over it needs no other memory than its own. Ranks that run the same entries in the same order number their
// runs alike; what an aborted run left on the way is dropped.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "comm/counter.h"

namespace whale {

// What a rank tells all others of the run that it is in. Begun: this is what I run. Ready: nothing of mine stands
// against the commit any more, I go along with it. Stopped: I never was ready and never will be. At: another rank is
// gone, or nothing moves, and this is where I am. Asks: nothing moves here, does it with you? Moves: it does. Lost: I
// failed after I was ready. Closed: I take part in no later run. Here: I am, whatever I run. Gone: its
// process has ended, or is silent; nobody knows how far it was.
struct Notice {
  enum Kind : uint8_t { kBegun, kReady, kStopped, kAt, kAsks, kMoves, kLost, kClosed, kHere, kGone };
  Kind kind = kReady;
  // kBegun: what is run, as a number that is another one where it is something else. Of what ended a run: the rank at
  // fault, from 1; 0: who tells it.
  uint64_t subject = 0;
  // kBegun: the same of the numbers that it begins with (learning rate, iteration, ..); and what the caller said that
  // all have to say, 0: nothing, which goes with everything.
  uint32_t numbers = 0, same = 0;
  int rank = 0;  // that tells it
  uint64_t run = 0;
  Code code = Code::kUnknown;
  std::string message = {};
};

inline Notice notice_of(Notice::Kind kind, const Error& error) {
  const auto at_fault = static_cast<uint64_t>(int64_t{error.where().rank} + 1);
  return {.kind = kind, .subject = at_fault, .code = error.code(), .message = error.message()};
}

// Of two notices that a run has begun: it is one run.
inline bool begin_alike(const Notice& a, const Notice& b) {
  return a.subject == b.subject && a.numbers == b.numbers && (a.same == b.same || a.same == 0 || b.same == 0);
}

// It is the other rank's, whose number it has.
inline Error runs_something_else(int other, int rank) {
  return error(
             Code::kFailedPrecondition,
             "rank {} runs something else than rank {}: all ranks make the same calls in the same order, with batches "
             "of one size, and ask for the same outputs",
             other, rank)
      .at_rank(other);
}

// Why two runs are not one: `theirs` has begun, of another rank, beside `mine`.
inline Error begins_something_else(const Notice& theirs, const Notice& mine, int rank) {
  if (theirs.subject != mine.subject) return runs_something_else(theirs.rank, rank);
  if (theirs.numbers != mine.numbers)
    return error(Code::kFailedPrecondition,
                 "rank {} begins this step with other numbers than rank {}: learning rate, loss scale, iteration, "
                 "updates or seed is another one there, and the ranks would train apart. All ranks set the same "
                 "learning rate and load the same checkpoint; nothing was changed",
                 theirs.rank, rank)
        .at_rank(theirs.rank);
  return error(Code::kFailedPrecondition,
               "rank {} feeds another batch than rank {}: all ranks feed their parts of one batch. Bring their loaders "
               "to one place (Loader.load_state; in C whale_session_same says which batch it is); nothing was changed",
               theirs.rank, rank)
      .at_rank(theirs.rank);
}

class Wire {
 public:
  // One end of a channel: messages from one rank to another under a tag, in order. One thread at a time.
  class Sender {
   public:
    virtual ~Sender() = default;
    virtual char* begin(size_t bytes, Lookout* lookout) = 0;  // where the next message is written; null: aborted
    virtual void end() = 0;                                   // it is written
    // The next message lies at `data` and is not written again before settle(): it is read from there where that is
    // possible and worth it. Waits where many are lent. false: aborted.
    virtual bool lend(const char* data, size_t bytes, Lookout* lookout) = 0;
    virtual bool settle(Lookout* lookout) = 0;  // until nothing is lent; false: aborted
  };
  class Receiver {
   public:
    virtual ~Receiver() = default;
    // Waits for the next message; null: aborted. Throws runs_something_else where it has another size: it may come
    // before the notice that says so is heard.
    virtual const char* begin(size_t bytes, Lookout* lookout) = 0;
    virtual void end() = 0;  // it has been read
    // The next message straight to its place; false: aborted.
    virtual bool take(char* to, size_t bytes, Lookout* lookout) = 0;
  };

  virtual ~Wire() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // `capacity`: messages of this sender, of a run, that wait at most before begin() does; 0: who uses it sees to it
  // that no more than two do. `settled`: the run ends with settle(): what begin() gave is then read where it lies too.
  virtual std::unique_ptr<Sender> open_sender(int to, uint64_t tag, uint32_t capacity, bool settled = false) = 0;
  virtual std::unique_ptr<Receiver> open_receiver(int from, uint64_t tag) = 0;
  virtual void begin_run() = 0;  // the next one; ends an abort
  // Until the others have read what senders that are `settled` wrote; false: aborted.
  virtual bool settle(Lookout* lookout) = 0;
  // Every begin() that waits, and every later one, gives null, until begin_run(). Takes no memory.
  virtual void abort() noexcept = 0;
  // All other ranks, who hear what one rank tells in its order; `rank` and `run` are this one's and this run. Takes no
  // memory once it has told as much before, but for a long message.
  virtual void tell(Notice notice) = 0;
  // The next notice of this run, or that a rank is lost, in whichever run, or has closed before this one; false: there
  // is none yet. Where there is no memory for it, it stays.
  virtual bool hear(Notice& notice) = 0;
  // When that rank last answered a kAsks, on the steady clock in nanoseconds; 0: never. Its wire does it by itself
  // (kHere), whatever it runs, unless no letter gets through.
  virtual int64_t answered(int rank) const = 0;
  // Until there may be more to hear than when it last returned, or ring().
  virtual void wait_for_notices() = 0;
  virtual void ring() = 0;
  // Bytes that its channels keep for messages, and have used: each as many of its longest as were on the way at once.
  virtual size_t held() const = 0;
};

// Wires of `ranks` parts of one process, which share nothing else.
std::vector<std::shared_ptr<Wire>> make_inproc_wires(int ranks);

}  // namespace whale
