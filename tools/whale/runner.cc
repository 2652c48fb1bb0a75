#include "runner.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "trials.h"

namespace tool {
namespace {

// A run that has been started, on one rank.
struct Started {
  Event event;
  std::vector<Tensor> outputs;
};

Started start(whale_session* session, decltype(&whale_session_step) call, const Batch& batch,
              const std::vector<std::string>& names) {
  std::vector<Tensor> tensors;
  std::vector<int32_t> inputs, outputs;
  std::vector<whale_tensor*> fed, out(names.size());
  for (const Array& array : batch) {
    tensors.push_back(own<Tensor>(whale_tensor_view, array.dtype, array.dims.data(), array.dims.size(),
                                  static_cast<void*>(const_cast<uint8_t*>(array.bytes.data()))));
    fed.push_back(tensors.back().get());
    check(whale_session_input(session, str(array.name), &inputs.emplace_back()));
  }
  for (const std::string& name : names) check(whale_session_output(session, str(name), &outputs.emplace_back()));
  Started started;
  started.event = own<Event>(call, session, inputs.data(), fed.data(), fed.size(), outputs.data(), out.data(),
                             out.size(), static_cast<whale_cancel*>(nullptr));
  for (whale_tensor* tensor : out) started.outputs.emplace_back(tensor);
  return started;
}

bool same_bytes(const whale_tensor* a, const whale_tensor* b) {
  return std::memcmp(whale_tensor_data(a), whale_tensor_data(b), whale_tensor_bytes(a)) == 0;
}

}  // namespace

World join_processes(whale_engine* engine, PlanArguments& plan, bool devices_given, SessionArguments& session) {
  World world = own<World>(whale_world_create, engine, static_cast<const whale_world_options*>(nullptr));
  const int32_t size = whale_world_size(world.get());
  if (size == 1) return world;
  if (plan.trials > 0) throw Failure("--trials runs in one process; plan with it there, and launch the plan file");
  if (session.ranks > 1) throw Failure("--ranks: this process is one of several already");
  if (!devices_given) plan.devices = "cpu:" + std::to_string(size);
  session.world = world.get(), plan.ranks = size;
  return world;
}

Runner::Runner(whale_engine* engine, Plan plan, const SessionArguments& arguments) : plan_(std::move(plan)) {
  const auto ranks = static_cast<size_t>(arguments.ranks);
  std::vector<whale_world*> handles(ranks);
  check(whale_world_create_inproc(arguments.ranks, handles.data()));
  const std::vector<World> worlds(handles.begin(), handles.end());
  for (size_t r = 0; r < ranks && ranks > 1; ++r) engines_.push_back(make_engine());
  sessions_.resize(ranks);
  // Each rank waits in it for the others.
  std::vector<std::string> failures(ranks);
  const auto open = [&](size_t rank) {
    whale_session_options options = WHALE_SESSION_OPTIONS_INIT;
    options.seed = arguments.seed;
    options.nan_policy = arguments.ignore_nan;
    options.no_pin = arguments.no_pin;
    options.no_bf16 = arguments.no_bf16;
    options.plan_in_run = 1;
    options.loss_scale = arguments.loss_scale;
    options.loss_scale_growth = arguments.loss_scale_growth;
    options.world = arguments.world != nullptr ? arguments.world : worlds[rank].get();
    try {
      sessions_[rank] = own<Session>(whale_session_create, ranks > 1 ? engines_[rank].get() : engine,
                                     static_cast<const whale_plan*>(plan_.get()), &options);
    } catch (const Failure& failure) {
      failures[rank] = failure.what();
    }
  };
  std::vector<std::thread> threads;
  for (size_t r = 1; r < ranks; ++r) threads.emplace_back(open, r);
  open(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures)
    if (!failure.empty()) throw Failure(failure);
}

double Runner::run(Call call, const Batch& batch, const std::vector<std::string>& names, std::vector<Tensor>& fetched) {
  std::vector<std::string> all{"loss"};
  all.insert(all.end(), names.begin(), names.end());
  std::vector<Started> runs(sessions_.size());
  std::string failure;  // the first rank's
  for (size_t r = 0; r < runs.size(); ++r) {
    try {
      runs[r] = start(sessions_[r].get(), call, batch, all);
    } catch (const Failure& refused) {
      if (failure.empty()) failure = refused.what();
    }
  }
  for (const Started& run : runs) {
    int32_t done = 0;
    try {
      if (run.event) check(whale_event_wait(run.event.get(), -1, &done));
    } catch (const Failure& ended) {
      if (failure.empty()) failure = ended.what();
    }
  }
  if (!failure.empty()) throw Failure(failure);
  for (size_t r = 1; r < runs.size(); ++r) {
    const std::string rank = "rank " + std::to_string(r) + " has ";
    for (size_t i = 0; i < all.size(); ++i)
      if (!same_bytes(runs[r].outputs[i].get(), runs[0].outputs[i].get()))
        throw Failure(rank + "another '" + all[i] + "' than rank 0");
    if (whale_session_updates(sessions_[r].get()) != whale_session_updates(session()))
      throw Failure(rank + "made other updates than rank 0");
  }
  fetched = std::move(runs[0].outputs);
  const Tensor loss = std::move(fetched.front());
  fetched.erase(fetched.begin());
  return values_of(loss.get()).data.at(0);
}

double Runner::run(Call call, const Batch& batch, const std::vector<std::string>& names, std::vector<Values>* values) {
  std::vector<Tensor> fetched;
  const double loss = run(call, batch, names, fetched);
  if (values) values->clear();
  for (size_t i = 0; values && i < fetched.size(); ++i) values->push_back(values_of(fetched[i].get()));
  return loss;
}

double Runner::step(const Batch& batch, const std::vector<std::string>& names, std::vector<Values>* values) {
  return run(whale_session_step, batch, names, values);
}
double Runner::eval(const Batch& batch, const std::vector<std::string>& names, std::vector<Values>* values) {
  return run(whale_session_eval, batch, names, values);
}
double Runner::step(const Batch& batch, const std::vector<std::string>& names, std::vector<Tensor>& tensors) {
  return run(whale_session_step, batch, names, tensors);
}
double Runner::eval(const Batch& batch, const std::vector<std::string>& names, std::vector<Tensor>& tensors) {
  return run(whale_session_eval, batch, names, tensors);
}

Tensor Runner::read(const std::string& variable, int64_t copy) const {
  if (sessions_.size() == 1) return own<Tensor>(whale_session_read_copy, session(), str(variable), copy, nullptr);
  whale_variable of = WHALE_VARIABLE_INIT;
  for (size_t i = 0; to_string(of.name) != variable; ++i) check(whale_session_variable(session(), i, &of));
  Tensor all[2];  // twice, onto other bytes: what no rank holds is not the same
  for (size_t k = 0; k < 2; ++k) {
    all[k] = own<Tensor>(whale_tensor_create, of.dtype, of.dims, of.rank);
    std::memset(whale_tensor_data(all[k].get()), k == 0 ? 0 : 0xff, whale_tensor_bytes(all[k].get()));
    for (const Session& session : sessions_)
      check(whale_session_read_here(session.get(), str(variable), copy, all[k].get(), nullptr));
  }
  if (!same_bytes(all[0].get(), all[1].get())) throw Failure("no rank holds a part of '" + variable + "'");
  return std::move(all[0]);
}
void Runner::write(const std::string& variable, const whale_tensor* tensor) {
  each([&](whale_session* session) { check(whale_session_write(session, str(variable), tensor)); });
}

void Runner::at_once(const std::function<void(whale_session*)>& body) const {
  std::vector<std::string> failures(sessions_.size());
  const auto call = [&](size_t rank) {
    try {
      body(sessions_[rank].get());
    } catch (const Failure& failure) {
      failures[rank] = failure.what();
    }
  };
  std::vector<std::thread> threads;
  for (size_t r = 1; r < sessions_.size(); ++r) threads.emplace_back(call, r);
  call(0);
  for (std::thread& thread : threads) thread.join();
  for (const std::string& failure : failures)
    if (!failure.empty()) throw Failure(failure);
}
void Runner::save(const std::string& directory) const {
  at_once([&](whale_session* session) { check(whale_session_save(session, str(directory))); });
}
void Runner::load(const std::string& directory) const {
  at_once([&](whale_session* session) { check(whale_session_load(session, str(directory))); });
}

FileKind kind_of(const std::string& path) {
  if (::access(path.c_str(), F_OK) != 0)
    throw Failure("cannot open '" + shown(path) + "': " + std::strerror(errno) +
                  (path.ends_with(".whale")  ? "; `whale model gpt -o gpt.whale` writes a model"
                   : path.ends_with(".plan") ? "; `whale plan MODEL -o FILE` writes a plan"
                                             : ""));
  const std::string start = read_start(path, 8);
  const std::string identifier = start.size() == 8 ? start.substr(4) : "";
  return identifier == "WHG1" ? FileKind::kGraph : identifier == "WHP1" ? FileKind::kPlan : FileKind::kOther;
}

bool has_checksum(const std::string& path) {
  const std::string content = read_file(path);
  return content.size() >= 12 && (content.compare(8, 4, "WHC2") == 0 ||
                                  content.compare(content.size() - 8, 4, "WHC1") == 0);  // of versions before
}

void check_fixed(const std::string& path, const PlanArguments& arguments) {
  const std::string fixed = arguments.fixed ? arguments.fixed() : "";
  if (!fixed.empty())
    throw Failure("'" + shown(path) + "' is a plan, made with its own " + fixed +
                  ": leave that out, or plan the model again");
}

Plan open_plan(whale_engine* engine, const std::string& path, const PlanArguments& arguments) {
  const FileKind kind = kind_of(path);
  if (kind == FileKind::kOther)
    throw Failure("'" + shown(path) + "' is neither a model (.whale) nor a plan (.plan): " +
                  (read_start(path, 1).empty() ? "it is empty" : "its first bytes are of neither"));
  if (kind == FileKind::kPlan) {
    check_fixed(path, arguments);
    return own<Plan>(whale_plan_load, engine, str(path));
  }
  const GraphHandle graph = own<GraphHandle>(whale_graph_load, engine, str(path));
  if (arguments.trials == 0) return make_plan(engine, graph.get(), arguments);
  if (arguments.strategy != "auto") throw Failure("--trials is of --strategy auto");
  return make_plan(engine, graph.get(), tried(engine, graph.get(), arguments));
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double peak_rss_mb() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;
}

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds);
  char buffer[32];
  if (s >= 3600)
    std::snprintf(buffer, sizeof buffer, "%ld:%02ld:%02ld", static_cast<long>(s / 3600), static_cast<long>(s / 60 % 60),
                  static_cast<long>(s % 60));
  else
    std::snprintf(buffer, sizeof buffer, "%ld:%02ld", static_cast<long>(s / 60), static_cast<long>(s % 60));
  return buffer;
}

}  // namespace tool
