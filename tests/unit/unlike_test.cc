// Unlike replicas: pipelines, splits and single devices side by side, each with a share of the samples.
#include <doctest/doctest.h>

#include <cmath>

#include "prove/prove.h"
#include "task/strategy.h"
#include "trained.h"
#include "unit/caught.h"

namespace whale {
namespace {

Plan planned(const small::Model& m, const std::string& devices, const CompileOptions& options) {
  return compile(m.g, parse_devices(devices, {0, 1, 2, 3}), options);
}

TEST_CASE("unlike: strategies as text") {
  const std::string text = "replica([pipeline(3,micro_batches=4),split(2,shares=[3,1])], shares=[3,5])";
  CHECK(to_string(parse_strategy(text)) == text);
  CHECK(to_string(parse_strategy("replica( [ pipeline(2) > split, replica(2) ] )")) ==
        "replica([pipeline(2)>split,replica(2)])");
  const auto refusal = [](const char* strategy) { return message_of([&] { parse_strategy(strategy); }); };
  CHECK(has(refusal("replica([split(2)])"), "parameter 'count' is '[split(2)]', a list of one replica"));
  CHECK(has(refusal("replica([])"), "expected a scope"));
  CHECK(has(refusal("replica([split(2),])"), "expected a scope"));
  CHECK(has(refusal("replica([split(2),fold(2)])"), "unknown scope 'fold'"));
  CHECK(has(refusal("replica([replica([split,split]),split])"), "inside of unlike replicas"));
  CHECK(has(refusal("split([split,split])"), "expected a whole number"));  // a count
  CHECK(has(refusal("replica([split(2),split(3)], count=2)"), "given twice"));
}

TEST_CASE("unlike: what does not fit is refused by name") {
  const auto refusal = [](const char* strategy, int devices, CompileOptions options = {}) {
    options.strategy = strategy;
    return message_of([&] { planned(small::mlp(12), fmt::format("ref:{}", devices), options); });
  };
  CHECK(has(refusal("replica([pipeline(2), split(3)])", 4), "wants 5 device(s) (2, 3), 4 are there"));
  CHECK(has(refusal("replica([pipeline(2), split(3)])", 6), "wants 5 device(s) (2, 3), 6 are there"));
  CHECK(has(refusal("replica([pipeline(2), split], shares=[1,2,3])", 4), "has 3 shares"));
  CHECK(has(refusal("replica([pipeline(2), split], shares=[0,0])", 4), "add up to 0"));
  CHECK(has(refusal("replica([pipeline(2), split]) > split(2)", 8), "nothing is around them or beside them"));
  CHECK(has(refusal("replica(2) > replica([pipeline(2), split])", 8), "nothing is around them or beside them"));
  CHECK(has(refusal("replica([pipeline(2, micro_batches=2), pipeline(2, micro_batches=3)])", 4),
            "replicas with 2 and 3 micro-batches"));
  CHECK(has(refusal("replica([pipeline(2, schedule=gpipe), pipeline(2, schedule=1f1b)])", 4), "schedules 'gpipe'"));
  CHECK(has(refusal("replica([pipeline(2, virtual_stages=2), split])", 4), "several virtual stages"));
  CHECK(has(refusal("replica([pipeline(2, warmup=[2,1]), split])", 4), "the depths of a warm-up"));
  CHECK(has(refusal("replica([pipeline(2), split], by=micro_batch)", 4), "'by' are not implemented"));
  CHECK(has(refusal("replica([pipeline(2), split])", 4, {{.exact = true}}), "exact mode"));
  CHECK(has(refusal("replica([pipeline(2), split])", 4, {{.adasum = true}}), "adasum"));
  CHECK(has(refusal("replica([pipeline(9), split])", 11), "replica 0 of"));
}

TEST_CASE("unlike: rows of a parameter for samples, and of a table for updates") {
  const auto refusal = [](const small::Model& m) {
    return message_of([&] { planned(m, "ref:2", {.strategy = "replica([split(1), replica(1)])"}); });
  };
  small::Model rows;  // each replica would make a part of its gradient, and no sum
  const TensorId x = rows.input("x", {4, 3}), w = rows.variable("w", {4, 3});
  rows.minimize(rows.op(OpCode::k_reduce_mean, {rows.op(OpCode::k_mul, {x, w})}), OptimizerKind::kSgd);
  CHECK(has(refusal(rows), "pairs samples with rows of 'w'"));
  rows.g.variables[0].trainable = false;
  rows.g.training.optimizer.kind = OptimizerKind::kNone;
  CHECK(refusal(rows).empty());
  small::Model table = small::mlp(4);
  table.g.training.optimizer.sparse_updates = true;
  CHECK(has(refusal(table), "sparse updates with unlike replicas"));
}

TEST_CASE("unlike: each replica has stages and a mesh of its own") {
  const Plan plan =
      planned(small::mlp(16), "ref:4", {.strategy = "replica([pipeline(2, micro_batches=2), split], shares=[3,5])"});
  CHECK(plan.strategy == "replica([pipeline(2, micro_batches=2), split(2)], shares=[3,5])");
  REQUIRE(plan.meshes.size() == 3);
  CHECK(plan.meshes[0].devices == std::vector<int32_t>{0});
  CHECK(plan.meshes[1].devices == std::vector<int32_t>{1});
  CHECK(plan.meshes[2].devices == std::vector<int32_t>{2, 3});
  const Entry& entry = *plan.find_entry("train", 16);
  // Each micro-batch of 8 is cut 3 to 5.
  const std::vector<SampleRange> first{{0, 3}, {8, 11}}, second{{3, 8}, {11, 16}};
  CHECK(entry.rows[0].samples[0].micro_batches == first);
  CHECK(entry.rows[2].samples[0].micro_batches == second);
  CHECK(entry.rows[3].samples[0].micro_batches == second);
  const std::vector<uint8_t> bytes = serialize(plan);
  CHECK(print(deserialize(bytes.data(), bytes.size())) == print(plan));
  // Without shares: as many devices, as many samples.
  const Plan even = planned(small::mlp(16), "ref:4", {.strategy = "replica([pipeline(3), replica(1)])"});
  CHECK(even.find_entry("train", 16)->rows[0].samples[0].whole == SampleRange{0, 12});
  CHECK(even.find_entry("train", 16)->rows[3].samples[0].whole == SampleRange{12, 16});
}

void check_close(const small::Trained& a, const small::Trained& b, double bound = 1e-5) {
  REQUIRE(a.variables.size() == b.variables.size());
  for (size_t s = 0; s < a.losses.size(); ++s) CHECK(std::abs(a.losses[s] - b.losses[s]) < bound);
  REQUIRE(a.logits.size() == b.logits.size());
  for (size_t i = 0; i < a.logits.size(); ++i) CHECK(std::abs(a.logits[i] - b.logits[i]) < 10 * bound);
  double apart = 0, norm = 0;
  for (size_t v = 0; v < a.variables.size(); ++v)
    for (size_t i = 0; i < a.variables[v].size(); ++i) {
      apart += std::pow(a.variables[v][i] - b.variables[v][i], 2);
      norm += std::pow(a.variables[v][i], 2);
    }
  CHECK(std::sqrt(apart) < bound * std::sqrt(norm));
}

TEST_CASE("unlike: equal to one device, and proven") {
  struct Case {
    const char *devices, *strategy;
    int zero = 0;
    int64_t accumulation = 0;
  };
  const Case cases[] = {
      {"ref:2", "replica([replica(1), replica(1)], shares=[1,2])"},
      {"ref:3", "replica([split(2), replica(1)])"},
      {"ref:3", "replica([split(2), replica(1)])", 0, 3},
      {"ref:4", "replica([pipeline(3, micro_batches=4), replica(1)], shares=[1,1])"},
      {"ref:4", "replica([pipeline(3, micro_batches=4), replica(1)], shares=[0,1])"},
      {"ref:4", "replica([split(2), pipeline(2, micro_batches=3)], shares=[3,5])"},
      {"ref:5", "replica([pipeline(2, micro_batches=2), replica(2), replica(1)])"},
      {"ref:6", "replica([pipeline(2, micro_batches=2) > split(2), replica(2)], shares=[2,1])"},
      {"ref:6", "replica([replica(2) > split(2), pipeline(2)], shares=[2,1])", 1},
      {"ref:5", "replica([replica(3), split(2)])", 3},
      {"ref:5", "replica([replica(3), pipeline(2, micro_batches=2, schedule=zb_h1)])", 2},
      {"ref:4", "replica([pipeline(2, micro_batches=4, schedule=gpipe), split(2)])"},
      {"lag:4", "replica([pipeline(3, micro_batches=4), replica(1)], shares=[1,1])"},
  };
  const small::Model mlp = small::mlp(12, OptimizerKind::kLamb, 8, 16), gpt = small::gpt(6, OptimizerKind::kAdamW, 1);
  const small::Trained one_mlp = small::train(mlp, "ref:1", {.strategy = "local"}),
                       one_gpt = small::train(gpt, "ref:1", {.strategy = "local"});
  for (const Case& c : cases) {
    CAPTURE(c.strategy);
    CAPTURE(c.zero);
    for (const auto& [model, one] : {std::pair{&mlp, &one_mlp}, std::pair{&gpt, &one_gpt}}) {
      const Plan plan = planned(*model, c.devices, {{.zero = c.zero}, c.strategy, {}, c.accumulation});
      check_close(*one, small::train(plan));
      const Proof proof = prove(plan);
      CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, text(proof));
    }
  }
}

}  // namespace
}  // namespace whale
