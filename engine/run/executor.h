// Runs one entry of a plan on a machine, step after step. Every device thread walks its lists; nothing is decided,
// looked up or allocated on the way.
//
// Steps are atomic. The first commit of the plan that has seen all votes commits the step: a cancel, a failure or a
// non-finite loss that comes before it stops all devices with the variables as they were; a cancel that comes later is
// too late, and the step completes; a failure later breaks the session. Both sides race for one atomic, so all devices
// agree.
//
// In a world of several ranks a rank promises to go along once all here have voted and a device, of whichever rank, is
// at its commit. The step is committed when all ranks have; one that stops before its promise stops all, and a failure
// after that breaks the session on every rank. A run in which nothing moves for too long (World::patience), because a
// rank is there and does nothing, or what it sends does not arrive, ends too. When a run has ended every rank has the
// outputs that it asked for: all ask for the same, which each tells the others when it begins.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "comm/counter.h"
#include "comm/wire.h"
#include "run/beginners.h"
#include "run/bound.h"
#include "run/handle.h"
#include "run/place.h"
#include "run/recorder.h"
#include "run/slice.h"
#include "run/timeline.h"

namespace whale {

struct StepValues {
  uint64_t seed = 0;
  int64_t iteration = 0, updates = 0;
  double learning_rate = 0;
  double loss_scale = 1;   // f16: the factor of the loss in the backward pass
  uint64_t same = 0;       // that all ranks have to give, such as which batch it is; 0: none
  bool check_loss = true;  // a non-finite loss is an error
  bool timeline = false;
  const std::atomic<bool>* cancel = nullptr;   // of the caller; may be null
  const std::atomic<bool>* closing = nullptr;  // of the session; may be null
};

class Executor final : private Job, private Lookout, private Ear::Listener {
 public:
  // Binds the entry on all devices at once; throws the first Error.
  Executor(Machine& machine, Entry entry);
  ~Executor() override;

  const Entry& entry() const { return *entry_; }
  // Pointers in the order of the entry's ports, null: not given, not wanted. Fill them before start().
  std::vector<const void*>& inputs() { return inputs_; }
  std::vector<void*>& outputs() { return outputs_; }
  // What the devices that are here read of each input, and whether inputs() of the next run are tensors of that alone.
  const std::vector<InputSlices>& input_slices() const { return slices_; }
  void take_slices(bool slices) { takes_slices_ = slices; }

  // Outputs that are not wanted are not computed, and what they alone need is not read; throws when a wanted one needs
  // an input that is not there. For entries that write no variables.
  void narrow_to_outputs();
  // Of each input, whether the next run reads it; empty: all are.
  const std::vector<bool>& inputs_read() const;
  // Starts a run; `ended` is called on a device thread, with the machine still busy for a moment. No allocation.
  using Ended = void (*)(void* context, std::optional<Error>& error, bool committed);
  void start(const StepValues& values, Ended ended, void* context);

  const std::vector<DeviceTimeline>& timeline() const { return timeline_; }
  const Recorder* recorder(size_t device, size_t queue) const {  // null: it is not in use here
    return recorders_[device][queue].get();
  }
  // What this rank waits for, or is at. From any thread.
  RankPlace place() const;
  Whereabouts::Place whereabouts() const;  // likewise
  // Of the last run: a value that was not finite was found before the update, which changed nothing.
  bool overflowed() const { return overflowed_.load(std::memory_order_acquire); }
  bool has_timeline() const { return timeline_filled_; }
  const BoundProgram* program(size_t device) const { return programs_[device].get(); }  // null: another rank's
  // Instead of start(), where it fails on this rank before it: the others, who begin this run, are told.
  static void refuse(Machine& machine, const Error& error);

 private:
  enum State : uint8_t { kOpen, kReady, kCommitted, kStopped, kBroken };
  struct alignas(64) DeviceRun {
    std::array<Counter, kQueues> done;  // the timelines: instructions of this run, of all queues, up to the one done
  };

  void run(int device, Queue queue) noexcept override;
  void finished() noexcept override;
  void look() override;
  bool walk(size_t device, size_t queue);
  // The value of the timelines of a device's queues when they begin a row, and when they began the one before it.
  struct Base {
    uint32_t row = 1, before = 1;
  };
  bool walk_row(size_t device, size_t queue, size_t row, BoundSegment& segment, const Base& base);
  bool execute(BoundInstruction& bound, size_t device, size_t micro_batch);
  void feed(const BoundInstruction& bound, Device& device, size_t micro_batch) const;
  void fetch(const BoundInstruction& bound, Device& device, size_t micro_batch) const;
  void check_index(BoundInstruction& bound, Device& device, size_t number, size_t micro_batch);
  std::unique_ptr<Sharing> make_sharing();
  void begin_with_others();
  void share_outputs() noexcept;
  void vote();
  bool commit();
  void stop_if_cancelled();
  std::vector<QueuePlace> places() const;  // of the queues that are here and in an instruction
  bool is_at_work() const;                 // one of them, on what waits for nobody, for less than the patience
  double still_seconds() const;            // since something has moved, here or with another rank
  double asks_after() const;               // seconds without a move
  void doubt_who_is_silent(int64_t now);
  void answer() noexcept;
  void look_at_others();
  std::string waiting_text(double seconds) const;
  std::string run_text(int64_t step) const;  // "step 7"
  void tell_place(int lost) noexcept;        // kNone: nothing moves
  void heard_place(const Notice& notice) noexcept;
  void expect_no_more(int rank);  // under error_mutex_
  void add_places();              // to the error, where a rank is lost
  void promise();                 // to the other ranks
  bool agree();                   // of all ranks: they commit
  void hear(const Notice& notice) noexcept override;
  bool is_bad_loss(const char* loss, const BoundProgram& program, Device& device) const;
  Error bad_loss() const;
  void stop(Error error) noexcept { stop(std::move(error), nullptr); }
  void stop(Error error, const Notice* heard) noexcept;  // heard: from another rank
  static std::optional<Damage> damage_at(uint8_t state, const Error& error, const Notice* heard);
  bool stopped() const { return state_.load(std::memory_order_relaxed) >= kStopped; }

  Machine& machine_;
  std::unique_ptr<const Entry> entry_;
  std::unique_ptr<Links> links_;
  std::vector<std::unique_ptr<BoundProgram>> programs_;  // by device; null: another rank's
  Wire* wire_ = nullptr;                                 // to the other ranks; null: there are none
  std::unique_ptr<Sharing> sharing_;                     // of outputs, between them
  std::unique_ptr<DeviceRun[]> runs_;
  std::vector<DeviceTimeline> timeline_;
  bool timeline_filled_ = false;
  std::vector<std::array<std::unique_ptr<Recorder>, kQueues>> recorders_;
  // Of this rank as a whole: with its lists, or behind them.
  enum Stage : uint8_t { kWalks, kAgrees, kBegins, kShares, kEnds };
  std::atomic<uint8_t> stage_{kEnds};
  std::vector<const void*> inputs_;
  std::vector<void*> outputs_;
  std::vector<InputSlices> slices_;
  bool takes_slices_ = false;
  std::vector<uint8_t> overflows_;  // by rank; empty: no device sees any
  struct Narrowed {
    std::vector<Mask> masks;  // a mask per program
    std::vector<bool> inputs_read;
  };
  std::map<std::vector<bool>, Narrowed> narrowed_;  // by wanted outputs
  const Narrowed* narrow_ = nullptr;                // of the next run; null: everything

  StepValues values_;
  std::atomic<int64_t> step_{0};  // its iteration, for other threads
  Ended ended_ = nullptr;
  void* context_ = nullptr;
  std::atomic<uint8_t> state_{kOpen};
  Notice begins_;         // what this rank tells of this run: the same on all
  Beginners begun_;       // other ranks that run the same
  Counter ready_;         // those that have promised
  bool commits_ = false;  // a device of whichever rank does
  std::atomic<uint32_t> votes_cast_{0}, promises_heard_{0};
  std::atomic<bool> overflowed_{false};
  Counter votes_;              // of all devices, in this run
  uint32_t votes_wanted_ = 0;  // by the commit
  bool indices_vote_ = false;  // checks of indices too: all of them come before the commits
  std::mutex error_mutex_;
  std::optional<Error> error_;
  std::vector<bool> gone_;         // ranks; those of earlier runs too
  bool lost_one_ = false;          // in this run
  bool is_stuck_ = false;          // somebody has waited too long
  std::vector<RankPlace> places_;  // that ranks have told since
  std::vector<bool> told_;         // it, or that they are gone
  Counter places_told_;            // by so many other ranks
  // Of runs between ranks: when an instruction has ended here, and when another rank has told that something moves with
  // it, which is no answer to the question whether something moves here: two would keep each other waiting.
  std::atomic<int64_t> moved_{0}, others_moved_{0};
  std::atomic<int64_t> asked_{0};  // all ranks, by this one or another, in this run; 0: not yet
  std::mutex patience_mutex_;
  int64_t looked_ = 0;  // last, under it, as what follows
  int64_t asking_ = 0;  // since the last move; 0: not yet
  bool warned_ = false;
  std::vector<char> doubted_;  // ranks, in this run
};

}  // namespace whale
