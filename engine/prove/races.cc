#include "prove/races.h"

#include <algorithm>
#include <array>
#include <set>
#include <tuple>

#include "base/watch.h"
#include "prove/memory.h"

namespace whale::proof {
namespace {

// What a step's decision is told by: a vote writes the first of these bytes, a commit reads it and writes the second,
// which writes of variables read.
constexpr Place kVoted{-2, 0, 1}, kCommitted{-2, 1, 1};

struct Access {
  int64_t time = 0;
  Place place;
  bool writes = false;
  BufferId buffer = kNone;
};

std::vector<Access> accesses_of(const Program& p, const Instruction& i, int32_t version, int64_t time) {
  std::vector<Access> out;
  const auto add = [&](BufferId id, bool writes) {
    if (id == kNone || p.buffers[id].bytes == 0) return;
    const Buffer& b = p.buffers[id];
    if (b.kind == BufferKind::kStep) return;
    out.push_back({time, place_of(p, id, version), writes, id});
    if (writes && b.kind == BufferKind::kVariable) out.push_back({time, kCommitted, false, id});
  };
  for (const BufferId id : i.in) add(id, false);
  for (const BufferId id : i.out) add(id, true);
  if (i.kind() == InstructionKind::kVote) out.push_back({time, kVoted, true, kNone});
  if (i.kind() == InstructionKind::kCommit) {
    out.push_back({time, kVoted, false, kNone});
    out.push_back({time, kCommitted, true, kNone});
  }
  return out;
}

// Two rows, one behind the other; all before them is done (RowWait in plan/plan.h). Time counts their instructions.
class Pair {
 public:
  explicit Pair(const Program& program) : p_(program) {
    for (Clock& c : known_) c.fill(-1);
  }

  // `row_waits`: for instructions of the row that this one follows.
  void row(const ScheduleRow& row, const RowWaits* row_waits) {
    const Segment& s = p_.segments[row.segment];
    const size_t before = begin_;
    begin_ = done_.size();
    size_t next = 0;
    for (size_t k = 0; k < s.instructions.size(); ++k) {
      Watch::look();
      const Instruction& i = s.instructions[k];
      const auto queue = static_cast<size_t>(i.queue);
      Clock& known = known_[queue];
      for (const Wait& w : i.waits) merge(known, done_[begin_ + static_cast<size_t>(w.index)]);
      for (; row_waits && next < row_waits->size() && (*row_waits)[next].at == static_cast<int32_t>(k); ++next)
        merge(known, done_[before + static_cast<size_t>((*row_waits)[next].on.index)]);
      const auto time = static_cast<int64_t>(done_.size());
      for (const Access& a : accesses_of(p_, i, row.version, time)) {
        check(a, queue, k);
        of_queues_[queue].push_back(a);
      }
      known[queue] = time;
      done_.push_back(known);
      names_.push_back(&i);
    }
  }
  size_t faulty() const { return faulty_; }  // the instruction of its row

 private:
  using Clock = std::array<int64_t, kQueues>;  // of each queue, the last that is known to be done

  static void merge(Clock& mine, const Clock& other) {
    for (size_t q = 0; q < kQueues; ++q) mine[q] = std::max(mine[q], other[q]);
  }

  void check(const Access& mine, size_t queue, size_t k) {
    for (size_t q = 0; q < kQueues; ++q) {
      if (q == queue) continue;
      const auto& list = of_queues_[q];
      for (auto other = list.rbegin(); other != list.rend() && other->time > known_[queue][q]; ++other) {
        if (!(mine.writes || other->writes) || !meet(mine.place, other->place)) continue;
        faulty_ = k;
        const bool in_row = other->time >= static_cast<int64_t>(begin_);
        const int64_t number = other->time - (in_row ? static_cast<int64_t>(begin_) : 0);
        refuse("it {} {} and does not wait for instruction {}{} '{}', which {} {}", mine.writes ? "writes" : "reads",
               name(mine), number, in_row ? "" : " of the row before", names_[other->time]->name,
               other->writes ? "writes" : "reads", mine.buffer == other->buffer ? "it" : name(*other));
      }
    }
  }
  std::string name(const Access& a) const {
    if (a.place == kVoted) return "what devices have voted";
    if (a.place == kCommitted) return "whether the step changes variables";
    return fmt::format("'{}'", p_.buffers[a.buffer].name);
  }

  const Program& p_;
  size_t begin_ = 0;  // of the row at hand
  std::vector<Clock> done_;
  std::vector<const Instruction*> names_;
  std::array<Clock, kQueues> known_;  // what each queue knows
  std::array<std::vector<Access>, kQueues> of_queues_;
  size_t faulty_ = 0;
};

}  // namespace

std::optional<Stopped> race_of(const Program& program, int32_t device) {
  std::set<std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>> seen;
  for (size_t r = 0; r < program.schedule.size(); ++r) {
    const ScheduleRow& now = program.schedule[r];
    const ScheduleRow* before = r > 0 ? &program.schedule[r - 1] : nullptr;
    if (!seen.emplace(before ? before->segment : kNone, before ? before->version : kNone, now.segment, now.version,
                      now.waits)
             .second)
      continue;
    Pair pair(program);
    try {
      if (before) pair.row(*before, nullptr);
      pair.row(now, before && now.waits != kNone ? &program.row_waits[now.waits] : nullptr);
    } catch (Stop& stop) {
      return Stopped{std::move(stop), {device, static_cast<int32_t>(r), static_cast<int32_t>(pair.faulty())}, {}};
    }
  }
  return {};
}

}  // namespace whale::proof
