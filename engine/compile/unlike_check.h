// Plans with unlike replicas (task/unlike.h) are proven before they are given: random models have shown that the passes
// do not lay out all of them yet.
#pragma once

#include "base/error.h"
#include "compile/compile.h"

namespace whale {

bool has_unlike_replicas(const Graph& graph, const CompileOptions& options);
bool has_unlike_replicas(const Plan& plan);
// Throws UNIMPLEMENTED where the entry is not proven equal to the one-device program; not covered is no fault.
void check_unlike(const Plan& plan, const Entry& entry);
Error cannot_be_unlike(std::string_view why);

}  // namespace whale
