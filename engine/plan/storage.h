// Which buffers share storage, what waits for what, and where everything lies.
#pragma once

#include "plan/memory.h"
#include "plan/program_builder.h"

namespace whale {

// Fills in waits between streams: a collective waits for all compute before it, compute for the collective that makes
// what it reads.
void add_waits(Program& program);

// In-place results (where the op allows it and the operand dies), variables' next values in the variables' own storage
// (or a copy at the end where that is impossible), offsets by liveness.
void share_storage(Draft& draft, const Graph& graph, MemoryPlanner& planner);

// Storage that a buffer shares: the end of its chain of aliases.
BufferId storage_of(const Program& program, BufferId id);

// Lives of storages in the arena, over all segments one after the other; a storage that crosses the body lives through
// all of it. Index: buffer; only storages (alias kNone) in the arena have first >= 0.
struct Life {
  int64_t first = -1, last = -1;
  int32_t first_segment = -1, last_segment = -1;
};
std::vector<Life> lives_of(const Program& program);

}  // namespace whale
