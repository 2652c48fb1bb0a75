// What compute waits for from row to row of the schedule, once everything has its place.
#include <algorithm>
#include <map>
#include <tuple>

#include "base/watch.h"
#include "lower/storage.h"
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

// The waits of compute in a row of `now` behind one of `before`.
Carry carry_of(const Program& p, const ScheduleRow& before, const ScheduleRow& now) {
  const Segment& earlier = p.segments[static_cast<size_t>(before.segment)];
  const std::vector<size_t> pending = pending_of(earlier);
  std::vector<Touched> left;
  QueueClock last;  // of each queue
  last.fill(-1);
  for (const size_t k : pending) {
    left.push_back(touched_by(p, earlier.instructions[k], before.version));
    last[static_cast<size_t>(earlier.instructions[k].queue)] = static_cast<int64_t>(k);
  }
  Carry out;
  QueueClock known;
  known.fill(-1);
  const Segment& segment = p.segments[static_cast<size_t>(now.segment)];
  for (size_t k = 0; k < segment.instructions.size() && known != last; ++k) {
    Watch::look();
    if (segment.instructions[k].queue != Queue::kCompute) continue;
    const Touched mine = touched_by(p, segment.instructions[k], now.version);
    for (size_t n = pending.size(); n-- > 0;) {
      const auto queue = static_cast<size_t>(earlier.instructions[pending[n]].queue);
      const auto index = static_cast<int64_t>(pending[n]);
      if (index <= known[queue] || !meet(mine, left[n])) continue;
      out.push_back({static_cast<int32_t>(k), {static_cast<Queue>(queue), static_cast<int32_t>(index)}});
      known[queue] = index;
    }
  }
  return out;
}

}  // namespace

void carry_over(Program& p) {
  p.carries.clear();
  std::vector<char> versioned(p.segments.size());
  for (size_t s = 0; s < versioned.size(); ++s)
    for (const Instruction& i : p.segments[s].instructions)
      for (const BufferIds* list : {&i.in, &i.out})
        for (const BufferId b : *list)
          versioned[s] |= b != kNone && p.buffers[static_cast<size_t>(storage_of(p, b))].versions > 1;
  const auto version = [&](const ScheduleRow& r) { return versioned[static_cast<size_t>(r.segment)] ? r.version : 0; };
  std::map<std::tuple<int32_t, int32_t, int32_t, int32_t>, int32_t> known;  // segments and versions of both rows
  for (size_t r = 1; r < p.schedule.size(); ++r) {
    Watch::look();
    const ScheduleRow& before = p.schedule[r - 1];
    ScheduleRow& now = p.schedule[r];
    const auto [at, fresh] = known.try_emplace({before.segment, version(before), now.segment, version(now)}, kNone);
    if (fresh)
      if (Carry carry = carry_of(p, before, now); !carry.empty()) {
        const auto same = std::ranges::find(p.carries, carry);
        at->second = static_cast<int32_t>(same - p.carries.begin());
        if (same == p.carries.end()) p.carries.push_back(std::move(carry));
      }
    now.carry = at->second;
  }
  if (!p.schedule.empty()) p.schedule[0].carry = kNone;
}

}  // namespace whale
