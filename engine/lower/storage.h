// Which buffers share storage, what waits for what, and where everything lies.
#pragma once

#include "plan/memory.h"
#include "lower/program.h"

namespace whale {

// Fills in waits between streams: a collective waits for all compute before it, compute for the collective that makes
// what it reads.
void add_waits(Program& program);

// In-place results (where the op allows it and the operand dies), variables' next values in the variables' own storage
// (or a copy at the end where that is impossible), offsets by liveness.
void share_storage(Draft& draft, const Graph& graph, MemoryPlanner& planner);

}  // namespace whale
