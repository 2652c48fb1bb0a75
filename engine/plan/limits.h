// The largest numbers of a plan, which the planner refuses to exceed and the reader of files takes no more of.
#pragma once

#include <cstdint>
#include <string_view>

#include "ir/graph.h"
#include "plan/plan.h"

namespace whale {

inline constexpr int64_t kMostBytes = int64_t{1} << 46;  // of a tensor: 64 TiB
inline constexpr int64_t kMostArena = int64_t{1} << 50;  // of the values that a device keeps: 1 PiB, for plans to read
inline constexpr int64_t kMostVersions = int64_t{1} << 16;  // of a buffer or a link: micro-batches alive at once
inline constexpr int64_t kMostRuns = int64_t{1} << 20;      // of a variable's part: pieces that do not touch

// Throw resource_exhausted that names the limit, what is beyond it and what helps.
void check_limits(const Graph& graph);
void check_limits(const Plan& plan);
void check_versions(int64_t versions, std::string_view schedule);

}  // namespace whale
