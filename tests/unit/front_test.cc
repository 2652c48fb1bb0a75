// What a search finds where prices count, beside all sets of a small cluster's devices under all that is written for
// them here, each planned and walked by the simulator.
#include <doctest/doctest.h>
#include <algorithm>

#include "cluster/devices.h"
#include "compile/automatic.h"
#include "simulate/simulate.h"
#include "trained.h"

namespace whale {
namespace {

struct Known {
  std::string text;
  double seconds, price;
};

std::vector<std::string> strategies_of(int n) {
  std::vector<std::string> out{fmt::format("replica({})", n)};
  if (n == 1) return out;
  for (const int m : {4, 8}) out.push_back(fmt::format("pipeline({}, micro_batches={})", n, m));
  out.push_back(fmt::format("split({})", n));
  if (n == 4)
    for (const char* nest : {"replica(2) > split(2)", "pipeline(2, micro_batches=8) > replica(2)"}) out.push_back(nest);
  return out;
}

std::vector<Known> all_of(const Graph& graph) {
  std::vector<Known> out;
  for (int v = 0; v <= 2; ++v)
    for (int p = 0; p <= 1; ++p)
      for (int t = 0; t <= 2; ++t) {
        if (v + p + t == 0) continue;
        std::string text;
        for (const auto& [n, type] : {std::pair(v, "V100-32GB"), {p, "P100-16GB"}, {t, "T4"}})
          if (n > 0) text += fmt::format("{}{}x{}", text.empty() ? "" : " + ", n, type);
        const std::vector<DeviceSpec> devices = parse_devices(text);
        double hour = 0;
        for (const DeviceSpec& d : devices) hour += d.figures.price_per_hour;
        for (const std::string& strategy : strategies_of(v + p + t)) {
          try {
            const Plan plan = compile(graph, devices, {.strategy = strategy});
            const double seconds = times_of(plan, plan.entries[0], 1'000'000)->seconds;
            out.push_back({fmt::format("{} on {}", strategy, text), seconds, hour / 3600 * seconds});
          } catch (const Error&) {  // the model has fewer heads
          }
        }
      }
  return out;
}

constexpr const char* kCluster = "2xV100-32GB + 1xP100-16GB + 2xT4";
constexpr double kNear = 1.001;

}  // namespace

TEST_CASE("by prices: no set of devices is both faster and cheaper than the front; budgets and bounds get the best") {
  const Graph graph = small::gpt(24, OptimizerKind::kAdamW, 4, 128, 256, 512, 4).g;
  const std::vector<Known> all = all_of(graph);
  CHECK(all.size() > 40);
  const std::vector<DeviceSpec> devices = parse_devices(kCluster);
  CompileOptions options;
  options.search.front = true;
  const std::vector<Judged> front = pareto_front(search(graph, devices, options));
  CHECK(front.size() >= 4);
  for (const Known& k : all)
    CHECK_MESSAGE(
        std::ranges::any_of(
            front, [&](const Judged& f) { return f.seconds <= k.seconds * kNear && f.price <= k.price * kNear; }),
        k.text << " takes " << k.seconds << " for " << k.price);
  for (const Judged& f : front) CHECK(f.simulated);
  const double fastest = search(graph, devices, {}).winner().seconds;
  for (const Known& k : all) CHECK_MESSAGE(fastest <= k.seconds * kNear, k.text);

  for (const Judged& f : {front[0], front[front.size() / 2], front.back()}) {
    CompileOptions bounded;
    bounded.search.most_price = f.price * 1.02;
    const Found cheap = search(graph, devices, bounded);
    REQUIRE(cheap.fits());
    CHECK(cheap.winner().price <= bounded.search.most_price);
    for (const Known& k : all)
      if (k.price <= bounded.search.most_price)
        CHECK_MESSAGE(cheap.winner().seconds <= k.seconds * kNear, k.text << " under " << bounded.search.most_price);

    bounded = {};
    bounded.search.objective = Objective::kPrice;
    bounded.search.least_throughput = 24 / (f.seconds * 1.02);
    const Found fast = search(graph, devices, bounded);
    REQUIRE(fast.fits());
    CHECK(fast.winner().seconds <= f.seconds * 1.02);
    for (const Known& k : all)
      if (k.seconds <= f.seconds * 1.02)
        CHECK_MESSAGE(fast.winner().price <= k.price * kNear, k.text << " in " << f.seconds * 1.02);
  }
}

}  // namespace whale
