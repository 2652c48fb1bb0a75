#include <algorithm>
#include <type_traits>

#include "base/error.h"
#include "base/text.h"
#include "schedule/schedule.h"
#include "task/strategy.h"
#include "task/task_parts.h"

namespace whale {
namespace {

// Leaves inside the pipeline agree with the first one on what is around it.
void check_one_pipeline(const TaskLeaf& first, const TaskLeaf& leaf) {
  bool one = leaf.outer() == first.outer() && (leaf.pipeline == SIZE_MAX) == (first.pipeline == SIZE_MAX);
  if (one && leaf.pipeline != SIZE_MAX) {
    const ScopeId a = first.ids[first.pipeline], b = leaf.ids[leaf.pipeline];
    one = a == b || (a > 0 && b > 0);  // written side by side
  }
  for (size_t i = 0; one && i < leaf.outer(); ++i)
    if (to_string(leaf.nest[i]) != to_string(first.nest[i]))
      refuse(leaf, fmt::format("and '{}' ({}) put different scopes around one pipeline", brief(to_string(first.nest)),
                               first.path));
  if (!one)
    throw unimplemented(
        "scopes '{}' ({}) and '{}' ({}) are two pipelines in one model, which is implemented for scopes side by "
        "side; write both as scopes of the model, or one pipeline around both",
        brief(to_string(first.nest)), first.path, brief(to_string(leaf.nest)), leaf.path)
        .at_scope(leaf.path);
}

// Pipelines side by side become virtual stages of one.
void join_siblings(const Graph& graph, const TaskLeaves& leaves, TaskPipeline& pipeline) {
  Scope& scope = pipeline.scope;
  std::vector<const TaskLeaf*> first;  // of each
  for (const Op& op : graph.ops) {
    const TaskLeaf& leaf = leaves.of(op);
    if (leaf.pipeline == SIZE_MAX || std::find(pipeline.siblings.begin(), pipeline.siblings.end(),
                                               leaf.ids[leaf.pipeline]) != pipeline.siblings.end())
      continue;
    pipeline.siblings.push_back(leaf.ids[leaf.pipeline]);
    first.push_back(&leaf);
  }
  if (first.size() < 2) return;
  for (const TaskLeaf* leaf : first) {
    const Scope& own = leaf->nest[leaf->pipeline];
    const auto agree = [&](const char* what, auto Scope::*member) {
      const std::remove_cvref_t<decltype(own.*member)> open{};
      if (scope.*member == open) scope.*member = own.*member;
      if (own.*member != open && own.*member != scope.*member)
        refuse(*leaf,
               fmt::format("and '{}' ({}) are pipelines on the same devices with different {}; give both the same",
                           brief(to_string(first[0]->nest)), first[0]->path, what));
    };
    agree("stages", &Scope::count);
    agree("micro_batches", &Scope::micro_batches);
    agree("virtual_stages", &Scope::virtual_stages);
    agree("schedules", &Scope::schedule);
  }
  if (!scope.schedule.empty() && scope.schedule != "1f1b" && scope.schedule != "interleaved")
    refuse(*first[0],
           fmt::format("has the schedule '{}', but {} pipelines side by side run interleaved; leave the schedule out, "
                       "or write one pipeline around them",
                       scope.schedule, first.size()));
  if (!scope.virtual_stages) scope.virtual_stages = scope.schedule == "interleaved" ? 2 : 1;
  scope.virtual_stages *= std::ssize(first);
  scope.schedule = "interleaved";
}

}  // namespace

std::optional<TaskPipeline> find_pipeline(const Graph& graph, const TaskLeaves& leaves, int64_t devices) {
  std::optional<size_t> staged;
  for (size_t l = 0; l < leaves.list.size(); ++l) {
    const TaskLeaf& leaf = leaves.list[l];
    if (!leaf.staged()) continue;
    if (staged) check_one_pipeline(leaves.list[*staged], leaf);
    if (!staged || (leaf.stage != SIZE_MAX && leaves.list[*staged].stage == SIZE_MAX)) staged = l;
  }
  if (!staged) return std::nullopt;
  for (const TaskLeaf& leaf : leaves.list)
    if (!leaf.staged() && leaf.annotated)
      throw unimplemented(
          "scope '{}' ({}) stands beside a pipeline and would share its devices; put it into a stage, or leave it "
          "out",
          brief(to_string(leaf.nest)), leaf.path)
          .at_scope(leaf.path);
  TaskPipeline out{.leaf = *staged, .scope = {}, .siblings = {}};
  Scope& scope = out.scope;
  const TaskLeaf& leaf = leaves.list[out.leaf];
  if (leaf.pipeline != SIZE_MAX) scope = leaf.nest[leaf.pipeline];
  if (!scope.count) scope.count = std::ssize(read_schedule(scope.schedule).warmup);
  // Before anything is sized by them.
  if (scope.count > devices)
    refuse(leaf, fmt::format("wants {} stages, {} device(s) are there; give at most as many stages as devices",
                             scope.count, devices));
  if (scope.virtual_stages > std::ssize(graph.ops))
    refuse(leaf, fmt::format("wants {} virtual stages a device, the model has {} op(s); give fewer",
                             scope.virtual_stages, graph.ops.size()));
  join_siblings(graph, leaves, out);
  ScheduleText schedule = read_schedule(scope.schedule);
  if (schedule.name.empty()) schedule.name = scope.virtual_stages > 1 ? "interleaved" : "1f1b";
  scope.schedule = to_string(schedule);
  if (!scope.virtual_stages) scope.virtual_stages = schedule_rule(schedule.name).min_virtual_stages;
  make_schedule(schedule.name, 1, 1, static_cast<int>(scope.virtual_stages));  // virtual stages are legal, or an error
  return out;
}

}  // namespace whale
