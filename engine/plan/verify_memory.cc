// Races and liveness, from the happens-before order of the streams and the rows of the schedule, not from the planner's
// lives.
#include <algorithm>
#include <map>
#include <set>

#include "base/watch.h"
#include "plan/verify.h"

namespace whale {

std::vector<StreamClock> clocks_of(const Segment& s) {
  std::vector<StreamClock> begin(s.instructions.size());
  std::array<StreamClock, kStreams> now;
  for (StreamClock& c : now) c.fill(-1);
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    Watch::look();
    const Instruction& i = s.instructions[k];
    StreamClock& mine = now[static_cast<size_t>(i.stream)];
    for (const WaitPoint& w : i.waits) {
      const StreamClock& other = begin[static_cast<size_t>(w.index)];
      for (size_t t = 0; t < mine.size(); ++t) mine[t] = std::max(mine[t], other[t]);
      mine[static_cast<size_t>(w.stream)] = std::max<int64_t>(mine[static_cast<size_t>(w.stream)], w.index);
    }
    begin[k] = mine;
    mine[static_cast<size_t>(i.stream)] = static_cast<int64_t>(k);
  }
  return begin;
}

namespace {

// Accesses of one storage in one segment.
struct Access {
  StreamClock first, last;  // per stream, instruction numbers; -1: none
  bool any = false;
  bool reads_first = false;  // its value comes from outside
};

struct SegmentUse {
  std::vector<StreamClock> clocks;
  std::vector<Access> of;  // per buffer (storages)
};

bool all_before(const SegmentUse& s, const Access& a, const Access& b) {
  for (size_t t = 0; t < kStreams; ++t) {
    if (b.first[t] < 0) continue;
    const StreamClock& clock = s.clocks[static_cast<size_t>(b.first[t])];
    for (size_t u = 0; u < kStreams; ++u)
      if (a.last[u] > clock[u]) return false;
  }
  return true;
}

BufferId storage_of(const Program& p, BufferId b) {
  const BufferId alias = p.buffers[static_cast<size_t>(b)].alias;
  return alias == kNone ? b : alias;
}

// A part of a storage: who wrote and read it last, per stream.
struct Touched {
  Interval at;
  StreamClock writer, reader;
};
Interval part_of(const Buffer& b) { return {b.at, b.at + b.bytes}; }

// Reads of a value that another stream makes must wait for it; done for every pair of writer and reader in a segment.
void check_races(const VerifyContext& c, const Segment& s, const SegmentUse& use) {
  std::vector<std::vector<Touched>> touched(c.program.buffers.size());
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    Watch::look();
    const Instruction& i = s.instructions[k];
    const auto stream = static_cast<size_t>(i.stream);
    const auto check = [&](StreamClock Touched::*earlier, const char* what, BufferId b) {
      const Buffer& buffer = c.program.buffers[static_cast<size_t>(b)];
      const Interval mine = part_of(buffer);
      for (const Touched& x : touched[static_cast<size_t>(storage_of(c.program, b))])
        for (size_t t = 0; t < kStreams && x.at.begin < mine.end && mine.begin < x.at.end; ++t)
          if (t != stream && (x.*earlier)[t] > use.clocks[k][t])
            c.fail(s, k, fmt::format("{} '{}' without waiting for instruction {}", what, buffer.name, (x.*earlier)[t]));
    };
    const auto note = [&](StreamClock Touched::*now, BufferId b) {
      const Interval mine = part_of(c.program.buffers[static_cast<size_t>(b)]);
      auto& list = touched[static_cast<size_t>(storage_of(c.program, b))];
      auto at = std::find_if(list.begin(), list.end(), [&](const Touched& x) { return x.at == mine; });
      if (at == list.end()) {
        list.push_back({mine, {}, {}});
        at = list.end() - 1;
        at->writer.fill(-1), at->reader.fill(-1);
      }
      ((*at).*now)[stream] = static_cast<int64_t>(k);
    };
    for (const BufferId b : i.in)
      if (b != kNone) check(&Touched::writer, "reads", b);
    for (const BufferId b : i.out) check(&Touched::writer, "writes", b), check(&Touched::reader, "overwrites", b);
    for (const BufferId b : i.in)
      if (b != kNone) note(&Touched::reader, b);
    for (const BufferId b : i.out) note(&Touched::writer, b);
  }
}

SegmentUse use_of(const Program& p, const Segment& s) {
  SegmentUse use{clocks_of(s), std::vector<Access>(p.buffers.size())};
  for (Access& a : use.of) a.first.fill(-1), a.last.fill(-1);
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    const Instruction& i = s.instructions[k];
    const auto touch = [&](BufferId b, bool reads) {
      if (b == kNone) return;
      Access& a = use.of[static_cast<size_t>(storage_of(p, b))];
      if (!a.any) a.reads_first = reads;
      a.any = true;
      auto& first = a.first[static_cast<size_t>(i.stream)];
      if (first < 0) first = static_cast<int64_t>(k);
      a.last[static_cast<size_t>(i.stream)] = static_cast<int64_t>(k);
    };
    for (const BufferId b : i.in) touch(b, true);
    for (const BufferId b : i.out) touch(b, false);
  }
  return use;
}

// One slot of a storage in the arena: its bytes, and per row of the schedule how its value lives.
enum State : uint8_t { kUsed = 1, kLiveIn = 2, kLiveOut = 4 };
struct SlotLife {
  size_t buffer = 0;
  int32_t slot = 0;
  int64_t begin = 0, end = 0;
  std::vector<uint8_t> rows;
};

std::vector<SlotLife> lives_of(const VerifyContext& c, const std::vector<SegmentUse>& uses) {
  const Program& p = c.program;
  std::vector<std::vector<size_t>> rows_of(p.segments.size());
  for (size_t r = 0; r < p.schedule.size(); ++r) rows_of[static_cast<size_t>(p.schedule[r].segment)].push_back(r);
  std::vector<SlotLife> lives;
  for (size_t b = 0; b < p.buffers.size(); ++b) {
    const Buffer& x = p.buffers[b];
    if (!in_arena(x) || x.alias != kNone || x.bytes == 0 || x.offset < 0) continue;
    std::vector<size_t> rows;  // that use it
    for (size_t s = 0; s < uses.size(); ++s)
      if (uses[s].of[b].any) rows.insert(rows.end(), rows_of[s].begin(), rows_of[s].end());
    std::ranges::sort(rows);
    for (int32_t slot = 0; slot < x.slots; ++slot) {
      Watch::look();
      const int64_t begin = x.offset + slot * slot_stride(x);
      SlotLife life{b, slot, begin, begin + x.bytes, std::vector<uint8_t>(p.schedule.size())};
      bool used = false;
      size_t before = p.schedule.size();  // the last row that used it
      size_t fresh = before;              // the row that made its value, unless it was changed in place since
      for (const size_t r : watched(rows)) {
        const ScheduleRow& row = p.schedule[r];
        const Access& a = uses[static_cast<size_t>(row.segment)].of[b];
        if (x.slots > 1 && row.slot != slot) continue;
        life.rows[r] |= kUsed;
        used = true;
        if (a.reads_first) {
          if (before == p.schedule.size())
            c.fail(fmt::format("segment '{}' reads '{}', which nothing has written",
                               p.segments[static_cast<size_t>(row.segment)].name, x.name));
          const ScheduleRow& made = p.schedule[fresh];
          if (!made.whole && !row.whole && made.micro_batch != row.micro_batch)
            c.fail(fmt::format("segment '{}' reads '{}' of micro-batch {} in micro-batch {}",
                               p.segments[static_cast<size_t>(row.segment)].name, x.name, made.micro_batch,
                               row.micro_batch));
          life.rows[before] |= kLiveOut;
          for (size_t k = before + 1; k < r; ++k) life.rows[k] |= kLiveIn | kLiveOut;
          life.rows[r] |= kLiveIn;
        }
        if (!a.reads_first) fresh = r;
        before = r;
      }
      if (used) lives.push_back(std::move(life));
    }
  }
  return lives;
}

void check_pair(const VerifyContext& c, const std::vector<SegmentUse>& uses, const SlotLife& x, const SlotLife& y,
                size_t r) {
  const uint8_t a = x.rows[r], b = y.rows[r];
  if (a == 0 || b == 0) return;
  const SegmentUse& use = uses[static_cast<size_t>(c.program.schedule[r].segment)];
  const Access &ua = use.of[x.buffer], &ub = use.of[y.buffer];
  const bool both = (a & kUsed) && (b & kUsed);
  const bool x_first = both && !(a & kLiveOut) && !(b & kLiveIn) && all_before(use, ua, ub);
  const bool y_first = both && !(b & kLiveOut) && !(a & kLiveIn) && all_before(use, ub, ua);
  if (!x_first && !y_first)
    c.fail(fmt::format("'{}' and '{}' share bytes and are both alive in segment '{}'", c.program.buffers[x.buffer].name,
                       c.program.buffers[y.buffer].name,
                       c.program.segments[static_cast<size_t>(c.program.schedule[r].segment)].name));
}

// Everything that lives in the row, in the order in which it is first used; each is checked against those that had its
// bytes just before. That is enough for all pairs: what is before something that is before a third is before the third.
void check_row(const VerifyContext& c, const std::vector<SegmentUse>& uses, const std::vector<SlotLife>& lives,
               size_t r) {
  const SegmentUse& use = uses[static_cast<size_t>(c.program.schedule[r].segment)];
  struct Item {
    bool made_here;  // not alive from before the row
    int64_t first;   // use
    const SlotLife* life;
  };
  std::vector<Item> items;
  for (const SlotLife& life : lives) {
    if (life.rows[r] == 0) continue;
    int64_t first = INT64_MAX;
    for (const int64_t k : use.of[life.buffer].first)
      if (k >= 0) first = std::min(first, k);
    items.push_back({(life.rows[r] & kLiveIn) == 0, first, &life});
  }
  std::ranges::stable_sort(items, {}, [](const Item& i) { return std::pair(i.made_here, i.first); });
  struct Piece {
    int64_t end;
    const SlotLife* life;
  };
  std::map<Memory, std::map<int64_t, Piece>> owners;  // by where the piece begins: the latest that had these bytes
  for (const Item& item : items) {
    Watch::look();
    const SlotLife& mine = *item.life;
    auto& pieces = owners[c.program.buffers[mine.buffer].memory];
    auto at = pieces.upper_bound(mine.begin);
    if (at != pieces.begin() && std::prev(at)->second.end > mine.begin) --at;
    while (at != pieces.end() && at->first < mine.end) {
      const auto [begin, piece] = *at;
      check_pair(c, uses, *piece.life, mine, r);
      at = pieces.erase(at);
      if (begin < mine.begin) pieces.emplace(begin, Piece{mine.begin, piece.life});
      if (piece.end > mine.end) at = pieces.emplace(mine.end, piece).first;
    }
    pieces.emplace(mine.begin, Piece{mine.end, &mine});
  }
}

// A value that a later instruction changed in place (a part of a sum, by its all_reduce) is not read any more; nor is a
// variable by its own name once it was updated, nor its new value before that.
void check_overwritten(const VerifyContext& c) {
  const Program& p = c.program;
  for (const Segment& segment : p.segments) {
    std::vector<int64_t> made(p.buffers.size(), -1);                    // by which instruction of the segment
    std::map<std::tuple<BufferId, int64_t, int64_t>, BufferId> latest;  // per storage and place in it
    std::set<BufferId> to_come;                                         // new values of variables
    for (const Instruction& i : segment.instructions)
      for (const BufferId b : i.out)
        if (b != kNone && p.buffers[static_cast<size_t>(b)].kind == BufferKind::kVariable &&
            p.buffers[static_cast<size_t>(b)].alias != kNone)
          to_come.insert(b);
    const auto place = [&](BufferId b) {
      const Buffer& buffer = p.buffers[static_cast<size_t>(b)];
      return std::tuple(storage_of(p, b), buffer.at, buffer.bytes);
    };
    for (size_t k = 0; k < segment.instructions.size(); ++k) {
      Watch::look();
      const Instruction& i = segment.instructions[k];
      for (const BufferId b : i.in) {
        if (b == kNone) continue;
        const Buffer& buffer = p.buffers[static_cast<size_t>(b)];
        if (made[static_cast<size_t>(b)] < 0 && to_come.contains(b))
          c.fail(
              fmt::format("instruction {} of segment '{}' reads '{}' before it is made", k, segment.name, buffer.name));
        const bool named = buffer.kind == BufferKind::kVariable && buffer.alias == kNone;
        if (made[static_cast<size_t>(b)] < 0 && !named) continue;  // of another segment, or a view
        const auto at = latest.find(place(b));
        const BufferId now = at == latest.end() ? b : at->second;
        if (now != b)
          c.fail(fmt::format("instruction {} of segment '{}' reads '{}', which became '{}' in place", k, segment.name,
                             buffer.name, p.buffers[static_cast<size_t>(now)].name));
      }
      for (const BufferId b : i.out)
        if (b != kNone) made[static_cast<size_t>(b)] = static_cast<int64_t>(k), latest[place(b)] = b;
    }
  }
}

}  // namespace

void verify_memory(const VerifyContext& c) {
  check_overwritten(c);
  const Program& p = c.program;
  std::vector<SegmentUse> uses;
  for (const Segment& s : p.segments) {
    uses.push_back(use_of(p, s));
    check_races(c, s, uses.back());
  }
  for (const ScheduleRow& row : watched(p.schedule))
    for (size_t b = 0; b < p.buffers.size(); ++b)
      if (p.buffers[b].slots > 1 && row.slot >= p.buffers[b].slots && uses[static_cast<size_t>(row.segment)].of[b].any)
        c.fail(fmt::format("a schedule row of segment '{}' works on slot {}, but '{}' has {}",
                           p.segments[static_cast<size_t>(row.segment)].name, row.slot, p.buffers[b].name,
                           p.buffers[b].slots));
  const std::vector<SlotLife> lives = lives_of(c, uses);
  // Rows of one segment in which everything lives in the same way are checked once.
  std::set<std::pair<int32_t, std::vector<uint8_t>>> seen;
  std::vector<size_t> rows;
  for (size_t r = 0; r < p.schedule.size(); ++r) {
    Watch::look();
    std::vector<uint8_t> states;
    for (const SlotLife& life : lives) states.push_back(life.rows[r]);
    if (seen.emplace(p.schedule[r].segment, std::move(states)).second) rows.push_back(r);
  }
  for (const size_t r : rows) check_row(c, uses, lives, r);
}

}  // namespace whale
