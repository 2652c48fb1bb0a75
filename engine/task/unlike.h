// Unlike replicas (semantics.md section 3): each has a nest of its own, on devices of its own.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "schedule/schedule.h"
#include "task/task_graph.h"

namespace whale {

// The scope whose `nests` the whole model is in: of the strategy, or one that is written around all ops. None: replicas
// are alike (or it stands where it may not, which find_leaves refuses).
std::optional<Scope> find_unlike(const Graph& graph, std::string_view strategy);

// What form_task_graphs makes of it: the TaskGraphs of each replica beside each other, their axes as one list behind
// that of the replicas. The ops get scopes that say in which stage of each replica they are (UnlikeReplica::scope).
TaskGraphs form_unlike(Graph& graph, const std::vector<DeviceSpec>& devices, const Scope& replicas,
                       const CostModel& cost, bool exact, const DealShares& deal);

size_t replica_of(const TaskGraphs& tasks, int32_t stage);  // which of unlike ones; 0 where they are alike

// Outputs with samples are one per copy (rewrite/copy_replicas.h): the first has the name, the others this and a number
// behind it.
inline constexpr char kCopyMark = '\x1f';
inline std::string_view name_of_copy(std::string_view output) { return output.substr(0, output.find(kCopyMark)); }

// The pipeline of the TaskGraphs, of unlike replicas one each, in the order of their meshes.
std::vector<PipelineSchedule> pipelines_of(const TaskGraphs& tasks, int64_t micro_batches);
// The devices of all, which know nothing of each other. Of one: itself.
PipelineSchedule beside_each_other(const std::vector<PipelineSchedule>& pipelines);

}  // namespace whale
