// What is done before an instruction begins: by the order of its queue, by the waits of a plan, and by what those whom
// it waits for had waited for.
#pragma once

#include <array>
#include <vector>

#include "plan/plan.h"

namespace whale {

// The last instruction of each queue that is done; -1: none.
using QueueClock = std::array<int64_t, kQueues>;
inline constexpr QueueClock kNothingDone = [] {
  QueueClock clock{};
  clock.fill(-1);
  return clock;
}();
inline void merge(QueueClock& clock, const QueueClock& other) {
  for (size_t t = 0; t < kQueues; ++t) clock[t] = clock[t] < other[t] ? other[t] : clock[t];
}

// Goes through the instructions of a row, or of a segment as if it were one, in their order.
class RowClock {
 public:
  RowClock() { known_.fill(kNothingDone); }

  // The next instruction begins, behind these.
  void begin(Queue queue, const std::vector<Wait>& waits) {
    QueueClock& mine = known_[static_cast<size_t>(queue)];
    for (const Wait& w : waits) {
      merge(mine, begun_[w.index]);
      int64_t& there = mine[static_cast<size_t>(w.queue)];
      there = there < w.index ? w.index : there;
    }
    begun_.push_back(mine);
    mine[static_cast<size_t>(queue)] = static_cast<int64_t>(begun_.size()) - 1;
  }
  // What a queue knows to be done, itself included; where instruction k began.
  const QueueClock& known(Queue queue) const { return known_[static_cast<size_t>(queue)]; }
  const QueueClock& begun(size_t k) const { return begun_[k]; }
  // Of all queues, when they are through.
  QueueClock last() const {
    QueueClock all = kNothingDone;
    for (size_t t = 0; t < kQueues; ++t) all[t] = known_[t][t];
    return all;
  }

 private:
  std::array<QueueClock, kQueues> known_;
  std::vector<QueueClock> begun_;
};
RowClock clock_of(const Segment& s);

// What instructions of a row know of the row before it. Of all rows before that one, everything is done.
class CrossClock {
 public:
  explicit CrossClock(const RowClock& before) : before_(before), last_(before.last()) {
    for (size_t t = 0; t < kQueues; ++t) known_[t] = before.known(static_cast<Queue>(t));
  }

  // The next instruction of the row, behind these of its own row.
  void begin(Queue queue, const std::vector<Wait>& waits) {
    queue_ = static_cast<size_t>(queue);
    for (const Wait& w : waits) merge(known_[queue_], begun_[w.index]);
    begun_.push_back(known_[queue_]);
  }
  // It waits for this one of the row before too.
  void wait(const Wait& on) {
    QueueClock& mine = begun_.back();
    merge(mine, before_.begun(static_cast<size_t>(on.index)));
    int64_t& there = mine[static_cast<size_t>(on.queue)];
    there = there < on.index ? on.index : there;
    known_[queue_] = mine;
  }
  const QueueClock& now() const { return begun_.back(); }
  bool all_done() const { return begun_.back() == last_; }

 private:
  const RowClock& before_;
  QueueClock last_;
  std::array<QueueClock, kQueues> known_;
  size_t queue_ = 0;
  std::vector<QueueClock> begun_;
};

}  // namespace whale
