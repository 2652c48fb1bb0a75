#include "session/session.h"

#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <map>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/file.h"
#include "base/philox.h"
#include "base/version.h"
#include "base/watch.h"
#include "checkpoint/checkpoint.h"
#include "checkpoint/shards.h"
#include "cluster/devices.h"
#include "cluster/host_memory.h"
#include "compile/checks.h"
#include "compile/compile.h"
#include "data/variable_part.h"
#include "ir/learning_rate.h"
#include "run/executor.h"
#include "run/flight_record.h"
#include "run/report.h"
#include "run/whole_read.h"
#include "session/cores.h"
#include "session/initialize.h"
#include "session/memory.h"
#include "session/restore.h"
#include "session/wire_peers.h"

namespace whale {
namespace {

constexpr int kMostFromRuns = 16;  // entries that runs have planned; then the oldest goes

// Of the loss in f16, as torch.cuda.amp.GradScaler has them.
constexpr double kLossScale = 65536, kLargestScale = 0x1p24, kSmallestScale = 0x1p-14;
constexpr int64_t kGrowthInterval = 2000;

constexpr double kSecondsToMeet = 300;  // until all ranks have opened their sessions

Error saying(const Error& e, std::string message) {
  Error out(e.code(), std::move(message));
  return out.at_op(e.where().op)
      .at_scope(e.where().scope)
      .at_device(e.where().device)
      .at_rank(e.where().rank)
      .with_damage(e.damage());
}

Error with_doubt(const Error& e) {
  return saying(e, fmt::format("{}. The plan was read from a file, which may be damaged or have been changed: plan "
                               "the model again",
                               e.message()));
}

// What a device cannot compute the user has to change, in this line.
Error with_location(const Error& e, const Plan& plan, const Entry& entry) {
  const std::string location = location_of(plan, entry.name, e.where().op);
  return saying(e, location.empty() ? e.message() : fmt::format("{}: {}", location, e.message()));
}

// What body() throws is told first.
template <class Body, class Tell>
std::invoke_result_t<Body> or_else(Body body, Tell tell) {
  try {
    return body();
  } catch (const std::exception& e) {
    tell(as_error(e, "open a session or begin a run"));
    throw;
  }
}

const char* entry_name(RunMode mode) { return mode == RunMode::kStep ? "train" : "eval"; }

}  // namespace

struct Session::Impl {
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<Backends> backends;
  SessionOptions options;
  pid_t process = getpid();
  int64_t iteration = 0, updates = 0;
  double fixed_learning_rate = -1;
  double loss_scale = 1;
  int64_t steps_at_scale = 0;
  uint64_t same = 0;  // of the next run
  bool trace = false;
  bool broken = false;
  LoadedCheckpoint loaded;  // the last one; format 0: none
  std::atomic<bool> closing{false};
  std::shared_ptr<RunState> run;             // of the last step or eval
  std::shared_ptr<const Cancel> run_cancel;  // kept as long as the run may look at it
  std::unique_ptr<CoreLeases::Lease> lease;
  std::unique_ptr<Machine> machine;
  struct Known {
    std::unique_ptr<Executor> executor;
    bool kept = false;  // the plan's, or prepared; false: planned by a run
    const Entry& entry() const { return executor->entry(); }
  };
  std::deque<Known> executors;  // destroyed before the machine; newest last
  int64_t planned = 0;          // entries, by this session
  Executor* last = nullptr;     // of the last run; written under record_mutex
  mutable std::mutex record_mutex;
  std::string run_error;                    // how the last run ended; likewise
  std::atomic<const char*> doing{nullptr};  // besides runs: "in a save"
  class Does {
   public:
    Does(Impl& impl, const char* what) : doing_(impl.doing) { doing_ = what; }
    ~Does() { doing_ = nullptr; }
    Does(const Does&) = delete;
    Does& operator=(const Does&) = delete;

   private:
    std::atomic<const char*>& doing_;
  };

  Impl(std::shared_ptr<const Plan> plan_, std::shared_ptr<Backends> backends_, const SessionOptions& options_)
      : plan(std::move(plan_)), backends(std::move(backends_)), options(options_) {
    if (options.world && options.world->size() == 1) options.world.reset();
    or_else([&] { check_options(); },
            [&](const Error& e) {
              if (!is_alone()) refuse(*options.world, e);
            });
    or_else([&] { stoppable([&] { agree_with_world(); }); },
            [&](const Error& e) {
              if (e.code() == Code::kCancelled) refuse(*options.world, e);
              leave_world(e);
            });
    or_else([&] { stoppable([&] { open(); }); }, [&](const Error& e) { leave_world(e); });
    if (tells_place()) options.world->whereabouts->add(options.world->number, [this] { return whereabouts(); });
  }

  void check_options() {
    if (options.loss_scale != 0 && !(options.loss_scale >= kSmallestScale && options.loss_scale <= kLargestScale))
      throw invalid("a loss scale of {}, expected 2^-14 to 2^24, or 0, which means {}", options.loss_scale, kLossScale);
    if (!scales_loss() && (options.loss_scale > 0 || options.loss_scale_growth > 0))
      throw invalid(
          "a loss scale is given, and the plan's precision is not f16, which alone scales the loss; plan with f16, or "
          "leave it out");
    if (scales_loss()) loss_scale = options.loss_scale > 0 ? options.loss_scale : kLossScale;
    if (options.threads < 0) throw invalid("{} threads per device; 0 means its share of the cores", options.threads);
    if (plan->devices.empty() || plan->entries.empty())
      throw invalid("the plan of '{}' has no devices or no entries", plan->model);
    check_kinds(plan->devices);
    check_copies(*plan);
    if (is_alone()) return;
    options.pin = false;  // ranks know nothing of each other's cores
    options.world->ranks = ranks_of_devices(options.world->size(), plan->devices.size());
  }

  void open() {
    check_memory(*plan, host_memory(), ranks(), rank());
    // Another number of threads may cut a reduction in another way.
    const int threads = plan->options.exact && options.threads == 0 ? 1 : options.threads;
    const size_t cores = usable_cores().size();
    if (!options.leases) options.leases = std::make_shared<CoreLeases>();
    lease = CoreLeases::lease(options.leases, devices_here(), threads, options.pin);
    machine = std::make_unique<Machine>(*plan, open_devices(lease->specs(), std::min(threads, static_cast<int>(cores))),
                                        options.world);
    machine->warn = options.warn;
    // What null devices hold is never computed with: no hours are spent on drawing 10^12 values.
    if (traits(plan->devices.front().kind).computes)
      initialize_variables(*machine, options.seed, cores, options.init_files);
    for (const Entry& entry : plan->entries) add_executor(entry, true);
  }

  // A null device leaves what it should have written as it was; alone it times the engine, beside others its garbage is
  // trained on.
  static void check_kinds(const std::vector<DeviceSpec>& devices) {
    for (size_t d = 0; d < devices.size(); ++d)
      for (const DeviceSpec& other : devices)
        if (!traits(devices[d].kind).computes && traits(other.kind).computes)
          throw invalid(
              "device {} of the plan is '{}' beside '{}': null devices compute nothing, and the others would train on "
              "what they leave; run on devices that compute, or on null devices alone",
              d, to_string(devices[d]), to_string(other))
              .at_device(static_cast<int>(d));
  }

  // Each kind of device rounds in its own way: copies that a step writes drift apart. What none writes stays as it was
  // initialized or loaded.
  static void check_copies(const Plan& plan) {
    const auto unlike = [&](size_t a, size_t b) { return plan.devices[a].kind != plan.devices[b].kind; };
    const std::vector<bool> written = written_variables(plan);
    for (size_t v = 0; v < plan.variables.size(); ++v) {
      if (!written[v]) continue;
      for (const HeldPart& held : held_parts(plan, plan.variables[v]))
        for (const size_t d : held.devices)
          if (held.part.bytes() > 0 && unlike(d, held.devices[0]))
            throw invalid(
                "variable '{}' has copies on device {} ('{}') and device {} ('{}'), and kinds of devices round in ways "
                "of their own: the copies would drift apart. Run on devices of one kind, or by a strategy that leaves "
                "no copies on devices of unlike kinds, such as a pipeline",
                plan.variables[v].name, held.devices[0], to_string(plan.devices[held.devices[0]]), d,
                to_string(plan.devices[d]))
                .at_device(static_cast<int>(d));
    }
  }
  static std::vector<bool> written_variables(const Plan& plan) {
    std::vector<bool> written(plan.variables.size());
    for (const Entry& entry : plan.entries)
      for (const Program& program : entry.programs)
        for (const Segment& segment : program.segments)
          for (const Instruction& instruction : segment.instructions)
            for (const BufferId id : instruction.out)
              if (const Buffer& buffer = program.buffers[id]; buffer.kind == BufferKind::kVariable)
                written[buffer.ref] = true;
    return written;
  }

  // ---- the world --------------------------------------------------------------------------------------------------
  bool is_alone() const { return !options.world; }
  const std::vector<int32_t>& ranks() const {  // of the devices; empty: all are here
    static const std::vector<int32_t> none;
    return is_alone() ? none : options.world->ranks;
  }
  int rank() const { return is_alone() ? 0 : options.world->rank(); }
  bool is_here(size_t device) const { return is_alone() || ranks()[device] == rank(); }

  // Which cores a process may use is its own affair, unless they were named.
  static Plan without_cores(Plan plan) {
    for (DeviceSpec& device : plan.devices)
      if (!device.named) device.cores.clear();
    return plan;
  }

  // Before anything is taken: all ranks run the same.
  void agree_with_world() const {
    if (is_alone()) return;
    const Plan compared = without_cores(*plan);
    const std::vector<uint8_t> bytes = serialize(compared);
    const uint64_t digest = hash_name({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    std::string planned_with;
    for (const auto& [name, value] : attrs_of(plan->options))
      planned_with += fmt::format(" {}={}", name, to_string(value));
    // What tells most is first: the first line that differs is shown.
    agree(*options.world,
          fmt::format("libwhale {}\nstrategy {}\nbatch {}\nmicro-batches {}\nprecision {}\noptions of the plan{}\n"
                      "optimizer {} with learning rate {}\ndevices {}\nmodel '{}' {:016x}\nplan {:016x}\nseed {}\n"
                      "nan policy {}\nloss scale {} growth {}\nranks of the devices {}\n",
                      kVersion, plan->strategy, plan->entries.front().batch, plan->micro_batches,
                      kPrecisions[static_cast<size_t>(plan->precision)], planned_with, optimizer_name(plan->optimizer),
                      plan->optimizer.learning_rate, to_string(compared.devices), plan->model, plan->model_hash, digest,
                      options.seed, static_cast<int>(options.nan_policy), options.loss_scale, options.loss_scale_growth,
                      fmt::join(ranks(), ",")),
          kSecondsToMeet);
  }

  bool tells_place() const { return !is_alone() && options.world->whereabouts != nullptr; }
  Whereabouts::Place whereabouts() const {
    if (const char* now = doing.load()) return {true, now};
    const std::lock_guard lock(record_mutex);
    return last == nullptr ? Whereabouts::Place{false, "in no run yet"} : last->whereabouts();
  }

  // The others' later runs end with this.
  void leave_world(const Error& why) noexcept {
    if (is_alone()) return;
    try {
      options.world->wire->tell(notice_of(Notice::kClosed, why));
    } catch (...) {  // no memory for a notice
    }
  }

  std::vector<DeviceSpec> devices_here() const {
    std::vector<DeviceSpec> specs;
    for (size_t d = 0; d < plan->devices.size(); ++d)
      if (is_here(d)) specs.push_back(plan->devices[d]);
    return specs;
  }

  // In the order of the plan's; null: another rank's. `specs`: of those that are here.
  std::vector<std::unique_ptr<Device>> open_devices(const std::vector<DeviceSpec>& specs, int threads) {
    std::vector<std::unique_ptr<Device>> devices(plan->devices.size());
    auto spec = specs.begin();
    for (size_t d = 0; d < devices.size(); ++d) {
      if (!is_here(d)) continue;
      try {
        devices[d] =
            backends->get(spec->kind).open(*spec, {.threads = threads, .pin = options.pin, .bf16 = options.bf16});
      } catch (Error& e) {
        throw Error(e.at_device(static_cast<int>(d)));
      }
      ++spec;
    }
    return devices;
  }

  ~Impl() {
    if (getpid() != process) {
      // The threads exist in the parent only; everything that would wait for them is left alone.
      machine->team().abandon();
      for (Known& known : executors) (void)known.executor.release();
      (void)machine.release();
      return;
    }
    closing.store(true);
    if (tells_place()) options.world->whereabouts->remove(options.world->number);
    if (run) run->wait(-1);
    machine->team().wait_idle();
    leave_world(error(Code::kUnavailable, "its session is closed"));
  }

  bool scales_loss() const { return plan->precision == Precision::kFloat16; }

  void check_process() const {
    if (getpid() != process)
      throw error(Code::kFailedPrecondition,
                  "this session was made before fork(); its threads are in the parent process. Make a new session in "
                  "the child");
  }
  void check_idle() const {
    check_process();
    if (run && !run->done())
      throw error(Code::kFailedPrecondition, "a run of this session is under way; wait for its event first");
  }
  void settle() {
    check_process();
    if (run) run->wait(-1);
  }
  void check_computes() const {
    for (size_t d = 0; d < plan->devices.size(); ++d)
      if (!traits(plan->devices[d].kind).computes)
        throw error(
            Code::kFailedPrecondition,
            "nothing of '{}' is saved: device {} of the plan is '{}', which computes nothing and holds no values; "
            "run on devices that compute, such as 'cpu:1'",
            plan->model, d, to_string(plan->devices[d]))
            .at_device(static_cast<int>(d));
  }
  void check_whole() const {
    if (broken)
      throw error(Code::kFailedPrecondition,
                  "an update of an earlier step was interrupted; make a new session and load a checkpoint")
          .with_damage(Damage::kSession);
  }

  // ---- entries ----------------------------------------------------------------------------------------------------
  bool doubts(const Error& e) const { return options.plan_from_file && e.code() == Code::kInternal; }

  std::unique_ptr<Executor> bound(const Entry& entry) {
    try {
      return std::make_unique<Executor>(*machine, entry);
    } catch (const Error& e) {
      if (e.code() == Code::kUnimplemented) throw with_location(e, *plan, entry);
      if (!doubts(e)) throw;
      throw with_doubt(e);
    }
  }

  Executor& add_executor(const Entry& entry, bool kept) {
    std::unique_ptr<Executor> executor = bound(entry);
    if (!kept && std::ranges::count(executors, false, &Known::kept) >= kMostFromRuns) {
      const auto oldest = std::ranges::find(executors, false, &Known::kept);
      const std::lock_guard lock(record_mutex);
      if (oldest->executor.get() == last) last = nullptr;
      executors.erase(oldest);
    }
    executors.push_back({std::move(executor), kept});
    return *executors.back().executor;
  }

  Executor& plan_executor(RunMode mode, int64_t batch, bool kept) {
    int64_t largest = 0;
    for (const Entry& entry : plan->entries)
      if (entry.name == entry_name(RunMode::kStep)) largest = std::max(largest, entry.batch);
    if (mode == RunMode::kStep && largest > 0 && batch > largest)
      throw invalid("a batch of {} samples; this plan is for at most {}. Make a plan for the larger batch", batch,
                    largest);
    const Entry entry = compile_entry(*plan, entry_name(mode), batch);
    check_memory(*machine, *plan, entry, host_memory());
    std::vector<DeviceMemory::Areas> before(machine->size());
    for (size_t d = 0; d < machine->size(); ++d)
      if (machine->is_here(d)) before[d] = machine->memory(d).areas();
    try {
      Executor& made = add_executor(entry, kept);
      ++planned;
      return made;
    } catch (...) {
      for (size_t d = 0; d < machine->size(); ++d)
        if (machine->is_here(d)) machine->memory(d).restore(before[d]);
      throw;
    }
  }

  void check_may_plan(RunMode mode, int64_t batch) const {
    if (options.plan_in_run || (mode == RunMode::kStep && !trains(plan->source))) return;  // which planning refuses
    std::string there;
    for (const Known& k : executors)
      there += fmt::format("{}{} of {}", there.empty() ? "" : ", ", k.entry().name, k.entry().batch);
    throw error(Code::kFailedPrecondition,
                "'{}' has no entry '{}' of {} samples, and this session plans none in a run (plan_in_run is 0); it has "
                "{}. Ask for the size when the plan is made ({}_batches) or before the run (whale_session_prepare), or "
                "let runs plan",
                plan->model, entry_name(mode), batch, there, entry_name(mode));
  }

  Known* known(RunMode mode, int64_t batch) {
    for (Known& k : executors)
      if (k.entry().batch == batch && k.entry().name == entry_name(mode)) return &k;
    return nullptr;
  }

  // The ports of a mode, from any entry of it: names and types are the same for all batch sizes.
  const Entry& any_entry(RunMode mode) {
    for (const Known& k : executors)
      if (k.entry().name == entry_name(mode)) return k.entry();
    const int64_t batch = plan->entries.front().batch;
    check_may_plan(mode, batch);
    return plan_executor(mode, batch, false).entry();
  }

  Executor& executor(RunMode mode, const std::vector<NamedHost>& inputs, int64_t slices_of) {
    const Entry& any = any_entry(mode);
    return executor(mode, slices_of > 0 ? slices_of : batch_of(any.inputs, inputs, any.batch));
  }

  Executor& executor(RunMode mode, int64_t batch) {
    if (const Known* k = known(mode, batch)) return *k->executor;
    check_may_plan(mode, batch);
    return plan_executor(mode, batch, false);
  }

  void prepare(RunMode mode, int64_t batch) {
    check_idle();
    if (batch_of(plan->source) == 0)
      throw invalid(
          "{} samples are asked for, and no input of '{}' counts samples: give the input that has them a batch "
          "dimension",
          batch, plan->model);
    if (Known* k = known(mode, batch))
      k->kept = true;
    else
      plan_executor(mode, batch, true);
  }

  // ---- runs -------------------------------------------------------------------------------------------------------
  double learning_rate() const {
    return fixed_learning_rate >= 0 ? fixed_learning_rate
                                    : learning_rate_at(plan->optimizer.learning_rate, plan->lr_schedule, updates);
  }

  Executor& prepared(RunMode mode, const std::vector<NamedHost>& inputs, const std::vector<NamedHost>& outputs,
                     int64_t slices_of) {
    return or_refuse([&]() -> Executor& {
      Executor& chosen = executor(mode, inputs, slices_of);
      const std::vector<PlanInput>& ports = chosen.entry().inputs;
      const bool evaluates = mode == RunMode::kEval;
      chosen.take_slices(slices_of > 0);
      if (slices_of > 0)
        bind_slices(ports, chosen.input_slices(), rank(), inputs, evaluates, chosen.inputs());
      else
        bind_inputs(ports, inputs, evaluates, chosen.inputs());
      bind_outputs(chosen.entry().outputs, outputs, chosen.outputs());
      if (evaluates) chosen.narrow_to_outputs();
      static const std::vector<InputSlices> whole;
      check_indices(ports, chosen.inputs(), chosen.inputs_read(), slices_of > 0 ? chosen.input_slices() : whole);
      return chosen;
    });
  }
  // What the other ranks begin, which wait for this one: they are told that it does not.
  template <class Body>
  std::invoke_result_t<Body> or_refuse(Body body) {
    return or_else(body, [&](const Error& e) { Executor::refuse(*machine, e); });
  }

  RunHandle start(RunMode mode, const std::vector<NamedHost>& inputs, const std::vector<NamedHost>& outputs,
                  std::shared_ptr<const Cancel> cancel, int64_t slices_of) {
    check_idle();
    const uint64_t same_of_this = std::exchange(same, 0);
    check_whole();
    if (mode == RunMode::kStep && iteration >= kMostIterations)
      throw error(Code::kFailedPrecondition, "the session is at iteration {}, the last that a checkpoint can name",
                  iteration);
    Executor& chosen = prepared(mode, inputs, outputs, slices_of);
    run = std::make_shared<RunState>();
    run_cancel = std::move(cancel);
    {
      const std::lock_guard lock(record_mutex);
      last = &chosen;
      run_error.clear();
    }
    StepValues values;
    values.seed = options.seed;
    values.iteration = iteration;
    values.updates = updates;
    values.learning_rate = learning_rate();
    values.loss_scale = loss_scale;
    values.same = same_of_this;
    // In f16 a loss that is not finite is an overflow: the step changes nothing, and the scale falls.
    values.check_loss = mode == RunMode::kStep && options.nan_policy == NanPolicy::kError && !scales_loss();
    values.timeline = trace;
    values.cancel = run_cancel ? &run_cancel->flag() : nullptr;
    values.closing = &closing;
    chosen.start(values, mode == RunMode::kStep ? &step_ended : &eval_ended, this);
    return RunHandle(run);
  }

  // On a device thread. The counters are read by the caller's thread once the state is done.
  static void step_ended(void* self, std::optional<Error>& error, bool committed) {
    Impl& impl = *static_cast<Impl*>(self);
    if (!error || committed) {
      ++impl.iteration;
      const bool overflow = impl.scales_loss() && impl.last->overflowed();
      impl.updates += committed && !overflow ? 1 : 0;
      if (impl.scales_loss() && !error) impl.adjust_scale(overflow, error);
    }
    if (error && error->damage() >= Damage::kSession) impl.broken = true;
    finish(impl, error);
  }
  void adjust_scale(bool overflow, std::optional<Error>& error) {
    const double before = loss_scale;
    if (!overflow) {
      if (++steps_at_scale < (options.loss_scale_growth > 0 ? options.loss_scale_growth : kGrowthInterval)) return;
      loss_scale = std::min(2 * loss_scale, kLargestScale);
    } else if (loss_scale > kSmallestScale) {
      loss_scale /= 2;
    } else if (options.nan_policy == NanPolicy::kError) {
      error = whale::error(Code::kOutOfRange,
                           "step {}: the loss or a gradient is not finite with the smallest loss scale of {}; the step "
                           "was not applied. Look at the learning rate and the data, or train in bf16 or f32",
                           iteration - 1, loss_scale);
    }
    steps_at_scale = 0;
    if (loss_scale != before && options.loss_scale_changed) options.loss_scale_changed(before, loss_scale);
  }
  static void eval_ended(void* self, std::optional<Error>& error, bool) { finish(*static_cast<Impl*>(self), error); }
  static void finish(Impl& impl, std::optional<Error>& error) {
    if (error && impl.doubts(*error)) error = with_doubt(*error);
    if (error) impl.keep_record(*error);
    const std::shared_ptr<RunState> state = impl.run;  // the next run may replace it as soon as this one is done
    state->finish(std::move(error));
  }

  // ---- flight records -----------------------------------------------------------------------------------------------
  std::string flight_record() const {
    check_process();
    const std::lock_guard lock(record_mutex);
    return flight_record_json(*machine, last, run_error);
  }
  // In the folder that the environment names. A failure of it is no failure of the run, and the error says so.
  void keep_record(Error& error) noexcept {
    try {
      {
        const std::lock_guard lock(record_mutex);
        run_error = error.message();
      }
      if (const char* folder = std::getenv("WHALE_FLIGHT_RECORDER");
          folder && *folder) {  // NOLINT(concurrency-mt-unsafe)
        const std::string text = flight_record();
        std::filesystem::create_directories(folder);
        replace_file(fmt::format("{}/rank-{}.json", folder, rank()), text.data(), text.size());
      }
    } catch (const std::exception& e) {
      try {
        error = saying(error, fmt::format("{}; its flight record is not written: {}", error.message(), e.what()));
      } catch (...) {  // no memory for it
      }
    }
  }

  // ---- variables --------------------------------------------------------------------------------------------------
  size_t find(std::string_view name) const {
    for (size_t v = 0; v < plan->variables.size(); ++v)
      if (plan->variables[v].name == name) return v;
    throw error(Code::kNotFound, "there is no variable '{}' in '{}'; optimizer state is called PARAMETER/STATE", name,
                plan->model);
  }

  void check_fits(const PlanVariable& variable, const HostTensor& tensor) const {
    if (tensor.dtype != variable.dtype || tensor.dims != variable.dims)
      throw invalid("variable '{}' is {} {}, the tensor given is {} {}", variable.name, name_of(variable.dtype),
                    to_string(variable.dims), name_of(tensor.dtype), to_string(tensor.dims));
    if (tensor.data == nullptr && tensor.bytes() != 0)
      throw invalid("the tensor for variable '{}' has no data (null pointer)", variable.name);
  }

  size_t find_copy(std::string_view name, const HostTensor& to, int64_t copy) const {
    const size_t index = find(name);
    check_fits(plan->variables[index], to);
    const auto count = static_cast<int64_t>(machine->copies(index).size());
    if (copy < 0 || copy >= count)
      throw invalid("copy {} of variable '{}', which has {}: 0 to {}", copy, name, count, count - 1);
    return index;
  }

  // ---- checkpoints ------------------------------------------------------------------------------------------------
  CheckpointPart part(bool state) {
    if (!is_alone()) return shards(state);
    CheckpointPart part;
    std::vector<size_t> indices;
    for (size_t v = 0; v < plan->variables.size(); ++v) {
      const PlanVariable& variable = plan->variables[v];
      if ((variable.role == Role::kState) != state) continue;
      part.tensors.push_back({variable.name, variable.dtype, variable.dims, 0, 0});
      indices.push_back(v);
    }
    part.source = [this, indices](size_t index, uint64_t offset, void* to, size_t bytes) {
      machine->read_variable(indices[index], 0, offset, to, bytes);
    };
    return part;
  }

  // What this rank writes of them. Every rank finds the same for all.
  CheckpointPart shards(bool state) {
    CheckpointPart part;
    std::vector<std::pair<size_t, VariablePart>> pieces;
    Shards all(options.world->size());
    for (size_t v = 0; v < plan->variables.size(); ++v) {
      const PlanVariable& variable = plan->variables[v];
      std::vector<HeldBy> held;
      for (const HeldPart& h : held_parts(*plan, variable)) {
        held.push_back({h.part.part(), {}});
        for (const size_t d : h.devices) held.back().ranks.push_back(ranks()[d]);
        std::ranges::sort(held.back().ranks);
        held.back().ranks.erase(std::unique(held.back().ranks.begin(), held.back().ranks.end()),
                                held.back().ranks.end());
      }
      // Both files are shared out together.
      const auto mine = all.next(variable.dims, size_of(variable.dtype), held)[rank()];
      if ((variable.role == Role::kState) != state) continue;
      for (const Part& piece : mine) {
        const bool whole = piece == part_of(variable.dims, std::vector<SubAxisCut>{});
        const std::string name = whole ? variable.name : fmt::format("{}[{}]", variable.name, to_text(piece));
        part.tensors.push_back({name, variable.dtype, piece.extents(), 0, 0});
        if (!whole) part.parts[name] = {variable.name, variable.dims, piece};
        pieces.emplace_back(v, VariablePart(piece, variable.dims, size_of(variable.dtype)));
      }
    }
    part.source = [this, pieces](size_t index, uint64_t offset, void* to, size_t bytes) {
      machine->read_part(pieces[index].first, pieces[index].second, offset, to, bytes);
    };
    return part;
  }
};

Session::Session(std::shared_ptr<const Plan> plan, std::shared_ptr<Backends> backends, const SessionOptions& options)
    : impl_(std::make_unique<Impl>(std::move(plan), std::move(backends), options)) {}

Session::~Session() = default;

RunHandle Session::step(const std::vector<NamedHost>& inputs, const std::vector<NamedHost>& outputs,
                        std::shared_ptr<const Cancel> cancel, int64_t slices_of) {
  return impl_->start(RunMode::kStep, inputs, outputs, std::move(cancel), slices_of);
}

RunHandle Session::eval(const std::vector<NamedHost>& inputs, const std::vector<NamedHost>& outputs,
                        std::shared_ptr<const Cancel> cancel, int64_t slices_of) {
  return impl_->start(RunMode::kEval, inputs, outputs, std::move(cancel), slices_of);
}

const InputSlices& Session::input_slices(RunMode mode, int64_t batch, std::string_view input) {
  impl_->check_idle();
  const Executor& executor = impl_->executor(mode, batch > 0 ? batch : impl_->plan->entries.front().batch);
  const std::vector<PlanInput>& ports = executor.entry().inputs;
  const auto port = std::ranges::find(ports, input, &PlanInput::name);
  if (port == ports.end()) throw invalid("{} has no input '{}'", entry_name(mode), input);
  return executor.input_slices()[port - ports.begin()];
}

void Session::prepare(RunMode mode, int64_t batch) { impl_->prepare(mode, batch); }

std::vector<EntryInfo> Session::entries() const {
  std::vector<EntryInfo> out;
  for (const Impl::Known& k : impl_->executors)
    out.push_back({k.entry().name == entry_name(RunMode::kStep) ? RunMode::kStep : RunMode::kEval, k.entry().batch,
                   impl_->plan->find_entry(k.entry().name, k.entry().batch) == nullptr});
  return out;
}

int64_t Session::planned() const { return impl_->planned; }

std::vector<TensorType> Session::output_types(RunMode mode, const std::vector<NamedHost>& inputs,
                                              const std::vector<std::string>& names, int64_t slices_of) {
  impl_->check_idle();
  const Entry& entry = impl_->executor(mode, inputs, slices_of).entry();
  std::vector<TensorType> types;
  for (const std::string& name : names) {
    const auto at =
        std::find_if(entry.outputs.begin(), entry.outputs.end(), [&](const PlanOutput& o) { return o.name == name; });
    if (at == entry.outputs.end()) {
      std::string known;
      for (const PlanOutput& output : entry.outputs) known += (known.empty() ? "" : ", ") + output.name;
      throw invalid(
          "there is no output '{}'; the plan has: {}. Others are fetched by naming them when the plan is made", name,
          known);
    }
    types.push_back({at->dtype, at->dims});
  }
  return types;
}

std::vector<std::string> Session::output_names(RunMode mode) const {
  impl_->settle();
  std::vector<std::string> names;
  for (const PlanOutput& output : impl_->any_entry(mode).outputs) names.push_back(output.name);
  return names;
}

std::vector<VariableInfo> Session::variables() const {
  std::vector<VariableInfo> list;
  for (size_t v = 0; v < impl_->plan->variables.size(); ++v) {
    const PlanVariable& variable = impl_->plan->variables[v];
    list.push_back({variable.name, variable.role, variable.dtype, variable.dims, impl_->machine->copies(v)});
  }
  return list;
}

TensorType Session::variable_type(std::string_view name) const {
  const PlanVariable& variable = impl_->plan->variables[impl_->find(name)];
  return {variable.dtype, variable.dims};
}

void Session::read(std::string_view name, const HostTensor& to, int64_t copy) {
  impl_->settle();
  const Impl::Does reads(*impl_, "in a read of a variable");
  const auto copy_number = static_cast<size_t>(copy);
  if (impl_->is_alone()) {
    impl_->machine->read_variable(impl_->find_copy(name, to, copy), copy_number, 0, to.data, to.bytes());
    return;
  }
  const size_t index = impl_->or_refuse([&] { return impl_->find_copy(name, to, copy); });
  read_whole(*impl_->machine, index, copy_number, to.data, to.bytes());
}

size_t Session::read_here(std::string_view name, const HostTensor& to, int64_t copy) {
  impl_->settle();
  return impl_->machine->read_variable(impl_->find_copy(name, to, copy), static_cast<size_t>(copy), 0, to.data,
                                       to.bytes());
}

void Session::write(std::string_view name, const HostTensor& from) {
  impl_->settle();
  const size_t index = impl_->find(name);
  impl_->check_fits(impl_->plan->variables[index], from);
  impl_->machine->write_variable(index, 0, from.data, from.bytes());
  impl_->machine->variable_written(index);
}

void Session::set_learning_rate(double learning_rate) {
  impl_->settle();
  if (!(learning_rate >= 0 && learning_rate <= kLargestLearningRate) && learning_rate != -1)
    throw invalid("learning rate is {}, expected 0 to {}, or -1: the schedule again", learning_rate,
                  kLargestLearningRate);
  impl_->fixed_learning_rate = learning_rate;
}

double Session::learning_rate() const {
  impl_->settle();
  return impl_->learning_rate();
}
int64_t Session::iteration() const {
  impl_->settle();
  return impl_->iteration;
}
int64_t Session::updates() const {
  impl_->settle();
  return impl_->updates;
}
double Session::loss_scale() const {
  impl_->settle();
  return impl_->loss_scale;
}
uint64_t Session::seed() const { return impl_->options.seed; }

void Session::save(const std::string& directory) {
  impl_->settle();
  const Impl::Does saves(*impl_, "in a save");
  CheckpointPart model, optimizer;
  impl_->or_refuse([&] {
    impl_->check_computes();
    impl_->check_whole();
    model = impl_->part(false), optimizer = impl_->part(true);
  });
  CheckpointMeta meta{impl_->plan->model,
                      impl_->options.seed,
                      impl_->iteration,
                      impl_->updates,
                      {},
                      {},
                      0,
                      optimizer_name(impl_->plan->optimizer)};
  if (impl_->fixed_learning_rate >= 0) meta.learning_rate = impl_->fixed_learning_rate;
  if (impl_->scales_loss()) meta.loss_scale = impl_->loss_scale, meta.steps_at_scale = impl_->steps_at_scale;
  std::optional<WirePeers> peers;
  if (!impl_->is_alone()) peers.emplace(*impl_->machine, "save");
  write_checkpoint(directory, meta, model, optimizer, {}, peers ? &*peers : nullptr);
}

void Session::load(const std::string& directory) {
  impl_->settle();
  const Impl::Does loads(*impl_, "in a load");
  std::optional<WirePeers> peers;
  if (!impl_->is_alone()) peers.emplace(*impl_->machine, "load");
  // On all ranks or on none.
  const auto together = [&](const std::function<void()>& work) { peers ? agree(*peers, work) : work(); };
  const Checkpoint checkpoint = peers ? open_checkpoint(directory, *peers) : open_checkpoint(directory);
  std::optional<Restoration> restoration;
  together([&] {
    restoration.emplace(*impl_->plan, checkpoint, RankOf{impl_->ranks(), impl_->rank(), peers ? peers->size() : 1});
    restoration->verify();
  });
  if (peers) peers->finish();
  try {
    together([&] { restoration->write_to(*impl_->machine); });
  } catch (Error& e) {
    impl_->broken = true;
    throw Error(e.with_damage(Damage::kSession));
  }
  const CheckpointMeta& meta = checkpoint.index.meta;
  impl_->options.seed = meta.seed;
  impl_->iteration = meta.iteration;
  impl_->updates = meta.updates;
  impl_->fixed_learning_rate = meta.learning_rate.value_or(-1);
  if (impl_->scales_loss()) {
    impl_->loss_scale = std::clamp(meta.loss_scale.value_or(kLossScale), kSmallestScale, kLargestScale);
    impl_->steps_at_scale = meta.steps_at_scale;
  }
  impl_->broken = false;
  impl_->loaded = {directory, checkpoint.index.id,     checkpoint.index.format, checkpoint.has_checksums(),
                   meta.seed, restoration->left_out(), meta.optimizer};
}

void Session::refuse_run(const Error& why) {
  impl_->same = 0;
  Executor::refuse(*impl_->machine, why);
}

void Session::set_same(uint64_t number) {
  impl_->check_idle();
  impl_->same = number;
}

const LoadedCheckpoint& Session::loaded() const { return impl_->loaded; }
void Session::check_idle() const { impl_->check_idle(); }

void Session::set_trace(bool enable) {
  impl_->settle();
  impl_->trace = enable;
}

std::string Session::timeline() {
  impl_->settle();
  if (impl_->last == nullptr || !impl_->last->has_timeline())
    throw error(Code::kFailedPrecondition, "there is no timeline: switch tracing on before the run");
  return to_chrome_trace(impl_->last->timeline(), *impl_->plan, impl_->last->entry());
}

const Entry& Session::last_entry() const { return impl_->last->entry(); }

std::string Session::flight_record() const { return impl_->flight_record(); }

DeviceBytes Session::memory(size_t device) const {
  impl_->settle();
  if (device >= impl_->machine->size())
    throw invalid("device {} of '{}', which is planned for {}", device, impl_->plan->model, impl_->machine->size());
  return device_bytes(*impl_->machine, impl_->last, device);
}

std::string Session::report() {
  impl_->settle();
  const std::optional<double> scale = impl_->scales_loss() ? std::optional(impl_->loss_scale) : std::nullopt;
  return report_json(*impl_->machine, impl_->last, scale, impl_->loaded.format > 0 ? &impl_->loaded : nullptr);
}

const Plan& Session::plan() const { return *impl_->plan; }

}  // namespace whale
