#include "trials.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "data.h"
#include "runner.h"

namespace tool {
namespace {

// What a candidate asks for besides its strategy, as options of the command line.
PlanArguments of_candidate(PlanArguments arguments, const nlohmann::json& candidate) {
  arguments.strategy = candidate.at("strategy");
  // All of them as they are given: a cluster file says more of them than their text.
  if (!candidate.at("all_devices").get<bool>()) arguments.devices = candidate.at("devices_text");
  const auto give = [&](const char* option, const char* key) {
    if (const auto it = candidate.find(key); it != candidate.end() && *it != "" && *it != 0)
      arguments.given[option] = it->is_string() ? it->get<std::string>() : it->dump();
  };
  give("accumulation", "accumulation"), give("zero", "zero"), give("recompute", "recompute"),
      give("offload", "offload");
  arguments.trials = 0;
  return arguments;
}

double seconds_of(whale_engine* engine, const whale_graph* graph, const PlanArguments& arguments) {
  constexpr int kWarm = 2, kTimed = 5;
  Plan plan = make_plan(engine, graph, arguments);
  const auto data = open_data("", inputs_of(plan.get(), "train"));
  SessionArguments session;
  session.ignore_nan = true;
  Runner runner(engine, std::move(plan), session);
  std::vector<double> seconds;
  for (int step = 0; step < kWarm + kTimed; ++step) {
    const Batch batch = data->batch(0, step);
    const double start = seconds_now();
    runner.step(batch);
    if (step >= kWarm) seconds.push_back(seconds_now() - start);
  }
  std::nth_element(seconds.begin(), seconds.begin() + kTimed / 2, seconds.end());
  return seconds[kTimed / 2];
}

}  // namespace

PlanArguments tried(whale_engine* engine, const whale_graph* graph, PlanArguments arguments) {
  const auto found = nlohmann::json::parse(candidates_of(engine, graph, arguments, true));
  PlanArguments best = arguments;
  double least = 0;
  int64_t left = arguments.trials;
  if (found.contains("computes") && !found.at("computes").get<bool>())
    throw Failure(
        "--trials runs candidates, and the devices of this cluster are not here; plan without --trials, which times "
        "them by the simulator, or name devices of this machine (cpu:N)");
  for (const auto& candidate : found.at("candidates")) {
    if (left == 0) break;
    if (candidate.at("seconds").get<double>() <= 0 || candidate.at("missing_bytes").get<int64_t>() > 0) continue;
    --left;
    PlanArguments mine = of_candidate(arguments, candidate);
    const double seconds = seconds_of(engine, graph, mine);
    std::fprintf(stderr, "trial: %s%s%s: %.2f ms a step, %.2f by the cost model\n", mine.strategy.c_str(),
                 candidate.at("options").get<std::string>().empty() ? "" : ", ",
                 candidate.at("options").get<std::string>().c_str(), seconds * 1e3,
                 candidate.at("seconds").get<double>() * 1e3);
    if (least == 0 || seconds < least) least = seconds, best = std::move(mine);
  }
  if (least == 0) throw Failure("--trials: no candidate fits these devices; `whale plan --candidates` says why");
  return best;
}

}  // namespace tool
