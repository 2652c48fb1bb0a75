// Races and liveness, from the happens-before order of the queues and the rows of the schedule, not from the planner's
// lives. A storage that passes from row to row has its bytes, with all versions, for itself from its first row to its
// last; so a segment is looked at once, however many rows run it.
#include <algorithm>
#include <compare>
#include <map>
#include <set>
#include <tuple>

#include "base/watch.h"
#include "plan/lives.h"
#include "plan/verify.h"

namespace whale {

namespace {

// Accesses of one storage in one segment.
struct Access {
  QueueClock first = kNothingDone, last = kNothingDone;  // per queue, instruction numbers
  bool any = false;
  bool reads_first = false;  // its value comes from outside
};

struct SegmentUse {
  RowClock clock;
  std::vector<Access> of;  // per buffer (storages)
};

bool all_before(const SegmentUse& s, const Access& a, const Access& b) {
  for (size_t t = 0; t < kQueues; ++t) {
    if (b.first[t] < 0) continue;
    const QueueClock& clock = s.clock.begun(static_cast<size_t>(b.first[t]));
    for (size_t u = 0; u < kQueues; ++u)
      if (a.last[u] > clock[u]) return false;
  }
  return true;
}

// A part of a storage: who wrote and read it last, per queue.
struct Touched {
  Interval at;
  QueueClock writer = kNothingDone, reader = kNothingDone;
};
Interval part_of(const Buffer& b) { return {b.at, b.at + b.bytes}; }

// Reads of a value that another queue makes must wait for it; done for every pair of writer and reader in a segment.
void check_races(const VerifyContext& c, const Segment& s, const SegmentUse& use) {
  std::vector<std::vector<Touched>> touched(c.program.buffers.size());
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    Watch::look();
    const Instruction& i = s.instructions[k];
    const auto queue = static_cast<size_t>(i.queue);
    const auto check = [&](QueueClock Touched::*earlier, const char* what, BufferId b) {
      const Buffer& buffer = c.program.buffers[b];
      const Interval mine = part_of(buffer);
      for (const Touched& x : touched[storage_of(c.program, b)])
        for (size_t t = 0; t < kQueues && x.at.begin < mine.end && mine.begin < x.at.end; ++t)
          if (t != queue && (x.*earlier)[t] > use.clock.begun(k)[t])
            c.fail(s, k,
                   fmt::format("{} '{}' without waiting for instruction {}", what, buffer.name,
                               told(c.plan, s, static_cast<size_t>((x.*earlier)[t]))));
    };
    const auto note = [&](QueueClock Touched::*now, BufferId b) {
      const Interval mine = part_of(c.program.buffers[b]);
      auto& list = touched[storage_of(c.program, b)];
      auto at = std::find_if(list.begin(), list.end(), [&](const Touched& x) { return x.at == mine; });
      if (at == list.end()) {
        list.push_back({mine});
        at = list.end() - 1;
      }
      ((*at).*now)[queue] = static_cast<int64_t>(k);
    };
    for (const BufferId b : i.in)
      if (b != kNone) check(&Touched::writer, "reads", b);
    for (const BufferId b : i.out) check(&Touched::writer, "writes", b), check(&Touched::reader, "overwrites", b);
    for (const BufferId b : i.in)
      if (b != kNone) note(&Touched::reader, b);
    for (const BufferId b : i.out) note(&Touched::writer, b);
  }
}

// A value is read behind the instruction that makes it, also where its bytes were written before (in place). Variables
// and what waits in the host's memory have their bytes from before: what an instruction has not written is read before
// others write there.
void check_names(const VerifyContext& c, const Segment& s, std::vector<size_t>& made) {
  const size_t none = s.instructions.size();
  const auto buffer = [&](BufferId b) -> const Buffer& { return c.program.buffers[b]; };
  made.assign(c.program.buffers.size(), none);
  for (size_t k = none; k-- > 0;)
    for (const BufferId b : s.instructions[k].out)
      if (in_arena(buffer(b)) && buffer(b).memory == Memory::kDevice) made[b] = k;
  std::map<BufferId, std::vector<std::pair<BufferId, size_t>>> written;  // per variable: names, and who wrote them
  for (size_t k = 0; k < none; ++k) {
    for (const BufferId b : s.instructions[k].in) {
      if (b == kNone) continue;
      if (const size_t by = made[b]; by < none && k < by)
        c.fail(s, k, fmt::format("reads '{}' before '{}' makes it", buffer(b).name, s.instructions[by].name));
      const auto over = written.find(storage_of(c.program, b));
      if (buffer(b).kind != BufferKind::kVariable || over == written.end()) continue;
      const auto is_own = [&](const auto& w) { return w.first == b; };
      if (std::ranges::any_of(over->second, is_own)) continue;
      const auto meets = [&](const auto& w) {
        return part_of(buffer(w.first)).begin < part_of(buffer(b)).end &&
               part_of(buffer(b)).begin < part_of(buffer(w.first)).end;
      };
      if (const auto by = std::ranges::find_if(over->second, meets); by != over->second.end())
        c.fail(s, k,
               fmt::format("reads '{}' of before the step, which '{}' has overwritten", buffer(b).name,
                           s.instructions[by->second].name));
    }
    for (const BufferId b : s.instructions[k].out)
      if (buffer(b).kind == BufferKind::kVariable) written[storage_of(c.program, b)].emplace_back(b, k);
  }
}

SegmentUse use_of(const Program& p, const Segment& s) {
  SegmentUse use{clock_of(s), std::vector<Access>(p.buffers.size())};
  for (size_t k = 0; k < s.instructions.size(); ++k) {
    const Instruction& i = s.instructions[k];
    const auto touch = [&](BufferId b, bool reads) {
      if (b == kNone) return;
      Access& a = use.of[storage_of(p, b)];
      if (!a.any) a.reads_first = reads;
      a.any = true;
      auto& first = a.first[static_cast<size_t>(i.queue)];
      if (first < 0) first = static_cast<int64_t>(k);
      a.last[static_cast<size_t>(i.queue)] = static_cast<int64_t>(k);
    };
    for (const BufferId b : i.in) touch(b, true);
    for (const BufferId b : i.out) touch(b, false);
  }
  return use;
}

// Who uses a storage: segments, and whether they read what came before.
using Users = std::vector<std::pair<size_t, bool>>;

// A storage of the arena and the rows of the schedule from its first use to its last. One that a single segment makes
// anew in each of its rows is `inner`: nothing of it is alive outside of them. Any other may be alive in all the rows
// between, and with all of its versions.
struct Held {
  size_t buffer = 0;
  int64_t begin = 0, end = 0;  // bytes
  size_t first_row = 0, last_row = 0;
  bool inner = false;
  Users users;
};

// The rows in which each segment runs.
std::vector<std::vector<size_t>> rows_of_segments(const Program& p) {
  std::vector<std::vector<size_t>> rows(p.segments.size());
  for (size_t r = 0; r < p.schedule.size(); ++r) rows[p.schedule[r].segment].push_back(r);
  return rows;
}

std::vector<Held> held_by(const Program& p, const std::vector<SegmentUse>& uses,
                          const std::vector<std::vector<size_t>>& rows) {
  std::vector<Held> out;
  for (size_t b = 0; b < p.buffers.size(); ++b) {
    Watch::look();
    const Buffer& x = p.buffers[b];
    if (!in_arena(x) || x.alias != kNone || x.bytes == 0 || x.offset < 0) continue;
    Held held{b, x.offset, x.offset + bytes_of_versions(x), p.schedule.size(), 0, false, {}};
    for (size_t s = 0; s < uses.size(); ++s) {
      if (!uses[s].of[b].any || rows[s].empty()) continue;
      held.users.emplace_back(s, uses[s].of[b].reads_first);
      held.first_row = std::min(held.first_row, rows[s].front());
      held.last_row = std::max(held.last_row, rows[s].back());
    }
    if (held.users.empty()) continue;
    held.inner = held.users.size() == 1 && !held.users[0].second;
    out.push_back(std::move(held));
  }
  return out;
}

// What a segment reads was written in an earlier row, to the same version and for the same micro-batch. Storages that
// the same segments use in the same way are checked once.
void check_values(const VerifyContext& c, const std::vector<Held>& all, const std::vector<std::vector<size_t>>& rows) {
  const Program& p = c.program;
  std::set<std::pair<Users, int32_t>> seen;
  for (const Held& held : all) {
    Watch::look();
    const Buffer& x = p.buffers[held.buffer];
    if (held.inner || !seen.emplace(held.users, x.versions).second) continue;
    std::vector<std::pair<size_t, bool>> uses;  // row, and whether it reads first
    for (const auto& [s, reads] : held.users)
      for (const size_t r : watched(rows[s])) uses.emplace_back(r, reads);
    std::ranges::sort(uses);
    std::vector<const ScheduleRow*> made(
        static_cast<size_t>(x.versions));  // the row that made the value of the version
    for (const auto& [r, reads] : watched(uses)) {
      const ScheduleRow& row = p.schedule[r];
      const Segment& segment = p.segments[row.segment];
      const auto reader = [&] {  // the first instruction that reads it
        const auto reads_it = [&](const Instruction& i) {
          return std::ranges::any_of(i.in, [&](BufferId b) {
            return b != kNone && storage_of(p, b) == storage_of(p, static_cast<BufferId>(held.buffer));
          });
        };
        const auto at = std::ranges::find_if(segment.instructions, reads_it);
        return at == segment.instructions.end() ? size_t{0} : static_cast<size_t>(at - segment.instructions.begin());
      };
      const ScheduleRow*& maker = made[static_cast<size_t>(row.version % x.versions)];
      const auto fail = [&](const std::string& what) {
        c.fail({.segment = &segment, .instruction = reader(), .micro_batch = row.micro_batch, .row = &row}, what);
      };
      if (reads && !maker) fail(fmt::format("reads '{}', which nothing has written", x.name));
      if (reads && !maker->whole && !row.whole && maker->micro_batch != row.micro_batch)
        fail(
            fmt::format("reads '{}' of micro-batch {} in micro-batch {}", x.name, maker->micro_batch, row.micro_batch));
      if (!reads) maker = &row;
    }
  }
}

// How a storage lives in a segment.
struct Item {
  const Held* held = nullptr;
  bool used = false;
  bool from_before = false, to_later = false;  // rows
  int64_t first_use = 0;
};

void check_pair(const VerifyContext& c, const Segment& s, const SegmentUse& use, const Item& x, const Item& y) {
  const Access &a = use.of[x.held->buffer], &b = use.of[y.held->buffer];
  const bool both = x.used && y.used;
  const bool x_first = both && !x.to_later && !y.from_before && all_before(use, a, b);
  const bool y_first = both && !y.to_later && !x.from_before && all_before(use, b, a);
  if (x_first || y_first) return;
  const auto name = [&](const Item& i) { return c.program.buffers[i.held->buffer].name; };
  const auto uses = [&](const Item& i, const Access& access) -> std::string {
    if (!i.used) return fmt::format("'{}' is kept from a row before for a later one", name(i));
    const auto last = *std::ranges::max_element(access.last);
    return fmt::format("'{}'{} is first used by instruction {}, last by instruction {}{}", name(i),
                       i.from_before ? " comes from a row before," : "",
                       told(c.plan, s, static_cast<size_t>(i.first_use)), told(c.plan, s, static_cast<size_t>(last)),
                       i.to_later ? ", and is kept for a later row" : "");
  };
  // The one that begins later is at fault, as far as anybody can say.
  const Item& late = y.used ? y : x;
  FaultSite site{.segment = &s, .path = {uses(x, a), uses(y, b)}};
  if (late.used) site.instruction = static_cast<size_t>(late.first_use);
  c.fail(std::move(site),
         fmt::format("'{}' and '{}' share bytes and are both alive in segment '{}'", name(x), name(y), s.name));
}

// Everything that lives in the rows of the segment, in the order in which it is first used; each is checked against
// those that had its bytes just before. That is enough for all pairs: what is before something that is before a third
// is before the third.
void check_sharing(const VerifyContext& c, size_t s, const SegmentUse& use, const std::vector<Held>& all,
                   const std::vector<size_t>& rows) {
  if (rows.empty()) return;
  std::vector<Item> items;
  for (const Held& held : all) {
    const Access& access = use.of[held.buffer];
    if (held.inner ? !access.any : (held.last_row < rows.front() || held.first_row > rows.back())) continue;
    Item item{&held, access.any, false, false, INT64_MAX};
    if (!held.inner) {  // in one of several rows a value may come from before, and in another go on
      item.from_before = held.first_row < rows.back();
      item.to_later = held.last_row > rows.front();
    }
    for (const int64_t k : access.first)
      if (k >= 0) item.first_use = std::min(item.first_use, k);
    items.push_back(item);
  }
  std::ranges::stable_sort(items, {}, [](const Item& i) { return std::pair(!i.from_before, i.first_use); });
  struct Piece {
    int64_t end;
    const Item* item;
  };
  std::map<Memory, std::map<int64_t, Piece>> owners;  // by where the piece begins: the latest that had these bytes
  for (const Item& mine : items) {
    Watch::look();
    const Held& held = *mine.held;
    auto& pieces = owners[c.program.buffers[held.buffer].memory];
    auto at = pieces.upper_bound(held.begin);
    if (at != pieces.begin() && std::prev(at)->second.end > held.begin) --at;
    while (at != pieces.end() && at->first < held.end) {
      const auto [begin, piece] = *at;
      check_pair(c, c.program.segments[s], use, *piece.item, mine);
      at = pieces.erase(at);
      if (begin < held.begin) pieces.emplace(begin, Piece{held.begin, piece.item});
      if (piece.end > held.end) at = pieces.emplace(held.end, piece).first;
    }
    pieces.emplace(held.begin, Piece{held.end, &mine});
  }
}

// An operand or result of an instruction, on the version of its row.
struct Use {
  Bytes bytes;
  bool writes = false;
  size_t by = 0;
  BufferId buffer = kNone;
};

// Of the row before, by queue, in order.
std::array<std::vector<Use>, kQueues> uses_of(const Program& p, const ScheduleRow& row) {
  std::array<std::vector<Use>, kQueues> out;
  const Segment& s = p.segments[row.segment];
  for (size_t k = 0; k < s.instructions.size(); ++k)
    for (const bool writes : {false, true})
      for (const BufferId b : writes ? s.instructions[k].out : s.instructions[k].in)
        if (b != kNone)
          out[static_cast<size_t>(s.instructions[k].queue)].push_back(
              {bytes_of_storage(p, b, row.version), writes, k, b});
  return out;
}

// What a queue does in a row, while others may still be at the row before, waits for those whose bytes it needs.
void check_rows(const VerifyContext& c, const std::vector<SegmentUse>& of_segments) {
  const Program& p = c.program;
  using Kind = std::pair<int32_t, int32_t>;  // segment and version
  std::map<Kind, std::array<std::vector<Use>, kQueues>> of_rows;
  std::set<std::tuple<Kind, Kind, int32_t>> seen;
  for (size_t r = 1; r < p.schedule.size(); ++r) {
    Watch::look();
    const ScheduleRow &before = p.schedule[r - 1], &now = p.schedule[r];
    const Kind kind{before.segment, before.version};
    if (!seen.emplace(kind, Kind{now.segment, now.version}, now.waits).second) continue;
    const auto [known, fresh] = of_rows.try_emplace(kind);
    auto& uses = known->second;
    if (fresh) uses = uses_of(p, before);
    const Segment &earlier = p.segments[before.segment], &later = p.segments[now.segment];
    CrossClock clock(of_segments[before.segment].clock);
    const RowWaits none;
    const RowWaits& waits = now.waits == kNone ? none : p.row_waits[now.waits];
    auto next = waits.begin();
    for (size_t k = 0; k < later.instructions.size(); ++k) {
      Watch::look();
      const Instruction& i = later.instructions[k];
      clock.begin(i.queue, i.waits);
      for (; next != waits.end() && next->at == static_cast<int32_t>(k); ++next) clock.wait(next->on);
      if (clock.all_done()) continue;
      const auto check = [&](BufferId b, bool writes) {
        const Bytes mine = bytes_of_storage(p, b, now.version);
        for (size_t t = 0; t < kQueues; ++t) {
          if (t == static_cast<size_t>(i.queue)) continue;
          const auto& list = uses[t];
          for (auto u = list.rbegin(); u != list.rend() && static_cast<int64_t>(u->by) > clock.now()[t]; ++u)
            if ((writes || u->writes) && mine.meets(u->bytes))
              c.fail({.segment = &later,
                      .instruction = k,
                      .micro_batch = now.micro_batch,
                      .row = &now,
                      .path = {fmt::format("instruction {}, micro-batch {}, {} '{}'", told(c.plan, earlier, u->by),
                                           before.micro_batch, u->writes ? "writes" : "reads",
                                           p.buffers[u->buffer].name)}},
                     fmt::format(
                         "it {} '{}' and does not wait for instruction {} of {} ('{}'), of the row before, which {}{}",
                         writes ? "writes" : "reads", p.buffers[b].name, u->by, earlier.name,
                         earlier.instructions[u->by].name, u->writes ? "writes" : "reads",
                         u->buffer == b ? " it" : fmt::format(" '{}' in the same bytes", p.buffers[u->buffer].name)));
        }
      };
      for (const BufferId b : i.in)
        if (b != kNone) check(b, false);
      for (const BufferId b : i.out)
        if (b != kNone) check(b, true);
    }
  }
}

// A row works on one of the versions that its segment has.
void check_versions(const VerifyContext& c) {
  const Program& p = c.program;
  const std::vector<int32_t> periods = periods_of(p);
  for (const ScheduleRow& row : watched(p.schedule)) {
    const int32_t period = periods[row.segment];
    if (period == 1 || row.version < period) continue;
    const Segment& segment = p.segments[row.segment];
    const auto has_several = [&](const BufferIds& ids) {
      return std::ranges::any_of(ids,
                                 [&](BufferId b) { return b != kNone && p.buffers[storage_of(p, b)].versions > 1; });
    };
    const auto at = std::ranges::find_if(segment.instructions,
                                         [&](const Instruction& i) { return has_several(i.in) || has_several(i.out); });
    c.fail({.segment = &segment,
            .instruction = static_cast<size_t>(at - segment.instructions.begin()),
            .micro_batch = row.micro_batch},
           fmt::format("a schedule row of segment '{}' works on version {}, but its buffers have {}", segment.name,
                       row.version, period));
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
        if (b != kNone && p.buffers[b].kind == BufferKind::kVariable && p.buffers[b].alias != kNone) to_come.insert(b);
    const auto place = [&](BufferId b) {
      const Buffer& buffer = p.buffers[b];
      return std::tuple(storage_of(p, b), buffer.at, buffer.bytes);
    };
    for (size_t k = 0; k < segment.instructions.size(); ++k) {
      Watch::look();
      const Instruction& i = segment.instructions[k];
      for (const BufferId b : i.in) {
        if (b == kNone) continue;
        const Buffer& buffer = p.buffers[b];
        if (made[b] < 0 && to_come.contains(b))
          c.fail(segment, k, fmt::format("reads '{}' before it is made", buffer.name));
        const bool named = buffer.kind == BufferKind::kVariable && buffer.alias == kNone;
        if (made[b] < 0 && !named) continue;  // of another segment, or a view
        const auto at = latest.find(place(b));
        const BufferId now = at == latest.end() ? b : at->second;
        if (now != b)
          c.fail(segment, k, fmt::format("reads '{}', which became '{}' in place", buffer.name, p.buffers[now].name));
      }
      for (const BufferId b : i.out)
        if (b != kNone) made[b] = static_cast<int64_t>(k), latest[place(b)] = b;
    }
  }
}

template <class T, class Compare>
std::strong_ordering order_of(const std::vector<T>& a, const std::vector<T>& b, Compare compare) {
  Watch::look();
  return std::lexicographical_compare_three_way(a.begin(), a.end(), b.begin(), b.end(), compare);
}

std::strong_ordering order_of(const Instruction& a, const Instruction& b) {
  const auto own = [](const Instruction& i) { return std::tie(i.queue, i.in, i.out); };
  const auto wait = [](const Wait& w) { return std::tie(w.queue, w.index); };
  const std::strong_ordering order = own(a) <=> own(b);
  if (order != 0) return order;
  return order_of(a.waits, b.waits, [&](const Wait& x, const Wait& y) { return wait(x) <=> wait(y); });
}

}  // namespace

bool before_in_memory(const Program* a, const Program* b) {
  const auto buffer = [](const Buffer& x) {
    return std::tie(x.kind, x.offset, x.bytes, x.versions, x.alias, x.memory, x.at);
  };
  const auto row = [](const ScheduleRow& x) { return std::tie(x.segment, x.micro_batch, x.version, x.whole, x.waits); };
  const auto wait = [](const RowWait& x) { return std::tie(x.at, x.on.queue, x.on.index); };
  std::strong_ordering order =
      order_of(a->buffers, b->buffers, [&](const Buffer& x, const Buffer& y) { return buffer(x) <=> buffer(y); });
  if (order == 0)
    order = order_of(a->segments, b->segments, [](const Segment& x, const Segment& y) {
      return order_of(x.instructions, y.instructions,
                      [](const Instruction& i, const Instruction& j) { return order_of(i, j); });
    });
  if (order == 0)
    order = order_of(a->schedule, b->schedule,
                     [&](const ScheduleRow& x, const ScheduleRow& y) { return row(x) <=> row(y); });
  if (order == 0)
    order = order_of(a->row_waits, b->row_waits, [&](const RowWaits& x, const RowWaits& y) {
      return order_of(x, y, [&](const RowWait& v, const RowWait& w) { return wait(v) <=> wait(w); });
    });
  return order < 0;
}

void verify_memory(const VerifyContext& c) {
  check_overwritten(c);
  const Program& p = c.program;
  std::vector<SegmentUse> uses;
  std::vector<size_t> made;
  for (const Segment& s : p.segments) {
    uses.push_back(use_of(p, s));
    check_races(c, s, uses.back());
    check_names(c, s, made);
  }
  check_versions(c);
  const std::vector<std::vector<size_t>> rows = rows_of_segments(p);
  const std::vector<Held> held = held_by(p, uses, rows);
  check_values(c, held, rows);
  check_rows(c, uses);
  for (size_t s = 0; s < p.segments.size(); ++s) check_sharing(c, s, uses[s], held, rows[s]);
}

}  // namespace whale
