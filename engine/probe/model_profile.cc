#include "probe/model_profile.h"

#include <algorithm>
#include <barrier>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "base/error.h"
#include "base/no_signals.h"
#include "base/progress.h"
#include "base/text.h"
#include "cluster/device_kinds.h"
#include "cluster/devices.h"
#include "cost/measured.h"
#include "probe/probe.h"
#include "probe/timing.h"
#include "run/team.h"
#include "session/session.h"
#include "simulate/simulate.h"

namespace whale {
namespace {

constexpr size_t kMostBatches = 6;
constexpr size_t kLeastSteps = 5, kMostSteps = 30;  // that are timed, of a local batch

// Halves of the graph's batch, at most six: the smallest is one sample.
std::vector<int64_t> local_batches(int64_t batch) {
  std::vector<int64_t> out;
  for (int64_t b = std::max<int64_t>(1, batch); b >= 1; b /= 2) out.push_back(b);
  while (out.size() > kMostBatches) out.erase(out.end() - 2);
  return out;
}

// Numbers for an input: integers that every op permits that takes them for an index, floats of a normal distribution.
std::vector<char> numbers_for(const PlanInput& input, const Dims& dims) {
  std::mt19937_64 random(1);
  const auto count = static_cast<size_t>(element_count(dims));
  std::vector<char> out(count * static_cast<size_t>(size_of(input.dtype)));
  if (is_float(input.dtype)) {
    if (input.dtype != DType::kF32) return out;
    std::normal_distribution<float> normal;
    auto* to = reinterpret_cast<float*>(out.data());
    for (size_t i = 0; i < count; ++i) to[i] = normal(random);
    return out;
  }
  int64_t limit = input.indices.empty() ? 1 : INT32_MAX;
  for (const IndexRange& range : input.indices) limit = std::min(limit, std::max<int64_t>(1, range.limit));
  for (size_t i = 0; i < count; ++i) {
    const auto value = static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
    if (input.dtype == DType::kI32) reinterpret_cast<int32_t*>(out.data())[i] = static_cast<int32_t>(value);
    if (input.dtype == DType::kI64) reinterpret_cast<int64_t*>(out.data())[i] = value;
  }
  return out;
}

// The instruction of each span of a trace, by what a trace says of it.
using ByName = std::map<std::pair<std::string, std::string>, const Instruction*>;

struct Timings {
  std::map<const Instruction*, std::vector<double>> seconds;  // one a step
  std::vector<double> steps;                                  // of the clock of the caller
};

class DeviceRun {
 public:
  DeviceRun(const std::shared_ptr<Backends>& backends, std::shared_ptr<const Plan> plan,
            const ModelProfileOptions& options)
      : plan_(std::move(plan)), options_(options) {
    SessionOptions with;
    with.nan_policy = NanPolicy::kPass;  // numbers drawn at random prove nothing
    with.leases = options.leases, with.init_files = options.init_files, with.plan_in_run = false;
    session_ = std::make_unique<Session>(plan_, backends, with);
    session_->set_trace(true);
  }

  void begin(const Entry& entry) {
    entry_ = &entry, timings_ = {}, by_name_.clear(), inputs_.clear(), memory_.clear();
    for (const PlanInput& input : entry.inputs) {
      memory_.push_back(numbers_for(input, input.dims));
      inputs_.push_back({input.name, {input.dtype, input.dims, memory_.back().data()}});
    }
    for (const Segment& segment : program().segments)
      for (const Instruction& i : segment.instructions) by_name_[{i.name, std::string(i.verb())}] = &i;
  }

  // `counts`: false of the first steps, in which memory is touched for the first time.
  double step(bool counts) {
    const auto start = std::chrono::steady_clock::now();
    const RunHandle run = entry_->name == "train" ? session_->step(inputs_, {}, options_.cancel)
                                                  : session_->eval(inputs_, {}, options_.cancel);
    run.wait();
    const double took = seconds_since(start);
    if (counts) timings_.steps.push_back(took), read(session_->timeline());
    return took;
  }

  const Timings& timings() const { return timings_; }
  const Program& program() const { return entry_->programs[entry_->rows[0].program]; }

 private:
  // An instruction takes until the next one of its queue begins: what lies between them is the executor's, and part of
  // the step.
  void read(const std::string& text) {
    struct Span {
      const Instruction* instruction;
      double begin, end;
    };
    std::map<int, std::vector<Span>> queues;
    const auto trace = nlohmann::json::parse(text);
    for (const auto& event : trace.at("traceEvents")) {
      if (event.at("ph") != "X") continue;
      const auto at = by_name_.find({event.at("name"), event.at("args").at("op")});
      const double begin = event.at("ts"), length = event.at("dur");
      if (at != by_name_.end())
        queues[event.at("tid").get<int>()].push_back({at->second, begin * 1e-6, (begin + length) * 1e-6});
    }
    constexpr double kMostBetween = 20e-6;  // more is a wait, or another program that ran
    for (auto& [_, spans] : queues) {
      std::ranges::stable_sort(spans, {}, &Span::begin);
      for (size_t k = 0; k < spans.size(); ++k) {
        const double next = k + 1 < spans.size() ? std::max(spans[k].end, spans[k + 1].begin) : spans[k].end;
        timings_.seconds[spans[k].instruction].push_back(std::min(next, spans[k].end + kMostBetween) - spans[k].begin);
      }
    }
  }

  const std::shared_ptr<const Plan> plan_;
  const ModelProfileOptions& options_;
  std::unique_ptr<Session> session_;
  const Entry* entry_ = nullptr;
  ByName by_name_;
  std::vector<std::vector<char>> memory_;
  std::vector<NamedHost> inputs_;
  Timings timings_;
};

double median(std::vector<double> list) {
  std::ranges::sort(list);
  return list.empty() ? 0 : list[list.size() / 2];
}

// What several devices of a kind, and several instructions of a shape, took.
struct Sums {
  struct Point {
    OpCost cost;
    double seconds = 0;
    int64_t count = 0, samples = 0;
  };
  std::map<std::string, std::map<std::vector<int64_t>, Point>> points;  // key, numbers
  std::map<int64_t, std::pair<MeasuredStep, int64_t>> steps;            // samples; with how many
};

// How often as long as all its instructions a step takes. On a core that another device shares, or under a control
// group's quota, an instruction runs alone, or its queue waits for its turn: the median is that of the former, so the
// turns are dealt to all of them. What is little is noise, and so is the slowest step of many.
double turns_of(const DeviceRun& run) {
  constexpr double kNoise = 1.2;
  constexpr size_t kMany = 8;
  double inside = 0;
  for (const auto& [_, list] : run.timings().seconds) inside += median(list);
  std::vector<double> steps = run.timings().steps;
  std::ranges::sort(steps);
  if (steps.size() >= kMany) steps.pop_back();
  const double mean = std::accumulate(steps.begin(), steps.end(), 0.0) / static_cast<double>(steps.size());
  return inside > 0 && mean > kNoise * inside ? mean / inside : 1;
}

void add(const DeviceRun& run, int64_t samples, Sums& sums) {
  auto& [step, count] = sums.steps[samples];
  step.samples = samples, ++count;
  step.step += median(run.timings().steps);
  const Program& program = run.program();
  const double turns = turns_of(run);
  for (const auto& [i, list] : run.timings().seconds) {
    const double seconds = std::max(turns * median(list), 1e-9);
    (i->phase == Phase::kForward ? step.forward : i->phase == Phase::kUpdate ? step.update : step.backward) += seconds;
    const InstructionKind kind = i->kind();
    if (kind != InstructionKind::kKernel && kind != InstructionKind::kFeed && kind != InstructionKind::kFetch) continue;
    const OpShape shape = measured_shape(*i, program.buffers);
    Sums::Point& point = sums.points[shape.key][shape.numbers];
    point.cost = shape.cost, point.seconds += seconds, ++point.count;
    point.samples = std::max(point.samples, samples);
  }
}

std::unique_ptr<MeasuredDevice> device_of(const Sums& sums) {
  auto out = std::make_unique<MeasuredDevice>();
  for (const auto& [key, points] : sums.points)
    for (const auto& [numbers, point] : points)
      out->ops[key].push_back({numbers, point.seconds / static_cast<double>(point.count), point.cost, point.samples});
  for (const auto& [_, counted] : sums.steps) {
    MeasuredStep step = counted.first;
    const auto n = static_cast<double>(counted.second);
    step.forward /= n, step.backward /= n, step.update /= n, step.step /= n;
    out->steps.push_back(step);
  }
  out->index();
  return out;
}

void check_kinds(const std::vector<DeviceSpec>& devices) {
  for (const DeviceSpec& d : devices)
    if (d.kind != DeviceKind::kCpu && d.kind != DeviceKind::kRef && d.kind != DeviceKind::kCuda)
      throw unimplemented(
          "{} devices are not profiled: they compute nothing, or are there for tests; profile cpu devices, or import "
          "what somebody measured",
          d.type.empty() ? name_of(d.kind) : d.type.c_str());
}

// All devices together, step by step; the first failure ends it.
class Together {
 public:
  Together(std::vector<std::unique_ptr<DeviceRun>>& runs, double seconds, const Cancel* cancel)
      : runs_(runs), seconds_(seconds), cancel_(cancel) {}

  void run(const std::vector<const Entry*>& entries) {
    std::atomic<bool> ends = false;
    const auto start = std::chrono::steady_clock::now();
    size_t done = 0;
    std::barrier meet(std::ssize(runs_), [&]() noexcept {
      ++done;
      const size_t timed = done < 2 ? 0 : done - 2;  // before the first step, and behind that of which nothing counts
      const bool enough = timed >= kMostSteps || (timed >= kLeastSteps && seconds_since(start) > seconds_);
      if (enough || error_ || (cancel_ != nullptr && cancel_->triggered())) ends = true;
    });
    const auto each = [&](size_t k) {
      try {
        runs_[k]->begin(*entries[k]);
      } catch (const std::exception& e) {
        fail(e);
      }
      for (bool counts = false;; counts = true) {
        meet.arrive_and_wait();
        if (ends) return;
        try {
          runs_[k]->step(counts);
        } catch (const std::exception& e) {
          fail(e);
        }
      }
    };
    const NoSignals quiet;
    std::vector<std::thread> threads;
    for (size_t k = 1; k < runs_.size(); ++k) threads.emplace_back(each, k);
    each(0);
    for (std::thread& thread : threads) thread.join();
    if (error_) throw Error(*error_);
    if (cancel_ != nullptr && cancel_->triggered()) throw error(Code::kCancelled, "profiling was cancelled");
  }

 private:
  void fail(const std::exception& e) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = as_error(e, "profile a model");
  }

  std::vector<std::unique_ptr<DeviceRun>>& runs_;
  const double seconds_;
  const Cancel* const cancel_;
  std::mutex mutex_;
  std::optional<Error> error_;
};

}  // namespace

Json profile_model(const std::shared_ptr<Backends>& backends, const Graph& graph,
                   const std::vector<DeviceSpec>& devices, const ModelProfileOptions& given) {
  check_kinds(devices);
  ModelProfileOptions options = given;
  if (!options.leases) options.leases = std::make_shared<CoreLeases>();
  CompileOptions& compiled = options.compile;
  compiled.strategy = "local", compiled.accumulation = 1, compiled.train_batches = {}, compiled.eval_batches = {};
  int64_t batch = 0;
  for (const TensorId id : graph.inputs)
    if (const Tensor& t = graph.tensor(id); t.batch_dim >= 0) batch = t.dims[t.batch_dim];
  std::vector<int64_t> samples = options.samples.empty() ? local_batches(batch) : options.samples;
  for (const int64_t b : samples)
    if (b < 1 || b > std::max<int64_t>(1, batch))
      throw invalid("a local batch of {} samples; expected 1 to {}, the model's own batch", b, batch);
  const bool trains = graph.training.loss != kNone && graph.training.optimizer.kind != OptimizerKind::kNone;
  (trains ? compiled.train_batches : compiled.eval_batches) = samples;

  const std::vector<int64_t> sharers = sharers_of(devices);
  std::vector<MeasuredKind> kinds;
  std::vector<std::shared_ptr<const Plan>> plans;
  std::vector<std::unique_ptr<DeviceRun>> runs;
  for (size_t d = 0; d < devices.size(); ++d) {
    kinds.push_back(kind_of(devices[d], sharers[d]));
    DeviceSpec alone = devices[d];
    alone.node = 0;
    plans.push_back(std::make_shared<const Plan>(compile(graph, {alone}, compiled)));
    runs.push_back(std::make_unique<DeviceRun>(backends, plans.back(), options));
  }
  std::map<MeasuredKind, Sums> sums;
  {
    Progress progress(samples.size(), "local batch");
    Together together(runs, options.seconds, options.cancel.get());
    for (const int64_t b : samples) {
      std::vector<const Entry*> entries;
      for (const auto& plan : plans) entries.push_back(plan->find_entry(trains ? "train" : "eval", b));
      together.run(entries);
      for (size_t k = 0; k < runs.size(); ++k) add(*runs[k], b, sums[kinds[k]]);
      progress.add();
    }
  }
  runs.clear();
  MeasuredProfile out;
  out.model = graph.name, out.digest = fmt::format("{:016x}", plans[0]->model_hash);
  for (const auto& [kind, sum] : sums) {
    const auto k = static_cast<size_t>(std::ranges::find(kinds, kind) - kinds.begin());
    std::unique_ptr<MeasuredDevice> device = device_of(sum);
    device->kind = kind, device->device = to_string(devices[k]);
    device->description = backends->get(devices[k].kind).describe();
    out.devices.push_back(std::move(device));
  }
  Json json = json_of(out);
  const ProbeOptions probing{.seconds = 0.05,
                             .leases = options.leases,
                             .cancel = options.cancel == nullptr ? nullptr : &options.cancel->flag()};
  json["profile"] = probe(*backends, devices, probing).json()["profile"];
  return json;
}

}  // namespace whale
