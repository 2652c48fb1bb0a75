// Storages of a program: their sizes, what is done before an instruction begins, and from when to when each lives.
#pragma once

#include <array>
#include <vector>

#include "plan/memory.h"
#include "plan/plan.h"

namespace whale {

inline bool in_arena(const Buffer& b) { return b.kind == BufferKind::kArena || b.kind == BufferKind::kInput; }
// From one slot of a buffer to the next.
inline int64_t slot_stride(const Buffer& b) { return (b.bytes + kAlignment - 1) / kAlignment * kAlignment; }
inline int64_t bytes_of_slots(const Buffer& b) { return (b.slots - 1) * slot_stride(b) + b.bytes; }

// Of the memory that the buffer is in.
inline int64_t arena_of(const Program& p, const Buffer& b) {
  return b.memory == Memory::kHost ? p.host_bytes : p.arena_bytes;
}

// clocks[k][t]: the last instruction of stream t that is done before instruction k begins; -1: none.
using StreamClock = std::array<int64_t, kStreams>;
std::vector<StreamClock> clocks_of(const Segment& s);

// Storage that a buffer shares: the end of its chain of aliases.
BufferId storage_of(const Program& program, BufferId id);
bool writes_variable(const Program& program, const Instruction& i);

// Lives of storages in the arena, over all segments one after the other; a storage that crosses the body lives through
// all of it. Index: buffer; only storages (alias kNone) in the arena have first >= 0.
struct Life {
  int64_t first = -1, last = -1;
  int32_t first_segment = -1, last_segment = -1;
};
std::vector<Life> lives_of(const Program& program);

}  // namespace whale
