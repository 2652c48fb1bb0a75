#include "compile/checks.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/philox.h"
#include "base/text.h"
#include "cluster/devices.h"
#include "cost/measured_layers.h"
#include "cost/plausible.h"
#include "grad/passes.h"
#include "plan/groups.h"
#include "schedule/schedule.h"
#include "schema/graph_file.h"

namespace whale {
namespace {

void check_zero(const CompileOptions& options) {
  if (options.zero < 0 || options.zero > 3) throw invalid("ZeRO level {}, expected 0 (none), 1, 2 or 3", options.zero);
  if (options.zero == 0 && options.update != UpdateForm::kSliced && !options.state_shares.empty())
    throw invalid(
        "{} shares of state are given without ZeRO or sliced updates, which alone cut state over replicas; plan with "
        "zero 1, 2 or 3 or update sliced, or leave them out",
        options.state_shares.size());
}

void check_accumulation(const CompileOptions& options, int64_t micro_batches) {
  if (options.accumulation > 1 && options.accumulation != micro_batches)
    throw invalid(
        "accumulation {} is asked for, and the pipeline has micro_batches={}: they are the same; leave one out",
        options.accumulation, micro_batches);
}

// Most rows of the schedule of all devices together: micro-batches of gpt3-175b on 1,024 devices are a third of it.
constexpr int64_t kMostRows = int64_t{1} << 22;

// Where a task may run: a nest without a stage spans several.
std::vector<const Mesh*> meshes_of(const TaskGraph& task, const TaskGraphs& tasks) {
  std::vector<const Mesh*> out;
  if (std::any_of(task.nest.begin(), task.nest.end(), [](const Scope& s) { return s.kind == ScopeKind::kStage; }))
    return {&tasks.mesh(task.stage)};
  for (const Mesh& mesh : tasks.meshes) out.push_back(&mesh);
  return out;
}

void check_gradients(const CompileOptions& options, const Graph& source, const TaskGraphs& tasks) {
  if (const auto dtype = options.gradient_dtype)
    if (*dtype != DType::kF32 && *dtype != DType::kBF16 && *dtype != DType::kF16)
      throw invalid("gradients summed in {}, expected f32, bf16 or f16", name_of(*dtype));
  if (const auto dtype = options.accumulate_dtype)
    if (*dtype != DType::kF32 && *dtype != DType::kBF16 && *dtype != DType::kF16)
      throw invalid("gradients accumulated in {}, expected f32, bf16 or f16", name_of(*dtype));
  if (options.exact && (options.adasum || options.gradient_dtype))
    throw invalid("exact mode with {}: results would depend on the number of replicas; leave one out",
                  options.adasum ? "Adasum" : "a gradient dtype");
  if (options.exact && options.accumulate_dtype)
    throw invalid(
        "exact mode with gradients accumulated in {}: sums over micro-batches are trees, of the gradients' own type; "
        "leave one out",
        name_of(*options.accumulate_dtype));
  if (!tasks.replicas.empty() && (options.adasum || options.gradient_dtype || options.accumulate_dtype))
    throw unimplemented(
        "{} with unlike replicas ({}), whose gradients are added as sums in their own type; leave one out",
        options.adasum           ? "adasum"
        : options.gradient_dtype ? "gradient_dtype"
                                 : "accumulate_dtype",
        tasks.strategy);
  if (!tasks.replicas.empty() && trains(source) && source.training.optimizer.sparse_updates)
    throw unimplemented(
        "sparse updates with unlike replicas ({}), each of which looks up rows of its own; leave sparse_updates out",
        tasks.strategy);
  if (!options.adasum) return;
  if (options.accumulate_dtype)
    throw unimplemented(
        "Adasum with gradients accumulated in {}: its products need the gradients as they are; leave one out",
        name_of(*options.accumulate_dtype));
  if (options.gradient_dtype)
    throw unimplemented("Adasum with gradient dtype {}: its products need the gradients as they are; leave one out",
                        name_of(*options.gradient_dtype));
  if (source.training.optimizer.sparse_updates)
    throw unimplemented("Adasum with sparse updates: rows of tables are no gradients of one shape; leave one out");
  const Precision precision = options.precision.value_or(source.training.precision);
  const bool narrow = is_half(precision);
  for (const Variable& v : source.variables)
    if (const Tensor& t = source.tensor(v.tensor); narrow && v.trainable && is_float(t.dtype) && size_of(t.dtype) < 4)
      throw unimplemented(
          "Adasum in 16 bits with parameters of 16 bits ('{}' is {}): what their gradients are rounded to before and "
          "after its products is not settled; plan in f32, or leave one out",
          t.name, name_of(t.dtype));
  for (const TaskGraph& task : tasks.tasks)
    for (const Mesh* mesh : meshes_of(task, tasks))
      for (size_t a = 0; a < mesh->axes.size(); ++a)
        if (mesh->axes[a].size > 1 && task.roles[a] != AxisRole::kReplica)
          throw unimplemented(
              "Adasum with a split over {} devices ('{}'): its products are over whole parameters, which no device "
              "has; "
              "use replica and pipeline alone",
              mesh->axes[a].size, mesh->axes[a].name);
}

void check_forms(const CompileOptions& options) {
  if (options.matmul_chunks < 0)
    throw invalid("{} chunks of a product, expected 1 or more (0: chosen by cost)", options.matmul_chunks);
  if (options.prefetch < 0)
    throw invalid("a prefetch of {} gathers, expected 1 or more (0: by the cost model)", options.prefetch);
  if (options.exact && (options.matmul_chunks > 1 || options.update == UpdateForm::kSliced))
    throw invalid(
        "exact mode promises the bits of every other plan, so its products are whole and so are its updates: leave out "
        "exact, or matmul_chunks and the sliced update");
}

}  // namespace

void check_options(const CompileOptions& options) {
  if (!options.search.present.empty())
    throw invalid(
        "a present strategy ('{}') is given beside {}: only a search starts from it; ask for strategy auto, or leave "
        "`present` out",
        brief(options.search.present),
        options.strategy.empty() ? "no strategy" : fmt::format("strategy '{}'", brief(options.strategy)));
  const SearchOptions& search = options.search;
  if (search.objective != Objective::kThroughput || std::isfinite(search.most_price) || search.least_throughput > 0)
    throw invalid(
        "an objective, a budget or a least throughput is given beside {}: only a search goes by them; ask for strategy "
        "auto, or leave them out",
        options.strategy.empty() ? "no strategy" : fmt::format("strategy '{}'", brief(options.strategy)));
  check_zero(options);
  check_forms(options);
}

CompileOptions without_idle(CompileOptions options, const Graph& graph) {
  const bool f32 = std::all_of(graph.tensors.begin(), graph.tensors.end(),
                               [](const Tensor& t) { return !is_float(t.dtype) || t.dtype == DType::kF32; });
  const Precision precision = options.precision.value_or(graph.training.precision);
  if (f32 && precision != Precision::kFloat64 && trains(graph))
    for (std::optional<DType>* const dtype : {&options.gradient_dtype, &options.accumulate_dtype})
      if (*dtype == DType::kF32) dtype->reset();
  return options;
}

bool trains(const Graph& graph) {
  return graph.training.loss != kNone && graph.training.optimizer.kind != OptimizerKind::kNone;
}

namespace {

// Options that are about a step of training have no meaning without one.
void check_untrained(const CompileOptions& options, const Graph& source) {
  if (trains(source)) return;
  std::string names;
  const auto name = [&](const std::string& option) { names += (names.empty() ? "" : ", ") + option; };
  if (options.accumulation > 1) name("accumulation");
  if (!options.train_batches.empty()) name("train_batches");
  const Attrs given = attrs_of(options);
  each_option(PlanOptions(), [&](const char* option, const auto&, OptionRule rule) {
    if (rule.of_training && given.contains(option)) name(option);
  });
  if (const uint32_t trained = options.offload & ~uint32_t{kOffloadParameters}; trained != 0)
    name("offload of " + offload_text(trained));
  if (names.empty()) return;
  throw invalid(
      "{} of graph '{}', which has no loss with an optimizer: these options are of training; leave them out, or "
      "minimize "
      "a loss",
      names, brief(source.name));
}

void check_batches(const CompileOptions& options, const Graph& source) {
  const int64_t own = batch_of(source);
  const auto check = [&](const char* name, const std::vector<int64_t>& batches, int64_t most) {
    for (const int64_t batch : batches) {
      if (own == 0)
        throw invalid(
            "argument `options.{}` asks for {} samples, and no input of '{}' counts samples: leave it out, or give the "
            "input that has the samples a batch dimension",
            name, batch, brief(source.name));
      if (batch > most)
        throw invalid(
            "argument `options.{}` asks for {} samples, and '{}' is trained with at most {}: make the graph for the "
            "larger batch",
            name, batch, brief(source.name), most);
    }
  };
  check("train_batches", options.train_batches, own);
  check("eval_batches", options.eval_batches, INT64_MAX);
}

bool moves_activations(const Entry& entry) {
  for (const Program& program : entry.programs)
    for (const Segment& segment : program.segments)
      for (const Instruction& i : segment.instructions)
        if (i.copies_to(Memory::kHost) && i.phase == Phase::kForward) return true;
  return false;
}

}  // namespace

std::vector<std::string> idle_notes(const Plan& plan) {
  std::vector<std::string> out;
  if (!trains(plan.source) || plan.entries.empty()) return out;
  const bool state = std::any_of(plan.variables.begin(), plan.variables.end(),
                                 [](const PlanVariable& v) { return v.role == Role::kState; });
  if ((plan.options.offload & kOffloadState) != 0 && !state)
    out.push_back("Offload of state: the optimizer keeps none, so none waits in the host's memory.");
  if (plan.options.zero == 1 && !state && most_replicas(plan.meshes) > 1)
    out.push_back("ZeRO 1 cuts the optimizer's state; this optimizer keeps none, so nothing is cut.");
  if (plan.options.prefetch > 0 && (plan.options.zero < 3 || most_replicas(plan.meshes) == 1))
    out.push_back("Prefetch is of parameters that ZeRO 3 cuts over replicas; here none are, so none are gathered.");
  if ((plan.options.offload & kOffloadActivations) != 0 && !moves_activations(plan.entries[0]))
    out.push_back(
        "Offload of activations: none is large and waits long enough to be worth a copy, so none waits in the host's "
        "memory.");
  return out;
}

void check_options(const CompileOptions& options, const Graph& source, const TaskGraphs& tasks, int64_t micro_batches) {
  check_untrained(options, source);
  check_batches(options, source);
  check_gradients(options, source, tasks);
  check_recompute(options, tasks);
  check_accumulation(options, micro_batches);
  check_micro_batches(source, tasks, micro_batches);
}

int64_t batch_of(const Graph& graph) {
  for (const TensorId id : graph.inputs)
    if (const Tensor& t = graph.tensor(id); t.batch_dim >= 0) return t.dims[t.batch_dim];
  return 0;
}

void check_micro_batches(const Graph& source, const TaskGraphs& tasks, int64_t micro_batches) {
  if (const Ints depths = read_schedule(tasks.schedule).warmup;
      !depths.empty() && depths[0] > std::max<int64_t>(micro_batches, 1))
    throw invalid(
        "strategy '{}': stage 0 is to run {} forward passes before its first backward one, and there are {} "
        "micro-batches; give depths of at most so many, or more micro-batches",
        brief(tasks.strategy), depths[0], micro_batches);
  const int64_t batch = batch_of(source);
  if (micro_batches <= 1) return;
  if (batch == 0)
    throw invalid(
        "{} micro-batches are asked for, and no input of '{}' counts samples: leave micro_batches and "
        "accumulation out, or give the input that has the samples a batch dimension",
        micro_batches, brief(source.name));
  if (micro_batches > batch)
    throw invalid(
        "{} micro-batches of a batch of {} sample(s): some would be empty; give at most {}, or a larger batch",
        micro_batches, batch, batch);
  int64_t devices = 0;
  for (const Mesh& mesh : tasks.meshes) devices += std::ssize(mesh.devices);
  if (devices > 0 && micro_batches > kMostRows / devices)
    throw error(Code::kResourceExhausted,
                "{} micro-batches on {} devices are a schedule of {} rows, at most {} are possible; give fewer",
                micro_batches, devices, static_cast<double>(micro_batches) * static_cast<double>(devices), kMostRows);
}

void check_recompute(const CompileOptions& options, const TaskGraphs& tasks) {
  if (const size_t n = options.stage_recompute.size(); n > 0 && n != tasks.stages())
    throw invalid("{} recompute policies for {} stage(s){}: give one for all, or one for each in the model's order", n,
                  tasks.stages(),
                  tasks.virtual_stages > 1 ? fmt::format(", {} on each device", tasks.virtual_stages) : "");
}

void check_devices(const std::vector<DeviceSpec>& devices, const Graph& source) {
  if (devices.empty()) throw invalid("the device list is empty, expected at least one device such as cpu:1");
  if (source.training.precision != Precision::kFloat64) return;
  for (const DeviceSpec& d : devices)
    if (!traits(d.kind).float64)
      throw invalid("precision float64 runs on ref devices only, the list has '{}'; use ref:{}", to_string(d),
                    devices.size());
}

void check_numbers(const Graph& source) {
  if (source.training.precision == Precision::kFloat64) return;
  const auto lost = [&](TensorId id, double value) {
    const DType dtype = source.tensor(id).dtype;
    return is_float(dtype) && dtype != DType::kF64 && std::isfinite(value) &&
           std::abs(value) >= 0x1.ffffffp127;  // halfway beyond float32, where bfloat16 ends too
  };
  constexpr const char* kAdvice = "which is infinite in float32: take a smaller one, or plan in float64";
  for (const Variable& v : source.variables)
    for (const double number : {v.init.a, v.init.b})
      if (lost(v.tensor, number))
        throw invalid("variable '{}': its initializer has the number {}, {}", source.tensor(v.tensor).name, number,
                      kAdvice);
  for (const Op& op : source.ops)
    if (const auto value = op.attrs.find("value");
        value != op.attrs.end() && lost(op.outputs[0], std::get<double>(value->second)))
      throw invalid("its value is {}, {}", std::get<double>(value->second), kAdvice)
          .at_op(op.name)
          .at_scope(source.scope_path(op.scope));
}

// Rounded up from what was measured: gpt3-175b on 1,024 devices in 8 stages 183 MB, m6-1t on 16 devices 114 MB. The
// graph grows fourfold with backward and updates, each stage has programs of its own, each micro-batch of a device is a
// row. Entries of other sizes are kept with their instructions.
double planning_bytes(const Graph& source, const TaskGraphs& tasks, int64_t devices, int64_t micro_batches,
                      size_t others) {
  const auto n = static_cast<double>(source.ops.size() + source.tensors.size());
  const auto stages = static_cast<double>(tasks.stages());
  return 30e6 + n * (40e3 + 1e3 * stages) + 1e3 * n * static_cast<double>(others) +
         static_cast<double>(devices) * (4e3 + 100 * static_cast<double>(micro_batches));
}

void check_memory(const CompileOptions& options, const Graph& source, const TaskGraphs& tasks, int64_t devices,
                  int64_t micro_batches) {
  const size_t others = options.train_batches.size() + options.eval_batches.size();
  const double bytes = planning_bytes(source, tasks, devices, micro_batches, others);
  if (options.max_bytes > 0 && bytes > static_cast<double>(options.max_bytes))
    throw error(Code::kResourceExhausted,
                "planning {} ops on {} devices with {} micro-batches{} would take about {:.0f} MB, engine option "
                "max_plan_bytes allows {:.0f} MB ({} bytes)",
                source.ops.size(), devices, micro_batches,
                others > 0 ? fmt::format(" and {} other batch sizes", others) : "", bytes / 1e6,
                static_cast<double>(options.max_bytes) / 1e6, options.max_bytes);
}

}  // namespace whale
