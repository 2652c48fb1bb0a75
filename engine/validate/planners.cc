#include "validate/planners.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <filesystem>

#include "base/error.h"
#include "search/cluster_pipelines.h"
#include "validate/csv.h"
#include "validate/measured_json.h"
#include "validate/sailor_tables.h"

namespace whale {
namespace {

// Between the 0.8 s after which no new cuts are tried and the second that a plan may take.
constexpr double kSearchSeconds = 0.8, kReplanSeconds = 0.04;

double peak_megabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return static_cast<double>(usage.ru_maxrss) / 1024;  // in KiB on Linux
}

Json plan_json(const ClusterProblem& problem, const FoundPipelines& found) {
  Json out;
  out["cuts"] = found.plan.cuts;
  Json stages = Json::array();
  for (int i = 0; i < found.plan.stages(); ++i) {
    Json layers = Json::array();
    for (int l = found.plan.cuts[i]; l < found.plan.cuts[static_cast<size_t>(i) + 1]; ++l) layers.push_back(l);
    stages.push_back(layers);
  }
  out["layers_of_stages"] = stages;
  out["global_batch"] = problem.batch;
  Json classes = Json::array();
  for (size_t k = 0; k < found.plan.classes.size(); ++k) {
    const ReplicaClass& c = found.plan.classes[k];
    Json one{{"replicas", c.replicas},
             {"micro_batches", c.micro_batches},
             {"micro_batch", c.micro_batch},
             {"seconds", found.price.class_seconds[k]},
             {"peak_gigabytes", found.price.peak_bytes[k] / 1e9}};
    Json places = Json::array();
    for (const StagePlace& place : c.stages)
      places.push_back({{"gpu", problem.types[place.type].name}, {"tensor_parallel", place.split}});
    one["stages"] = places;
    classes.push_back(one);
  }
  out["classes"] = classes;
  Json used = Json::object(), idle = Json::object();
  for (size_t t = 0; t < problem.types.size(); ++t) {
    int64_t here = 0, all = 0;
    for (const int n : problem.types[t].nodes) all += n;
    for (const ReplicaClass& c : found.plan.classes)
      for (const StagePlace& place : c.stages) here += place.type == static_cast<int>(t) ? c.replicas * place.split : 0;
    used[problem.types[t].name] = here;
    idle[problem.types[t].name] = all - here;
  }
  out["devices_used"] = used;
  out["devices_idle"] = idle;
  out["step_seconds"] = found.price.step_seconds;
  out["sync_seconds"] = found.price.sync_seconds;
  out["iterations_per_second"] = 1 / found.price.step_seconds;
  return out;
}

// "V100-16/2" for a stage on two of them; equal ones side by side are counted.
std::string stages_text(const ClusterProblem& problem, const ReplicaClass& c) {
  std::string out;
  for (size_t i = 0; i < c.stages.size();) {
    size_t same = i;
    while (same < c.stages.size() && c.stages[same] == c.stages[i]) ++same;
    out += fmt::format("{}{}{}x{}", out.empty() ? "" : ", ", same - i > 1 ? fmt::format("{} of ", same - i) : "",
                       c.stages[i].split, problem.types[c.stages[i].type].name);
    i = same;
  }
  return out;
}

struct Replan {
  const char* what;
  double step_seconds = 0, milliseconds = 0;
};

std::vector<Replan> replans(const ClusterProblem& problem, const FoundPipelines& found) {
  std::vector<Replan> out;
  const ClusterSearch near{.within_seconds = kReplanSeconds, .near_only = true};
  const auto last = static_cast<int>(problem.types.size()) - 1;
  const auto add = [&](const char* what, const auto& plan) {
    const auto begin = std::chrono::steady_clock::now();
    const FoundPipelines again = plan();
    out.push_back({what, again.price.step_seconds,
                   1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()});
  };
  add("first type loses a device", [&] { return plan_pipelines(without_device(problem, 0), near, &found.plan); });
  add("last type loses a device", [&] { return plan_pipelines(without_device(problem, last), near, &found.plan); });
  add("a device of the first type slows to half",
      [&] { return replan_slow(problem, 0, 2, found.plan, kReplanSeconds); });
  add("a device of the last type slows to half",
      [&] { return replan_slow(problem, last, 2, found.plan, kReplanSeconds); });
  return out;
}

}  // namespace

bool is_planners(const std::string& path) {
  std::error_code ignored;
  return is_folder(path) && std::filesystem::is_regular_file(path + "/planner_bars.csv", ignored);
}

Json validate_planners(const std::string& path, const ValidateOptions& options) {
  if (!is_folder(path))
    throw invalid("{} is no folder, expected one with planner_bars.csv, profiles and providers", path);
  const SailorTables tables(path, options.profiles);
  const Csv bars = read_csv(path + "/planner_bars.csv");
  Json rows = Json::array(), others = Json::array(), plans = Json::array();
  std::string text = fmt::format("{:<12}{:>9}{:>10}{:>9}{:>8}{:>9}{:>8}{:>10}\n", "model", "A100+V100", "Sailor",
                                 "ours", "ratio", "search s", "Sailor s", "replan ms");
  std::string details;
  double log_sum = 0, least = 1e300, slowest = 0, slowest_replan = 0;
  int count = 0;
  for (size_t r = 0; r < bars.rows.size(); ++r) {
    if (!bars.text(r, "planner").starts_with("Sailor")) continue;
    const std::string& model = bars.text(r, "model");
    const auto a100 = static_cast<int>(bars.whole(r, "a100_40")), v100 = static_cast<int>(bars.whole(r, "v100_16"));
    const double bar = bars.number(r, "plan_it_per_s_in_sailor_simulator");
    if (!(bar > 0)) throw invalid("{}, row {}: a plan of {} iterations a second", bars.path, r + 1, bar);
    std::vector<std::pair<std::string, int>> devices;
    if (a100 > 0) devices.emplace_back("A100-40", a100);
    if (v100 > 0) devices.emplace_back("V100-16", v100);
    const ClusterProblem problem = tables.problem(model, devices);
    const FoundPipelines found = plan_pipelines(problem, {.within_seconds = kSearchSeconds});
    const double ours = 1 / found.price.step_seconds, ratio = ours / bar;
    // The clusters that planners are compared on: three of the slower devices to one of the faster.
    const bool compared = v100 == 3 * a100;
    Json row{{"model", model},
             {"a100_40", a100},
             {"v100_16", v100},
             {"iterations_per_second", ours},
             {"sailor_iterations_per_second", bar},
             {"over_sailor", ratio},
             {"search_seconds", found.seconds},
             {"sailor_search_seconds", bars.number(r, "search_s_here")},
             {"cuts_tried", found.cuts_tried},
             {"stages", found.plan.stages()},
             {"replicas", found.plan.replicas()}};
    double replan_ms = 0;
    Json again = Json::array();
    for (const Replan& replan : replans(problem, found)) {
      replan_ms = std::max(replan_ms, replan.milliseconds);
      again.push_back({{"what", replan.what},
                       {"iterations_per_second", 1 / replan.step_seconds},
                       {"milliseconds", replan.milliseconds}});
    }
    row["replans"] = again;
    (compared ? rows : others).push_back(row);
    Json plan = plan_json(problem, found);
    plan["model"] = model;
    plan["a100_40"] = a100;
    plan["v100_16"] = v100;
    plans.push_back(plan);
    if (compared) {
      log_sum += std::log(ratio);
      least = std::min(least, ratio);
      slowest = std::max(slowest, found.seconds);
      slowest_replan = std::max(slowest_replan, replan_ms);
      ++count;
    }
    text += fmt::format("{:<12}{:>9}{:>10.5f}{:>9.5f}{:>8.3f}{:>9.2f}{:>8.2f}{:>10.1f}\n", model,
                        fmt::format("{}+{}", a100, v100), bar, ours, ratio, found.seconds,
                        bars.number(r, "search_s_here"), replan_ms);
    details += fmt::format("\n{} on {}+{}: {} stage(s), cuts at {}; {:.4f} s a step, {:.4f} of them all-reduce\n",
                           model, a100, v100, found.plan.stages(), fmt::join(found.plan.cuts, ","),
                           found.price.step_seconds, found.price.sync_seconds);
    for (const ReplicaClass& c : found.plan.classes)
      details += fmt::format("  {} replica(s), {} micro-batches of {}: {}\n", c.replicas, c.micro_batches,
                             c.micro_batch, stages_text(problem, c));
  }
  if (rows.empty() && others.empty()) throw invalid("{} has no rows of the planner Sailor", bars.path);
  Json out{{"rows", rows}, {"other_rows", others}};
  if (count > 0) {
    out["geometric_mean_over_sailor"] = std::exp(log_sum / count);
    out["least_over_sailor"] = least;
    out["slowest_search_seconds"] = slowest;
    out["slowest_replan_milliseconds"] = slowest_replan;
    text +=
        fmt::format("\nof the {} clusters with three V100 to an A100: geometric mean {:.3f} x Sailor, least {:.3f} x\n",
                    count, std::exp(log_sum / count), least);
  }
  out["peak_megabytes"] = peak_megabytes();
  out["plans"] = plans;
  out["text"] = text + details + fmt::format("\npeak memory of this process: {:.0f} MB\n", peak_megabytes());
  return out;
}

}  // namespace whale
