// Devices of little or unlike memory: stages are cut and splits are dealt so that all have room.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "caught.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "compile/source_check.h"
#include "plan/figures.h"
#include "property.h"
#include "report/fit.h"
#include "task/stages.h"
#include "trained.h"

namespace whale {
namespace {

// What a chain of products is cut by, computed apart from the planner: 4 bytes a number, `rows` rows.
struct Chain {
  std::vector<int64_t> widths;  // of the input and of each product
  int64_t rows = 8;
  small::Model model() const {
    small::Model m;
    TensorId y = m.input("x", {rows, widths[0]});
    for (size_t k = 1; k < widths.size(); ++k)
      y = m.op(OpCode::k_matmul, {y, m.variable(fmt::format("w{}", k), {widths[k - 1], widths[k]})});
    return m;
  }
  double parameters(size_t k) const { return 4.0 * static_cast<double>(widths[k] * widths[k + 1]); }
  double values(size_t k) const { return 4.0 * static_cast<double>(rows * widths[k + 1]); }
};

struct Judged {
  double slowest = 0, fullest = 0;
};

}  // namespace

TEST_CASE("room: no cut where all have room is faster; where none has, none leaves the fullest device less full") {
  int roomy = 0, tight = 0;
  CHECK(whale::test::holds("equal to all cuts", 300, [&] {
    Chain chain{.widths = {}};
    for (int k = *rc::gen::inRange(4, 9); k >= 0; --k) chain.widths.push_back(*rc::gen::inRange<int64_t>(1, 60));
    const size_t products = chain.widths.size() - 1;
    const auto stages = static_cast<size_t>(*rc::gen::inRange(2, 4));
    std::vector<DeviceRates> rates;
    StageRooms rooms(stages);
    double all = 0;
    for (size_t k = 0; k < products; ++k) all += chain.parameters(k) + chain.values(k);
    for (size_t s = 0; s < stages; ++s) {
      rates.push_back({1e6 * *rc::gen::inRange(1, 5), 1e18, 0});
      for (int d = *rc::gen::inRange(0, 3); d > 0; --d)
        rooms[s].push_back({.bytes = all * *rc::gen::inRange(20, 200) / 100,
                            .of_parameters = static_cast<double>(*rc::gen::inRange(0, 5)),
                            .of_values = static_cast<double>(*rc::gen::inRange(0, 5))});
    }
    const small::Model m = chain.model();
    std::vector<OpId> ops(m.g.ops.size());
    std::iota(ops.begin(), ops.end(), 0);
    Profile profile = kMachineOfCores;
    profile.link = {1e18, 0}, profile.freed_bytes_per_second = 1e18;
    const CostModel cost({}, 1, profile);
    const auto judged = [&](const std::vector<int32_t>& stage_of) {
      Judged out;
      for (size_t s = 0; s < stages; ++s) {
        double seconds = 0, parameters = 0, values = 0;
        for (size_t k = 0; k < products; ++k) {
          if (stage_of[k] != static_cast<int32_t>(s)) continue;
          seconds +=
              2.0 * static_cast<double>(chain.rows * chain.widths[k] * chain.widths[k + 1]) / rates[s].flops_per_second;
          parameters += chain.parameters(k), values += chain.values(k);
        }
        out.slowest = std::max(out.slowest, seconds);
        for (const StageRoom& room : rooms[s])
          out.fullest = std::max(out.fullest, (room.of_parameters * parameters + room.of_values * values) / room.bytes);
      }
      return out;
    };
    double fastest = INFINITY, least_full = INFINITY;
    std::vector<int32_t> tried(products);
    const std::function<void(size_t)> each = [&](size_t k) {
      if (k == products) {
        if (tried.back() + 1 != static_cast<int32_t>(stages)) return;
        const Judged mine = judged(tried);
        least_full = std::min(least_full, mine.fullest);
        if (mine.fullest <= 1) fastest = std::min(fastest, mine.slowest);
        return;
      }
      for (const int32_t s : {tried[k - 1], tried[k - 1] + 1})
        if (s < static_cast<int32_t>(stages)) tried[k] = s, each(k + 1);
    };
    each(1);
    const Judged found = judged(cut_stages(m.g, ops, static_cast<int64_t>(stages), 1, cost, false, rates, rooms));
    if (std::isfinite(fastest)) {
      ++roomy;
      RC_ASSERT(found.fullest <= 1 + 1e-9);
      RC_ASSERT(found.slowest <= fastest * 1.0011);
    } else {
      ++tight;
      RC_ASSERT(found.fullest <= least_full * 1.0011);
    }
  }));
  CHECK(roomy > 10);
  CHECK(tight > 10);
}

namespace {

// Devices without figures but with memory: `bytes` 0: any.
std::vector<DeviceSpec> of_memory(const char* kind, const std::vector<int64_t>& bytes) {
  std::vector<DeviceSpec> out;
  for (const int64_t b : bytes) {
    out.push_back(parse_devices(kind, {0})[0]);
    out.back().memory_bytes = b;
  }
  return out;
}

CompileOptions with(const char* strategy) {
  CompileOptions options;
  options.strategy = strategy;
  return options;
}

std::vector<int64_t> needed_by(const Plan& plan) {
  std::vector<int64_t> out(plan.devices.size());
  for (const Entry& entry : plan.entries)
    for (const DeviceRow& row : entry.rows) {
      int64_t& mine = out[row.device];
      mine = std::max(mine, memory_of(plan, entry, static_cast<size_t>(row.program)).device.total());
    }
  return out;
}

size_t fullest_of(const std::vector<int64_t>& bytes) {
  return static_cast<size_t>(std::ranges::max_element(bytes) - bytes.begin());
}

}  // namespace

// The plan by time needs more than the fullest device has, at every price of memory (`cheapest`): only a plan that is
// cut otherwise can pass.
TEST_CASE("room: a stage that has no room is cut smaller, for every schedule and option") {
  struct Case {
    const char* strategy;
    int64_t devices;
    PlanOptions options = {};
    int percent = 85;  // of what the fullest device needs; virtual stages have their parts of it by themselves
  };
  PlanOptions zero, recompute, offload;
  zero.zero = 2, recompute.recompute = Recompute::kFull, offload.offload = kOffloadState;
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 10, 32, 32, 64);
  for (const Case& c :
       {Case{"pipeline(2, micro_batches=4)", 2}, Case{"pipeline(2, micro_batches=4, schedule=gpipe)", 2},
        Case{"pipeline(3, micro_batches=4)", 3}, Case{"pipeline(2, micro_batches=4, schedule=zb_h1)", 2},
        Case{"pipeline(2, micro_batches=4, schedule=interleaved, virtual_stages=2)", 2, {}, 94},
        Case{"replica(2) > pipeline(2, micro_batches=4)", 4, zero}, Case{"pipeline(2, micro_batches=4) > split(2)", 4},
        Case{"pipeline(2, micro_batches=4)", 2, recompute}, Case{"pipeline(2, micro_batches=4)", 2, offload}}) {
    CAPTURE(c.strategy);
    CompileOptions options = with(c.strategy);
    static_cast<PlanOptions&>(options) = c.options, options.strategy = c.strategy;
    std::vector<int64_t> cheapest;  // at any price of memory
    for (const double price : {1.0, 4.0, 16.0, 64.0}) {
      CompileOptions priced = options;
      priced.memory_price = price;
      const std::vector<int64_t> mine =
          needed_by(compile(m.g, of_memory("null", std::vector<int64_t>(static_cast<size_t>(c.devices))), priced));
      if (cheapest.empty()) cheapest = mine;
      for (size_t d = 0; d < mine.size(); ++d) cheapest[d] = std::min(cheapest[d], mine[d]);
    }
    const size_t full = fullest_of(cheapest);
    std::vector<int64_t> memory;
    for (const int64_t bytes : cheapest)
      memory.push_back(bytes == cheapest[full] ? bytes * c.percent / 100 : bytes * 150 / 100);
    const std::vector<DeviceSpec> devices = of_memory("null", memory);
    Plan plan;
    CHECK_NOTHROW(plan = compile(m.g, devices, options));
    if (plan.entries.empty()) continue;
    const std::vector<int64_t> needed = needed_by(plan);
    for (size_t d = 0; d < needed.size(); ++d) CHECK(needed[d] <= memory[d]);
    CHECK(!plan.stage_begins.empty());
    CHECK(std::ranges::any_of(plan.notes, [](const std::string& n) { return has(n, "Stages are cut where each"); }));
  }
}

// Devices that are alike: the first of two stages of 1f1b keeps two micro-batches. Half of what both need by time is
// less than the first stage needs, so that a plan by time is refused.
TEST_CASE("room: devices that are alike share what 1f1b keeps") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 10, 32, 32, 64);
  const CompileOptions options = with("pipeline(2, micro_batches=8)");
  const std::vector<int64_t> needed = needed_by(compile(m.g, of_memory("null", {0, 0}), options));
  const int64_t each = (needed[0] + needed[1]) * 52 / 100;
  REQUIRE(each < needed[0] * 95 / 100);
  const Plan plan = compile(m.g, of_memory("null", {each, each}), options);
  for (const int64_t bytes : needed_by(plan)) CHECK(bytes <= each);
  // With room for all, cuts are those by time.
  const Plan roomy = compile(m.g, of_memory("null", {2 * needed[0], 2 * needed[0]}), options);
  CHECK(roomy.stage_begins.empty());
  CHECK(print(roomy.entries[0].programs[0]) ==
        print(compile(m.g, of_memory("null", {0, 0}), options).entries[0].programs[0]));
}

// Every cut is planned by itself; devices that have what the best one needs are enough, though by time they are not.
TEST_CASE("room: what some cut fits is planned") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 5, 16, 16, 32);
  int refused_by_time = 0;
  for (const char* strategy : {"pipeline(2, micro_batches=4)", "pipeline(2, micro_batches=4, schedule=gpipe)"}) {
    const std::vector<int64_t> by_time = needed_by(compile(m.g, of_memory("null", {0, 0}), with(strategy)));
    std::vector<std::vector<int64_t>> needed;  // of each cut
    for (int64_t op = 1; op < std::ssize(m.g.ops); ++op) {
      CompileOptions options = with(strategy);
      options.stages.begins = {op};
      try {
        needed.push_back(needed_by(compile(m.g, of_memory("null", {0, 0}), options)));
      } catch (const Error&) {  // no legal cut
      }
    }
    REQUIRE(needed.size() > 20);
    for (const double first : {0.5, 0.8, 1.0, 1.25, 2.0}) {  // times what the second device has
      CAPTURE(strategy);
      CAPTURE(first);
      double least = INFINITY;
      const auto second = [&](const std::vector<int64_t>& bytes) {
        return std::max(static_cast<double>(bytes[0]) / first, static_cast<double>(bytes[1]));
      };
      for (const std::vector<int64_t>& bytes : needed) least = std::min(least, second(bytes));
      least *= 1.01;
      refused_by_time += second(by_time) > least;
      const std::vector<int64_t> memory{static_cast<int64_t>(least * first), static_cast<int64_t>(least)};
      Plan plan;
      CHECK_NOTHROW(plan = compile(m.g, of_memory("null", memory), with(strategy)));
      if (plan.entries.empty()) continue;
      for (size_t d = 0; d < 2; ++d) CHECK(needed_by(plan)[d] <= memory[d]);
    }
  }
  CHECK(refused_by_time >= 8);
}

// Equal parts need more than the small device has; with the batch and the strategy given, only smaller parts need less.
TEST_CASE("room: a split's parts go from who has no room to who has") {
  struct Case {
    const char* name;
    small::Model model;
    int percent;  // of what equal parts need
  };
  for (const Case& c : {Case{"heads and columns", small::gpt(8, OptimizerKind::kAdamW, 2, 16, 64, 64, 8), 80},
                        Case{"columns", small::mlp(8, OptimizerKind::kAdamW, 64, 4096), 60},
                        Case{"vocabulary", small::gpt(4, OptimizerKind::kAdamW, 1, 8, 32, 4000), 60}}) {
    CAPTURE(c.name);
    const Plan equal = compile(c.model.g, of_memory("null", {0, 0}), with("split(2)"));
    const std::vector<int64_t> needed = needed_by(equal);
    for (const bool first : {true, false}) {
      CAPTURE(first);
      std::vector<int64_t> memory{needed[0] * 3, needed[1] * 3};
      memory[first ? 0 : 1] = std::max(needed[0], needed[1]) * c.percent / 100;
      Plan plan;
      CHECK_NOTHROW(plan = compile(c.model.g, of_memory("null", memory), with("split(2)")));
      if (plan.entries.empty()) continue;
      const std::vector<double>& shares = plan.meshes[0].axes[0].shares;
      REQUIRE(shares.size() == 2);
      CHECK((first ? shares[0] < shares[1] : shares[1] < shares[0]));
      for (size_t d = 0; d < 2; ++d) CHECK(needed_by(plan)[d] <= memory[d]);
    }
  }
}

// The first product alone needs more than the first device has, so that no cut fits in the order of the list.
TEST_CASE("room: where no cut fits, the devices change places along the pipeline") {
  const small::Model m = Chain{.widths = {2000, 500, 64, 64, 64, 3}, .rows = 8}.model();
  small::Model trained = m;
  trained.minimize(trained.op(OpCode::k_reduce_mean, {trained.g.ops.back().outputs[0]}, {}, "loss"),
                   OptimizerKind::kAdamW);
  const std::vector<DeviceSpec> devices = of_memory("null", {4'000'000, 64'000'000});
  const Plan plan = compile(trained.g, devices, with("pipeline(2, micro_batches=2)"));
  CHECK(has(plan.strategy, "cluster(device_order=[1,0])"));
  CHECK(plan.meshes[0].devices == std::vector<int32_t>{1});
  CHECK(std::ranges::any_of(plan.notes, [](const std::string& n) { return has(n, "largest memory first"); }));
  // What is written stays, and is refused.
  const std::string text = message_of(
      [&] { compile(trained.g, devices, with("cluster(device_order=[0,1]) > pipeline(2, micro_batches=2)")); });
  CHECK(has(text, "does not fit: device 0"));
}

TEST_CASE("room: a plan cut by room trains what one device trains, from a file and for other batches too") {
  const small::Model m = small::gpt(12, OptimizerKind::kAdamW, 6);
  const small::Trained one = small::train(compile(m.g, parse_devices("ref:1"), with("replica")));
  for (const char* strategy : {"pipeline(2, micro_batches=4)", "split(2)",
                               "pipeline(2, micro_batches=3, schedule=interleaved, virtual_stages=2)"}) {
    CAPTURE(strategy);
    const std::vector<int64_t> needed = needed_by(compile(m.g, of_memory("ref", {0, 0}), with(strategy)));
    const Plan plan = compile(m.g, of_memory("ref", {needed[0] * 90 / 100, needed[1] * 2}), with(strategy));
    CHECK(small::distance(small::train(plan), one) < 2e-5);
    const std::vector<uint8_t> bytes = serialize(plan);
    const Plan again = deserialize(bytes.data(), bytes.size());
    CHECK(again.stage_begins == plan.stage_begins);
    CHECK(again.meshes == plan.meshes);
    CHECK_NOTHROW(verify_source(again));
    // The same weights in the same places: the entry of another batch uses the plan's variables.
    const Entry seven = compile_entry(again, "train", 7);
    CHECK(seven.programs.size() == plan.entries[0].programs.size());
  }
}

TEST_CASE("room: a plan file that begins its stages nowhere is refused") {
  const small::Model m = small::gpt(12, OptimizerKind::kAdamW, 6);
  const CompileOptions options = with("pipeline(2, micro_batches=4)");
  const std::vector<int64_t> needed = needed_by(compile(m.g, of_memory("null", {0, 0}), options));
  Plan plan = compile(m.g, of_memory("null", {needed[0] * 90 / 100, needed[1] * 2}), options);
  REQUIRE(plan.stage_begins.size() == 1);
  for (const Ints& begins : {Ints{0}, Ints{3, 2}, Ints{1, 2, 3}}) {
    plan.stage_begins = begins;
    CHECK_THROWS_AS(verify_source(plan), Error);
  }
  plan.stage_begins = {int64_t{1} << 40};
  const std::vector<uint8_t> bytes = serialize(plan);
  CHECK(has(message_of([&] { deserialize(bytes.data(), bytes.size()); }), "begins with"));
}

// Together they have less than the model needs: nothing is tried for long, and who lacks what is said.
TEST_CASE("room: what fits nowhere is refused by class and bytes") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 6, 32, 32, 64);
  for (const char* strategy : {"pipeline(2, micro_batches=4)", "split(2)"}) {
    CAPTURE(strategy);
    const std::string text = message_of([&] { compile(m.g, of_memory("null", {100'000, 150'000}), with(strategy)); });
    CHECK(has(text, "does not fit: device "));
    for (const char* word : {"parameters ", "gradients ", "state ", "activations "}) CHECK(has(text, word));
    CHECK(has(text, "What else makes it less: "));
  }
}

}  // namespace whale
