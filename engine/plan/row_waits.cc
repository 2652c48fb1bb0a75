#include "plan/row_waits.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "base/watch.h"
#include "plan/clocks.h"
#include "plan/lives.h"

namespace whale {
namespace {

// What an instruction touches, on the version of its row.
struct Touched {
  std::vector<Bytes> read, written;
};
Touched touched_by(const Program& p, const Instruction& i, int32_t version) {
  Touched out;
  for (const BufferId b : i.in)
    if (b != kNone) out.read.push_back(bytes_of_storage(p, b, version));
  for (const BufferId b : i.out)
    if (b != kNone) out.written.push_back(bytes_of_storage(p, b, version));
  return out;
}

bool meet(const std::vector<Bytes>& a, const std::vector<Bytes>& b) {
  return std::ranges::any_of(
      a, [&](const Bytes& x) { return std::ranges::any_of(b, [&](const Bytes& y) { return x.meets(y); }); });
}
bool meet(const Touched& now, const Touched& before) {
  return meet(now.written, before.read) || meet(now.written, before.written) || meet(now.read, before.written);
}

// A row that others come behind.
class Before {
 public:
  Before(const Program& p, const ScheduleRow& row)
      : p_(p),
        segment_(p.segments[row.segment]),
        version_(row.version),
        clock_(clock_of(segment_)),
        touched_(segment_.instructions.size()) {
    for (size_t k = 0; k < touched_.size(); ++k)
      of_[static_cast<size_t>(segment_.instructions[k].queue)].push_back(static_cast<int64_t>(k));
  }

  const RowClock& clock() const { return clock_; }
  // The last instruction of each queue but this one that touches what `mine` does, as far as they are not known.
  QueueClock latest(Queue queue, const Touched& mine, const QueueClock& known) {
    QueueClock out = known;
    for (size_t t = 0; t < kQueues; ++t) {
      if (t == static_cast<size_t>(queue)) continue;
      for (auto k = of_[t].rbegin(); k != of_[t].rend() && *k > known[t]; ++k)
        if (meet(mine, touched(static_cast<size_t>(*k)))) {
          out[t] = *k;
          break;
        }
    }
    return out;
  }

 private:
  const Touched& touched(size_t k) {
    if (!touched_[k]) touched_[k] = touched_by(p_, segment_.instructions[k], version_);
    return *touched_[k];
  }

  const Program& p_;
  const Segment& segment_;
  int32_t version_;
  RowClock clock_;
  std::array<std::vector<int64_t>, kQueues> of_;
  std::vector<std::optional<Touched>> touched_;
};

RowWaits waits_for(Before& before, const Program& p, const ScheduleRow& now) {
  RowWaits out;
  CrossClock clock(before.clock());
  const Segment& segment = p.segments[now.segment];
  for (size_t k = 0; k < segment.instructions.size(); ++k) {
    Watch::look();
    const Instruction& i = segment.instructions[k];
    clock.begin(i.queue, i.waits);
    if (clock.all_done()) continue;
    const QueueClock need = before.latest(i.queue, touched_by(p, i, now.version), clock.now());
    for (;;) {  // the latest instruction first: its queue may know of the others
      size_t latest = kQueues;
      for (size_t t = 0; t < kQueues; ++t)
        if (need[t] > clock.now()[t] && (latest == kQueues || need[t] > need[latest])) latest = t;
      if (latest == kQueues) break;
      const Wait on{static_cast<Queue>(latest), static_cast<int32_t>(need[latest])};
      out.push_back({static_cast<int32_t>(k), on});
      clock.wait(on);
    }
  }
  return out;
}

}  // namespace

void add_row_waits(Program& p) {
  p.row_waits.clear();
  const std::vector<int32_t> periods = periods_of(p);
  using Kind = std::pair<int32_t, int32_t>;  // rows of one segment and version are alike
  const auto kind = [&](const ScheduleRow& r) -> Kind { return {r.segment, r.version % periods[r.segment]}; };
  std::map<Kind, Before> rows;
  std::map<std::pair<Kind, Kind>, int32_t> known;
  for (size_t r = 1; r < p.schedule.size(); ++r) {
    Watch::look();
    const ScheduleRow& before = p.schedule[r - 1];
    ScheduleRow& now = p.schedule[r];
    const auto [at, fresh] = known.try_emplace({kind(before), kind(now)}, kNone);
    if (fresh) {
      Before& earlier = rows.try_emplace(kind(before), p, before).first->second;
      if (RowWaits waits = waits_for(earlier, p, now); !waits.empty()) {
        const auto same = std::ranges::find(p.row_waits, waits);
        at->second = static_cast<int32_t>(same - p.row_waits.begin());
        if (same == p.row_waits.end()) p.row_waits.push_back(std::move(waits));
      }
    }
    now.waits = at->second;
  }
  if (!p.schedule.empty()) p.schedule[0].waits = kNone;
}

}  // namespace whale
