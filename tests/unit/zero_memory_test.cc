// Memory under ZeRO against the closed forms (Rajbhandari et al., 2020, table 1), micro-batches and pipelines included.
#include <doctest/doctest.h>

#include <algorithm>

#include "cluster/devices.h"
#include "compile.h"
#include "plan/figures.h"
#include "small_models.h"

using namespace whale;

namespace {

constexpr int64_t kBucket = 16 << 10;

struct Setup {
  const char* devices;
  const char* strategy;
  int64_t accumulation;
  int64_t replicas;
};

MemoryClasses memory(const small::Model& m, const Setup& s, int zero) {
  CompileOptions options;
  options.strategy = s.strategy;
  options.accumulation = s.accumulation;
  options.zero = zero;
  options.bucket_bytes = kBucket;
  const Plan plan = compile(m.g, parse_devices(s.devices, {0}), options);
  return memory_of(plan, plan.entries[0], 0).device;
}

// Within 5 % of `whole` / n and a few bytes of padding.
bool near_part(int64_t bytes, int64_t whole, int64_t n) {
  return static_cast<double>(std::abs(bytes * n - whole)) <= 0.05 * static_cast<double>(whole);
}

}  // namespace

TEST_CASE("ZeRO: parameters, gradients and state are divided by the replicas, with micro-batches too") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64);
  const int64_t matrix = int64_t{4} * 64 * 256 * 4;  // the largest parameter
  for (const Setup& s :
       {Setup{"null:4", "replica", 4, 4}, Setup{"null:8", "replica(4) > pipeline(2, micro_batches=8)", 0, 4},
        Setup{"null:4", "replica(2) > split(2)", 8, 2}}) {
    CAPTURE(s.strategy);
    const MemoryClasses none = memory(m, s, 0), one = memory(m, s, 1), two = memory(m, s, 2), three = memory(m, s, 3);
    // Gradients under way: those of a bucket, what becomes of them, and the one at work.
    const int64_t under_way = 3 * (kBucket + matrix);
    CHECK(none.gradients >= none.parameters);
    CHECK(none.gradients <= none.parameters + under_way);
    CHECK(near_part(one.state, none.state, s.replicas));
    CHECK(one.parameters == none.parameters);
    CHECK(near_part(two.state, none.state, s.replicas));
    CHECK(two.gradients <= none.parameters / s.replicas * 21 / 20 + under_way);
    CHECK(near_part(three.parameters, none.parameters, s.replicas));
    CHECK(near_part(three.state, none.state, s.replicas));
    CHECK(three.gradients <= none.parameters / s.replicas * 21 / 20 + under_way);
    // Whole parameters: those that the ops at work and the next ones read.
    CHECK(three.activations <= two.activations + 8 * matrix);
    CHECK(none.total() > one.total());
    CHECK(one.total() > two.total());
    CHECK(two.total() > three.total());
  }
}

TEST_CASE("sums over micro-batches: a gradient is added as soon as it is there") {
  const small::Model m = small::gpt(64, OptimizerKind::kAdamW, 12, 8, 64, 64);
  const MemoryClasses one = memory(m, {"null:1", "", 1, 1}, 0), many = memory(m, {"null:1", "", 8, 1}, 0);
  CHECK(many.gradients >= one.parameters);
  CHECK(many.gradients * 4 < one.parameters * 5);
  CHECK(many.total() < one.total() + one.parameters);
}

// Megatron's pairs in both passes (Shoeybi et al., 2019, section 3): cut by sequences fewer bytes would move, and each
// device would hold whole weights and whole sums of their gradients over all micro-batches.
TEST_CASE("split: sums of gradients over micro-batches are cut as their parameters") {
  const small::Model m = small::gpt(32, OptimizerKind::kAdamW, 4, 2048, 4096, 1000);
  const MemoryClasses held = memory(m, {"null:16", "pipeline(2, micro_batches=32) > split(8)", 0, 1}, 0);
  CHECK(held.gradients <= held.parameters * 5 / 4);
}

// Adafactor keeps means of rows and of columns (Shazeer and Stern, 2018): those that a cut of the parameter cuts.
TEST_CASE("split: factors of the second moment are cut as their parameters") {
  const small::Model m = small::gpt(32, OptimizerKind::kAdafactor, 2, 512, 1024, 1000, 16);
  CompileOptions options;
  options.strategy = "pipeline(2, micro_batches=32) > split(4)";
  const Plan plan = compile(m.g, parse_devices("null:8", {0}), options);
  int rows = 0, columns = 0;
  for (const PlanVariable& v : plan.variables) {
    if (v.slot != "row" && v.slot != "col") continue;
    const auto owner = std::find_if(plan.variables.begin(), plan.variables.end(),
                                    [&](const PlanVariable& p) { return p.name == v.owner; });
    REQUIRE(owner != plan.variables.end());
    const AxisLayout &of = owner->home.axes.back(), &mine = v.home.axes.back();
    if (of.placement != Placement::kShard) continue;
    CAPTURE(v.name);
    const bool first = of.digit.dim == 0;
    CHECK((mine.placement == Placement::kShard) == (first == (v.slot == "row")));
    if (mine.placement == Placement::kShard) CHECK(mine.digit == Digit{0, of.digit.outer, of.digit.inner});
    (first ? rows : columns) += mine.placement == Placement::kShard;
  }
  CHECK(rows > 0);
  CHECK(columns > 0);
}
