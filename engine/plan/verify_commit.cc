// A step changes all variables or none: the place of the commit among what writes variables, and of the vote behind the
// loss.
#include <algorithm>
#include <optional>

#include "plan/verify.h"

namespace whale {
namespace {

// Where an instruction runs: a row of the schedule, and the place in its segment.
struct Place {
  size_t row = 0, index = 0;
};

class Order {
 public:
  explicit Order(const VerifyContext& c) : c_(c), rows_(c.program.segments.size()), clocks_(c.program.segments.size()) {
    for (size_t r = 0; r < c.program.schedule.size(); ++r) rows_[c.program.schedule[r].segment].push_back(r);
  }

  // The place of the only instruction of this kind, which runs once; none: there is none.
  std::optional<Place> only(InstructionKind kind) const {
    std::optional<Place> found;
    for (size_t s = 0; s < rows_.size(); ++s) {
      const Segment& segment = c_.program.segments[s];
      for (size_t k = 0; k < segment.instructions.size(); ++k) {
        if (segment.instructions[k].kind() != kind || rows_[s].empty()) continue;
        if (found || rows_[s].size() > 1)
          c_.fail(segment, k, fmt::format("a step has more than one {}", segment.instructions[k].verb()));
        found = Place{rows_[s][0], k};
      }
    }
    return found;
  }

  // Whether all runs of instruction k of segment s, or its first one, are behind `at`; whether all are before it.
  bool behind(size_t s, size_t k, const Place& at) const {
    return rows_[s].empty() || follows({rows_[s].front(), k}, at);
  }
  bool before(size_t s, size_t k, const Place& at) const {
    return rows_[s].empty() || follows(at, {rows_[s].back(), k});
  }
  const Segment& segment(const Place& at) const { return c_.program.segments[c_.program.schedule[at.row].segment]; }

 private:
  const Instruction& instruction(const Place& at) const { return segment(at).instructions[at.index]; }

  // `later` begins when `earlier` is done.
  bool follows(const Place& later, const Place& earlier) const {
    if (later.row == earlier.row)
      return waits(static_cast<size_t>(c_.program.schedule[later.row].segment), later.index, earlier.index);
    if (later.row < earlier.row) return false;
    if (later.row > earlier.row + 1 || instruction(later).queue == instruction(earlier).queue) return true;
    const int32_t list = c_.program.schedule[later.row].waits;
    const RowWaits none;
    const RowWaits& waits = list == kNone ? none : c_.program.row_waits[list];
    const RowClock before = clock_of(segment(earlier));
    CrossClock clock(before);
    auto next = waits.begin();
    for (size_t k = 0; k <= later.index; ++k) {
      const Instruction& i = segment(later).instructions[k];
      clock.begin(i.queue, i.waits);
      for (; next != waits.end() && next->at == static_cast<int32_t>(k); ++next) clock.wait(next->on);
    }
    return clock.now()[static_cast<size_t>(instruction(earlier).queue)] >= static_cast<int64_t>(earlier.index);
  }

  // Of one segment: `later` begins when `earlier` is done.
  bool waits(size_t s, size_t later, size_t earlier) const {
    const auto& list = c_.program.segments[s].instructions;
    if (later <= earlier) return false;
    if (list[later].queue == list[earlier].queue) return true;
    if (!clocks_[s]) clocks_[s] = clock_of(c_.program.segments[s]);
    return clocks_[s]->begun(later)[static_cast<size_t>(list[earlier].queue)] >= static_cast<int64_t>(earlier);
  }

  const VerifyContext& c_;
  std::vector<std::vector<size_t>> rows_;                // of each segment
  mutable std::vector<std::optional<RowClock>> clocks_;  // of each segment that was asked for
};

template <class Body>
void each(const Program& p, Body body) {
  for (size_t s = 0; s < p.segments.size(); ++s)
    for (size_t k = 0; k < p.segments[s].instructions.size(); ++k) body(s, k, p.segments[s].instructions[k]);
}

}  // namespace

void verify_commit(const VerifyContext& c, bool step) {
  const Program& p = c.program;
  const Order order(c);
  const std::optional<Place> commit = order.only(InstructionKind::kCommit), vote = order.only(InstructionKind::kVote);
  bool writes = false;
  each(p, [&](size_t s, size_t k, const Instruction& i) {
    if (!writes_variable(p, i)) return;
    writes = true;
    if (!commit || !order.behind(s, k, *commit))
      c.fail(p.segments[s], k, "writes a variable without a commit before it");
  });
  if (commit && !writes) c.fail(order.segment(*commit), commit->index, "a commit, and no variable is written");
  BufferId loss = kNone;
  std::string handed_out;  // by which instruction
  const int32_t output = c.entry.loss();
  each(p, [&](size_t s, size_t k, const Instruction& i) {
    if (const auto* fetch = i.as<work::Fetch>(); fetch != nullptr && fetch->output == output && output != kNone)
      loss = storage_of(p, i.in[0]), handed_out = told(c.plan, p.segments[s], k);
  });
  if (!vote) {
    if (step && loss != kNone)
      c.fail(site_of(
                 p, [&](const Instruction& i) { return i.as<work::Fetch>() && i.as<work::Fetch>()->output == output; }),
             "it has the loss of a step and does not vote");
    return;
  }
  const Segment& segment = order.segment(*vote);
  const Instruction& v = segment.instructions[vote->index];
  if (loss == kNone) c.fail(segment, vote->index, "votes, and this device has no loss");
  if (storage_of(p, v.in[0]) != loss)
    c.fail(segment, vote->index,
           fmt::format("votes on '{}', and what it hands out as the loss is '{}', by instruction {}",
                       p.buffers[v.in[0]].name, p.buffers[loss].name, handed_out));
  if (!step) c.fail(segment, vote->index, "votes, and no variable is written");
  if (commit && !order.before(static_cast<size_t>(p.schedule[vote->row].segment), vote->index, *commit))
    c.fail(segment, vote->index, "votes, and the commit does not wait for it");
  each(p, [&](size_t s, size_t k, const Instruction& i) {
    const bool makes =
        std::any_of(i.out.begin(), i.out.end(), [&](BufferId b) { return b != kNone && storage_of(p, b) == loss; });
    if (makes && !order.before(s, k, *vote)) c.fail(p.segments[s], k, "makes the loss when it has been voted on");
  });
}

}  // namespace whale
