#include "task/unlike.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/error.h"
#include "base/text.h"
#include "cluster/shares.h"
#include "task/axis_links.h"
#include "task/strategy.h"
#include "task/task_parts.h"

namespace whale {
namespace {

constexpr const char* kAxis = "unlike";  // of the meshes

template <class... A>
[[noreturn]] void refuse_unlike(const Scope& replicas, fmt::format_string<A...> what, A&&... args) {
  throw invalid("scope '{}' {}", brief(to_string(replicas)), fmt::format(what, std::forward<A>(args)...));
}

bool is_bare(const Scope& scope) { return to_string(scope) == "replica"; }

// What a replica has inside, and how many devices.
struct Inside {
  std::vector<Scope> nest;
  int64_t devices = 0;
};

void check(const Scope& replicas, const std::vector<Inside>& inside, bool exact) {
  if (exact)
    refuse_unlike(
        replicas,
        "has unlike replicas, and exact mode promises the same bits for all plans, which sizes that differ do "
        "not have; leave exact out, or give a count");
  if (!replicas.by.empty() || !replicas.device_order.empty())
    throw unimplemented(
        "scope '{}': unlike replicas with '{}' are not implemented; they cut samples and take devices one after the "
        "other; leave it out",
        brief(to_string(replicas)), replicas.by.empty() ? "device_order" : "by");
  if (!replicas.shares.empty() && replicas.shares.size() != inside.size())
    refuse_unlike(replicas, "has {} shares for {} replicas; give one for each", replicas.shares.size(), inside.size());
  std::optional<Scope> first;
  for (const Inside& own : inside)
    for (const Scope& scope : own.nest) {
      const std::string told = brief(to_string(own.nest));
      if (scope.kind == ScopeKind::kStage || scope.kind == ScopeKind::kCluster)
        throw unimplemented("scope '{}': '{}' in a list of replicas; pipeline, split and replica are implemented there",
                            brief(to_string(replicas)), told);
      if (scope.by == "micro_batch")
        throw unimplemented("scope '{}': '{}' takes whole micro-batches; inside of unlike replicas samples are cut",
                            brief(to_string(replicas)), told);
      if (scope.kind != ScopeKind::kPipeline) continue;
      if (!read_schedule(scope.schedule).warmup.empty())
        throw unimplemented(
            "scope '{}': '{}' has the depths of a warm-up, which unlike replicas do not take yet; leave warmup out",
            brief(to_string(replicas)), told);
      if (scope.virtual_stages > 1 || (!scope.schedule.empty() && schedule_rule(scope.schedule).min_virtual_stages > 1))
        throw unimplemented(
            "scope '{}': '{}' has several virtual stages on a device, which unlike replicas do not have yet; leave "
            "virtual_stages out and take 1f1b, gpipe or zb_h1",
            brief(to_string(replicas)), told);
      if (!first) first = scope;
      if (scope.micro_batches && first->micro_batches && scope.micro_batches != first->micro_batches)
        throw unimplemented(
            "scope '{}': replicas with {} and {} micro-batches; all have the same number, of sizes by their shares: "
            "give one number",
            brief(to_string(replicas)), first->micro_batches, scope.micro_batches);
      if (!scope.schedule.empty() && !first->schedule.empty() && scope.schedule != first->schedule)
        throw unimplemented("scope '{}': replicas with the schedules '{}' and '{}'; give all the same",
                            brief(to_string(replicas)), first->schedule, scope.schedule);
      if (!first->micro_batches) first->micro_batches = scope.micro_batches;
      if (first->schedule.empty()) first->schedule = scope.schedule;
    }
}

// Written, or what the others leave, in even runs.
void count_devices(const Scope& replicas, std::vector<Inside>& inside, int64_t there) {
  std::vector<size_t> open;
  int64_t wanted = 0;
  std::vector<std::string> each;
  for (size_t r = 0; r < inside.size(); ++r) {
    bool complete = true;
    inside[r].devices = product(inside[r].nest, 0, inside[r].nest.size(), complete);
    wanted += inside[r].devices;
    each.push_back(fmt::format("{}{}", inside[r].devices, complete ? "" : " or more"));
    if (!complete) open.push_back(r);
  }
  if (wanted > there || (open.empty() && wanted != there))
    refuse_unlike(replicas, "wants {}{} device(s) ({}), {} are there; change the counts or the number of devices",
                  wanted, open.empty() ? "" : " or more", fmt::join(each, ", "), there);
  int64_t left = there - wanted;
  for (size_t k = 0; k < open.size(); ++k) {
    Inside& own = inside[open[k]];
    const int64_t step = own.devices, rest = std::ssize(open) - static_cast<int64_t>(k);
    const int64_t more = rest == 1 ? left : left / rest / step * step;
    own.devices += more, left -= more;
  }
}

// Samples in proportion to what the devices do in a second; where that is known of some alone, to their number.
std::vector<double> weights_of(const Scope& replicas, const std::vector<Inside>& inside,
                               const std::vector<DeviceSpec>& devices, const CostModel& cost) {
  if (!replicas.shares.empty()) {
    round_shares(1, replicas.shares);  // some are positive
    return replicas.shares;
  }
  const auto known_of = [](const DeviceSpec& d) { return d.figures.known(); };
  const bool known = std::ranges::all_of(devices, known_of) || std::ranges::none_of(devices, known_of);
  std::vector<double> out;
  auto device = devices.begin();
  for (const Inside& own : inside) {
    double sum = 0;
    for (int64_t k = 0; k < own.devices; ++k, ++device)
      sum += known ? 1 / op_seconds({.flops = 1e12, .bytes = 0}, cost.rates_of(*device)) : 1;
    out.push_back(sum);
  }
  return out;
}

// The model in one replica: what is written around it is the replica itself.
Graph model_of(const Graph& graph) {
  Graph out = graph;
  for (Scope& scope : out.scopes)
    if (scope.kind == ScopeKind::kReplica) {
      scope.kind = ScopeKind::kName;
      if (scope.name.empty()) scope.name = "replica";
    }
  return out;
}

// Axes of all replicas in one order: matched by name, what is new comes at the end.
struct JointAxes {
  std::vector<std::pair<std::string, char>> list{{kAxis, 0}};  // with by_micro_batch
  std::vector<std::vector<size_t>> place;                      // of each replica's own

  void add(const TaskGraphs& tasks) {
    std::vector<size_t> mine;
    size_t from = 1;
    for (size_t a = 0; a < tasks.meshes[0].axes.size(); ++a) {
      const std::pair<std::string, char> own{tasks.meshes[0].axes[a].name, tasks.by_micro_batch[a]};
      size_t at = from;
      while (at < list.size() && list[at] != own) ++at;
      if (at == list.size()) list.push_back(own);
      mine.push_back(at);
      from = at + 1;
    }
    place.push_back(std::move(mine));
  }
};

void add_meshes(const TaskGraphs& own, const JointAxes& axes, size_t r, const std::vector<double>& weights,
                int32_t first_device, TaskGraphs& out) {
  for (const Mesh& mesh : own.meshes) {
    Mesh joint;
    for (const auto& [name, by] : axes.list) joint.axes.push_back({.name = name});
    joint.axes[0].shares = weights, joint.axes[0].only = static_cast<int64_t>(r);
    for (size_t a = 0; a < mesh.axes.size(); ++a) joint.axes[axes.place[r][a]] = mesh.axes[a];
    for (const int32_t d : mesh.devices) joint.devices.push_back(d == kNone ? kNone : first_device + d);
    out.meshes.push_back(std::move(joint));
  }
}

void add_tasks(const TaskGraphs& own, const JointAxes& axes, size_t r, int32_t first_stage, TaskGraphs& out) {
  for (TaskGraph task : own.tasks) {
    std::vector<AxisRole> roles(axes.list.size(), AxisRole::kFollow);
    std::vector<std::string> factors(axes.list.size());
    roles[0] = AxisRole::kReplica;
    for (size_t a = 0; a < task.roles.size(); ++a)
      roles[axes.place[r][a]] = task.roles[a], factors[axes.place[r][a]] = task.factors[a];
    task.roles = std::move(roles), task.factors = std::move(factors);
    task.stage += first_stage;
    out.tasks.push_back(std::move(task));
  }
}

// Scopes of the copies, and for each combination of them one in which the ops wait to be copied.
class ScopeWriter {
 public:
  ScopeWriter(Graph& graph, TaskGraphs& out) : graph_(graph), out_(out) {
    out.stage_of_scope.assign(graph.scopes.size(), -1);
    out.task_of_scope.assign(graph.scopes.size(), -1);
    for (size_t s = 0; s < graph.scopes.size(); ++s) out.written.push_back(static_cast<ScopeId>(s));
  }

  // `in`: of each replica the scope, stage and task of the op there.
  struct Place {
    ScopeId scope = kNone;
    int32_t stage = 0, task = 0;
  };
  void write(Op& op, const std::vector<Place>& in) {
    std::vector<ScopeId> copies;
    for (size_t r = 0; r < in.size(); ++r) {
      const auto [at, fresh] = copies_.try_emplace({op.scope, r, in[r].scope}, kNone);
      if (fresh) {
        at->second = add(op.scope, in[r]);
        // What is one expression in the program is one in a copy, whatever stages it is cut into.
        out_.written.back() = written_.try_emplace({op.scope, r}, at->second).first->second;
      }
      copies.push_back(at->second);
    }
    const auto [at, fresh] = waiting_.try_emplace({op.scope, copies}, kNone);
    if (fresh) {
      const ScopeId scope = at->second = add(op.scope, in[0]);
      out_.written.back() = op.scope;
      for (size_t r = 0; r < in.size(); ++r) {
        std::vector<ScopeId>& of = out_.replicas[r].scope;
        of.resize(static_cast<size_t>(scope) + 1, kNone);
        of[scope] = copies[r];
      }
    }
    op.scope = at->second;
  }

 private:
  ScopeId add(ScopeId parent, const Place& in) {
    Scope scope;
    scope.kind = ScopeKind::kStage;
    scope.parent = parent;
    graph_.scopes.push_back(std::move(scope));
    out_.stage_of_scope.push_back(in.stage);
    out_.task_of_scope.push_back(in.task);
    out_.written.push_back(kNone);
    return static_cast<ScopeId>(graph_.scopes.size()) - 1;
  }

  Graph& graph_;
  TaskGraphs& out_;
  std::map<std::tuple<ScopeId, size_t, ScopeId>, ScopeId> copies_;
  std::map<std::pair<ScopeId, size_t>, ScopeId> written_;
  std::map<std::pair<ScopeId, std::vector<ScopeId>>, ScopeId> waiting_;
};

}  // namespace

std::optional<Scope> find_unlike(const Graph& graph, std::string_view strategy) {
  if (strategy == "local") return std::nullopt;
  std::optional<Scope> found;
  std::set<ScopeId> seen;
  bool around_all = true;
  for (const Op& op : graph.ops) {
    if (!seen.insert(op.scope).second) continue;
    std::vector<const Scope*> nest;
    for (ScopeId id = op.scope; id > 0; id = graph.scopes[id].parent) {
      const Scope& scope = graph.scopes[id];
      if (scope.kind != ScopeKind::kName && scope.kind != ScopeKind::kRoot) nest.push_back(&scope);
    }
    if (nest.empty() || (nest.size() == 1 && is_bare(*nest[0]))) continue;
    if (nest.size() > 1 || nest[0]->nests.empty()) return std::nullopt;
    if (!found) found = *nest[0];
    around_all &= to_string(*found) == to_string(*nest[0]);
  }
  if (found || strategy.empty()) return around_all ? found : std::nullopt;
  const std::vector<StrategyClause> clauses = parse_clauses(strategy);
  const bool one = clauses.size() == 1 && clauses[0].name.empty() && clauses[0].nest.size() == 1;
  return one && !clauses[0].nest[0].nests.empty() ? std::optional(clauses[0].nest[0]) : std::nullopt;
}

TaskGraphs form_unlike(Graph& graph, const std::vector<DeviceSpec>& devices, const Scope& replicas,
                       const CostModel& cost, bool exact, const DealShares& deal) {
  std::vector<Inside> inside;
  for (std::vector<Scope>& nest : parse_nests(replicas.nests)) inside.push_back({std::move(nest)});
  check(replicas, inside, exact);
  count_devices(replicas, inside, std::ssize(devices));
  const std::vector<double> weights = weights_of(replicas, inside, devices, cost);
  TaskGraphs out(cost);
  JointAxes axes;
  std::vector<TaskGraphs> own;
  std::vector<Graph> models;
  auto device = devices.begin();
  for (size_t r = 0; r < inside.size(); ++r) {
    models.push_back(model_of(graph));
    const std::vector<DeviceSpec> mine(device, device + inside[r].devices);
    device += inside[r].devices;
    try {
      own.push_back(form_task_graphs(models[r], mine, to_string(inside[r].nest), cost, false, deal));
    } catch (Error& e) {
      throw Error(e.code(), fmt::format("replica {} of '{}': {}", r, brief(to_string(replicas)), e.message()));
    }
    axes.add(own[r]);
  }
  Scope told = replicas;
  told.nests.clear();
  int32_t first_device = 0;
  std::vector<int32_t> first_task;
  for (size_t r = 0; r < own.size(); ++r) {
    const auto first_stage = static_cast<int32_t>(out.mesh_of_stage.size());
    first_task.push_back(static_cast<int32_t>(out.tasks.size()));
    out.replicas.push_back({.stage = first_stage, .stages = static_cast<int32_t>(own[r].stages())});
    add_meshes(own[r], axes, r, weights, first_device, out);
    add_tasks(own[r], axes, r, first_stage, out);
    for (int32_t s = 0; s < static_cast<int32_t>(own[r].stages()); ++s) out.mesh_of_stage.push_back(first_stage + s);
    first_device += static_cast<int32_t>(inside[r].devices);
    told.nests += fmt::format("{}{}", r ? ", " : "", own[r].strategy);
    if (out.schedule.empty()) out.schedule = own[r].schedule;
    out.notes.insert(out.notes.end(), own[r].notes.begin(), own[r].notes.end());
  }
  if (out.schedule.empty()) out.schedule = "1f1b";  // of pipelines of one stage
  told.nests = "[" + told.nests + "]";
  out.strategy = to_string(told);
  for (const auto& [name, by] : axes.list) out.by_micro_batch.push_back(by);
  out.links = axis_links(out.meshes, devices, cost);
  ScopeWriter scopes(graph, out);
  for (size_t i = 0; i < graph.ops.size(); ++i) {
    std::vector<ScopeWriter::Place> in;
    for (size_t r = 0; r < own.size(); ++r) {
      const Op& op = models[r].ops[i];
      const auto scope = static_cast<size_t>(op.scope);
      in.push_back({op.scope, out.replicas[r].stage + own[r].stage_of_scope[scope],
                    first_task[r] + own[r].task_of_scope[scope]});
    }
    scopes.write(graph.ops[i], in);
  }
  return out;
}

size_t replica_of(const TaskGraphs& tasks, int32_t stage) {
  size_t r = 0;
  while (r + 1 < tasks.replicas.size() && stage >= tasks.replicas[r + 1].stage) ++r;
  return r;
}

std::vector<PipelineSchedule> pipelines_of(const TaskGraphs& tasks, int64_t micro_batches) {
  const auto of = [&](size_t stages) {
    return make_schedule(tasks.schedule, static_cast<int>(stages), std::max(static_cast<int>(micro_batches), 1),
                         static_cast<int>(tasks.virtual_stages));
  };
  if (tasks.replicas.empty()) return {of(tasks.meshes.size())};
  std::vector<PipelineSchedule> out;
  for (const UnlikeReplica& r : tasks.replicas) out.push_back(of(static_cast<size_t>(r.stages)));
  return out;
}

PipelineSchedule beside_each_other(const std::vector<PipelineSchedule>& pipelines) {
  PipelineSchedule out = pipelines[0];
  for (size_t k = 1; k < pipelines.size(); ++k) {
    out.shape.stages += pipelines[k].shape.stages;
    out.devices.insert(out.devices.end(), pipelines[k].devices.begin(), pipelines[k].devices.end());
  }
  return out;
}

}  // namespace whale
