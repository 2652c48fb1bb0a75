#include "runner.h"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>

#include <nlohmann/json.hpp>

namespace tool {
namespace {

using StepFunction = decltype(&whale_session_step);

double run(whale_session* session, StepFunction function, const Batch& batch, const std::vector<std::string>& names,
           std::vector<Tensor>& fetched) {
  std::vector<Tensor> tensors;
  std::vector<int32_t> inputs, outputs(1 + names.size());
  std::vector<whale_tensor*> fed, out(outputs.size());
  for (const Array& array : batch) {
    tensors.push_back(own<Tensor>(whale_tensor_view, array.dtype, array.dims.data(), array.dims.size(),
                                  static_cast<void*>(const_cast<uint8_t*>(array.bytes.data()))));
    fed.push_back(tensors.back().get());
    check(whale_session_input(session, str(array.name), &inputs.emplace_back()));
  }
  for (size_t i = 0; i < outputs.size(); ++i)
    check(whale_session_output(session, i == 0 ? WHALE_STR("loss") : str(names[i - 1]), &outputs[i]));
  const Event event = own<Event>(function, session, inputs.data(), fed.data(), fed.size(), outputs.data(), out.data(),
                                 out.size(), static_cast<whale_cancel*>(nullptr));
  int32_t done = 0;
  check(whale_event_wait(event.get(), -1, &done));
  const Tensor loss(out[0]);
  fetched.clear();
  for (size_t i = 1; i < out.size(); ++i) fetched.emplace_back(out[i]);
  return values_of(loss.get()).data.at(0);
}

double run(whale_session* session, StepFunction function, const Batch& batch, const std::vector<std::string>& names,
           std::vector<Values>* values) {
  std::vector<Tensor> fetched;
  const double loss = run(session, function, batch, names, fetched);
  if (values) values->clear();
  for (size_t i = 0; values && i < fetched.size(); ++i) values->push_back(values_of(fetched[i].get()));
  return loss;
}

}  // namespace

Runner::Runner(whale_engine* engine, Plan plan, const SessionArguments& arguments) : plan_(std::move(plan)) {
  whale_session_options options = WHALE_SESSION_OPTIONS_INIT;
  options.seed = arguments.seed;
  options.nan_policy = arguments.ignore_nan;
  options.no_pin = arguments.no_pin;
  options.no_bf16 = arguments.no_bf16;
  options.loss_scale = arguments.loss_scale;
  options.loss_scale_growth = arguments.loss_scale_growth;
  session_ = own<Session>(whale_session_create, engine, static_cast<const whale_plan*>(plan_.get()), &options);
}

double Runner::step(const Batch& batch, const std::vector<std::string>& names, std::vector<Values>* values) {
  return run(session(), whale_session_step, batch, names, values);
}
double Runner::eval(const Batch& batch, const std::vector<std::string>& names, std::vector<Values>* values) {
  return run(session(), whale_session_eval, batch, names, values);
}
double Runner::step(const Batch& batch, const std::vector<std::string>& names, std::vector<Tensor>& tensors) {
  return run(session(), whale_session_step, batch, names, tensors);
}
double Runner::eval(const Batch& batch, const std::vector<std::string>& names, std::vector<Tensor>& tensors) {
  return run(session(), whale_session_eval, batch, names, tensors);
}

Tensor Runner::read(const std::string& variable, int64_t copy) const {
  return own<Tensor>(whale_session_read_copy, session(), str(variable), copy);
}
void Runner::write(const std::string& variable, const whale_tensor* tensor) {
  check(whale_session_write(session(), str(variable), tensor));
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
  return content.size() >= 8 && content.compare(content.size() - 8, 4, "WHC1") == 0;
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
    throw Failure("'" + shown(path) +
                  "' is neither a model (.whale) nor a plan (.plan): its first bytes are of neither");
  if (kind == FileKind::kPlan) {
    check_fixed(path, arguments);
    return own<Plan>(whale_plan_load, engine, str(path));
  }
  const GraphHandle graph = own<GraphHandle>(whale_graph_load, engine, str(path));
  return make_plan(engine, graph.get(), arguments);
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
