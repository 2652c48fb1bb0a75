// What a person should know about a plan, in sentences: how the batch is cut, what travels, which options change the
// result or have no effect.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.h"
#include "task/task_graph.h"

namespace whale {

std::vector<std::string> notes_of(const Plan& plan);
// Replicas of whole micro-batches may be more than these; empty: they are not.
std::string idle_note(const TaskGraphs& tasks, int64_t micro_batches, bool exact);

}  // namespace whale
