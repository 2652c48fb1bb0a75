#include "plan/lives.h"

#include <algorithm>
#include <numeric>

#include "base/watch.h"
#include "plan/limits.h"

namespace whale {
namespace {

// From when on compute is behind an instruction of another queue, directly or by what it waited for: position in the
// segment, or its end.
std::vector<size_t> released(const Segment& segment) {
  const RowClock clock = clock_of(segment);
  const size_t n = segment.instructions.size();
  std::vector<size_t> out(n, n);
  std::array<size_t, kQueues> known{};  // how many instructions have been found done
  for (size_t q = 0; q < n; ++q) {
    if (segment.instructions[q].queue != Queue::kCompute) continue;
    for (size_t t = 1; t < kQueues; ++t)
      for (; static_cast<int64_t>(known[t]) <= clock.begun(q)[t]; ++known[t])
        if (segment.instructions[known[t]].queue == static_cast<Queue>(t)) out[known[t]] = q;
  }
  return out;
}

}  // namespace

BufferId storage_of(const Program& program, BufferId id) {
  while (program.buffers[id].alias != kNone) id = program.buffers[id].alias;
  return id;
}

Bytes bytes_of_storage(const Program& program, BufferId id, int32_t version) {
  const Buffer& b = program.buffers[storage_of(program, id)];
  constexpr int32_t kDeviceArena = 0, kHostArena = 1, kStepScalars = 2, kVariables = 3;
  if (b.kind == BufferKind::kVariable) return {kVariables + b.ref, 0, b.bytes};
  if (b.kind == BufferKind::kStep) return {kStepScalars, 0, 0};
  const int64_t begin = b.offset + version % b.versions * version_stride(b);
  return {b.memory == Memory::kHost ? kHostArena : kDeviceArena, begin, begin + b.bytes};
}

std::vector<int32_t> periods_of(const Program& p) {
  std::vector<int32_t> out(p.segments.size(), 1);
  for (size_t s = 0; s < out.size(); ++s)
    for (const Instruction& i : p.segments[s].instructions)
      for (const BufferIds* list : {&i.in, &i.out})
        for (const BufferId b : *list)
          if (const int32_t n = b == kNone ? 1 : p.buffers[storage_of(p, b)].versions; n > 1)
            out[s] = static_cast<int32_t>(std::min(std::lcm(int64_t{out[s]}, int64_t{n}), kMostVersions));
  return out;
}

bool writes_variable(const Program& program, const Instruction& i) {
  return std::any_of(i.out.begin(), i.out.end(), [&](BufferId b) {
    return b != kNone && program.buffers[storage_of(program, b)].kind == BufferKind::kVariable;
  });
}

std::vector<Life> lives_of(const Program& program) {
  std::vector<Life> lives(program.buffers.size());
  int64_t start = 0;
  std::vector<int64_t> starts;
  for (size_t s = 0; s < program.segments.size(); ++s) {
    const Segment& segment = program.segments[s];
    starts.push_back(start);
    const std::vector<size_t> ends = released(segment);
    for (size_t k = 0; k < segment.instructions.size(); ++k) {
      Watch::look();
      const Instruction& i = segment.instructions[k];
      const int64_t first = start + static_cast<int64_t>(k);
      const int64_t last = i.queue == Queue::kCompute ? first : start + static_cast<int64_t>(ends[k]);
      for (const BufferIds* list : {&i.in, &i.out})
        for (const BufferId b : *list) {
          if (b == kNone) continue;
          const BufferId storage = storage_of(program, b);
          if (!in_arena(program.buffers[storage])) continue;
          Life& life = lives[storage];
          if (life.first < 0) life.first = first, life.first_segment = static_cast<int32_t>(s);
          life.last = std::max(life.last, last);
          life.last_segment = static_cast<int32_t>(s);
        }
    }
    start += static_cast<int64_t>(segment.instructions.size()) + 1;
  }
  starts.push_back(start);
  // Segments between the first and the last are the body and run many times.
  const auto segments = static_cast<int32_t>(program.segments.size());
  for (Life& life : lives) {
    if (life.first < 0 || life.first_segment == life.last_segment) continue;
    if (life.first_segment >= 1) life.first = std::min(life.first, starts[1]);
    if (life.last_segment < segments - 1)
      life.last = std::max(life.last, starts[static_cast<size_t>(segments) - 1] - 1);
  }
  return lives;
}

}  // namespace whale
