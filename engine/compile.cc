// THE LIST of passes, with their levels: Graph -> LayoutGraph -> Entry -> Plan. After each row the level's verifier
// runs and the level's text goes to `dump`.
#include "compile.h"

#include <algorithm>

#include "base/philox.h"
#include "cluster/devices.h"
#include "grad/passes.h"
#include "parallel/fold.h"
#include "parallel/fuse.h"
#include "parallel/order.h"
#include "parallel/propagate.h"
#include "parallel/strategy.h"
#include "parallel/task_graph.h"
#include "plan/figures.h"
#include "plan/lower.h"

namespace whale {
namespace {

constexpr int64_t kBucketBytes = int64_t{4} << 20;

int64_t bucket_bytes(const CompileOptions& options) {
  return options.bucket_bytes > 0 ? options.bucket_bytes : kBucketBytes;
}

enum When : unsigned { kTrain = 1, kEval = 2, kAlways = 3 };

struct GraphPass {
  const char* name;
  void (*run)(Graph&);
  unsigned when;
  bool fuses;  // left out by fusion = false
};

constexpr GraphPass kGraphPasses[] = {
    {"canonicalise", canonicalise, kAlways, false},
    {"fold_bias", fold_bias, kAlways, true},
    {"apply_precision", apply_precision, kAlways, false},
    {"clean", clean, kAlways, false},
    {"differentiate", differentiate, kTrain, false},
    {"split_weights", split_weights, kAlways, false},
    {"add_updates", add_updates, kTrain, false},
    {"clean_updates", clean, kTrain, false},
    {"fold_activation", fold_activation, kAlways, true},
    {"assign_regions", assign_regions, kAlways, false},
};

struct LayoutPass {
  const char* name;
  void (*run)(LayoutGraph&, const CompileOptions& options);
  bool fuses;
};

constexpr LayoutPass kLayoutPasses[] = {
    {"fuse_elementwise", [](LayoutGraph& g, const CompileOptions&) { fuse_elementwise(g); }, true},
    {"recompute_cheap", [](LayoutGraph& g, const CompileOptions& o) { recompute_cheap(g, !o.recompute); }, false},
    {"order_sources", [](LayoutGraph& g, const CompileOptions&) { order_ops(g); }, false},
    {"shorten_lives", [](LayoutGraph& g, const CompileOptions&) { shorten_lives(g); }, false},
    {"form_buckets", [](LayoutGraph& g, const CompileOptions& o) { form_buckets(g, bucket_bytes(o)); }, false},
    {"group_updates", [](LayoutGraph& g, const CompileOptions& o) { group_updates(g, bucket_bytes(o)); }, true},
    {"order_ops", [](LayoutGraph& g, const CompileOptions&) { order_ops(g); }, false},
};

bool trains(const Graph& graph) {
  return graph.training.loss != kNone && graph.training.optimizer.kind != OptimizerKind::kNone;
}

int64_t batch_of(const Graph& graph) {
  for (const TensorId id : graph.inputs)
    if (const Tensor& t = graph.tensor(id); t.batch_dim >= 0) return t.dims[static_cast<size_t>(t.batch_dim)];
  return 0;
}

// The user's graph with the options in it: what Plan::source keeps.
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
      throw error(Code::kNotFound, "fetch '{}': the graph has no tensor of this name", name);
    source.outputs.push_back({name, static_cast<TensorId>(it - source.tensors.begin())});
  }
  return source;
}

struct Compiler {
  const CompileOptions& options;
  const std::vector<DeviceSpec>& devices;
  std::vector<std::string> gradients;  // names after "grad:"

  template <class Level>
  void after(const std::string& pass, const Level& level) const {
    if (options.verify) {
      try {
        verify(level);
        if constexpr (std::is_same_v<Level, Graph>) verify_ops(level);
      } catch (const Error& e) {
        throw Error(e.code(), fmt::format("after pass {}: {}", pass, e.message()));
      }
    }
    if (options.dump) options.dump(pass, print(level));
  }

  Graph graph_passes(Graph graph, const std::string& entry) const {
    const unsigned when = entry == "train" ? kTrain : kEval;
    if (when == kEval) {
      graph = for_inference(graph);
      after(entry + ".for_inference", graph);
    }
    for (const GraphPass& pass : kGraphPasses) {
      if (!(pass.when & when) || (pass.fuses && !options.fusion)) continue;
      pass.run(graph);
      after(entry + "." + pass.name, graph);
    }
    return graph;
  }

  LayoutGraph layout_passes(const Graph& graph, const std::string& entry, int64_t micro_batches,
                            const Mesh& mesh) const {
    PropagateOptions layouts{.micro_batches = micro_batches, .devices = mesh.size(), .fetch_gradients = {}};
    if (entry == "train") layouts.fetch_gradients = gradients;
    LayoutGraph lg = propagate(graph, layouts);
    after(entry + ".propagate", lg);
    for (const LayoutPass& pass : kLayoutPasses) {
      if (pass.fuses && !options.fusion) continue;
      pass.run(lg, options);
      after(entry + "." + pass.name, lg);
    }
    return lg;
  }

  Entry make_entry(const LayoutGraph& lg, const std::string& name, const Mesh& mesh,
                   const std::vector<PlanVariable>& variables) const {
    LowerOptions lowering;
    lowering.entry = name;
    lowering.overlap = options.overlap;
    for (size_t v = 0; v < variables.size(); ++v) {
      lowering.variables.emplace(variables[v].name, static_cast<int32_t>(v));
      lowering.variable_bytes += element_count(variables[v].dims) * size_of(variables[v].dtype);
    }
    return lower(lg, mesh, cut_batch(lg.batch, lg.axes[0].size, mesh.device_shares()), lowering);
  }
};

std::vector<PlanVariable> variables_of(const Graph& graph, size_t axes) {
  std::vector<PlanVariable> out;
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
    p.slot = v.slot;
    p.home = Layout{std::vector<AxisLayout>(axes)};
    out.push_back(std::move(p));
  }
  return out;
}

// One TaskGraph, or several on the same mesh.
Mesh mesh_of(const Graph& source, int64_t devices, std::string& strategy) {
  const std::vector<TaskGraph> tasks = form_task_graphs(source, devices, source.default_strategy);
  for (const TaskGraph& task : tasks)
    if (!(task.mesh == tasks[0].mesh))
      throw unimplemented(
          "scopes '{}' ({}) and '{}' ({}) use different meshes; bridges between meshes are not implemented yet: give "
          "them the same count and shares",
          to_string(tasks[0].nest), tasks[0].path, to_string(task.nest), task.path)
          .at_scope(task.path);
  strategy = to_string(tasks[0].nest);
  return tasks[0].mesh;
}

void check_devices(const std::vector<DeviceSpec>& devices, const Graph& source) {
  if (devices.empty()) throw invalid("the device list is empty, expected at least one device such as cpu:1");
  if (source.training.precision != Precision::kFloat64) return;
  for (const DeviceSpec& d : devices)
    if (d.kind != DeviceKind::kRef && d.kind != DeviceKind::kNull)
      throw invalid("precision float64 runs on ref devices only, the list has '{}'; use ref:{}", to_string(d),
                    devices.size());
}

std::vector<std::string> notes_of(const Plan& plan) {
  std::vector<std::string> notes;
  if (plan.entries.empty()) return notes;
  const Entry& e = plan.entries[0];
  if (plan.devices.size() > 1) {
    std::vector<int64_t> sizes;
    for (const DeviceRow& row : e.rows) sizes.push_back(row.samples.size());
    if (e.batch == 1)
      notes.push_back("The batch is one sample, which cannot be cut: every device computes all of it.");
    else
      notes.push_back(fmt::format("{} samples are cut over {} devices as [{}]; {} program(s) for them.", e.batch,
                                  e.rows.size(), fmt::join(sizes, ", "), e.programs.size()));
  }
  if (plan.micro_batches > 1)
    notes.push_back(fmt::format("Each step runs {} micro-batches and updates once.", plan.micro_batches));
  const StepFigures f = step_of(e.programs[0]);
  if (f.collectives)
    notes.push_back(fmt::format("{} collective(s) a step carry {}, {} of them beside the computation.", f.collectives,
                                bytes_text(f.communicated), f.on_the_side));
  return notes;
}

}  // namespace

Plan compile(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  Graph source = source_of(graph, options);
  check_devices(devices, source);
  Compiler compiler{options, devices, {}};
  for (const std::string& name : options.fetch)
    if (name.starts_with("grad:")) compiler.gradients.push_back(name.substr(5));
  verify(source);
  verify_ops(source);
  if (options.dump) options.dump("source", print(source));

  Plan plan;
  plan.model = source.name;
  plan.model_hash = hash_name(print(graph));
  plan.devices = devices;
  const Mesh mesh = mesh_of(source, static_cast<int64_t>(devices.size()), plan.strategy);
  for (const Axis& axis : mesh.axes) plan.mesh.push_back({axis.name, axis.size, axis.shares});
  if (devices.size() > 1) {
    Group all{.axis = "replica", .devices = {}};
    for (size_t d = 0; d < devices.size(); ++d) all.devices.push_back(static_cast<int32_t>(d));
    plan.groups.push_back(std::move(all));
  }
  plan.scopes = source.scopes;
  plan.optimizer = source.training.optimizer;
  plan.schedule = source.training.schedule;
  plan.precision = source.training.precision;
  plan.micro_batches = batch_of(source) > 1 ? source.training.accumulation : 1;

  std::vector<std::string> entries;
  if (trains(source))
    entries.push_back("train");
  else if (!compiler.gradients.empty())
    throw invalid("fetch 'grad:{}': the graph has no loss with an optimizer, so nothing is differentiated",
                  compiler.gradients[0]);
  entries.push_back("eval");
  for (const std::string& name : entries) {
    const Graph whole = compiler.graph_passes(source, name);
    if (plan.variables.empty()) plan.variables = variables_of(whole, mesh.axes.size());
    const LayoutGraph lg = compiler.layout_passes(whole, name, plan.micro_batches, mesh);
    plan.entries.push_back(compiler.make_entry(lg, name, mesh, plan.variables));
  }
  plan.source = std::move(source);
  plan.notes = notes_of(plan);
  compiler.after("plan", plan);
  return plan;
}

Entry compile_entry(const Plan& plan, std::string_view name, int64_t batch) {
  if (name != "train" && name != "eval") throw invalid("entry '{}', expected train or eval", name);
  if (name == "train" && !trains(plan.source))
    throw error(Code::kFailedPrecondition, "model '{}' has no loss with an optimizer; it can be evaluated only",
                plan.model);
  if (batch < 1) throw invalid("a batch of {} samples, expected at least 1", batch);
  CompileOptions options;
  options.verify = false;
  Compiler compiler{options, plan.devices, {}};
  for (const Entry& e : plan.entries)
    for (const PlanOutput& o : e.outputs)
      if (e.name == name && o.name.starts_with("grad:") &&
          std::find(compiler.gradients.begin(), compiler.gradients.end(), o.name.substr(5)) == compiler.gradients.end())
        compiler.gradients.push_back(o.name.substr(5));
  Mesh mesh;
  for (const MeshAxis& axis : plan.mesh) mesh.axes.push_back({axis.name, axis.size, axis.shares});
  const Graph source = batch == batch_of(plan.source) ? plan.source : rebatch(plan.source, batch);
  const int64_t micro_batches = batch > 1 ? plan.source.training.accumulation : 1;
  const Graph whole = compiler.graph_passes(source, std::string(name));
  const LayoutGraph lg = compiler.layout_passes(whole, std::string(name), micro_batches, mesh);
  return compiler.make_entry(lg, std::string(name), mesh, plan.variables);
}

}  // namespace whale
