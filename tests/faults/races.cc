#include "races.h"

#include <set>
#include <tuple>

#include "base/format.h"
#include "own_programs.h"
#include "plan/memory.h"

namespace whale::test {
Bytes bytes_of(const Program& p, BufferId id, int64_t version) {
  const Buffer& b = p.buffers[id];
  const Buffer& root = b.alias == kNone ? b : p.buffers[b.alias];
  const int64_t stride = (root.bytes + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t at = (root.versions > 1 ? version * stride : 0) + b.at;
  if (root.kind == BufferKind::kVariable) return {2 + root.ref, at, at + b.bytes};
  if (root.kind == BufferKind::kStep) return {-1 - root.ref, 0, 0};  // nobody writes it
  return {root.memory == Memory::kHost ? 1 : 0, root.offset + at, root.offset + at + b.bytes};
}

namespace {

// An instruction of one of two rows, the one before and the one at hand.
struct Step {
  const Instruction* does = nullptr;
  bool before = false;
  int64_t version = 0;
};

// Two that may run at once and share bytes, the later one in the row at hand.
std::string race_between(const Program& p, const ScheduleRow* before, const ScheduleRow& now) {
  std::vector<Step> steps;
  const auto add = [&](const ScheduleRow& row, bool first) {
    for (const Instruction& i : p.segments[row.segment].instructions) steps.push_back({&i, first, row.version});
  };
  if (before) add(*before, true);
  const size_t begin = steps.size();
  add(now, false);
  const size_t n = steps.size();
  std::vector<std::vector<char>> after(n, std::vector<char>(n));  // after[j][i]: j begins when i is over
  for (size_t j = 0; j < n; ++j) {
    const auto follow = [&](size_t i) {
      after[j][i] = 1;
      for (size_t k = 0; k < i; ++k) after[j][k] = static_cast<char>(after[j][k] | after[i][k]);
    };
    for (size_t i = 0; i < j; ++i)
      if (steps[i].does->queue == steps[j].does->queue) follow(i);
    const size_t base = steps[j].before ? 0 : begin;
    for (const Wait& w : steps[j].does->waits) follow(base + static_cast<size_t>(w.index));
    if (j < begin || now.waits == kNone) continue;
    for (const RowWait& w : p.row_waits[now.waits])
      if (static_cast<size_t>(w.at) == j - begin) follow(static_cast<size_t>(w.on.index));
  }
  for (size_t j = begin; j < n; ++j)
    for (size_t i = 0; i < j; ++i) {
      if (after[j][i]) continue;
      const auto meet = [&](const BufferIds& a, const BufferIds& b) {
        for (const BufferId x : a)
          for (const BufferId y : b)
            if (x != kNone && y != kNone && bytes_of(p, x, steps[i].version).meets(bytes_of(p, y, steps[j].version)))
              return true;
        return false;
      };
      const Instruction &x = *steps[i].does, &y = *steps[j].does;
      if (meet(x.out, y.out) || meet(x.out, y.in) || meet(x.in, y.out))
        return fmt::format("segment '{}': {} ('{}'{}) and {} ('{}') may run at once and share bytes",
                           p.segments[now.segment].name, i, x.name, steps[i].before ? ", of the row before" : "",
                           j - begin, y.name);
    }
  return "";
}

}  // namespace

std::string race_in(const Entry& of_plan) {
  Entry entry = of_plan;
  give_own_programs(entry);
  for (const Program& p : entry.programs) {
    std::set<std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t>> seen;  // of both rows
    for (size_t r = 0; r < p.schedule.size(); ++r) {
      const ScheduleRow* before = r > 0 ? &p.schedule[r - 1] : nullptr;
      const ScheduleRow& now = p.schedule[r];
      if (!seen.emplace(before ? before->segment : kNone, before ? before->version : 0, now.segment, now.version,
                        now.waits)
               .second)
        continue;
      if (std::string race = race_between(p, before, now); !race.empty()) return race;
    }
  }
  return "";
}

}  // namespace whale::test
