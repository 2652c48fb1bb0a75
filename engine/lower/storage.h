// Which buffers share storage, what waits for what, and where everything lies.
#pragma once

#include "lower/program.h"
#include "plan/memory.h"

namespace whale {

// Fills in waits between queues, within a row: the others wait for all compute before them, compute for those that make
// what it reads.
void add_waits(Draft& draft, const Graph& graph);

// Whether an instruction writes a variable, or will where it works in place.
bool updates(const Draft& draft, const Graph& graph, size_t segment, size_t index);
// Puts the vote behind what makes the loss, and the commit before what writes a variable first.
void place_commit(Draft& draft, const Graph& graph, int32_t loss);

// In-place results (where the op allows it and the operand dies), variables' next values in the variables' own storage
// (or a copy at the end where that is impossible). `loss`: the output that it is, kNone: none.
void share_storage(Draft& draft, const Graph& graph, int32_t loss);

// Offsets by liveness.
void place_arenas(Program& program, MemoryPlanner& planner);

}  // namespace whale
