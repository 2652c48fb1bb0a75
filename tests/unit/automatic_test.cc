// The parts of a search for a strategy: which devices are alike, what savings come to, what is an error. What it finds
// is in mixed_test.cc.
#include <doctest/doctest.h>

#include <algorithm>

#include "cluster/device_kinds.h"
#include "cluster/cluster_file.h"
#include "cluster/devices.h"
#include "compile/automatic.h"
#include "compile/device_sets.h"
#include "compile/estimate.h"
#include "compile/savings.h"
#include "grad/passes.h"
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
    const auto estimated = [&](const Saving& saving) {
      CompileOptions options;
      static_cast<PlanOptions&>(options) = saved({}, saving, true);
      options.strategy = strategy;
      return estimate_at(m.g, devices, options, 1);
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
