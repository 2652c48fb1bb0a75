#include "compile/checks.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <map>

#include "base/error.h"
#include "base/philox.h"
#include "base/text.h"
#include "cost/measured_layers.h"
#include "cost/plausible.h"
#include "cluster/devices.h"
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
  const uint32_t trained = options.offload & ~uint32_t{kOffloadParameters};
  const bool recompute = options.recompute != Recompute::kNone || !options.stage_recompute.empty();
  const std::pair<const char*, bool> given[] = {{"accumulation", options.accumulation > 1},
                                                {"bucket_bytes", options.bucket_bytes != 0},
                                                {"train_batches", !options.train_batches.empty()},
                                                {"zero", options.zero != 0},
                                                {"state_shares", !options.state_shares.empty()},
                                                {"recompute", recompute},
                                                {"gradient_dtype", options.gradient_dtype.has_value()},
                                                {"accumulate_dtype", options.accumulate_dtype.has_value()},
                                                {"adasum", options.adasum},
                                                {"update", options.update != UpdateForm::kByCost}};
  std::string names;
  for (const auto& [name, is] : given)
    if (is) names += (names.empty() ? "" : ", ") + std::string(name);
  if (trained != 0) names += (names.empty() ? "offload of " : ", offload of ") + offload_text(trained);
  if (names.empty()) return;
  throw invalid(
      "{} of graph '{}', which has no loss with an optimizer: these options are of training; leave them out, or "
      "minimize "
      "a loss",
      names, brief(source.name));
}

}  // namespace

namespace {

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
    if (const Tensor& t = graph.tensor(id); t.batch_dim >= 0) return t.dims[static_cast<size_t>(t.batch_dim)];
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

namespace {

std::string capital(std::string text) {
  if (!text.empty()) text[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(text[0])));
  return text;
}

// Of an op as it is written, and of what a plan may make of it: a product takes a bias and an activation in.
bool is_measured(const MeasuredDevice& device, OpView view, const OpCost& cost) {
  if (device.own(shape_of(view, cost))) return true;
  if (!has_flag(view.code, kProduct) || view.inputs.size() != 3 || view.outputs.empty()) return false;
  Attrs attrs = *view.attrs;
  view.attrs = &attrs;
  for (const bool bias : {false, true}) {
    if (bias && view.present[2]) break;
    if (bias) view.present[2] = true, view.inputs[2] = {view.outputs[0].dtype, {view.outputs[0].dims.back()}};
    for (const OpCode op : all_ops()) {
      if (op != all_ops().front() && def(op).as_activation == nullptr) continue;
      attrs["activation"] = std::string(def(op).as_activation == nullptr ? "none" : def(op).as_activation);
      if (device.own(shape_of(view, cost))) return true;
    }
  }
  return false;
}

}  // namespace

std::vector<std::string> check_profile(const Profile& profile, const Graph& source, const Graph& given) {
  if (!profile.measured || profile.measured->devices.empty()) return {};
  const MeasuredProfile& measured = *profile.measured;
  std::vector<std::string> notes;
  const auto note = [&](const std::string& doubt) {
    notes.push_back(
        fmt::format("What {} says may be wrong: {}{}", measured.name(), doubt, doubt.ends_with('?') ? "" : "."));
  };
  for (const std::string& doubt : measured.doubts) note(doubt);
  const std::string of =
      measured.model.empty() ? std::string() : fmt::format(" is of model '{}' and", brief(measured.model));
  for (const auto& device : measured.devices) {
    const int64_t blocks = blocks_of(source.scopes).count;
    if (!device->layers.empty() && std::ssize(device->layers[0].layers) != blocks + 2)
      throw invalid("{}{} has times of {} layers; model '{}' has {} blocks, with the embedding and the head {} layers",
                    measured.name(), of, device->layers[0].layers.size(), source.name, blocks, blocks + 2);
  }
  const bool of_model = measured.of_ops() && !measured.model.empty();  // a table of ops is of none
  double all = 0, known = 0, ops = 0;                                  // FLOPs; kernels
  for (const Op& op : source.ops) {
    if (has_flag(op.code, kView)) continue;
    const OpView view = view_of(source, op);
    const OpCost cost = cost_of(view);
    all += cost.flops, ++ops;
    const auto has = [&](const auto& device) { return is_measured(*device, view, cost); };
    if (of_model && std::ranges::any_of(measured.devices, has)) known += cost.flops;
  }
  int64_t batch = 1;
  for (const TensorId id : source.inputs)
    if (const Tensor& t = source.tensor(id); t.batch_dim >= 0) batch = t.dims[static_cast<size_t>(t.batch_dim)];
  std::vector<std::string> doubts;
  check_layers(measured, all / static_cast<double>(std::max<int64_t>(1, batch)), ops, doubts);
  for (const std::string& doubt : doubts) note(doubt);
  if (!of_model) return notes;
  constexpr double kLeast = 0.1;  // of the work: any two models have some small op in common
  if (known < kLeast * all)
    throw invalid(
        "{}{} has hardly an op of model '{}' ({:.2g} % of its FLOPs are of ops with the same types, attributes and "
        "sizes beside the batch); measure this model with `whale profile`",
        measured.name(), of, source.name, 100 * known / all);
  if (measured.digest.empty()) return notes;
  const std::vector<uint8_t> file = serialize(given);
  const std::string digest =
      fmt::format("{:016x}", hash_name({reinterpret_cast<const char*>(file.data()), file.size()}));
  if (digest != measured.digest)
    notes.push_back(
        fmt::format("{} was measured with another graph: model '{}' of digest {}, and this is '{}' of {}. Of this "
                    "one's FLOPs {:.3g} % are of ops that it has.",
                    capital(measured.name()), brief(measured.model), brief(measured.digest, 40), source.name, digest,
                    100 * known / std::max(all, 1.0)));
  return notes;
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

namespace {

class SourceCheck {
 public:
  SourceCheck(const Plan& plan, const Entry& entry, const Graph& whole) : plan_(plan), entry_(entry), whole_(whole) {}

  void run() const {
    inputs();
    outputs();
    index_checks();
    if (&entry_ == plan_.entries.data()) variables();
    Graph claimed = plan_.source;
    claimed.name = plan_.model;
    claimed.training.optimizer = plan_.optimizer;
    claimed.training.lr_schedule = plan_.lr_schedule;
    claimed.training.precision = plan_.precision;
    if (serialize(claimed) != serialize(plan_.source))
      fail("its name, optimizer, schedule or precision are not those of its model");
  }

 private:
  template <class... A>
  [[noreturn]] void fail(fmt::format_string<A...> format, A&&... args) const {
    throw error(Code::kDataLoss, "plan '{}', entry '{}': {}; the file is damaged: plan the model again", plan_.model,
                entry_.name, fmt::format(format, std::forward<A>(args)...));
  }

  void inputs() const {
    if (entry_.inputs.size() != whole_.inputs.size())
      fail("{} inputs, the model has {}", entry_.inputs.size(), whole_.inputs.size());
    const auto indices = indices_of_inputs(whole_);
    for (size_t i = 0; i < entry_.inputs.size(); ++i) {
      const PlanInput& input = entry_.inputs[i];
      const Tensor& t = whole_.tensor(whole_.inputs[i]);
      if (input.name != t.name || input.dtype != t.dtype || input.dims != t.dims || input.batch_dim != t.batch_dim)
        fail("input '{}' is {} {}, the model's is '{}', {} {}", input.name, name_of(input.dtype), to_string(input.dims),
             t.name, name_of(t.dtype), to_string(t.dims));
      if (input.indices != indices[i])
        fail("input '{}' as an index may be {}, by the model it may be {}", input.name, ranges_text(input.indices),
             ranges_text(indices[i]));
    }
  }

  static std::string ranges_text(const std::vector<IndexRange>& ranges) {
    std::string text;
    for (const IndexRange& range : ranges) text += (text.empty() ? "" : " and ") + to_string(range);
    return text.empty() ? "anything" : text;
  }

  void outputs() const {
    std::map<std::string, TensorId> known;
    for (const NamedTensor& o : whole_.outputs) known.emplace(o.name, o.tensor);
    for (const NamedTensor& g : whole_.gradients) known.emplace("grad:" + g.name, g.tensor);
    if (whole_.training.loss != kNone) known["loss"] = whole_.training.loss;
    for (const PlanOutput& output : entry_.outputs) {
      const auto at = known.find(output.name);
      if (at == known.end()) fail("the model has no output '{}'", output.name);
      const Tensor& t = whole_.tensor(at->second);
      if (output.dtype != t.dtype || output.dims != t.dims)
        fail("output '{}' is {} {}, the model's is {} {}", output.name, name_of(output.dtype), to_string(output.dims),
             name_of(t.dtype), to_string(t.dims));
    }
  }

  // An op that checks its index does so in every program that has it, with its own limit.
  void index_checks() const {
    std::map<std::string_view, int64_t> limits;  // by the op's name; 0: its index was checked before
    for (const Op& op : whole_.ops)
      if (def(op.code).index.input >= 0) limits[op.name] = attr_int(op.attrs, kIndexLimit);
    for (const Program& program : entry_.programs) {
      std::map<std::string_view, bool> checked;
      for (const Segment& segment : program.segments)
        for (const Instruction& instruction : segment.instructions) {
          const auto at = limits.find(instruction.name);
          const work::Kernel* kernel = instruction.kernel();
          if (at == limits.end() || kernel == nullptr || def(kernel->op).index.input < 0) continue;
          const int64_t limit = attr_int(kernel->attrs, kIndexLimit);
          if (limit != 0 && limit != at->second)
            fail("op '{}' takes indices below {}, by the model below {}", instruction.name, limit, at->second);
          checked[instruction.name] |= limit == at->second;
        }
      for (const auto& [name, is] : checked)
        if (!is) fail("op '{}' does not check its index, of which the model says 0 to {}", name, limits.at(name) - 1);
    }
  }

  // Of the model's the length is known to be right (ir/verify.cc).
  static bool same_data(const Initializer& claimed, const Initializer& init) {
    if (init.kind != InitKind::kData) return claimed.data == nullptr;
    return claimed.data != nullptr && claimed.data_type == init.data_type && *claimed.data == *init.data;
  }

  void variables() const {
    if (plan_.variables.size() != whole_.variables.size())
      fail("{} variables, the model has {}", plan_.variables.size(), whole_.variables.size());
    for (size_t v = 0; v < plan_.variables.size(); ++v) {
      const PlanVariable& found = plan_.variables[v];
      const Variable& variable = whole_.variables[v];
      const Tensor& t = whole_.tensor(variable.tensor);
      if (found.name != t.name || found.dtype != t.dtype || found.dims != t.dims)
        fail("variable '{}' is {} {}, the model's is '{}', {} {}", found.name, name_of(found.dtype),
             to_string(found.dims), t.name, name_of(t.dtype), to_string(t.dims));
      // A file of initial values is named as found from where the plan lies.
      const Initializer &init = variable.init, &claimed = found.init;
      const std::string owner = variable.owner == kNone ? "" : whole_.tensor(variable.owner).name;
      if (found.role != variable.role || found.trainable != variable.trainable || found.owner != owner ||
          found.state_name != variable.state_name || claimed.kind != init.kind || claimed.a != init.a ||
          claimed.b != init.b || claimed.key != init.key || !same_data(claimed, init))
        fail("role, initializer or owner of variable '{}' are not those of the model's", found.name);
    }
  }

  const Plan& plan_;
  const Entry& entry_;
  const Graph& whole_;
};

}  // namespace

void check_source(const Plan& plan, const Entry& entry, const Graph& whole) { SourceCheck(plan, entry, whole).run(); }

}  // namespace whale
