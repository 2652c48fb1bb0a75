// What users call the factors of ops: by the op's own name, or by one of the words of docs/primitives/split.md.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "ops/op.h"
#include "task/task_graph.h"

namespace whale {

bool is_named(const std::string& name, const std::string& wanted);
// A word may stand for a name only where some op of the model has another factor too: "experts" are the "b" of a
// product of matrices where there are gates. That factor; empty: the word stands by itself, or is none.
std::string needed_by(const std::string& name, const std::string& wanted);
// What these factors can be asked for by, words of the user first.
std::vector<std::string> words_of(const std::set<std::string>& names);
// The split along the axis (of the shardings) that the op is in asks for the factor by name.
bool asks_for(const TaskGraphs& tasks, const Op& op, size_t axis, const Factor& factor);

}  // namespace whale
