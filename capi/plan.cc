// Plans: compiled, printed, saved.
#include <unistd.h>

#include "plan/plan.h"

#include "base/json.h"
#include "base/watch.h"
#include "compile/automatic.h"
#include "compile/compile.h"
#include "compile/source_check.h"
#include "cost/profile_text.h"
#include "guard.h"
#include "handles.h"
#include "ir/plan_options.h"
#include "plan/figures.h"
#include "plan/in_float64.h"
#include "probe/model_profile.h"
#include "prove/prove.h"
#include "report/page.h"
#include "report/predicted_trace.h"
#include "schema/graph_file.h"
#include "simulate/summary.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

namespace whale::capi {
namespace {

template <class T>
concept Number = std::is_integral_v<T> || std::is_enum_v<T>;

// A field of whale_plan_options into the plan's option: a number, a flag or a choice up to `last`.
template <std::integral From, Number To>
void read(From from, To& to, int64_t last, const char* what) {
  to = static_cast<To>(number<int64_t>(from, 0, last, what));
}
void read(int32_t from, std::optional<DType>& to, int64_t, const char*) {
  if (from != 0) to = checked_dtype(from);
}
void read(whale_str from, uint32_t& to, int64_t, const char* what) { to = parse_offload(text(from, what)); }
void read(std::span<const double> from, std::vector<double>& to, int64_t, const char*) {
  to.assign(from.begin(), from.end());
}
void read(std::span<const int32_t> from, std::vector<Recompute>& to, int64_t last, const char* what) {
  for (const int32_t each : from) read(each, to.emplace_back(), last, what);
}

// Where the field is the option's; with "no_" before its name a flag is turned around.
template <class From, class To>
void take(const std::string& field, const From& from, const std::string& option, To& to, int64_t last) {
  const std::string what = "options." + field;
  if constexpr (requires { read(from, to, last, ""); })
    if (field == option) read(from, to, last, what.c_str());
  if constexpr (std::is_integral_v<From> && std::is_same_v<To, bool>)
    if (field == "no_" + option) to = number<int64_t>(from, 0, 1, what.c_str()) == 0;
}

void read_fields(const whale_plan_options& o, PlanOptions& out) {
  each_option(out, [&](const std::string& option, auto& to, OptionRule rule) {
#define WHALE_FIELD(field) take(#field, o.field, option, to, rule.last);
#define WHALE_LIST(field, count) take(#field, array(o.field, o.count, "options." #field), option, to, rule.last);
#include "plan_fields.inc"
#undef WHALE_FIELD
#undef WHALE_LIST
  });
}

CompileOptions read_options(const whale_plan_options& o) {
  CompileOptions out;
  out.verify_passes = false;  // which pass erred is looked for here, not at a user's
  out.strategy = text(o.strategy, "options.strategy");
  for (const whale_str& name : array(o.fetch, o.fetch_count, "options.fetch"))
    out.fetch.push_back(nonempty(name, "options.fetch"));
  out.accumulation = number<int64_t>(o.accumulation, 0, INT32_MAX, "options.accumulation");
  out.precision = checked_precision(o.precision, "options.precision");
  for (const int64_t batch : array(o.train_batches, o.train_batch_count, "options.train_batches"))
    out.train_batches.push_back(number<int64_t>(batch, 1, INT64_MAX, "options.train_batches"));
  for (const int64_t batch : array(o.eval_batches, o.eval_batch_count, "options.eval_batches"))
    out.eval_batches.push_back(number<int64_t>(batch, 1, INT64_MAX, "options.eval_batches"));
  if (o.profile.size > 0) {
    if (o.profile.data == nullptr) throw invalid("options.profile has a size and no data (null pointer)");
    constexpr std::string_view kFile = "file:";
    std::string_view given{o.profile.data, o.profile.size};
    if (given.starts_with(kFile)) {
      const std::string path(given.substr(kFile.size()));
      const std::vector<uint8_t> bytes = read_file(path);
      out.profile = profile_of_text({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path);
    } else {
      out.profile = profile_of_text(given);
    }
  }
  read_fields(o, out);
  const auto bound = [](double given, const char* what) {
    if (!(given >= 0) || !std::isfinite(given))
      throw invalid("argument `{}` is {}, expected a number from 0", what, given);
    return given;
  };
  SearchOptions& search = out.search;
  search.objective = static_cast<Objective>(number<int64_t>(o.objective, 0, 1, "options.objective"));
  if (bound(o.most_price, "options.most_price") > 0) search.most_price = o.most_price;
  if (bound(o.least_throughput, "options.least_throughput") > 0) search.least_throughput = o.least_throughput;
  if (bound(o.search_seconds, "options.search_seconds") > 0) search.seconds = o.search_seconds;
  search.ranks = static_cast<int32_t>(std::max<int64_t>(1, number<int64_t>(o.ranks, 0, INT32_MAX, "options.ranks")));
  search.present = text(o.present, "options.present");
  return out;
}

std::unique_ptr<whale_plan> handle(Plan plan, InitFiles init_files) {
  auto out = std::make_unique<whale_plan>();
  out->init_files = std::move(init_files);
  out->plan = std::make_shared<const Plan>(std::move(plan));
  return out;
}

std::unique_ptr<whale_plan> loaded(const whale_engine& engine, Plan plan, const std::string& path) {
  check_limits(engine.limits, plan);
  verify_source(plan);
  auto out = handle(std::move(plan), init_files_of(engine.limits, path, "plan"));
  out->from_file = true;
  return out;
}

// What is to be planned, looked through. Holds what it needs, so that it may be planned when the handles are gone.
struct Request {
  Request(whale_engine* engine, const whale_graph* g, const whale_cluster* c, const whale_plan_options* o) {
    const whale_graph& given_graph = need(g, "graph");
    devices = need(c, "cluster").devices;
    need(engine, "engine");
    graph = given_graph.graph, init_files = given_graph.init_files, log = engine->log;
    if (!given_graph.sealed)
      throw error(Code::kFailedPrecondition, "graph '{}' is not sealed; call whale_graph_seal first", graph->name);
    const whale_plan_options given = capi::options(o, whale_plan_options WHALE_PLAN_OPTIONS_INIT, "options");
    options = read_options(given);
    options.max_bytes = engine->limits.plan_bytes;
    if (given.cancel != nullptr) cancel = given.cancel->cancel;
    timeout_seconds = given.timeout_seconds;
    care = flag(given.quick, "options.quick") ? Care::kQuick : Care::kChecked;
    watch();  // throws for a timeout that is none
  }
  Watch watch() const { return Watch("planning", cancel == nullptr ? nullptr : &cancel->flag(), timeout_seconds); }
  std::unique_ptr<whale_plan> plan() const {
    const Watch watching = watch();
    auto made = handle(compile(*graph, devices, options), init_files);
    made->cancel = cancel;
    made->timeout_seconds = timeout_seconds;
    const Plan& p = *made->plan;
    log->add(WHALE_SEVERITY_INFO, "plan",
             fmt::format("'{}' is planned for {} device(s): {}", p.model, p.devices.size(), p.strategy));
    for (const std::string& note : p.notes) log->add(WHALE_SEVERITY_INFO, "plan", note);
    return made;
  }
  Estimate estimate() const {
    const Watch watching = watch();
    return whale::estimate(*graph, devices, options, care);
  }

  std::shared_ptr<const Graph> graph;
  InitFiles init_files;
  std::vector<DeviceSpec> devices;
  CompileOptions options;
  Care care = Care::kChecked;  // of an estimate
  std::shared_ptr<const Cancel> cancel;
  double timeout_seconds = 0;
  std::shared_ptr<Log> log;
};

// A report under the watch that the plan was made with. what: the work, for messages.
template <class F>
whale_status* watched_report(const char* what, const whale_plan* plan, whale_text* out, F&& report, const char* call) {
  return guard(
      [&] {
        const whale_plan& p = need(plan, "plan");
        need(out, "out");
        const Watch watch(what, p.cancel == nullptr ? nullptr : &p.cancel->flag(), p.timeout_seconds);
        *out = make_text(report(*p.plan));
      },
      call);
}

// One that plans once more.
template <class F>
whale_status* planned_again(const whale_plan* plan, whale_text* out, F&& report, const char* call) {
  return watched_report("planning", plan, out, std::forward<F>(report), call);
}

}  // namespace
}  // namespace whale::capi

whale_status* whale_plan_create(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                const whale_plan_options* options, whale_plan** out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    *out = request.plan().release();
  });
}

whale_status* whale_plan_create_async(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                      const whale_plan_options* options, whale_event** out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    auto event = std::make_unique<whale_event>();
    event->process = ::getpid();
    event->plan = std::make_shared<whale_plan>();
    event->work = AsyncWork::start(
        [request, plan = event->plan] {
          *plan = std::move(*request.plan());
          plan->cancel = nullptr;  // who is late to cancel changes nothing
        },
        "whale_plan_create_async");
    event->run = RunHandle(event->work->state());
    *out = event.release();
  });
}

whale_status* whale_event_plan(whale_event* event, whale_plan** out) {
  return guard([&] {
    const whale_event& e = need(event, "event");
    need(out, "out");
    if (e.plan == nullptr)
      throw error(Code::kFailedPrecondition, "this event is not of whale_plan_create_async: no plan comes of it");
    if (!e.run.done()) throw error(Code::kFailedPrecondition, "planning is under way; wait for its event first");
    e.run.wait(0);  // throws how it failed
    *out = std::make_unique<whale_plan>(*e.plan).release();
  });
}

whale_status* whale_plan_estimate(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                  const whale_plan_options* options, whale_text* out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    *out = make_text(estimate_text(request.estimate(), request.devices));
  });
}

whale_status* whale_plan_estimate_json(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                       const whale_plan_options* options, whale_text* out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    *out = make_text(estimate_json(request.estimate(), request.devices));
  });
}

whale_status* whale_plan_search_json(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                     const whale_plan_options* options, whale_text* out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    const Watch watching = request.watch();
    CompileOptions asked = request.options;
    asked.search.front = true;
    *out = make_text(text_of(found_json(whale::search(*request.graph, request.devices, asked), request.devices)));
  });
}

whale_status* whale_plan_search(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                const whale_plan_options* options, whale_text* out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    const Watch watching = request.watch();
    *out = make_text(found_text(whale::search(*request.graph, request.devices, request.options), request.devices));
  });
}

whale_status* whale_plan_predict_json(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                      const whale_plan_options* options, const int64_t* counts, size_t count_count,
                                      const int64_t* batches, size_t batch_count, whale_text* out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    std::vector<int64_t> of_devices, of_samples;
    for (const int64_t n : array(counts, count_count, "counts"))
      of_devices.push_back(number<int64_t>(n, 1, std::ssize(request.devices), "counts"));
    for (const int64_t n : array(batches, batch_count, "batches"))
      of_samples.push_back(number<int64_t>(n, 1, INT32_MAX, "batches"));
    const Watch watching = request.watch();
    *out = make_text(text_of(predict(*request.graph, request.devices, request.options, of_devices, of_samples)));
  });
}

whale_status* whale_engine_profile_json(whale_engine* engine, const whale_graph* graph, const whale_cluster* cluster,
                                        const whale_plan_options* options, const int64_t* samples, size_t sample_count,
                                        double seconds, whale_text* out) {
  return guard([&] {
    const Request request(engine, graph, cluster, options);
    need(out, "out");
    ModelProfileOptions profiled;
    profiled.compile.precision = request.options.precision;
    profiled.compile.max_bytes = request.options.max_bytes, profiled.compile.verify_passes = false;
    for (const int64_t n : array(samples, sample_count, "samples"))
      profiled.samples.push_back(number<int64_t>(n, 1, INT32_MAX, "samples"));
    if (!(seconds >= 0 && seconds <= 3600)) throw invalid("argument `seconds` is {}, expected 0 to 3600", seconds);
    if (seconds > 0) profiled.seconds = seconds;
    profiled.leases = engine->leases, profiled.cancel = request.cancel, profiled.init_files = request.init_files;
    const Watch watching = request.watch();
    *out = make_text(text_of(profile_model(engine->backends, *request.graph, request.devices, profiled)));
  });
}

whale_status* whale_plan_parse(whale_engine* engine, const void* data, size_t size, whale_plan** out) {
  return guard([&] {
    need(engine, "engine");
    array(static_cast<const char*>(data), size, "data");
    need(out, "out");
    check_file_bytes(engine->limits, static_cast<int64_t>(size), "a plan as bytes");
    const auto* bytes = static_cast<const uint8_t*>(data);
    *out = loaded(*engine, deserialize(bytes, checked_size(bytes, size, "the plan")), "").release();
  });
}

namespace {

// What `made` makes of a file's bytes; its errors name the file.
template <class Make>
auto of_file(const whale_engine& engine, const std::string& file, Make made) {
  const std::vector<uint8_t> bytes = read_file(file, engine.limits.file_bytes);
  try {
    return made(bytes.data(), checked_size(bytes.data(), bytes.size(), "it"));
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("'{}': {}", brief(file), e.message()))
        .at_op(e.where().op)
        .at_scope(e.where().scope)
        .at_device(e.where().device);
  }
}

}  // namespace

whale_status* whale_plan_load(whale_engine* engine, whale_str path, whale_plan** out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    const std::string file = nonempty(path, "path");
    *out = of_file(*engine, file, [&](const uint8_t* bytes, size_t size) {
             return loaded(*engine, deserialize(bytes, size), file);
           }).release();
  });
}

whale_status* whale_plan_serialize(const whale_plan* plan, whale_bytes* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = make_bytes(with_checksum(serialize(p)));
  });
}

whale_status* whale_plan_save(const whale_plan* plan, whale_str path) {
  return guard([&] {
    const whale_plan& p = need(plan, "plan");
    write_to(nonempty(path, "path"), *p.plan, p.init_files);
  });
}

whale_status* whale_plan_print(const whale_plan* plan, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = make_text(print(p));
  });
}

whale_status* whale_plan_summary(const whale_plan* plan, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = make_text(summary(p));
  });
}

whale_status* whale_plan_json(const whale_plan* plan, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = make_text(to_json(p));
  });
}

whale_status* whale_plan_reshards(const whale_plan* plan, whale_text* out) {
  return planned_again(
      plan, out, [](const Plan& p) { return reshards_text(reshards_of(p), cost_of(p).link); }, __func__);
}

whale_status* whale_plan_reshards_json(const whale_plan* plan, whale_text* out) {
  return planned_again(
      plan, out, [](const Plan& p) { return reshards_json(reshards_of(p)); }, __func__);
}

whale_status* whale_plan_choices(const whale_plan* plan, whale_text* out) {
  return planned_again(
      plan, out, [](const Plan& p) { return choices_text(choices_of(p)); }, __func__);
}

whale_status* whale_plan_choices_json(const whale_plan* plan, whale_text* out) {
  return planned_again(
      plan, out, [](const Plan& p) { return choices_json(choices_of(p)); }, __func__);
}

whale_status* whale_plan_simulate_json(const whale_plan* plan, whale_text* out) {
  return planned_again(
      plan, out, [](const Plan& p) { return text_of(simulation_json(p, p.entries.at(0))); }, __func__);
}

whale_status* whale_plan_simulate(const whale_plan* plan, whale_text* out) {
  return planned_again(
      plan, out, [](const Plan& p) { return simulation_text(simulation_json(p, p.entries.at(0))); }, __func__);
}

whale_status* whale_plan_timeline_json(const whale_plan* plan, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = make_text(predicted_trace(p));
  });
}

whale_status* whale_plan_report_html(const whale_plan* plan, const whale_str* traces, size_t trace_count,
                                     whale_text* out) {
  return planned_again(
      plan, out,
      [&](const Plan& p) {
        std::vector<std::string> texts;
        for (const whale_str& trace : array(traces, trace_count, "traces")) {
          array(trace.data, trace.size, "traces");
          texts.emplace_back(trace.data == nullptr ? "" : trace.data, trace.size);
        }
        return page_html(page_data(p, reshards_of(p), texts));
      },
      __func__);
}

namespace {

// Of a plan that is not refuted: nor does it contradict its source?
void check_source_of(const Plan& plan, Proof& proof) {
  try {
    verify_source(plan);
  } catch (const Error& e) {
    if (e.code() != Code::kDataLoss) throw;
    EntryProof of;
    of.entry = "all", of.verdict = ProofVerdict::kRefuted, of.what = e.message();
    proof.verdict = ProofVerdict::kRefuted, proof.entries = {std::move(of)};
  }
}

// As JSON, under the options of a proof.
whale_text proof_of(const whale_proof_options* options, const std::function<Proof(bool progress)>& proof) {
  const whale_proof_options given = capi::options(options, whale_proof_options WHALE_PROOF_OPTIONS_INIT, "options");
  const bool progress = flag(given.progress, "options.progress");
  const Watch watch("proving", given.cancel == nullptr ? nullptr : &given.cancel->cancel->flag(),
                    given.timeout_seconds);
  return make_text(to_json(proof(progress)));
}

}  // namespace

whale_status* whale_plan_prove_json(const whale_plan* plan, const whale_proof_options* options, whale_text* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    need(out, "out");
    *out = proof_of(options, [&](bool progress) { return prove(p, progress); });
  });
}

whale_status* whale_plan_file_prove_json(whale_engine* engine, whale_str path, const whale_proof_options* options,
                                         whale_text* out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    const std::string file = nonempty(path, "path");
    *out = proof_of(options, [&](bool progress) {
      return of_file(*engine, file, [&](const uint8_t* bytes, size_t size) {
        try {
          const Plan plan = deserialize_unverified(bytes, size);
          check_limits(engine->limits, plan);
          Proof proof = prove(plan, progress);
          if (proof.verdict != ProofVerdict::kRefuted) check_source_of(plan, proof);
          return proof;
        } catch (const PlanFault& fault) {
          return refutation(fault);
        }
      });
    });
  });
}

whale_status* whale_plan_prove(const whale_plan* plan, whale_text* out) {
  return watched_report(
      "proving", plan, out, [](const Plan& p) { return to_json(prove(p)); }, __func__);
}

size_t whale_plan_device_count(const whale_plan* plan) { return plan == nullptr ? 0 : plan->plan->devices.size(); }

whale_status* whale_plan_device(const whale_plan* plan, size_t index, whale_device* out) {
  return guard([&] { fill(out, describe_device(need(plan, "plan").plan->devices, index), "out"); });
}

size_t whale_plan_entry_count(const whale_plan* plan) { return plan == nullptr ? 0 : plan->plan->entries.size(); }

whale_status* whale_plan_entry(const whale_plan* plan, size_t index, whale_entry* out) {
  return guard([&] {
    const std::vector<Entry>& all = need(plan, "plan").plan->entries;
    if (index >= all.size()) throw invalid("argument `index` is {}; the plan has {} entries", index, all.size());
    const int32_t run = all[index].name == "train" ? WHALE_RUN_STEP : WHALE_RUN_EVAL;
    fill(out, {sizeof(whale_entry), run, 0, all[index].batch}, "out");
  });
}

whale_status* whale_plan_memory(const whale_plan* plan, size_t device, whale_memory* out) {
  return guard([&] {
    const Plan& p = *need(plan, "plan").plan;
    if (device >= p.devices.size())
      throw invalid("argument `device` is {}; the plan is for {} devices", device, p.devices.size());
    const Entry& entry = p.entries.front();
    MemoryFigures m = memory_of(p, entry, static_cast<size_t>(entry.rows[device].program));
    const MemoryClasses own = variables_of_device(p, static_cast<int32_t>(device));
    m.device.parameters = own.parameters, m.device.state = own.state, m.device.buffers = own.buffers;
    const MemoryClasses& d = m.device;
    fill(out,
         {sizeof(whale_memory), d.parameters, d.gradients, d.state, d.buffers, d.copies, 0, d.activations, 0,
          m.host.total(), d.total()},
         "out");
  });
}

whale_status* whale_plan_in_float64(const whale_plan* plan, whale_plan** out) {
  return guard([&] {
    const whale_plan& p = need(plan, "plan");
    need(out, "out");
    auto widened = handle(in_float64(*p.plan), p.init_files);
    widened->from_file = p.from_file;
    *out = widened.release();
  });
}

void whale_plan_release(whale_plan* plan) { delete plan; }
