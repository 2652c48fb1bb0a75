// By which factor an op that follows others is cut along a split: the one of those that its neighbours suggest that
// moves and computes least.
#pragma once

#include "shard/forms.h"

namespace whale {

OpCut cheapest_cut(const CutProblem& problem, const Forms& forms, const Placed& placed, size_t axis);

}  // namespace whale
