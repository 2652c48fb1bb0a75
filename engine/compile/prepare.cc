#include "compile/prepare.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/text.h"
#include "cluster/device_kinds.h"
#include "cluster/shares.h"
#include "compile/checks.h"
#include "compile/profile_check.h"
#include "cost/measured.h"
#include "grad/passes.h"
#include "ops/cost.h"
#include "plan/groups.h"
#include "plan/limits.h"
#include "rewrite/offload.h"
#include "rewrite/order.h"
#include "task/join_replicas.h"
#include "task/strategy.h"

namespace whale {
namespace {

void check_source(const Graph& source) {
  verify(source);
  verify_ops(source);
  check_limits(source);
  check_numbers(source);
}

// Where memory is traded for time: of the rate of bytes that a second more has to free, the part that is asked of this
// model. A byte is worth at least the 500th part of a step that it is of all that a device has to hold of the
// parameters, if each stage, split and replica works as long as it must: no trade takes more than 1/500 of a step for
// as much as that again. Where a step is of many samples for its size, that is more than the usual rate says.
double part_of_rate(const Graph& source, const std::vector<Mesh>& meshes, const Profile& usual) {
  constexpr double kLeastShare = 1.0 / 500;
  double flops = 0, bytes = 0;
  for (const Op& op : source.ops) flops += cost_of(source, op).flops;
  for (const Variable& v : source.variables)
    if (v.role == Role::kParameter && v.trainable) bytes += static_cast<double>(bytes_of(source.tensor(v.tensor)));
  const double seconds = usual.passes * flops / usual.device.flops_per_second;
  const double held = usual.held_copies * bytes * static_cast<double>(most_replicas(meshes));
  if (!trains(source) || !(held > 0 && seconds > 0)) return 1;
  return std::min(1.0, held / (kLeastShare * seconds) / usual.freed_bytes_per_second);
}

// Whose times are measured, and whose are not.
std::string profile_note(const std::vector<DeviceSpec>& devices, const Profile& profile) {
  if (!profile.measured) return "";
  std::set<MeasuredKind> with, without;
  const std::vector<int64_t> sharers = sharers_of(devices);
  for (size_t d = 0; d < devices.size(); ++d) {
    const MeasuredKind kind = kind_of(devices[d], sharers[d]);
    (profile.measured->of(kind) != nullptr ? with : without).insert(kind);
  }
  const auto names = [](const std::set<MeasuredKind>& kinds) {
    std::vector<std::string> out;
    for (const MeasuredKind& kind : kinds) out.push_back(to_string(kind));
    return fmt::format("{}", fmt::join(out, ", "));
  };
  std::string out = with.empty() ? ""
                                 : fmt::format("Times of {} on {} are measured.",
                                               profile.measured->of_ops() ? "ops" : "layers", names(with));
  if (!without.empty())
    out += fmt::format("{}The profile has none of {}, but of {}: those are timed by their rates.",
                       out.empty() ? "" : " ", names(without), profile.measured->kinds());
  return out;
}

// Micro-batches: written on the pipeline, or the graph's.
int64_t micro_batches_of(const Graph& source, const TaskGraphs& tasks) {
  for (const TaskGraph& task : tasks.tasks)
    for (const Scope& scope : task.nest)
      if (scope.kind == ScopeKind::kPipeline && scope.micro_batches) return scope.micro_batches;
  return source.training.accumulation;
}

}  // namespace

Graph source_of(const Graph& graph, const CompileOptions& options) {
  Graph source = graph;
  if (options.accumulation < 0)
    throw invalid("accumulation is {}, expected 1 or more micro-batches (0: the graph's)", options.accumulation);
  if (options.accumulation) source.training.accumulation = options.accumulation;
  if (source.training.accumulation < 1) source.training.accumulation = 1;
  if (options.precision) source.training.precision = *options.precision;
  if (!options.strategy.empty()) source.default_strategy = options.strategy;
  for (const std::string& name : options.fetch) {
    if (name.starts_with("grad:") || name == "loss") continue;
    if (std::any_of(source.outputs.begin(), source.outputs.end(), [&](const NamedTensor& o) { return o.name == name; }))
      continue;
    const auto it =
        std::find_if(source.tensors.begin(), source.tensors.end(), [&](const Tensor& t) { return t.name == name; });
    if (it == source.tensors.end())
      throw error(Code::kNotFound, "fetch '{}': the graph has no tensor of this name", brief(name));
    source.outputs.push_back({name, static_cast<TensorId>(it - source.tensors.begin())});
  }
  return source;
}

void check_graph(const Graph& graph, const CompileOptions& options) { check_source(source_of(graph, options)); }

Scoped scope_out(Graph source, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                 double memory_price) {
  const std::vector<double>& state_shares = options.state_shares;
  const CostModel cost(devices, memory_price, options.profile, source.training.precision);
  const auto deal = [&](const Graph& graph, const std::vector<DeviceSpec>& there, TaskGraphs& formed) {
    const DealOptions dealt{.batch = batch_of(graph),
                            .micro_batches = std::max<int64_t>(1, micro_batches_of(graph, formed)),
                            .half = is_half(graph.training.precision),
                            .rooms = there.size() == devices.size() ? options.rooms : std::vector<Room>{}};
    deal_axes(graph, there, dealt, formed);
  };
  TaskGraphs tasks = form_task_graphs(source, devices, source.default_strategy, cost, options.exact,
                                      are_unlike(devices, cost) ? DealShares(deal) : DealShares(), options.stages);
  tasks.cost.freed_bytes_per_second *= part_of_rate(source, tasks.meshes, options.profile);
  Scoped out{std::move(source), std::move(tasks)};
  if (state_shares.empty()) {  // which are of one scope's replicas, as Adasum's tree is
    if (!options.adasum) join_replicas(out.tasks, devices);
    return out;
  }
  bool found = false;
  for (Mesh& mesh : out.tasks.meshes)
    for (MeshAxis& axis : mesh.axes)
      if (has_replicas(axis.name) && axis.size == static_cast<int64_t>(state_shares.size())) {
        if (axis.has_gaps())
          throw unimplemented("shares of state between replicas of which groups have different numbers ({})",
                              out.tasks.strategy);
        axis.state_shares = state_shares, found = true;
      }
  if (!found)
    throw invalid("{} shares of state are given, no replica scope has so many replicas ({}); give one for each replica",
                  state_shares.size(), out.tasks.strategy);
  round_shares(1, state_shares);
  return out;
}

Scoped prepare(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
               double memory_price, Care care) {
  check_options(options);
  Graph source = source_of(graph, options);
  check_devices(devices, source);
  if (care == Care::kChecked) check_source(source);
  const std::vector<std::string> doubts = check_profile(options.profile, source, graph);
  if (options.dump) options.dump("source", print(source));
  Scoped scoped = scope_out(std::move(source), devices, options, memory_price);
  if (const std::string note = profile_note(devices, options.profile); !note.empty())
    scoped.tasks.notes.push_back(note);
  scoped.tasks.notes.insert(scoped.tasks.notes.end(), doubts.begin(), doubts.end());
  const int64_t micro_batches = micro_batches_of(scoped.graph, scoped.tasks);
  check_options(options, scoped.graph, scoped.tasks, micro_batches);
  check_memory(options, scoped.graph, scoped.tasks, std::ssize(devices), micro_batches);
  scoped.graph.training.accumulation = micro_batches;
  return scoped;
}

std::vector<std::string> gradients_of(const CompileOptions& options) {
  std::vector<std::string> names;
  for (const std::string& name : options.fetch)
    if (name.starts_with("grad:")) names.push_back(name.substr(5));
  return names;
}

Plan outline(const Scoped& scoped, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
             double memory_price) {
  const Graph& graph = scoped.graph;
  Plan plan;
  plan.model = graph.name;
  plan.devices = devices;
  plan.strategy = scoped.tasks.strategy;
  plan.meshes = scoped.tasks.meshes;
  plan.groups = groups_of(scoped.tasks.meshes);
  plan.scopes = scoped.graph.scopes;
  plan.optimizer = graph.training.optimizer;
  plan.lr_schedule = graph.training.lr_schedule;
  plan.precision = graph.training.precision;
  plan.options = options;
  plan.memory_price = memory_price, plan.profile = options.profile;
  if (!options.stages.rooms.empty() || !options.stages.begins.empty()) plan.stage_begins = scoped.tasks.stage_begins;
  plan.micro_batches = batch_of(graph) > 1 ? graph.training.accumulation : 1;
  return plan;
}

std::vector<PlanVariable> variables_of(const ShardedGraph& lg) {
  const Graph& graph = lg.graph;
  std::vector<PlanVariable> out;
  out.reserve(graph.variables.size());
  for (const Variable& v : graph.variables) {
    const Tensor& t = graph.tensor(v.tensor);
    PlanVariable p;
    p.name = t.name;
    p.dtype = t.dtype;
    p.dims = t.dims;
    p.role = v.role;
    p.trainable = v.trainable;
    p.init = v.init;
    if (v.owner != kNone) p.owner = graph.tensor(v.owner).name;
    p.state_name = v.state_name;
    p.mesh = lg.tasks.mesh_of_stage[lg.stage(v.tensor)];
    const Sharding& storage_sharding = lg.shardings[v.tensor];
    p.storage_sharding.axes.assign(storage_sharding.axes.begin() + 1, storage_sharding.axes.end());
    p.memory = in_host(lg, v.tensor) ? Memory::kHost : Memory::kDevice;
    out.push_back(std::move(p));
  }
  return out;
}

StorageShardings storage_shardings_of(const std::vector<PlanVariable>& variables) {
  StorageShardings storage_shardings;
  storage_shardings.reserve(variables.size());
  for (const PlanVariable& v : variables)
    storage_shardings.try_emplace(v.name, StorageSharding{&v.storage_sharding, v.mesh});
  return storage_shardings;
}

}  // namespace whale
