// Storages of a program: their sizes, and from when to when each lives.
#pragma once

#include <vector>

#include "plan/clocks.h"
#include "plan/memory.h"
#include "plan/plan.h"

namespace whale {

inline bool in_arena(const Buffer& b) { return b.kind == BufferKind::kArena || b.kind == BufferKind::kInput; }
// From one version of a buffer to the next.
inline int64_t version_stride(const Buffer& b) { return (b.bytes + kAlignment - 1) / kAlignment * kAlignment; }
inline int64_t bytes_of_versions(const Buffer& b) { return (b.versions - 1) * version_stride(b) + b.bytes; }

// Of the memory that the buffer is in.
inline int64_t arena_of(const Program& p, const Buffer& b) {
  return b.memory == Memory::kHost ? p.host_bytes : p.arena_bytes;
}

// Bytes of a storage on one version: where two of them meet, they are the same memory.
struct Bytes {
  int32_t space = 0;  // the device's arena, the host's, or a variable
  int64_t begin = 0, end = 0;
  bool meets(const Bytes& other) const { return space == other.space && begin < other.end && other.begin < end; }
};
Bytes bytes_of_storage(const Program& program, BufferId id, int32_t version);
// Per segment, after how many versions its rows are at the same bytes again: the least common multiple of its buffers'.
std::vector<int32_t> periods_of(const Program& program);

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
