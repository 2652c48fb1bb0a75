#include "task/task_graph.h"

#include <algorithm>
#include <map>

#include "base/error.h"
#include "task/strategy.h"
#include "task/task_former.h"
#include "schedule/schedule.h"

namespace whale {
namespace {

bool takes_whole(const Scope& scope) { return scope.by == "micro_batch"; }

bool is_bare(const std::vector<Scope>& nest) { return nest.size() == 1 && to_string(nest[0]) == "replica"; }

}  // namespace

TaskFormer::TaskFormer(Graph& graph, const std::vector<DeviceSpec>& devices, std::string_view strategy,
                       const CostModel& cost, bool exact)
    : g_(graph), devices_(std::ssize(devices)), exact_(exact), out_(cost) {
  for (const DeviceSpec& device : devices) nodes_.push_back(device.node);
  if (strategy.empty()) strategy = graph.default_strategy;
  local_ = strategy == "local";
  if (local_ && devices_ != 1)
    throw invalid(
        "strategy 'local' ignores all scopes and runs on one device, {} are there; give one device, such as cpu:1",
        devices_);
  clauses_ = parse_clauses(strategy.empty() || local_ ? "replica" : strategy);
  otherwise_ = parse_strategy("replica");
  for (const StrategyClause& clause : clauses_)
    if (clause.name.empty()) otherwise_ = clause.nest;
}

TaskGraphs TaskFormer::run() {
  collect();
  find_pipeline();
  if (staged_) assign_stages();
  count_devices();
  make_axes();
  make_meshes();
  make_tasks();
  find_whole_micro_batches();
  return std::move(out_);
}

void TaskFormer::collect() {
  std::map<ScopeId, std::pair<std::vector<Scope>, std::vector<ScopeId>>> nests;
  std::vector<Scope> explicit_nest = otherwise_;
  std::string explicit_path = "default strategy";
  for (const Op& op : g_.ops) {
    const auto [at, fresh] = nests.try_emplace(op.scope);
    if (!fresh) continue;
    for (ScopeId id = local_ ? 0 : op.scope; id > 0; id = g_.scopes[static_cast<size_t>(id)].parent) {
      const Scope& scope = g_.scopes[static_cast<size_t>(id)];
      if (scope.kind == ScopeKind::kName || scope.kind == ScopeKind::kRoot) continue;
      at->second.first.insert(at->second.first.begin(), scope);
      at->second.second.insert(at->second.second.begin(), id);
    }
    const std::vector<Scope>& found = at->second.first;
    if (is_bare(explicit_nest) && !found.empty() &&
        std::all_of(found.begin(), found.end(), [](const Scope& s) { return s.kind == ScopeKind::kReplica; })) {
      explicit_nest = found;
      explicit_path = g_.scope_path(op.scope) + ", and ops without a scope";
    }
  }
  if (nests.empty()) nests.try_emplace(0);
  if (!local_) check_clauses(g_, clauses_);
  std::map<std::string, size_t> known;
  for (auto& [scope, found] : nests) {
    auto& [nest, ids] = found;
    std::string path = nest.empty() ? "default strategy" : g_.scope_path(scope);
    if (nest.empty())
      if (const StrategyClause* clause = clause_of(scope)) {
        nest = clause->nest;
        path = clause->name;
        // A pipeline written in several clauses is one; each clause is a stage of its own.
        for (const Scope& s : nest)
          ids.push_back(s.kind == ScopeKind::kStage ? -10 - static_cast<ScopeId>(clause - clauses_.data()) : -2);
      }
    const bool annotated = !nest.empty();
    if (nest.empty()) nest = otherwise_, ids.assign(nest.size(), kNone);
    if (is_bare(nest)) {
      nest = explicit_nest, ids.assign(nest.size(), kNone);
      if (!annotated) path = explicit_path;
    }
    std::string key = to_string(nest);
    for (size_t i = 0; i < nest.size(); ++i)
      if (nest[i].kind == ScopeKind::kStage || nest[i].kind == ScopeKind::kPipeline) key += fmt::format("#{}", ids[i]);
    const auto [at, fresh] = known.try_emplace(key, leaves_.size());
    if (fresh) leaves_.push_back(leaf_of(nest, ids, std::move(path), annotated));
    leaf_of_scope_[scope] = at->second;
  }
}

const StrategyClause* TaskFormer::clause_of(ScopeId scope) const {
  if (local_) return nullptr;
  std::vector<std::string> names;
  for (ScopeId id = scope; id > 0; id = g_.scopes[static_cast<size_t>(id)].parent)
    if (const std::string& name = g_.scopes[static_cast<size_t>(id)].name; !name.empty())
      names.insert(names.begin(), name);
  for (size_t n = names.size(); n > 0; --n) {
    const std::string path =
        fmt::format("{}", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(n), "/"));
    for (const StrategyClause& clause : clauses_)
      if (!clause.name.empty() && (clause.name == names[n - 1] || clause.name == path)) return &clause;
  }
  return nullptr;
}

void TaskFormer::find_pipeline() {
  for (size_t l = 0; l < leaves_.size(); ++l) {
    const TaskLeaf& leaf = leaves_[l];
    if (!leaf.staged()) continue;
    if (staged_) {
      const TaskLeaf& first = leaves_[*staged_];
      bool one = leaf.outer() == first.outer() && (leaf.pipeline == SIZE_MAX) == (first.pipeline == SIZE_MAX);
      if (one && leaf.pipeline != SIZE_MAX) {
        const ScopeId a = first.ids[first.pipeline], b = leaf.ids[leaf.pipeline];
        one = a == b || (a > 0 && b > 0);  // written side by side: find_siblings
      }
      for (size_t i = 0; one && i < leaf.outer(); ++i)
        if (to_string(leaf.nest[i]) != to_string(first.nest[i]))
          refuse(
              leaf.nest, leaf.path,
              fmt::format("and '{}' ({}) put different scopes around one pipeline", to_string(first.nest), first.path));
      if (!one)
        throw unimplemented(
            "scopes '{}' ({}) and '{}' ({}) are two pipelines in one model, which is implemented for scopes side by "
            "side; write both as scopes of the model, or one pipeline around both",
            to_string(first.nest), first.path, to_string(leaf.nest), leaf.path)
            .at_scope(leaf.path);
      if (leaf.stage != SIZE_MAX && first.stage == SIZE_MAX) staged_ = l;
    } else {
      staged_ = l;
    }
  }
  if (!staged_) return;
  for (const TaskLeaf& leaf : leaves_)
    if (!leaf.staged() && leaf.annotated)
      throw unimplemented(
          "scope '{}' ({}) stands beside a pipeline and would share its devices; put it into a stage, or leave it "
          "out",
          to_string(leaf.nest), leaf.path)
          .at_scope(leaf.path);
  const TaskLeaf& leaf = leaves_[*staged_];
  if (leaf.pipeline != SIZE_MAX) pipeline_ = leaf.nest[leaf.pipeline];
  check_pipeline(leaf, pipeline_);
  find_siblings();
  if (pipeline_.schedule.empty()) pipeline_.schedule = pipeline_.chunks > 1 ? "interleaved" : "1f1b";
  const ScheduleRule& rule = schedule_rule(pipeline_.schedule);
  if (!pipeline_.chunks) pipeline_.chunks = rule.min_chunks;
  make_schedule(pipeline_.schedule, 1, 1, static_cast<int>(pipeline_.chunks));  // chunks are legal, or an error
  out_.schedule = pipeline_.schedule;
  out_.chunks = pipeline_.chunks;
  if (pipeline_.schedule == "interleaved" && pipeline_.chunks == 1)
    out_.notes.push_back(
        "Schedule 'interleaved' with one chunk a device is 1f1b; chunks=2 gives every device two stages.");
}

void TaskFormer::check_pipeline(const TaskLeaf& leaf, const Scope& pipeline) const {
  const std::string more =
      pipeline.count > devices_ ? fmt::format(
                                      "{} stages, {} device(s) are there; give at most as "
                                      "many stages as devices",
                                      pipeline.count, devices_)
      : pipeline.chunks > std::ssize(g_.ops)
          ? fmt::format("{} chunks a device, the model has {} op(s); give fewer", pipeline.chunks, g_.ops.size())
          : "";
  if (!more.empty()) refuse(leaf.nest, leaf.path, "wants " + more);
}

void TaskFormer::make_tasks() {
  std::map<std::pair<size_t, size_t>, int32_t> known;  // (leaf, mesh)
  out_.task_of_scope.assign(g_.scopes.size(), -1);
  out_.stage_of_scope.resize(g_.scopes.size(), staged_ ? -1 : 0);
  for (const auto& [scope, l] : leaf_of_scope_) {
    const int32_t stage = out_.stage_of_scope[static_cast<size_t>(scope)];
    if (stage < 0) continue;
    const auto mesh = static_cast<size_t>(out_.mesh_of_stage[static_cast<size_t>(stage)]);
    const auto [at, fresh] = known.try_emplace({l, mesh}, static_cast<int32_t>(out_.tasks.size()));
    if (fresh) out_.tasks.push_back(task(l, mesh, stage));
    out_.task_of_scope[static_cast<size_t>(scope)] = at->second;
  }
  for (size_t i = 0; i < g_.ops.size(); ++i) {
    const int32_t t = out_.task_of_scope[static_cast<size_t>(g_.ops[i].scope)];
    out_.tasks[static_cast<size_t>(t)].ops.push_back(static_cast<OpId>(i));
  }
  std::stable_sort(leaves_.begin(), leaves_.end(),
                   [](const TaskLeaf& a, const TaskLeaf& b) { return b.annotated < a.annotated; });
  std::vector<std::string> texts;
  for (const TaskLeaf& leaf : leaves_)
    if (const std::string text = to_string(leaf.nest);
        (!staged_ || leaf.staged()) && std::find(texts.begin(), texts.end(), text) == texts.end())
      texts.push_back(text);
  out_.strategy = fmt::format("{}", fmt::join(texts, "; "));
}

void TaskFormer::find_whole_micro_batches() {
  const size_t axes = out_.meshes[0].axes.size();
  out_.by_micro_batch.assign(axes, 0);
  std::vector<char> split(axes), asked(axes);
  const auto look = [&](size_t a, const AxisUse& use) {
    split[a] |= use.role == AxisRole::kSplit;
    if (use.role != AxisRole::kReplica) return;
    out_.by_micro_batch[a] |= exact_ || use.by_micro_batch;
    asked[a] |= use.by_micro_batch;
  };
  for (const auto& uses : outer_.uses)
    for (size_t a = 0; a < uses.size(); ++a) look(a, uses[a]);
  for (size_t m = 0; m < physical_; ++m)
    for (const auto& uses : stage_axes_[m].uses)
      for (size_t a = 0; a < uses.size(); ++a) look(outer_.axes.size() + place_[m][a], uses[a]);
  const auto any_mesh = [&](auto holds) { return std::any_of(out_.meshes.begin(), out_.meshes.end(), holds); };
  for (size_t a = 0; a < axes; ++a) {
    if (!out_.by_micro_batch[a]) continue;
    const bool differs = any_mesh([&](const Mesh& mesh) {
      return mesh.axes[a].size != out_.meshes[0].axes[a].size || mesh.axes[a].shares != out_.meshes[0].axes[a].shares;
    });
    const bool uneven = any_mesh([&](const Mesh& mesh) {
      bool inside = exact_ && mesh.axes[a].has_gaps();
      for (size_t b = 0; b < a; ++b) inside |= mesh.axes[b].size > 1 && !out_.by_micro_batch[b];
      return inside && mesh.axes[a].ragged();
    });
    if (!split[a] && !differs && !uneven) continue;
    const char* why = split[a]  ? "share their devices with a split, which needs all of them for every micro-batch"
                      : differs ? "differ between the stages of a pipeline, which passes on every micro-batch"
                                : "have shares that differ between groups that need every micro-batch";
    const char* instead = split[a]  ? "put the split inside the replica"
                          : differs ? "put the replica around the pipeline"
                                    : "give all groups equal shares";
    std::string path;
    for (TaskGraph& task : out_.tasks) {
      if (task.roles[a] != AxisRole::kReplica) continue;
      if (path.empty()) path = task.path;
      if (asked[a] && std::any_of(task.nest.begin(), task.nest.end(), takes_whole))
        throw invalid("scope '{}' ({}): replicas of whole micro-batches (by=micro_batch) {}; {}, or leave 'by' out",
                      to_string(task.nest), task.path, why, instead)
            .at_scope(task.path);
      task.roles[a] = AxisRole::kFollow;
    }
    // Exact mode promises bits: what cannot be shared by whole micro-batches is not shared.
    out_.by_micro_batch[a] = 0;
    out_.notes.push_back(fmt::format(
        "Exact mode: replicas ({}) {}, so each computes all of them; {} to share the work.", path, why, instead));
  }
  if (!exact_) return;
  for (const Mesh& mesh : out_.meshes) {
    bool replicas = false;  // outside, of which each adds up the nodes of all
    for (size_t a = 0; a < axes; ++a) {
      if (replicas && mesh.axes[a].ragged() && !out_.by_micro_batch[a])
        throw invalid(
            "exact mode: axis '{}' of '{}' has shares that differ between replicas; give all of them equal shares",
            mesh.axes[a].name, out_.strategy);
      replicas |= out_.by_micro_batch[a] && mesh.axes[a].size > 1;
    }
  }
}

TaskGraph TaskFormer::task(size_t l, size_t mesh, int32_t stage) const {
  const TaskLeaf& leaf = leaves_[l];
  TaskGraph t{.nest = leaf.nest, .path = leaf.path, .ops = {}, .stage = stage, .roles = {}, .factors = {}};
  const size_t axes = out_.meshes[mesh].axes.size();
  t.roles.assign(axes, AxisRole::kFollow);
  t.factors.resize(axes);
  for (size_t a = 0; a < outer_.axes.size(); ++a)
    t.roles[a] = outer_.uses[0][a].role, t.factors[a] = outer_.uses[0][a].factor;
  const auto& list = stage_leaves_[mesh];
  const auto at = static_cast<size_t>(std::find(list.begin(), list.end(), l) - list.begin());
  for (size_t a = 0; a < stage_axes_[mesh].axes.size(); ++a) {
    const size_t to = outer_.axes.size() + place_[mesh][a];
    t.roles[to] = stage_axes_[mesh].uses[at][a].role;
    t.factors[to] = stage_axes_[mesh].uses[at][a].factor;
  }
  return t;
}

const TaskGraph& TaskGraphs::task(const Op& op) const {
  const auto scope = static_cast<size_t>(op.scope);
  const int32_t t = scope < task_of_scope.size() ? task_of_scope[scope] : -1;
  return tasks[static_cast<size_t>(t < 0 ? 0 : t)];
}

TaskGraphs form_task_graphs(Graph& graph, const std::vector<DeviceSpec>& devices, std::string_view strategy,
                            const CostModel& cost, bool exact) {
  return TaskFormer(graph, devices, strategy, cost, exact).run();
}

}  // namespace whale
