// That a profile and a model belong together.
#pragma once

#include <string>
#include <vector>

#include "cost/cost.h"
#include "ir/graph.h"

namespace whale {

// That what a profile has measured is of this model, or of one with ops or layers like it. Returns what may be wrong
// with it, for people. `given`: the graph as `whale profile` would have it, whose digest a profile has.
std::vector<std::string> check_profile(const Profile& profile, const Graph& source, const Graph& given);

}  // namespace whale
