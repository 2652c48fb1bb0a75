#include "races.h"

#include <set>

#include "base/format.h"
#include "own_programs.h"
#include "plan/memory.h"

namespace whale::test {
namespace {

struct Bytes {
  int64_t space = 0;  // the arena, the host's, or a variable
  int64_t begin = 0, end = 0;
  bool meets(const Bytes& o) const { return space == o.space && begin < o.end && o.begin < end; }
};

Bytes bytes_of(const Program& p, BufferId id, int64_t slot) {
  const Buffer& b = p.buffers[static_cast<size_t>(id)];
  const Buffer& root = b.alias == kNone ? b : p.buffers[static_cast<size_t>(b.alias)];
  const int64_t stride = (root.bytes + kAlignment - 1) / kAlignment * kAlignment;
  const int64_t at = (root.slots > 1 ? slot * stride : 0) + b.at;
  if (root.kind == BufferKind::kVariable) return {2 + root.ref, at, at + b.bytes};
  if (root.kind == BufferKind::kStep) return {-1 - root.ref, 0, 0};  // nobody writes it
  return {root.memory == Memory::kHost ? 1 : 0, root.offset + at, root.offset + at + b.bytes};
}

}  // namespace

std::string race_in(const Entry& of_plan) {
  Entry entry = of_plan;
  give_own_programs(entry);
  for (const Program& p : entry.programs) {
    std::set<std::pair<int32_t, int32_t>> seen;
    for (const ScheduleRow& row : p.schedule) {
      if (!seen.emplace(row.segment, row.slot).second) continue;
      const Segment& s = p.segments[static_cast<size_t>(row.segment)];
      const size_t n = s.instructions.size();
      std::vector<std::vector<char>> after(n, std::vector<char>(n));  // after[j][i]: j begins when i is over
      for (size_t j = 0; j < n; ++j) {
        const auto follow = [&](size_t i) {
          after[j][i] = 1;
          for (size_t k = 0; k < i; ++k) after[j][k] = static_cast<char>(after[j][k] | after[i][k]);
        };
        for (size_t i = 0; i < j; ++i)
          if (s.instructions[i].stream == s.instructions[j].stream) follow(i);
        for (const WaitPoint& w : s.instructions[j].waits) follow(static_cast<size_t>(w.index));
      }
      for (size_t j = 0; j < n; ++j)
        for (size_t i = 0; i < j; ++i) {
          if (after[j][i]) continue;
          const auto meet = [&](const BufferIds& a, const BufferIds& b) {
            for (const BufferId x : a)
              for (const BufferId y : b)
                if (x != kNone && y != kNone && bytes_of(p, x, row.slot).meets(bytes_of(p, y, row.slot))) return true;
            return false;
          };
          const Instruction &x = s.instructions[i], &y = s.instructions[j];
          if (meet(x.out, y.out) || meet(x.out, y.in) || meet(x.in, y.out))
            return fmt::format("segment '{}': {} ('{}') and {} ('{}') may run at once and share bytes", s.name, i,
                               x.name, j, y.name);
        }
    }
  }
  return "";
}

}  // namespace whale::test
