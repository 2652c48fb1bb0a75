// What reshards cost, against closed forms and against the transfers of the plan itself.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "unit/small_models.h"

using namespace whale;

namespace {

Plan plan_of(const small::Model& m, int devices, const std::string& strategy, int zero = 0, int64_t accumulation = 0) {
  CompileOptions options;
  options.strategy = strategy;
  options.zero = zero;
  options.accumulation = accumulation;
  return compile(m.g, parse_devices("null:" + std::to_string(devices), {0, 1, 2, 3}), options);
}

std::vector<ReshardRow> rows_of(const std::vector<ReshardRow>& all, const std::string& name) {
  std::vector<ReshardRow> out;
  for (const ReshardRow& row : all)
    if (row.way.name == name) out.push_back(row);
  return out;
}

}  // namespace

TEST_CASE("reshards: a gradient's all-reduce moves 2 (n - 1) / n of it, in 2 (n - 1) rounds") {
  for (const int n : {2, 3, 5}) {
    const auto rows = rows_of(reshards_of(plan_of(small::mlp(30), n, "replica")), "all_reduce");
    const auto w1 = std::find_if(rows.begin(), rows.end(), [](const ReshardRow& r) { return r.dims == Dims{4, 16}; });
    REQUIRE(w1 != rows.end());
    CHECK(w1->way.bytes == doctest::Approx(2.0 * (n - 1) / n * 4 * 16 * 4));
    CHECK(w1->way.rounds == 2 * (n - 1));
    CHECK(w1->way.seconds ==
          doctest::Approx(all_reduce_seconds(4 * 16 * 4, n, CostModel({}, 1, kMachineOfCores).link)));
    CHECK(w1->from == "R,P(sum)");
    CHECK(w1->to == "R,R");
    CHECK(w1->axis == "replica");
    CHECK(w1->devices == n);
    // Everyone asks everyone for the whole: n - 1 times the gradient.
    const auto plain = std::find_if(w1->alternatives.begin(), w1->alternatives.end(),
                                    [](const ReshardWay& w) { return w.name == "plain transfers"; });
    REQUIRE(plain != w1->alternatives.end());
    CHECK(plain->bytes == (n - 1) * 4 * 16 * 4);
  }
}

TEST_CASE("reshards: no chosen way receives more than its alternatives, but for slices that receive nothing") {
  for (const char* strategy : {"replica", "split", "replica(2) > split(2)", "replica(2) > pipeline(2, micro_batches=2)",
                               "pipeline(2, micro_batches=4) > split(2)"})
    for (const int zero : {0, 3}) {
      const auto rows = reshards_of(plan_of(small::gpt(8), 4, strategy, zero));
      CHECK(!rows.empty());
      CHECK(std::is_sorted(rows.begin(), rows.end(),
                           [](const ReshardRow& a, const ReshardRow& b) { return a.seconds() > b.seconds(); }));
      for (const ReshardRow& row : rows)
        for (const ReshardWay& other : row.alternatives) {
          INFO(strategy, " zero ", zero, ": ", row.way.name, " of ", row.tensor, " against ", other.name);
          CHECK(row.way.bytes <= other.bytes * 1.0000001);
        }
    }
}

TEST_CASE("reshards: ZeRO cuts a gradient once and gathers the parameter: together an all-reduce") {
  const auto rows = reshards_of(plan_of(small::mlp(8), 4, "replica", 2));
  const auto of = [&](const char* name, const Dims& dims) {
    for (const ReshardRow& row : rows)
      if (row.way.name == name && row.dims == dims) return row.way;
    return ReshardWay{};
  };
  const double bytes = 4 * 16 * 4;
  CHECK(of("reduce_scatter", {4, 16}).bytes == doctest::Approx(0.75 * bytes));
  CHECK(of("all_gather", {4, 16}).bytes == doctest::Approx(0.75 * bytes));
  CHECK(of("reduce_scatter", {4, 16}).seconds + of("all_gather", {4, 16}).seconds ==
        doctest::Approx(all_reduce_seconds(bytes, 4, CostModel({}, 1, kMachineOfCores).link)));
}

TEST_CASE("reshards: transfers between stages and halos are what the plan's links carry") {
  struct Case {
    small::Model model;
    int devices;
    const char* strategy;
    const char* way;
  };
  for (const Case& c : {Case{small::gpt(8), 2, "pipeline(2, micro_batches=2)", "transfer"},
                        Case{small::gpt(8), 4, "pipeline(2, micro_batches=2) > replica(2)", "transfer"},
                        Case{small::resnet(4), 2, "split(2, factor=height)", "halo transfer"}}) {
    const Plan plan = plan_of(c.model, c.devices, c.strategy);
    double listed = 0;
    for (const ReshardRow& row : rows_of(reshards_of(plan), c.way))
      listed += row.way.bytes * static_cast<double>(row.count);
    // The largest part of each link that one device gets from others.
    double carried = 0;
    const Entry& e = plan.entries[0];
    for (size_t l = 0; l < e.links.size(); ++l) {
      std::map<int32_t, double> received;
      for (const Transfer& t : e.links[l].transfers) {
        double n = t.from == t.to ? 0 : 4;
        for (const Interval& i : t.source) n *= static_cast<double>(i.size());
        received[t.to] += n;
      }
      double most = 0;
      for (const auto& [device, n] : received) most = std::max(most, n);
      carried += most;
    }
    INFO(c.strategy);
    CHECK(listed > 0);
    CHECK(listed == doctest::Approx(carried));
  }
}

TEST_CASE("reshards: repeated blocks are one row, micro-batches are counted") {
  const auto rows = reshards_of(plan_of(small::gpt(8, OptimizerKind::kAdamW, 6), 2, "split(2)", 0, 4));
  const auto repeated = std::find_if(rows.begin(), rows.end(), [](const ReshardRow& r) { return r.count >= 6; });
  REQUIRE(repeated != rows.end());
  CHECK(repeated->tensor.find('*') != std::string::npos);
  CHECK(std::any_of(rows.begin(), rows.end(), [](const ReshardRow& r) { return r.runs == 4; }));
  CHECK(reshards_text(rows, CostModel({}, 1, kMachineOfCores).link).find(fmt::format("x {}", repeated->count)) !=
        std::string::npos);
}
