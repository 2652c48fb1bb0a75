// The parts of a search for a strategy: which devices are alike, what savings come to, what is an error. What it finds
// is in mixed_test.cc.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <set>
#include <string>

#include "cluster/cluster_file.h"
#include "cluster/device_kinds.h"
#include "cluster/devices.h"
#include "compile/automatic.h"
#include "compile/device_sets.h"
#include "compile/estimate.h"
#include "compile/savings.h"
#include "grad/passes.h"
#include "simulate/simulate.h"
#include "trained.h"
#include "unit/caught.h"

namespace whale {
namespace {

TEST_CASE("device kinds: one predicate says who is alike; names tell those of one type apart") {
  std::vector<DeviceSpec> devices = parse_devices("T4:2|V100-32GB:1|T4:1");
  CHECK(kinds_of(devices) == std::vector<int32_t>{0, 0, 1, 0});
  CHECK(are_alike(devices[0], devices[3]));  // in another node
  CHECK(are_unlike(devices));
  devices[3].memory_bytes /= 2;
  CHECK(kinds_of(devices) == std::vector<int32_t>{0, 0, 1, 2});
  CHECK(names_of_kinds(devices) == std::vector<std::string>{"T4", "T4", "V100-32GB", "T4 (2)"});
  // Work is not dealt by prices and links.
  std::vector<DeviceSpec> dear = parse_devices("T4:2");
  dear[1].figures.price_per_hour *= 2, dear[1].figures.network.bytes_per_second /= 2;
  CHECK(!are_alike(dear[0], dear[1]));
  CHECK(!are_unlike(dear));
  const std::vector<DeviceSpec> chosen = chosen_of(devices, {2, 3});
  CHECK(chosen[0].type == "V100-32GB");
  CHECK(chosen[0].node == 0);
  CHECK(chosen[1].node == 1);
}

TEST_CASE("auto: of two sites with a thin wire between them the larger one alone") {
  const auto found = [](const char* between) {
    const std::vector<DeviceSpec> devices = devices_of_json(fmt::format(
        R"({{"zones": {{"west": {{"network": "{0}"}}, "east": {{"network": "{0}"}}}},
             "nodes": [{{"zone": "west", "devices": [{{"type": "T4", "count": 2}}], "network": "100Gb/s"}},
                       {{"zone": "east", "count": 2, "devices": [{{"type": "T4", "count": 2}}], "network": "100Gb/s"}}]}})",
        between));
    CompileOptions options;
    options.strategy = "auto";
    return compile(small::gpt(24, OptimizerKind::kAdamW, 4, 128, 256, 512, 4).g, devices, options).devices;
  };
  const std::vector<DeviceSpec> thin = found("10Mb/s@40ms"), wide = found("100Gb/s@10us");
  CHECK(thin.size() == 4);
  for (const DeviceSpec& d : thin) CHECK(d.zone == 1);
  CHECK(wide.size() == 6);
}

TEST_CASE("an optimizer's state, of a byte of a parameter: what its update rule makes") {
  const auto states = [](OptimizerKind kind, double momentum = 0) {
    Optimizer o;
    o.kind = kind, o.momentum = momentum;
    return states_of(o);
  };
  CHECK(states(OptimizerKind::kNone) == 0);
  CHECK(states(OptimizerKind::kSgd) == 0);
  CHECK(states(OptimizerKind::kSgd, 0.9) == 1);
  CHECK(states(OptimizerKind::kAdagrad) == 1);
  for (const OptimizerKind kind : {OptimizerKind::kAdam, OptimizerKind::kAdamW, OptimizerKind::kLamb})
    CHECK(states(kind) == 2);
  CHECK(states(OptimizerKind::kAdafactor) == doctest::Approx(2.0 / 1024));  // a row and a column
}

TEST_CASE("auto: a present strategy beside another than auto is an error that says so") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 2);
  CompileOptions options;
  options.search.present = "replica(2)", options.strategy = "replica";
  const auto refused = [&] {
    return message_of([&] { compile(m.g, parse_devices("T4:2"), options); }, {Code::kInvalidArgument});
  };
  CHECK(has(refused(), "a present strategy ('replica(2)') is given beside strategy 'replica'"));
  options.strategy = "";
  CHECK(has(refused(), "beside no strategy"));
  options.strategy = "auto";
  CHECK(compile(m.g, parse_devices("T4:2"), options).devices.size() <= 2);
}

TEST_CASE("auto: a present strategy of many more devices than there are is refused") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 2);
  CompileOptions options;
  options.strategy = "auto";
  const auto said = [&](const char* present) {
    options.search.present = present;
    return message_of([&] { search(m.g, parse_devices("T4:3"), options); });
  };
  CHECK(has(said("replica(50)"), "the present strategy 'replica(50)' needs 50 devices, and there are 3"));
  CHECK(has(said("replica(3) > split(3)"), "needs 9 devices"));
  CHECK(said("replica(4)") == "");  // one is lost
  CHECK(said("pipeline(3, micro_batches=4)") == "");
}

TEST_CASE("auto: one plan is listed once") {
  const small::Model m = small::gpt(32, OptimizerKind::kAdamW, 8);
  for (const char* text : {"4xV100-32GB:1~10Gb/s|2xP100-16GB:2~10Gb/s", "T4:4"}) {
    const std::vector<DeviceSpec> devices = parse_devices(text, {0});
    std::set<std::string> seen;
    for (const Judged& j : search(m.g, devices, {}).list) {
      CAPTURE(whole_text(j));
      if (has(j.candidate.strategy, "interleaved")) CHECK(has(j.candidate.strategy, "virtual_stages=2"));
      CHECK(seen.insert(fmt::format("{} on {}", whole_text(j), to_string(chosen_of(devices, j.candidate.devices))))
                .second);
    }
  }
}

TEST_CASE("auto: devices that are alike are one set, whatever their zone") {
  const std::vector<DeviceSpec> devices = devices_of_json(
      R"({"zones": {"west": {"network": "1Gb/s"}, "east": {"network": "1Gb/s"}},
          "nodes": [{"zone": "west", "devices": [{"type": "T4", "count": 2}], "network": "100Gb/s"},
                    {"zone": "east", "devices": [{"type": "T4", "count": 2}], "network": "100Gb/s"}]})");
  const std::vector<DeviceSet> sets = device_sets(devices, {}, Precision::kFloat32);
  for (size_t a = 0; a < sets.size(); ++a)
    for (size_t b = 0; b < a; ++b) CHECK(to_string(sets[a].specs) != to_string(sets[b].specs));
  CHECK(std::ranges::count(sets, size_t{2}, [](const DeviceSet& s) { return s.devices.size(); }) == 1);
}

TEST_CASE("auto: no other number of micro-batches next to the winner's is faster") {
  const small::Model m = small::gpt(48, OptimizerKind::kAdamW, 8);
  for (const char* text : {"2xT4:1~5Gb/s@30us", "2xV100-32GB:1~25Gb/s@10us"}) {
    const std::vector<DeviceSpec> devices = parse_devices(text, {0});
    const Found found = search(m.g, devices, {});
    REQUIRE(found.fits());
    const Judged& best = found.winner();
    CAPTURE(whole_text(best));
    const size_t at = best.candidate.strategy.find("micro_batches=");
    if (at == std::string::npos) continue;
    const int64_t parts = std::stoll(best.candidate.strategy.substr(at + 14));
    for (int64_t other = 1; other <= 48; ++other) {
      if (48 % other != 0 || other < parts / 2 || other > parts * 2) continue;
      CompileOptions options;
      static_cast<PlanOptions&>(options) = best.candidate.options;
      options.strategy = best.candidate.strategy;
      options.strategy.replace(at + 14, std::to_string(parts).size(), std::to_string(other));
      const Plan plan = compile(m.g, chosen_of(devices, best.candidate.devices), options);
      CAPTURE(options.strategy);
      CHECK(times_of(plan, plan.entries[0])->seconds >= best.seconds * (1 - 1e-6));
    }
  }
}

TEST_CASE("auto: by price where some devices have none names their types") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 2);
  std::vector<DeviceSpec> devices = parse_devices("T4:2|V100-32GB:2|H100:1");
  for (DeviceSpec& d : devices)
    if (d.type != "T4") d.figures.price_per_hour = 0;
  CompileOptions options;
  CHECK(search(m.g, devices, options).fits());  // by time no price is needed
  options.search.objective = Objective::kPrice;
  const std::string message = message_of([&] { search(m.g, devices, options); }, {Code::kInvalidArgument});
  CHECK(has(message, "H100, V100-32GB"));
  CHECK(!has(message, "T4"));
  options.search.objective = Objective::kThroughput, options.search.most_price = 1;
  CHECK(has(message_of([&] { search(m.g, devices, options); }), "H100, V100-32GB"));
}

// What was seen with some savings says of all others what is missing at least: never more than they lack.
TEST_CASE("auto: savings that are ruled out by what was seen do not fit") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 4, 64, 128, 64, 4);
  for (const char* strategy : {"replica(4)", "replica(2) > pipeline(2, micro_batches=4)", "replica(2) > split(2)"}) {
    std::vector<DeviceSpec> devices = parse_devices("T4:4");
    std::map<std::string, Estimate> known;
    const auto estimated = [&](const Saving& saving) -> const Estimate& {
      if (const auto it = known.find(saving.name); it != known.end()) return it->second;
      CompileOptions options;
      static_cast<PlanOptions&>(options) = saved({}, saving, true);
      options.strategy = strategy;
      return known[saving.name] = estimate_at(m.g, devices, options, 1);
    };
    const double replicas = std::string_view(strategy) == "replica(4)" ? 4 : 2;
    int64_t most = 0;
    for (const Estimate::Class& c : estimated(kSavings[0]).classes) most = std::max(most, c.memory.device.total());
    size_t ruled_out = 0;
    for (const int64_t part : {2, 4}) {
      for (DeviceSpec& d : devices) d.memory_bytes = most / part;
      for (const Saving& from : kSavings) {
        SavingsSeen seen(false, false);
        seen.see(saved({}, from, true), estimated(from), devices);
        for (const Saving& to : kSavings) {
          CAPTURE(strategy);
          CAPTURE(from.name);
          CAPTURE(to.name);
          const int64_t least = seen.least_missing(saved({}, to, true), replicas);
          CHECK(least <= missing_bytes(estimated(to), devices));
          ruled_out += least > 0 && saves_as_much(saved({}, to, true), saved({}, from, true));
        }
      }
    }
    CHECK(ruled_out > 0);
  }
}

TEST_CASE("estimates without the look at one layer more are near those with it") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 16, 64, 128, 64, 4);
  for (const char* strategy : {"replica(4)", "pipeline(4, micro_batches=8)", "replica(2) > split(2)"}) {
    CAPTURE(strategy);
    CompileOptions options;
    options.strategy = strategy;
    const std::vector<DeviceSpec> devices = parse_devices("T4:4");
    const Estimate quick = estimate_at(m.g, devices, options, 1, Care::kQuick);
    const Estimate checked = estimate_at(m.g, devices, options, 1);
    CHECK(quick.seconds == doctest::Approx(checked.seconds).epsilon(0.05));
    REQUIRE(quick.classes.size() == checked.classes.size());
    for (size_t k = 0; k < quick.classes.size(); ++k)
      CHECK(static_cast<double>(quick.classes[k].memory.device.total()) ==
            doctest::Approx(static_cast<double>(checked.classes[k].memory.device.total())).epsilon(0.1));
  }
}

}  // namespace
}  // namespace whale
