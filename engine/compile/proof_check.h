// Plans that are proven before they are given: those with unlike replicas (task/unlike.h), since random models have
// shown that the passes do not lay out all of them yet, and in debug builds all.
#pragma once

#include "base/error.h"
#include "compile/compile.h"

namespace whale {

bool has_unlike_replicas(const Graph& graph, const CompileOptions& options);
bool has_unlike_replicas(const Plan& plan);
// Throws UNIMPLEMENTED, in a debug build INTERNAL where replicas are alike, where the entry is refuted to be equal to
// the one-device program; not covered is no fault.
void check_proof(const Plan& plan, const Entry& entry);
Error cannot_be_unlike(std::string_view why);

}  // namespace whale
