// Sessions, events and cancelling.
#include <unistd.h>
#include <algorithm>

#include "base/json.h"
#include "base/text.h"
#include "base/watch.h"
#include "cluster/devices.h"
#include "guard.h"
#include "handles.h"
#include "report/predicted_trace.h"
#include "run/team.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace whale::capi {
namespace {

constexpr const char* kRoles[] = {"parameter", "state", "buffer"};  // as Role

void check_process(int64_t process) {
  if (process != static_cast<int64_t>(::getpid())) {
    throw error(Code::kFailedPrecondition,
                "this session belongs to the parent of this process: its threads did not survive fork()");
  }
}

// A save or a load beside the caller is waited for.
Session& live(whale_session* session) {
  whale_session& s = need(session, "session");
  check_process(s.process);
  if (s.work != nullptr) s.work->settle();
  return *s.session;
}

// For what begins something: nothing else may be under way.
Session& idle(whale_session* session) {
  whale_session& s = need(session, "session");
  check_process(s.process);
  if (s.work != nullptr && s.work->under_way())
    throw error(Code::kFailedPrecondition, "a save or a load of this session is under way; wait for its event first");
  return *s.session;
}

// For answers without a status.
const Session& waited(const whale_session* session) {
  check_process(session->process);
  if (session->work != nullptr) session->work->settle();
  return *session->session;
}

// The scale of the loss has followed an overflow, or steps without one (precision f16).
void log_loss_scale(Log& log, double before, double now) noexcept try {
  if (now < before)
    log.add(WHALE_SEVERITY_WARNING, "session",
            fmt::format("a step overflowed in f16 and was not applied; the loss scale is {} now", now));
  else
    log.add(WHALE_SEVERITY_INFO, "session", fmt::format("the loss scale is {} now", now));
} catch (...) {  // no memory for the text: nothing fails for its log
}

// The newest entry, where there were `before` that the session had planned.
void log_planned(const whale_session& session, int64_t before, const char* when) {
  if (session.session->planned() == before) return;
  const EntryInfo entry = session.session->entries().back();
  session.log->add(WHALE_SEVERITY_INFO, "plan",
                   fmt::format("'{}' is planned for {} of {} samples, {}", session.session->plan().model,
                               entry.mode == RunMode::kStep ? "a step" : "an evaluation", entry.batch, when));
}

void save_and_log(Session& session, Log& log, const std::string& directory) {
  session.save(directory);
  log.add(WHALE_SEVERITY_INFO, "checkpoint",
          fmt::format("saved '{}' after {} updates to '{}'", session.plan().model, session.updates(), directory));
}

void load_and_log(Session& session, Log& log, const std::string& directory) {
  session.load(directory);
  log.add(WHALE_SEVERITY_INFO, "checkpoint",
          fmt::format("loaded '{}' after {} updates from '{}'", session.plan().model, session.updates(), directory));
  const LoadedCheckpoint& loaded = session.loaded();
  if (!loaded.checksums)
    log.add(WHALE_SEVERITY_WARNING, "checkpoint",
            fmt::format("'{}' has no checksums: a changed byte in it would not have been noticed; save it again",
                        directory));
  if (!loaded.left_out.empty())
    log.add(
        WHALE_SEVERITY_WARNING, "checkpoint",
        fmt::format("'{}' holds optimizer state that this plan keeps none of ({} tensors, such as '{}'): it was left "
                    "out",
                    directory, loaded.left_out.size(), loaded.left_out[0]));
}

// Of a save or a load. The other ranks of a world, which begin one, are told what is refused here.
template <class Body>
std::invoke_result_t<Body> or_refuse(Session& session, Body body) {
  try {
    return body();
  } catch (const std::exception& e) {
    session.refuse_run(as_error(e, "begin what the other ranks have begun"));
    throw;
  }
}

// A save or a load on a thread of its own.
void begin(whale_session* session, whale_str directory, whale_cancel* cancel, whale_event** out,
           void (*work)(Session&, Log&, const std::string&), const char* what, const char* call) {
  Session& s = idle(session);
  need(out, "out");
  s.check_idle();
  const auto started = [&] {
    auto event = std::make_unique<whale_event>();
    event->process = session->process;
    event->work = AsyncWork::start(
        [&s, work, what, path = nonempty(directory, "directory"), log = session->log,
         token = cancel == nullptr ? nullptr : cancel->cancel] {
          const Watch watch(what, token == nullptr ? nullptr : &token->flag(), 0);
          or_refuse(s, [] { Watch::look(); });
          work(s, *log, path);
        },
        call);
    return event;
  };
  auto event = or_refuse(s, started);
  session->work = event->work;
  event->run = RunHandle(event->work->state());
  *out = event.release();
}

// The ports of the plan's entries, in their order: those of a step first.
template <class Port>
void add_ports(std::vector<whale_session_port>& to, const std::vector<Port>& ports, bool step) {
  for (const Port& port : ports) {
    auto at = std::ranges::find(to, port.name, &whale_session_port::name);
    if (at == to.end()) {
      const bool input = std::is_same_v<Port, PlanInput>;  // an output's is that of how its parts are joined
      to.push_back({port.name, port.dtype, port.dims, input ? port.batch_dim : -1});
      at = to.end() - 1;
    }
    (step ? at->in_step : at->in_eval) = true;
  }
}

int32_t number_of(const std::vector<whale_session_port>& ports, const std::string& name, const char* what) {
  const auto at = std::ranges::find(ports, name, &whale_session_port::name);
  if (at != ports.end()) return static_cast<int32_t>(at - ports.begin());
  std::string known;
  for (const whale_session_port& port : ports) known += (known.empty() ? "" : ", ") + port.name;
  throw error(Code::kNotFound, "there is no {} '{}'; the plan has: {}{}", what, brief(name), known,
              std::string_view(what) == "output" ? ". Others are fetched by naming them when the plan is made" : "");
}

const whale_session_port& port_of(const std::vector<whale_session_port>& ports, int32_t number, const char* what) {
  if (number < 0 || static_cast<size_t>(number) >= ports.size())
    throw invalid("there is no {} {}; the plan has {}, numbered from 0", what, number, ports.size());
  return ports[number];
}

whale_port described(const whale_session_port& port) {
  return {sizeof(whale_port),
          {port.name.data(), port.name.size()},
          static_cast<int32_t>(port.dtype),
          port.batch_dim,
          port.dims.data(),
          port.dims.size(),
          port.in_step ? 1 : 0,
          port.in_eval ? 1 : 0};
}

const VariableInfo& variable_of(const whale_session& session, size_t index) {
  const auto& all = session.variables;
  if (index >= all.size()) throw invalid("argument `index` is {}; the session has {} variables", index, all.size());
  return all[index];
}

// What a run is given, by number.
struct Fed {
  const int32_t* inputs;
  whale_tensor* const* input_tensors;
  size_t input_count;
  const int32_t* outputs;
  whale_tensor** output_tensors;
  size_t output_count;
};

std::vector<NamedHost> read_inputs(const whale_session& session, const Fed& fed, whale_event& event) {
  std::vector<NamedHost> out;
  const auto numbers = array(fed.inputs, fed.input_count, "inputs");
  const auto tensors = array(fed.input_tensors, fed.input_count, "input_tensors");
  for (size_t i = 0; i < numbers.size(); ++i) {
    const std::string& name = port_of(session.inputs, numbers[i], "input").name;
    if (tensors[i] == nullptr) throw invalid("input '{}' has no tensor", name);
    out.push_back({name, tensors[i]->host});
    event.keep.push_back(tensors[i]->storage);
  }
  return out;
}

// Missing tensors are made here and handed over by the caller once nothing can fail any more.
struct Outputs {
  std::vector<NamedHost> hosts;
  std::vector<std::unique_ptr<whale_tensor>> made;  // null where the caller gave one
};

Outputs read_outputs(whale_session& session, RunMode mode, const std::vector<NamedHost>& inputs, const Fed& fed,
                     int64_t slices_of, whale_event& event) {
  Outputs out;
  std::vector<std::string> names;
  for (const int32_t number : array(fed.outputs, fed.output_count, "outputs"))
    names.push_back(port_of(session.outputs, number, "output").name);
  const auto tensors = array(fed.output_tensors, fed.output_count, "output_tensors");
  const std::vector<TensorType> types = session.session->output_types(mode, inputs, names, slices_of);
  for (size_t i = 0; i < names.size(); ++i) {
    const whale_tensor* tensor = tensors[i];
    if (tensor != nullptr && tensor->read_only) throw invalid("the tensor for output '{}' is read-only", names[i]);
    out.made.push_back(tensor == nullptr ? make_tensor(types[i].dtype, types[i].dims) : nullptr);
    if (tensor == nullptr) tensor = out.made.back().get();
    if (tensor->host.dtype != types[i].dtype || tensor->host.dims != types[i].dims) {
      throw invalid("output '{}' is {} {}, but the tensor given for it is {} {}", names[i], name_of(types[i].dtype),
                    to_string(types[i].dims), name_of(tensor->host.dtype), to_string(tensor->host.dims));
    }
    out.hosts.push_back({names[i], tensor->host});
    event.keep.push_back(tensor->storage);
  }
  return out;
}

constexpr const char* kInRun = "in the run";

// Samples of a batch; 0: the graph's own.
int64_t samples_of(const Session& session, int64_t batch) {
  return number<int64_t>(batch, 0, INT64_MAX, "batch") > 0 ? batch : session.plan().entries.front().batch;
}

// slices_of: samples of the batch of which the inputs are slices; none: they are whole.
void start(whale_session* session, RunMode mode, const Fed& fed, whale_cancel* cancel, whale_event** out,
           std::optional<int64_t> slices_of = {}) {
  Session& s = idle(session);
  need(out, "out");
  s.check_idle();
  // A batch of a new size may be planned here.
  const Watch watch("planning for this batch", cancel == nullptr ? nullptr : &cancel->cancel->flag(), 0);
  const int64_t planned = s.planned();
  std::unique_ptr<whale_event> event;
  int64_t batch = 0;
  std::vector<NamedHost> in;
  Outputs o;
  try {
    event = std::make_unique<whale_event>();
    event->process = session->process;
    if (slices_of) batch = samples_of(s, *slices_of);
    in = read_inputs(*session, fed, *event);
    o = read_outputs(*session, mode, in, fed, batch, *event);
  } catch (const std::exception& e) {
    log_planned(*session, planned, kInRun);
    s.refuse_run(as_error(e, "begin a run"));
    throw;
  }
  log_planned(*session, planned, kInRun);
  const std::shared_ptr<const Cancel> token = cancel == nullptr ? nullptr : cancel->cancel;
  event->run = mode == RunMode::kStep ? s.step(in, o.hosts, token, batch) : s.eval(in, o.hosts, token, batch);
  for (size_t i = 0; i < o.made.size(); ++i)
    if (o.made[i] != nullptr) fed.output_tensors[i] = o.made[i].release();
  *out = event.release();
}

const InputSlices& slices_of(whale_session* session, int32_t run, int64_t batch, int32_t input) {
  Session& s = idle(session);
  const auto mode = number<RunMode>(run, WHALE_RUN_STEP, WHALE_RUN_EVAL, "run");
  const std::string& name = port_of(session->inputs, input, "input").name;
  const int64_t samples = samples_of(s, batch), planned = s.planned();
  const InputSlices& slices = s.input_slices(mode, samples, name);
  log_planned(*session, planned, "ahead of it");
  return slices;
}

SessionOptions read_options(const whale_engine& engine, const whale_plan& plan, const whale_session_options& o) {
  SessionOptions out;
  if (o.world != nullptr && o.world->process != 0 && o.world->process != static_cast<int64_t>(::getpid()))
    throw error(Code::kFailedPrecondition,
                "options.world belongs to the parent of this process: its threads did not survive fork()");
  if (o.world != nullptr) out.world = o.world->worlds->next();
  try {
    out.seed = o.seed;
    out.nan_policy = number<NanPolicy>(o.nan_policy, 0, 1, "options.nan_policy");
    out.threads = number<int>(o.threads, 0, 65536, "options.threads");
    out.init_files = plan.init_files;
    out.plan_in_run = flag(o.plan_in_run, "options.plan_in_run");
    out.plan_from_file = plan.from_file;
    out.loss_scale = o.loss_scale;
    out.pin = !flag(o.no_pin, "options.no_pin");
    out.bf16 = !flag(o.no_bf16, "options.no_bf16");
    out.leases = engine.leases;
    out.loss_scale_changed = [log = engine.log](double before, double now) { log_loss_scale(*log, before, now); };
    out.warn = [log = engine.log](const std::string& text) { log->add(WHALE_SEVERITY_WARNING, "session", text); };
    out.loss_scale_growth = number<int64_t>(o.loss_scale_growth, 0, INT64_MAX, "options.loss_scale_growth");
  } catch (const Error& e) {
    if (out.world) refuse(*out.world, e);
    throw;
  }
  return out;
}

}  // namespace
}  // namespace whale::capi

whale_status* whale_cancel_create(whale_cancel** out) {
  return guard([&] {
    need(out, "out");
    *out = new whale_cancel{std::make_shared<Cancel>()};
  });
}

void whale_cancel_trigger(whale_cancel* cancel) {
  if (cancel != nullptr) cancel->cancel->trigger();
}

void whale_cancel_release(whale_cancel* cancel) { delete cancel; }

whale_status* whale_event_wait(whale_event* event, double timeout_seconds, int32_t* done) {
  return guard([&] {
    const whale_event& e = need(event, "event");
    need(done, "done");
    check_process(e.process);
    if (timeout_seconds != timeout_seconds) throw invalid("`timeout_seconds` is not a number");
    try {
      *done = e.run.wait(timeout_seconds) ? 1 : 0;
    } catch (...) {  // how the run ended
      *done = 1;
      throw;
    }
  });
}

whale_status* whale_event_wait_any(whale_event* const* events, size_t count, double timeout_seconds, int64_t* index) {
  return guard([&] {
    need(index, "index");
    if (timeout_seconds != timeout_seconds) throw invalid("`timeout_seconds` is not a number");
    std::vector<const RunHandle*> runs;
    std::vector<int64_t> places;
    const auto all = array(events, count, "events");
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i] == nullptr) continue;
      check_process(all[i]->process);
      runs.push_back(&all[i]->run);
      places.push_back(static_cast<int64_t>(i));
    }
    if (runs.empty()) throw invalid("argument `events` holds no event: nothing to wait for");
    const std::optional<size_t> first = RunHandle::wait_any(runs, timeout_seconds);
    *index = first ? places[*first] : -1;
  });
}

int32_t whale_event_query(const whale_event* event) { return event != nullptr && event->run.done() ? 1 : 0; }

void whale_event_release(whale_event* event) {
  if (event == nullptr) return;
  if (event->process == static_cast<int64_t>(::getpid())) event->run.settle();
  delete event;
}

whale_status* whale_session_create(whale_engine* engine, const whale_plan* plan, const whale_session_options* options,
                                   whale_session** out) {
  return guard([&] {
    need(engine, "engine");
    need(plan, "plan");
    need(out, "out");
    const whale_session_options o = capi::options(options, whale_session_options WHALE_SESSION_OPTIONS_INIT, "options");
    const SessionOptions so = read_options(*engine, *plan, o);
    auto session = std::make_unique<whale_session>();
    session->process = ::getpid();
    const Watch watch("opening the session", o.cancel == nullptr ? nullptr : &o.cancel->cancel->flag(), 0);
    session->session = std::make_unique<Session>(plan->plan, engine->backends, so);
    for (const bool step : {true, false})
      for (const Entry& entry : plan->plan->entries)
        if ((entry.name == "train") == step) {
          add_ports(session->inputs, entry.inputs, step);
          add_ports(session->outputs, entry.outputs, step);
        }
    session->variables = session->session->variables();
    session->log = engine->log;
    session->log->add(WHALE_SEVERITY_INFO, "session",
                      fmt::format("'{}' runs on {} device(s): {}", plan->plan->model, plan->plan->devices.size(),
                                  brief(to_string(plan->plan->devices))));
    *out = session.release();
  });
}

void whale_session_release(whale_session* session) {
  if (session == nullptr) return;
  // After fork() the threads that the destructor would join are not here: the memory is the child's loss.
  if (session->process != static_cast<int64_t>(::getpid()))
    (void)session->session.release();
  else if (session->work != nullptr)
    session->work->settle();
  delete session;
}

whale_status* whale_session_input(whale_session* session, whale_str name, int32_t* out) {
  return guard([&] {
    const whale_session& s = need(session, "session");
    need(out, "out") = number_of(s.inputs, nonempty(name, "name"), "input");
  });
}

whale_status* whale_session_output(whale_session* session, whale_str name, int32_t* out) {
  return guard([&] {
    const whale_session& s = need(session, "session");
    need(out, "out") = number_of(s.outputs, nonempty(name, "name"), "output");
  });
}

size_t whale_session_input_count(const whale_session* s) { return s == nullptr ? 0 : s->inputs.size(); }
size_t whale_session_output_count(const whale_session* s) { return s == nullptr ? 0 : s->outputs.size(); }

whale_status* whale_session_input_port(whale_session* session, int32_t input, whale_port* out) {
  return guard([&] { fill(out, described(port_of(need(session, "session").inputs, input, "input")), "out"); });
}

whale_status* whale_session_output_port(whale_session* session, int32_t output, whale_port* out) {
  return guard([&] { fill(out, described(port_of(need(session, "session").outputs, output, "output")), "out"); });
}

whale_status* whale_session_step(whale_session* session, const int32_t* inputs, whale_tensor* const* input_tensors,
                                 size_t input_count, const int32_t* outputs, whale_tensor** output_tensors,
                                 size_t output_count, whale_cancel* cancel, whale_event** out) {
  return guard([&] {
    start(session, RunMode::kStep, {inputs, input_tensors, input_count, outputs, output_tensors, output_count}, cancel,
          out);
  });
}

whale_status* whale_session_eval(whale_session* session, const int32_t* inputs, whale_tensor* const* input_tensors,
                                 size_t input_count, const int32_t* outputs, whale_tensor** output_tensors,
                                 size_t output_count, whale_cancel* cancel, whale_event** out) {
  return guard([&] {
    start(session, RunMode::kEval, {inputs, input_tensors, input_count, outputs, output_tensors, output_count}, cancel,
          out);
  });
}

whale_status* whale_session_prepare(whale_session* session, int32_t run, int64_t batch, whale_cancel* cancel) {
  return guard([&] {
    Session& s = idle(session);
    const auto mode = number<RunMode>(run, WHALE_RUN_STEP, WHALE_RUN_EVAL, "run");
    const Watch watch("planning for this batch", cancel == nullptr ? nullptr : &cancel->cancel->flag(), 0);
    const int64_t planned = s.planned();
    s.prepare(mode, number<int64_t>(batch, 1, INT64_MAX, "batch"));
    log_planned(*session, planned, "ahead of it");
  });
}

whale_status* whale_session_slice_count(whale_session* session, int32_t run, int64_t batch, int32_t input,
                                        size_t* out) {
  return guard([&] {
    need(out, "out");
    *out = slices_of(session, run, batch, input).count();
  });
}

whale_status* whale_session_slice(whale_session* session, int32_t run, int64_t batch, int32_t input, size_t index,
                                  int64_t* begin, int64_t* end) {
  return guard([&] {
    const InputSlices& slices = slices_of(session, run, batch, input);
    if (index >= slices.count())
      throw invalid("argument `index` is {}; this rank has {} slices of the input", index, slices.count());
    const std::vector<Interval> box = slices.box(index);
    if (!box.empty()) need(begin, "begin"), need(end, "end");
    for (size_t d = 0; d < box.size(); ++d) begin[d] = box[d].begin, end[d] = box[d].end;
  });
}

whale_status* whale_session_run_slices(whale_session* session, int32_t run, int64_t batch, const int32_t* inputs,
                                       whale_tensor* const* input_tensors, size_t input_count, const int32_t* outputs,
                                       whale_tensor** output_tensors, size_t output_count, whale_cancel* cancel,
                                       whale_event** out) {
  return guard([&] {
    const auto mode = number<RunMode>(run, WHALE_RUN_STEP, WHALE_RUN_EVAL, "run");
    start(session, mode, {inputs, input_tensors, input_count, outputs, output_tensors, output_count}, cancel, out,
          batch);
  });
}

size_t whale_session_entry_count(const whale_session* s) {
  return s == nullptr ? 0 : answer(size_t{0}, [&] { return s->session->entries().size(); });
}

whale_status* whale_session_entry(whale_session* session, size_t index, whale_entry* out) {
  return guard([&] {
    const std::vector<EntryInfo> all = need(session, "session").session->entries();
    if (index >= all.size()) throw invalid("argument `index` is {}; the session has {} entries", index, all.size());
    const EntryInfo& entry = all[index];
    fill(out, {sizeof(whale_entry), static_cast<int32_t>(entry.mode), entry.planned_here ? 1 : 0, entry.batch}, "out");
  });
}

size_t whale_session_variable_count(const whale_session* s) { return s == nullptr ? 0 : s->variables.size(); }

whale_status* whale_session_variable(whale_session* session, size_t index, whale_variable* out) {
  return guard([&] {
    const VariableInfo& v = variable_of(need(session, "session"), index);
    fill(out,
         {sizeof(whale_variable),
          {v.name.data(), v.name.size()},
          static_cast<int32_t>(v.role),
          static_cast<int32_t>(v.dtype),
          v.dims.data(),
          v.dims.size(),
          std::ssize(v.copies)},
         "out");
  });
}

whale_status* whale_session_variable_devices(whale_session* session, size_t index, int64_t copy,
                                             const int32_t** devices, size_t* count) {
  return guard([&] {
    const VariableInfo& v = variable_of(need(session, "session"), index);
    const auto copies = std::ssize(v.copies);
    if (copy < 0 || copy >= copies)
      throw invalid("argument `copy` is {}; variable '{}' has {}, numbered from 0", copy, v.name, copies);
    need(devices, "devices"), need(count, "count");
    const std::vector<int32_t>& from = v.copies[copy];
    *devices = from.data(), *count = from.size();
  });
}

whale_status* whale_session_memory(whale_session* session, size_t device, whale_memory* out) {
  return guard([&] {
    const DeviceBytes m = live(session).memory(device);
    const auto bytes = [](size_t n) { return static_cast<int64_t>(n); };
    fill(out,
         {sizeof(whale_memory), bytes(m.parameters), bytes(m.gradients), bytes(m.state), bytes(m.buffers), 0,
          bytes(m.inputs), bytes(m.activations), bytes(m.workspace), bytes(m.host), bytes(m.total())},
         "out");
  });
}

whale_status* whale_session_read(whale_session* session, whale_str name, whale_tensor** out) {
  return whale_session_read_copy(session, name, 0, nullptr, out);
}

whale_status* whale_session_read_copy(whale_session* session, whale_str name, int64_t copy, whale_cancel* cancel,
                                      whale_tensor** out) {
  return guard([&] {
    Session& s = live(session);
    need(out, "out");
    const Watch watch("reading", cancel == nullptr ? nullptr : &cancel->cancel->flag(), 0);
    std::string variable;
    auto tensor = or_refuse(s, [&] {
      variable = nonempty(name, "name");
      const TensorType type = s.variable_type(variable);
      return make_tensor(type.dtype, type.dims);
    });
    s.read(variable, tensor->host, copy);
    *out = tensor.release();
  });
}

whale_status* whale_session_read_here(whale_session* session, whale_str name, int64_t copy, whale_tensor* tensor,
                                      size_t* bytes) {
  return guard([&] {
    Session& s = live(session);
    const whale_tensor& to = need(tensor, "tensor");
    if (to.read_only) throw invalid("the tensor for a variable is read-only");
    const size_t read = s.read_here(nonempty(name, "name"), to.host, copy);
    if (bytes != nullptr) *bytes = read;
  });
}

whale_status* whale_session_write(whale_session* session, whale_str name, const whale_tensor* tensor) {
  return guard([&] {
    Session& s = live(session);
    s.write(nonempty(name, "name"), need(tensor, "tensor").host);
  });
}

whale_status* whale_session_variables_json(whale_session* session, whale_text* out) {
  return guard([&] {
    const Session& s = live(session);
    need(out, "out");
    Json rows = Json::array();
    for (const VariableInfo& v : s.variables())
      rows.push_back({{"name", v.name},
                      {"role", kRoles[static_cast<size_t>(v.role)]},
                      {"dtype", name_of(v.dtype)},
                      {"dims", v.dims},
                      {"copies", v.copies}});
    *out = make_text(text_of(rows));
  });
}

whale_status* whale_session_set_learning_rate(whale_session* session, double learning_rate) {
  return guard([&] { live(session).set_learning_rate(learning_rate); });
}

double whale_session_learning_rate(const whale_session* s) {
  return s == nullptr ? 0.0 : answer(-1.0, [&] { return waited(s).learning_rate(); });
}
int64_t whale_session_iteration(const whale_session* s) {
  return s == nullptr ? 0 : answer(int64_t{-1}, [&] { return waited(s).iteration(); });
}
int64_t whale_session_updates(const whale_session* s) {
  return s == nullptr ? 0 : answer(int64_t{-1}, [&] { return waited(s).updates(); });
}

whale_status* whale_session_refuse(whale_session* session, int32_t code, whale_str message) {
  return guard([&] {
    Session& s = idle(session);
    const Code given = number<Code>(code, WHALE_CANCELLED, WHALE_UNAUTHENTICATED, "code");
    const std::string why = text(message, "message");
    s.check_idle();
    s.refuse_run(error(given, "{}", why));
  });
}

whale_status* whale_session_same(whale_session* session, uint64_t number) {
  return guard([&] { idle(session).set_same(number); });
}

whale_status* whale_session_save(whale_session* session, whale_str directory) {
  return guard([&] {
    Session& s = idle(session);
    save_and_log(s, *session->log, or_refuse(s, [&] { return nonempty(directory, "directory"); }));
  });
}

whale_status* whale_session_save_async(whale_session* session, whale_str directory, whale_cancel* cancel,
                                       whale_event** out) {
  return guard([&] { begin(session, directory, cancel, out, save_and_log, "saving", "whale_session_save_async"); });
}

whale_status* whale_session_load(whale_session* session, whale_str directory) {
  return guard([&] {
    Session& s = idle(session);
    load_and_log(s, *session->log, or_refuse(s, [&] { return nonempty(directory, "directory"); }));
  });
}

whale_status* whale_session_load_async(whale_session* session, whale_str directory, whale_cancel* cancel,
                                       whale_event** out) {
  return guard([&] { begin(session, directory, cancel, out, load_and_log, "loading", "whale_session_load_async"); });
}

whale_status* whale_session_trace(whale_session* session, int32_t enable) {
  return guard([&] { live(session).set_trace(flag(enable, "enable")); });
}

whale_status* whale_session_timeline_json(whale_session* session, whale_text* out) {
  return guard([&] {
    Session& s = live(session);
    need(out, "out");
    std::string timeline = s.timeline();
    if (is_of_null_devices(s.plan())) timeline = predicted_trace(s.plan(), s.last_entry());
    *out = make_text(timeline);
  });
}

whale_status* whale_session_flight_record_json(whale_session* session, whale_text* out) {
  return guard([&] {
    const whale_session& s = need(session, "session");  // which may be busy: nothing is waited for
    need(out, "out");
    check_process(s.process);
    *out = make_text(s.session->flight_record());
  });
}

whale_status* whale_session_report_json(whale_session* session, whale_text* out) {
  return guard([&] {
    Session& s = live(session);
    need(out, "out");
    *out = make_text(s.report());
  });
}
