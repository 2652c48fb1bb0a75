// Ragged shardings: groups along an outer axis that cut the same tensors in ways of their own.
#include <doctest/doctest.h>

#include <cmath>

#include "cluster/shares.h"
#include "task/strategy.h"
#include "trained.h"
#include "unit/caught.h"

namespace whale {
namespace {

TEST_CASE("ragged: a row of shares for each position along the axes outside") {
  const std::vector<MeshAxis> axes{{"replica", 2, {}, {}}, {"split", 2, {3, 1, 1, 1}, {}}};
  CHECK(cut_of(axes, 1, false, 8, {0, 0}) == Interval{0, 6});
  CHECK(cut_of(axes, 1, false, 8, {0, 1}) == Interval{6, 8});
  CHECK(cut_of(axes, 1, false, 8, {1, 0}) == Interval{0, 4});
  CHECK(cut_of(axes, 1, false, 8, {1, 1}) == Interval{4, 8});
  CHECK(cut_of(axes, 1, true, 8, {0, 1}) == Interval{4, 8});  // state has shares of its own
}

TEST_CASE("ragged: strategies as text") {
  const std::string text = "replica(2) > split(2, shares=[[3,1],[1,1]])";
  CHECK(to_string(parse_strategy(text)) == text);
  CHECK(to_string(parse_strategy("split(shares=[[3,1],[1,1]])")) == "split(2, shares=[[3,1],[1,1]])");
  const std::string gaps = "replica(2) > split(2, shares=[[3,1],[1]])";
  CHECK(to_string(parse_strategy(gaps)) == gaps);
  CHECK(parse_strategy(gaps)[1].shares == std::vector<double>{3, 1, 1, kNoDevice});
  CHECK_THROWS_AS(parse_strategy("split(3, shares=[[3,1],[1,1]])"), Error);
  CHECK_THROWS_AS(parse_strategy("split(shares=[[3,1],1])"), Error);
  CHECK_THROWS_AS(parse_strategy("split(shares=[[3,1],[1,1])"), Error);
}

Plan planned(const small::Model& m, const std::string& devices, CompileOptions options) {
  return compile(m.g, parse_devices(devices, {0, 1, 2, 3}), options);
}

std::string refusal(const std::string& strategy, int64_t devices) {
  return message_of([&] { planned(small::mlp(), fmt::format("ref:{}", devices), {.strategy = strategy}); });
}

TEST_CASE("ragged: rows that fit nothing are refused") {
  CHECK(has(refusal("split(2, shares=[[3,1],[1,1]])", 2), "2 rows of 2, expected one"));
  CHECK(has(refusal("replica(3) > split(2, shares=[[3,1],[1,1]])", 6), "expected one, or 3"));
  CHECK(has(refusal("replica(2) > split(2, shares=[[3,1],[0,0]])", 4), "add up to 0"));
}

CompileOptions options_of(const char* strategy) {
  CompileOptions options;
  options.strategy = strategy;
  return options;
}

// A product over no columns is zero, and what is added to it stays.
TEST_CASE("ragged: operands without elements are read as they are, however they are cut") {
  using enum OpCode;
  small::Model m;
  const TensorId x = m.input("x", {8, 0}), target = m.input("target", {8, 4});
  const TensorId h = m.op(k_add, {m.op(k_matmul, {x, m.variable("w", {0, 4})}), m.variable("b", {4})});
  m.minimize(m.op(k_reduce_mean, {m.op(k_squared_difference, {h, target})}, {}, "loss"), OptimizerKind::kAdamW);
  const small::Trained one = small::train(m, "ref:1", options_of("local"));
  for (const bool fusion : {false, true})
    for (const char* strategy :
         {"replica(3)", "split(3)", "replica(3, shares=[2,0,1])", "pipeline(3, micro_batches=2)"})
      for (const int zero : {0, 3}) {
        CAPTURE(strategy);
        CompileOptions options = options_of(strategy);
        options.fusion = fusion, options.zero = zero;
        CHECK(small::distance(one, small::train(m, "ref:3", options)) < 1e-6);
      }
  CompileOptions in_four = options_of("local");
  in_four.accumulation = 4;
  CHECK(small::distance(one, small::train(m, "ref:1", in_four)) < 1e-6);
}

// Between groups that are cut differently, statistics of f64 are added by ops, and many of them become one.
TEST_CASE("ragged: batch norm over three or more groups runs on cpu") {
  using enum OpCode;
  small::Model m;
  const TensorId x = m.input("x", {6, 5}), target = m.input("target", {6, 6});
  const TensorId h = m.op(
      k_batch_norm, {m.op(k_matmul, {x, m.variable("w", {5, 6})}), m.variable("scale", {6}), m.variable("shift", {6}),
                     m.variable("mean", {6}, Role::kBuffer), m.variable("variance", {6}, Role::kBuffer)});
  m.minimize(m.op(k_reduce_mean, {m.op(k_squared_difference, {h, target})}, {}, "loss"), OptimizerKind::kSgd);
  for (const char* strategy :
       {"replica(3) > split(2, shares=[[3,1],[1,1],[1,3]])", "replica > split(shares=[[1,1],[1],[1,1,2]])"})
    for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16, Precision::kFloat16}) {
      CAPTURE(strategy);
      CAPTURE(static_cast<int>(precision));
      CompileOptions one, many;
      one.precision = many.precision = precision;
      many.strategy = strategy;
      const small::Trained want = small::train(m, "ref:1", one);
      const small::Trained got = small::train(m, "cpu@0,cpu@1,cpu@0,cpu@1,cpu@0,cpu@1", many);
      CHECK(small::distance(want, got) < (precision == Precision::kFloat32 ? 1e-5 : 2e-2));
    }
}

TEST_CASE("ragged: no collective goes between groups that cut a tensor differently, and only what is missing travels") {
  const Plan plan = planned(small::mlp(8, OptimizerKind::kSgd, 8, 16), "ref:4",
                            {.strategy = "replica(2) > split(2, shares=[[3,1],[1,1]])"});
  const Entry& entry = *plan.find_entry("train", 8);
  int64_t moved = 0;
  for (const Link& link : entry.links)
    for (const Transfer& t : link.transfers) {
      int64_t n = t.from != t.to;
      for (const Interval& i : t.source) n *= i.size();
      moved += n;
    }
  // Each of w1 [8, 16], b1 [16], w2 [16, 3] is cut along 16; a device receives its part of it from the other group.
  CHECK(moved == 2 * (8 * 16 + 16 + 16 * 3));
  for (const Program& p : entry.programs)
    for (const Segment& s : p.segments)
      for (const Instruction& i : s.instructions)
        if (i.kind() == InstructionKind::kCollective && plan.groups[i.group()].axis == "replica")
          CHECK(i.name.find("grad") == std::string::npos);
}

void check_close(const small::Trained& a, const small::Trained& b) {
  REQUIRE(a.variables.size() == b.variables.size());
  for (size_t s = 0; s < a.losses.size(); ++s) CHECK(std::abs(a.losses[s] - b.losses[s]) < 1e-5);
  double apart = 0, norm = 0;
  for (size_t v = 0; v < a.variables.size(); ++v)
    for (size_t i = 0; i < a.variables[v].size(); ++i) {
      apart += std::pow(a.variables[v][i] - b.variables[v][i], 2);
      norm += std::pow(a.variables[v][i], 2);
    }
  CHECK(std::sqrt(apart) < 1e-5 * std::sqrt(norm));
}

TEST_CASE("ragged: equal to one device") {
  struct Case {
    const char *devices, *strategy;
    int zero;
  };
  const Case cases[] = {
      {"ref:4", "replica(2) > split(2, shares=[[3,1],[1,1]])", 0},
      {"ref:4", "replica(2) > split(2, shares=[[3,1],[1,1]])", 1},
      {"ref:4", "replica(2) > split(2, shares=[[1,0],[1,1]])", 3},
      {"ref:6", "replica(2, shares=[2,1]) > split(3, shares=[[2,1,1],[1,1,1]])", 2},
      {"ref:4", "replica(2) > replica(2, shares=[[3,1],[1,1]])", 1},
      {"ref:8", "split(2) > split(2, shares=[[3,1],[1,1]]) > replica(2)", 0},
      {"ref:8", "replica(2) > pipeline(2, micro_batches=3) > split(2, shares=[[3,1],[1,1]])", 0},
      {"ref:3", "replica > split(shares=[[3,1],[1]])", 0},
      {"ref:5", "replica(2, shares=[2,1]) > split(3, shares=[[2,1,1],[1,1]])", 3},
      {"ref:3", "replica(2) > replica(2, shares=[[3,1],[1]])", 1},
      {"ref:6", "replica(2) > split(2, shares=[[1,1],[1]]) > replica(2)", 2},
      {"ref:8", "pipeline(2, micro_batches=2) > replica(2) > split(2, shares=[[3,1],[1,1]])", 0},
      {"ref:6", "replica(2) > replica(2, shares=[[1,1],[1]]) > pipeline(2, micro_batches=3)", 1},
      {"ref:6", "replica(2, shares=[3,1]) > split(2, shares=[[1,1],[1]]) > pipeline(2, micro_batches=2)", 0},
      {"ref:6", "pipeline(2, micro_batches=2) > replica(2) > split(2, shares=[[3,1],[1]])", 2},
  };
  const small::Model mlp = small::mlp(12, OptimizerKind::kLamb, 8, 16), gpt = small::gpt(6, OptimizerKind::kSgd, 1);
  const small::Trained one_mlp = small::train(mlp, "ref:1", {.strategy = "local"}),
                       one_gpt = small::train(gpt, "ref:1", {.strategy = "local"});
  for (const Case& c : cases) {
    CAPTURE(c.strategy);
    CAPTURE(c.zero);
    check_close(one_mlp, small::train(mlp, c.devices, {{.zero = c.zero}, c.strategy}));
    check_close(one_gpt, small::train(gpt, c.devices, {{.zero = c.zero}, c.strategy}));
    if (std::string(c.strategy).find("pipeline") != std::string::npos) continue;
    check_close(one_gpt, small::train(gpt, c.devices, {{.zero = c.zero}, c.strategy, {}, 3}));
  }
}

TEST_CASE("ragged: groups of different sizes") {
  const Plan plan = planned(small::mlp(), "ref:3", {.strategy = "replica > split(shares=[[1,1],[1]])"});
  CHECK(plan.strategy == "replica(2) > split(2, shares=[[1,1],[1]])");
  CHECK(plan.meshes[0].devices == std::vector<int32_t>{0, 1, 2, kNone});
  const std::vector<uint8_t> bytes = serialize(plan);
  CHECK(print(deserialize(bytes.data(), bytes.size())) == print(plan));
  CHECK(refusal("replica(2) > split(2, shares=[[1,1],[1]])", 4).find("wants 3 device(s), 4 are there") !=
        std::string::npos);
  CHECK(refusal("replica(2) > pipeline(2) > split(shares=[[1,1],[1]])", 6) != "");
  CHECK_THROWS_AS(
      planned(small::mlp(), "ref:3", {{.zero = 1, .state_shares = {2, 1}}, "replica > replica(shares=[[1,1],[1]])"}),
      Error);
  CHECK_THROWS_AS(planned(small::mlp(), "ref:3", {{.exact = true}, "replica > split(shares=[[1,1],[1]])", {}, 2}),
                  Error);
}

TEST_CASE("shares: updates that are merged go on where a device has nothing of one of their parameters") {
  // With shares 3 and 1 the second device has none of the three classes' columns, but a part of the hidden ones.
  const small::Model m = small::mlp(8, OptimizerKind::kAdamW, 4, 16);
  const small::Trained one = small::train(m, "ref:1", options_of("local"));
  check_close(one, small::train(m, "ref:2", {.strategy = "split(2, shares=[7,1])"}));
  const small::Model gpt = small::gpt(6, OptimizerKind::kSgd, 2, 8, 16, 32, 2);
  check_close(small::train(gpt, "ref:1", {.strategy = "local"}),
              small::train(gpt, "ref:2", {.strategy = "split(2, shares=[5,1])"}));
}

}  // namespace
}  // namespace whale
