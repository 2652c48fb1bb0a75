// THE LIST of passes, with their levels: Graph -> LayoutGraph -> Entry -> Plan. The level's verifier runs after its
// last row (after each, when asked), and the level's text goes to `dump`. The last row of a level always runs.
#include "compile.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>

#include "base/philox.h"
#include "base/watch.h"
#include "base/text.h"
#include "cluster/devices.h"
#include "compile_checks.h"
#include "grad/passes.h"
#include "rewrite/copies.h"
#include "rewrite/fold.h"
#include "rewrite/fuse.h"
#include "rewrite/gather_late.h"
#include "rewrite/offload.h"
#include "rewrite/order.h"
#include "shard/insert.h"
#include "task/condense.h"
#include "task/shares.h"
#include "rewrite/slice_updates.h"
#include "task/strategy.h"
#include "rewrite/stream.h"
#include "task/task_graph.h"
#include "report/fit.h"
#include "plan/groups.h"
#include "plan/limits.h"
#include "lower/lower.h"
#include "report/notes.h"
#include "schema/graph_file.h"

namespace whale {
namespace {

int64_t bucket_bytes(const CostModel& cost, const CompileOptions& options) {
  return options.bucket_bytes > 0 ? options.bucket_bytes : cost.bucket_bytes;
}

// What an update works on is copied in and out as a whole: smaller groups keep less on the device.
int64_t update_bytes(const CostModel& cost, const CompileOptions& options) {
  const bool copied = options.offload & (kOffloadState | kOffloadParameters);
  const int64_t bytes = bucket_bytes(cost, options);
  return copied ? std::min(bytes, cost.copied_bytes) : bytes;
}

enum When : unsigned { kTrain = 1, kEval = 2, kAlways = 3 };

struct GraphPass {
  const char* name;
  void (*run)(Graph&, const TaskGraphs&);
  unsigned when;
  bool fuses;  // left out by fusion = false
};

template <void (*Pass)(Graph&)>
void plain(Graph& graph, const TaskGraphs&) {
  Pass(graph);
}

void clean_scopes(Graph& graph, const TaskGraphs& tasks) { clean_as_written(graph, tasks.written); }

constexpr GraphPass kGraphPasses[] = {
    {"canonicalise", plain<canonicalise>, kAlways, false},
    {"decompose_splits", decompose_splits, kAlways, false},
    {"fold_bias", fold_bias, kAlways, true},
    {"apply_precision", plain<apply_precision>, kAlways, false},
    {"clean", clean_scopes, kAlways, false},
    {"differentiate", plain<differentiate>, kTrain, false},
    {"split_weights", plain<split_weights>, kAlways, false},
    {"add_updates", plain<add_updates>, kTrain, false},
    {"clean_updates", clean_scopes, kTrain, false},
    {"fold_activation", fold_activation, kAlways, true},
    {"check_indices", plain<check_indices>, kAlways, false},
    {"assign_regions", plain<assign_regions>, kAlways, false},
    {"place_in_stages", place_in_stages, kAlways, false},
    {"name_apart", plain<name_apart>, kAlways, false},
};

struct LayoutPass {
  const char* name;
  void (*run)(LayoutGraph&, const CompileOptions& options);
  bool fuses;
};

// The stages that have one of the policies.
std::vector<char> stages_with(const LayoutGraph& g, const CompileOptions& o,
                              std::initializer_list<Recompute> policies) {
  std::vector<char> out(g.tasks.stages());
  for (size_t s = 0; s < out.size(); ++s) {
    const Recompute mine = o.stage_recompute.empty() ? o.recompute : o.stage_recompute[s];
    out[s] = std::find(policies.begin(), policies.end(), mine) != policies.end();
  }
  return out;
}

constexpr LayoutPass kLayoutPasses[] = {
    {"slice_updates",
     [](LayoutGraph& g, const CompileOptions& o) {
       const bool by_cost = o.update == UpdateForm::kByCost && g.tasks.cost.beside;
       if (by_cost || o.update == UpdateForm::kSliced) slice_updates(g, !by_cost);
     },
     false},
    {"gather_late", [](LayoutGraph& g, const CompileOptions&) { gather_late(g); }, false},
    {"view_slices", [](LayoutGraph& g, const CompileOptions&) { view_slices(g); }, false},
    // Where a stage ends would say what is folded, and a product with its bias has other bits.
    {"fold_whole_products",
     [](LayoutGraph& g, const CompileOptions& o) {
       if (!o.exact) fold_whole_products(g);
     },
     true},
    {"fuse_elementwise", [](LayoutGraph& g, const CompileOptions&) { fuse_elementwise(g); }, true},
    {"recompute_blocks",
     [](LayoutGraph& g, const CompileOptions& o) { recompute_blocks(g, stages_with(g, o, {Recompute::kFull})); },
     false},
    {"recompute_cheap",
     [](LayoutGraph& g, const CompileOptions& o) {
       const bool short_of_memory = g.tasks.cost.memory_price > 1;
       recompute_cheap(g, stages_with(g, o, {Recompute::kSelective}),
                       short_of_memory ? std::vector<char>(g.tasks.stages(), 1)
                                       : stages_with(g, o, {Recompute::kSelective, Recompute::kFull}));
     },
     false},
    {"stream_gathers", [](LayoutGraph& g, const CompileOptions&) { stream_gathers(g); }, false},
    {"copy_before_sums", [](LayoutGraph& g, const CompileOptions&) { copy_before_sums(g); }, false},
    {"order_sources", [](LayoutGraph& g, const CompileOptions& o) { order_ops(g, o.prefetch); }, false},
    {"shorten_lives", [](LayoutGraph& g, const CompileOptions&) { shorten_lives(g); }, false},
    {"form_buckets", [](LayoutGraph& g, const CompileOptions& o) { form_buckets(g, bucket_bytes(g.tasks.cost, o)); },
     false},
    {"group_updates", [](LayoutGraph& g, const CompileOptions& o) { group_updates(g, update_bytes(g.tasks.cost, o)); },
     true},
    {"order_ops", [](LayoutGraph& g, const CompileOptions& o) { order_ops(g, o.prefetch); }, false},
    {"offload", [](LayoutGraph& g, const CompileOptions& o) { offload(g, o.offload); }, false},
};

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
      throw error(Code::kNotFound, "fetch '{}': the graph has no tensor of this name", brief(name));
    source.outputs.push_back({name, static_cast<TensorId>(it - source.tensors.begin())});
  }
  return source;
}

struct Compiler {
  const CompileOptions& options;
  TaskGraphs tasks;
  std::vector<std::string> gradients;  // names after "grad:"

  template <class Check>
  static void check(const std::string& pass, Check holds) {
    try {
      holds();
    } catch (const Error& e) {
      throw Error(Code::kInternal,
                  fmt::format("after pass {}: {} (planning refuses what it has made itself: this is a bug in "
                              "libwhale, please report it with the model, the devices and the options)",
                              pass, e.message()))
          .at_op(e.where().op)
          .at_scope(e.where().scope);
    }
  }

  template <class Level>
  void after(const std::string& pass, const Level& level, bool last) const {
    Watch::look();
    if (last || options.verify_passes)
      check(pass, [&] {
        verify(level);
        if constexpr (std::is_same_v<Level, Graph>) verify_ops(level);
      });
    if (options.dump) options.dump(pass, print(level));
  }

  Graph graph_passes(Graph graph, const std::string& entry) const {
    const unsigned when = entry == "train" ? kTrain : kEval;
    if (when == kEval) {
      graph = for_inference(std::move(graph));
      after(entry + ".for_inference", graph, false);
    }
    for (const GraphPass& pass : kGraphPasses) {
      if (!(pass.when & when) || (pass.fuses && !options.fusion)) continue;
      pass.run(graph, tasks);
      after(entry + "." + pass.name, graph, &pass == std::end(kGraphPasses) - 1);
    }
    return graph;
  }

  ShardOptions shard_options(const Graph& graph, const std::string& entry, int64_t micro_batches,
                             const Homes* homes) const {
    return {.micro_batches = micro_batches,
            .fetch_gradients = entry == "train" ? gradients : std::vector<std::string>{},
            .zero = options.zero,
            .exact = options.exact,
            .gradient_dtype = options.gradient_dtype,
            .adasum = options.adasum && batch_of(graph) != 1,  // of one sample's gradient it is that gradient
            .homes = homes};
  }

  LayoutGraph lay_out(Graph graph, const std::string& entry, int64_t micro_batches, const Homes* homes) const {
    const ShardOptions sharding = shard_options(graph, entry, micro_batches, homes);
    const Choices choices = choose_cuts(graph, tasks, sharding);
    if (options.dump) options.dump(entry + ".choose_cuts", choices_text(choice_report(graph, tasks, choices, false)));
    const Graph before = options.verify_passes ? graph : Graph{};
    LayoutGraph lg = insert_reshards(std::move(graph), tasks, sharding, choices);
    if (options.verify_passes) check(entry + ".insert_reshards", [&] { verify(before, choices, lg); });
    after(entry + ".insert_reshards", lg, false);
    return lg;
  }

  LayoutGraph layout_passes(Graph graph, const std::string& entry, int64_t micro_batches, const Homes* homes) const {
    LayoutGraph lg = lay_out(std::move(graph), entry, micro_batches, homes);
    for (const LayoutPass& pass : kLayoutPasses) {
      if (pass.fuses && !options.fusion) continue;
      pass.run(lg, options);
      after(entry + "." + pass.name, lg, &pass == std::end(kLayoutPasses) - 1);
    }
    return lg;
  }

  Entry make_entry(const LayoutGraph& lg, const std::vector<std::vector<IndexRange>>& indices, const std::string& name,
                   const std::vector<PlanVariable>& variables, std::vector<std::string>* notes,
                   bool messages = true) const {
    LowerOptions lowering;
    lowering.messages = messages;
    lowering.entry = name;
    lowering.share = options.share_programs;
    lowering.overlap = options.overlap;
    lowering.matmul_chunks = options.matmul_chunks;
    lowering.notes = notes;
    lowering.variables.reserve(variables.size());
    for (size_t v = 0; v < variables.size(); ++v)
      lowering.variables.emplace(variables[v].name, static_cast<int32_t>(v));
    Entry entry = lower(lg, lowering);
    for (size_t i = 0; i < indices.size(); ++i) entry.inputs.at(i).indices = indices[i];
    return entry;
  }
};

std::vector<PlanVariable> variables_of(const LayoutGraph& lg) {
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
    p.slot = v.slot;
    p.mesh = lg.tasks.mesh_of_stage[static_cast<size_t>(lg.stage(v.tensor))];
    const Layout& home = lg.layouts[static_cast<size_t>(v.tensor)];
    p.home.axes.assign(home.axes.begin() + 1, home.axes.end());
    p.memory = in_host(lg, v.tensor) ? Memory::kHost : Memory::kDevice;
    out.push_back(std::move(p));
  }
  return out;
}

Homes homes_of(const std::vector<PlanVariable>& variables) {
  Homes homes;
  homes.reserve(variables.size());
  for (const PlanVariable& v : variables) homes.try_emplace(v.name, Home{&v.home, v.mesh});
  return homes;
}

// The scopes as written, and with the stages that a pipeline was cut into.
struct Scoped {
  Graph graph;
  TaskGraphs tasks;
};
Scoped scope_out(const Graph& source, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                 double memory_price) {
  const std::vector<double>& state_shares = options.state_shares;
  const CostModel cost(devices, memory_price, options.profile);
  Graph scoped = source;
  TaskGraphs tasks = form_task_graphs(scoped, devices, source.default_strategy, cost, options.exact);
  Scoped out{std::move(scoped), std::move(tasks)};
  if (state_shares.empty()) return out;
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

// Micro-batches: written on the pipeline, or the graph's.
int64_t micro_batches_of(const Graph& source, const TaskGraphs& tasks) {
  for (const TaskGraph& task : tasks.tasks)
    for (const Scope& scope : task.nest)
      if (scope.kind == ScopeKind::kPipeline && scope.micro_batches) return scope.micro_batches;
  return source.training.accumulation;
}

// The graph with the options in it, checked, and who works on what.
struct Prepared {
  Graph source;
  Scoped scoped;
  int64_t micro_batches;
};
Prepared prepare(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                 double memory_price) {
  check_options(options);
  Graph source = source_of(graph, options);
  check_devices(devices, source);
  verify(source);
  verify_ops(source);
  check_limits(source);
  check_numbers(source);
  if (options.dump) options.dump("source", print(source));
  Scoped scoped = scope_out(source, devices, options, memory_price);
  const int64_t micro_batches = micro_batches_of(source, scoped.tasks);
  check_options(options, source, scoped.tasks, micro_batches);
  check_memory(options, source, scoped.tasks, std::ssize(devices), micro_batches);
  source.training.accumulation = scoped.graph.training.accumulation = micro_batches;
  return {std::move(source), std::move(scoped), micro_batches};
}

// The names after "grad:" that are fetched.
std::vector<std::string> gradients_of(const CompileOptions& options) {
  std::vector<std::string> names;
  for (const std::string& name : options.fetch)
    if (name.starts_with("grad:")) names.push_back(name.substr(5));
  return names;
}

// A plan without entries and variables.
Plan outline(const Prepared& prepared, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
             double memory_price) {
  const auto& [source, scoped, micro_batches] = prepared;
  Plan plan;
  plan.model = source.name;
  plan.devices = devices;
  plan.strategy = scoped.tasks.strategy;
  plan.meshes = scoped.tasks.meshes;
  plan.groups = groups_of(scoped.tasks.meshes);
  plan.scopes = scoped.graph.scopes;
  plan.optimizer = source.training.optimizer;
  plan.schedule = source.training.schedule;
  plan.precision = source.training.precision;
  plan.options = options;
  plan.memory_price = memory_price, plan.profile = options.profile;
  plan.micro_batches = batch_of(source) > 1 ? micro_batches : 1;
  return plan;
}

// `memory_price`: CostModel's. `last`: the plan is wanted whole, even where its variables alone are too large.
Plan make_plan(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
               double memory_price, bool last) {
  Prepared prepared = prepare(graph, devices, options, memory_price);
  auto& [source, scoped, micro_batches] = prepared;
  const Compiler compiler{options, scoped.tasks, gradients_of(options)};
  Plan plan = outline(prepared, devices, options, memory_price);
  const std::vector<uint8_t> file = serialize(graph);  // its training included
  plan.model_hash = hash_name({reinterpret_cast<const char*>(file.data()), file.size()});

  std::vector<std::string> entries;
  if (trains(source))
    entries.push_back("train");
  else if (!compiler.gradients.empty())
    throw invalid("fetch 'grad:{}': the graph has no loss with an optimizer, so nothing is differentiated",
                  brief(compiler.gradients[0]));
  entries.push_back("eval");
  Homes homes;
  std::vector<std::string> decisions;  // of the first entry
  for (const std::string& name : entries) {
    const bool last_entry = &name == &entries.back();
    Graph whole = compiler.graph_passes(last_entry ? std::move(scoped.graph) : scoped.graph, name);
    const auto indices = indices_of_inputs(whole);
    const LayoutGraph lg =
        compiler.layout_passes(std::move(whole), name, plan.micro_batches, homes.empty() ? nullptr : &homes);
    if (plan.variables.empty()) plan.variables = variables_of(lg);
    if (homes.empty()) homes = homes_of(plan.variables), decisions = lg.notes;
    if (!last && shortage_of(plan).bytes > 0) return plan;  // the rest would only add to it
    plan.entries.push_back(
        compiler.make_entry(lg, indices, name, plan.variables, plan.entries.empty() ? &decisions : nullptr));
  }
  plan.source = std::move(source);
  plan.notes = notes_of(plan);
  for (const std::string& note : idle_notes(plan)) plan.notes.push_back(note);
  plan.notes.insert(plan.notes.end(), decisions.begin(), decisions.end());
  plan.notes.insert(plan.notes.end(), scoped.tasks.notes.begin(), scoped.tasks.notes.end());
  if (const std::string note = idle_note(scoped.tasks, plan.micro_batches, options.exact); !note.empty())
    plan.notes.push_back(note);
  if (memory_price > 1)
    plan.notes.push_back(fmt::format(
        "The plan that is fastest without regard to memory does not fit; here a byte is worth {:g} times as much.",
        memory_price));
  check_limits(plan);
  compiler.after("plan", plan, true);
  return plan;
}

// Memory becomes dearer from attempt to attempt, until what is planned fits the devices that say how much they have.
constexpr int kPrices = 4;
double price_of(const CompileOptions& options, int attempt) { return std::ldexp(options.memory_price, 2 * attempt); }

// Where what is asked for is the same in all layers.
std::optional<Condensed> condensed_form(const Prepared& p, const CompileOptions& options, size_t more) {
  const bool waits = p.scoped.tasks.stages() > 1 && p.micro_batches == 1;  // whole stages for each other
  const bool late = !p.scoped.tasks.schedule.empty() && schedule_rule(p.scoped.tasks.schedule).split_backward;
  if (waits || late || options.prefetch || options.exact || options.adasum || options.offload ||
      !options.fetch.empty() || !options.stage_recompute.empty())
    return std::nullopt;
  constexpr double kBuckets = 2;  // that the gradients of a layer fill
  return condense(p.scoped.graph, p.scoped.tasks,
                  kBuckets * static_cast<double>(bucket_bytes(p.scoped.tasks.cost, options)), more);
}

// A model's first entry, or that of its condensed form, as far as estimates need it.
struct Lowered {
  LayoutGraph lg;
  Plan plan;
};
Lowered lowered(Prepared p, const std::vector<DeviceSpec>& devices, const CompileOptions& options, double memory_price,
                const Condensed* small) {
  if (small) p.scoped = {small->graph, small->tasks};
  const Compiler compiler{options, p.scoped.tasks, gradients_of(options)};
  const char* name = trains(p.source) ? "train" : "eval";
  Plan plan = outline(p, devices, options, memory_price);
  LayoutGraph lg =
      compiler.layout_passes(compiler.graph_passes(std::move(p.scoped.graph), name), name, plan.micro_batches, nullptr);
  plan.variables = variables_of(lg);
  plan.entries.push_back(compiler.make_entry(lg, {}, name, plan.variables, nullptr, !small));
  if (small) plan.devices.assign(plan.entries[0].rows.size(), devices[0]);
  return {std::move(lg), std::move(plan)};
}

// Few layers say what all do where one more says the same of them, and is itself what they say of it; else none.
std::optional<Estimate> condensed_estimate(const Prepared& p, const std::vector<DeviceSpec>& devices,
                                           const CompileOptions& options, double memory_price) {
  const std::optional<Condensed> few = condensed_form(p, options, 0), more = condensed_form(p, options, 1);
  if (!few || !more || few->tasks.stages() != more->tasks.stages()) return std::nullopt;
  const Lowered less = lowered(p, devices, options, memory_price, &*few);
  const Lowered whole = lowered(p, devices, options, memory_price, &*more);
  const TaskGraphs& tasks = p.scoped.tasks;
  Estimate out = estimate_of(*more, tasks, whole.lg, whole.plan);
  int64_t layers = 1, least = INT64_MAX;
  for (const auto& of_stage : more->layers)
    for (const int64_t n : of_stage) layers = std::max(layers, n);
  for (const Estimate::Class& c : out.classes) least = std::min(least, c.memory.device.total());
  const auto same = [&](const Estimate& a, const Estimate& b) { return agree(a, b, layers, least); };
  if (!same(estimate_of(*few, tasks, less.lg, less.plan), out)) return std::nullopt;
  const Condensed by_one = one_layer_less(*few, *more);
  if (!same(estimate_of(by_one, more->tasks, less.lg, less.plan), estimate_of(whole.lg, whole.plan)))
    return std::nullopt;
  return out;
}

Estimate estimate_at(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options,
                     double price) {
  Prepared p = prepare(graph, devices, options, price);
  if (std::optional<Estimate> quick = condensed_estimate(p, devices, options, price)) return std::move(*quick);
  const Lowered all = lowered(std::move(p), devices, options, price, nullptr);
  return estimate_of(all.lg, all.plan);
}

// What remedies would be missing at the plan's price of memory, as many as are estimated in `seconds`.
std::vector<Tried> tried_remedies(const Graph& graph, const std::vector<DeviceSpec>& devices,
                                  const CompileOptions& options, const Plan& plan, double seconds) {
  const std::vector<Remedy> remedies = remedies_of(plan);
  std::vector<Tried> out;
  size_t known = 0;
  try {
    const Watch watch("remedies", nullptr, seconds);
    for (; known < remedies.size(); ++known) {
      CompileOptions with = options;
      static_cast<PlanOptions&>(with) = remedies[known].options;
      try {
        out.push_back(
            {remedies[known].text, missing_bytes(estimate_at(graph, devices, with, plan.memory_price), devices)});
      } catch (const Error&) {  // not with this model and strategy
      }
    }
  } catch (const Stopped&) {
  }
  for (; known < remedies.size(); ++known) out.push_back({remedies[known].text});
  return out;
}

Plan make_fitting_plan(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  const auto began = std::chrono::steady_clock::now();
  std::optional<Plan> best;
  Shortage least;
  const auto judge = [&](Plan plan, const Shortage& shortage) {
    if (!best || shortage.bytes < least.bytes) least = shortage, best = std::move(plan);
  };
  std::vector<double> cut_short;  // prices at which the variables alone were too large
  for (int k = 0; k < kPrices; ++k) {
    Plan plan = make_plan(graph, devices, options, price_of(options, k), k == kPrices - 1);
    const Shortage shortage = shortage_of(plan);
    if (shortage.bytes == 0) return plan;
    if (plan.entries.empty())
      cut_short.push_back(price_of(options, k));
    else
      judge(std::move(plan), shortage);
  }
  for (const double price : cut_short) {
    if (missing_bytes(estimate_at(graph, devices, options, price), devices) >= least.bytes) continue;
    Plan plan = make_plan(graph, devices, options, price, true);
    const Shortage shortage = shortage_of(plan);
    judge(std::move(plan), shortage);
  }
  constexpr double kLeastSeconds = 2;
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - began;
  throw does_not_fit(*best, least,
                     tried_remedies(graph, devices, options, *best, std::max(kLeastSeconds, 2 * took.count())));
}

// The plan's source once more, for another batch, or to be looked at.
struct Regraphed {
  Compiler compiler;
  Graph whole;
};
Regraphed graph_again(const Plan& plan, const CompileOptions& options, std::string_view name, int64_t batch) {
  if (name != "train" && name != "eval") throw invalid("entry '{}', expected train or eval", name);
  if (name == "train" && !trains(plan.source))
    throw error(Code::kFailedPrecondition, "model '{}' has no loss with an optimizer; it can be evaluated only",
                plan.model);
  // Stages are cut by the plan's own batch: another one must not move them.
  Scoped scoped = scope_out(plan.source, plan.devices, options, plan.memory_price);
  check_recompute(options, scoped.tasks);
  check_micro_batches(plan.source, scoped.tasks, plan.source.training.accumulation);
  Compiler compiler{options, scoped.tasks, {}};
  for (const Entry& e : plan.entries)
    for (const PlanOutput& o : e.outputs)
      if (e.name == name && o.name.starts_with("grad:") &&
          std::find(compiler.gradients.begin(), compiler.gradients.end(), o.name.substr(5)) == compiler.gradients.end())
        compiler.gradients.push_back(o.name.substr(5));
  // What training asks of a batch (groups of samples) does not bind evaluation.
  const Graph base = name == "eval" ? for_inference(scoped.graph) : scoped.graph;
  const Graph source = batch == batch_of(plan.source) ? base : rebatch(base, batch);
  Graph whole = compiler.graph_passes(source, std::string(name));
  return {std::move(compiler), std::move(whole)};
}

LayoutGraph lay_out_again(Regraphed again, const Plan& plan, std::string_view name, int64_t batch) {
  const int64_t micro_batches = batch > 1 ? plan.source.training.accumulation : 1;
  const Homes homes = homes_of(plan.variables);
  return again.compiler.layout_passes(std::move(again.whole), std::string(name), micro_batches, &homes);
}

CompileOptions options_of(const Plan& plan) {
  CompileOptions options{plan.options};
  options.profile = plan.profile;
  options.verify_passes = false;
  return options;
}

}  // namespace

Plan compile(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& options) {
  return stoppable([&] { return make_fitting_plan(graph, devices, without_idle(options, graph)); });
}

Entry compile_entry(const Plan& plan, std::string_view name, int64_t batch) {
  if (batch < 1) throw invalid("a batch of {} samples, expected at least 1", batch);
  return stoppable([&] {
    const CompileOptions options = options_of(plan);
    Regraphed again = graph_again(plan, options, name, batch);
    const Compiler compiler = again.compiler;
    const auto indices = indices_of_inputs(again.whole);
    const LayoutGraph layouts = lay_out_again(std::move(again), plan, name, batch);
    Entry entry = compiler.make_entry(layouts, indices, std::string(name), plan.variables, nullptr);
    Shortage shortage = shortage_of(plan, entry);
    shortage.batch = batch;
    if (shortage.bytes > 0) throw does_not_fit(plan, shortage, {});
    return entry;
  });
}

void verify_source(const Plan& plan) {
  stoppable([&] {
    const CompileOptions options = options_of(plan);
    for (const Entry& entry : plan.entries)
      check_source(plan, entry, graph_again(plan, options, entry.name, entry.batch).whole);
  });
}

std::vector<BridgeRow> bridges_of(const Plan& plan) {
  return stoppable([&] {
    const CompileOptions options = options_of(plan);
    const char* name = trains(plan.source) ? "train" : "eval";
    const int64_t batch = batch_of(plan.source);
    return bridges_of(lay_out_again(graph_again(plan, options, name, batch), plan, name, batch));
  });
}

Estimate estimate(const Graph& graph, const std::vector<DeviceSpec>& devices, const CompileOptions& asked) {
  return stoppable([&] {
    const CompileOptions options = without_idle(asked, graph);
    Estimate out;
    for (int k = 0; k < kPrices; ++k) {
      const Estimate mine = estimate_at(graph, devices, options, price_of(options, k));
      const int64_t missing = missing_bytes(mine, devices);
      if (k == 0 || missing < missing_bytes(out, devices)) out = mine;
      if (missing == 0) break;
    }
    return out;
  });
}

ChoiceReport choices_of(const Plan& plan) {
  return stoppable([&] {
    const CompileOptions options = options_of(plan);
    const char* name = trains(plan.source) ? "train" : "eval";
    const auto [compiler, whole] = graph_again(plan, options, name, batch_of(plan.source));
    const ShardOptions sharding = compiler.shard_options(whole, name, plan.micro_batches, nullptr);
    return choice_report(whole, compiler.tasks, choose_cuts(whole, compiler.tasks, sharding));
  });
}

std::string location_of(const Plan& plan, std::string_view entry, std::string_view op) {
  try {
    const CompileOptions options = options_of(plan);
    for (const Op& made : graph_again(plan, options, entry, batch_of(plan.source)).whole.ops)
      if (made.name == op) return made.location;
  } catch (const Error&) {  // there is another one to tell of
  }
  return "";
}

}  // namespace whale
