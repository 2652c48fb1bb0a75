// predict: throughput and memory by number of devices and batch: what a scheduler of many jobs asks.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "commands.h"
#include "plan_arguments.h"
#include "runner.h"

namespace tool {
namespace {

int64_t whole_number(const std::string& text, const std::string& all) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 1)
    throw Failure("'" + shown(all) + "', expected numbers from 1 and ranges such as 1..8, joined by commas");
  return value;
}

// "1..4,8": 1, 2, 3, 4, 8.
std::vector<int64_t> numbers_of(const std::string& text) {
  constexpr int64_t kMost = 4096;
  std::vector<int64_t> out;
  for (size_t at = 0; at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    const std::string part = text.substr(at, end - at);
    const size_t dots = part.find("..");
    const int64_t first = whole_number(part.substr(0, dots), text);
    const int64_t last = dots == std::string::npos ? first : whole_number(part.substr(dots + 2), text);
    if (last < first || last - first >= kMost) throw Failure("'" + shown(text) + "': the range " + part + " is none");
    for (int64_t n = first; n <= last; ++n) out.push_back(n);
    at = end + 1;
  }
  return out;
}

void print_table(const nlohmann::json& rows) {
  std::printf("%8s%8s%12s%14s%9s  %s\n", "devices", "batch", "a step", "samples/s", "GB", "strategy");
  for (const auto& row : rows) {
    std::printf("%8lld%8lld", static_cast<long long>(row["devices"].get<int64_t>()),
                static_cast<long long>(row["batch"].get<int64_t>()));
    if (row.contains("error")) {
      std::printf("%12s%14s%9s  %s\n", "-", "-", "-", row["error"].get<std::string>().substr(0, 100).c_str());
      continue;
    }
    const std::string options = row["options"];
    const double seconds = row["seconds"];
    const bool short_step = seconds < 10;
    std::printf("%9.*f %s%14.*f%9.2f  %s%s%s\n", short_step ? 2 : 1, short_step ? seconds * 1e3 : seconds,
                short_step ? "ms" : " s", row["samples_per_second"].get<double>() < 1 ? 4 : 1,
                row["samples_per_second"].get<double>(), static_cast<double>(row["bytes"].get<int64_t>()) / 1e9,
                row["strategy"].get<std::string>().c_str(), options.empty() ? "" : ", ", options.c_str());
  }
}

}  // namespace

void add_predict(CLI::App& app) {
  struct State {
    std::string path, counts = "1", batches;
    bool json = false;
    PlanArguments arguments;
  };
  const auto state = std::make_shared<State>();
  CLI::App* command = app.add_subcommand(
      "predict", "throughput and memory of a model by number of devices and batch, by the best strategy of each");
  command->add_option("MODEL", state->path, "a .whale file")->required();
  command->add_option("--counts", state->counts, "of the first devices, such as 1..8 or 1,2,4 (default 1)");
  command->add_option("--batches", state->batches, "samples of a step, such as 32,64 (default: the model's)");
  command->add_flag("--json", state->json, "print as JSON");
  add_plan_options(*command, state->arguments);
  command->callback([state] {
    const std::vector<int64_t> counts = numbers_of(state->counts);
    const std::vector<int64_t> batches = state->batches.empty() ? std::vector<int64_t>{} : numbers_of(state->batches);
    const Engine engine = make_engine(state->arguments.init_dir);
    const GraphHandle graph = own<GraphHandle>(whale_graph_load, engine.get(), str(state->path));
    const std::string told = prediction_of(engine.get(), graph.get(), state->arguments, counts, batches);
    if (state->json)
      std::printf("%s\n", told.c_str());
    else
      print_table(nlohmann::json::parse(told));
  });
}

}  // namespace tool
