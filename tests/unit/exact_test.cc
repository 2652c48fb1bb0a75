// Exact mode (semantics.md section 9): every plan of one program and one number of micro-batches trains the same bits.
#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "lower/tree.h"
#include "prove/prove.h"
#include "trained.h"
#include "unit/caught.h"

namespace whale {
namespace {

CompileOptions exactly(const std::string& strategy, int64_t accumulation = 0, int zero = 0,
                       Recompute recompute = Recompute::kNone) {
  CompileOptions options;
  options.strategy = strategy;
  options.accumulation = accumulation;
  options.zero = zero;
  options.recompute = recompute;
  options.exact = true;
  return options;
}

// The sum of all leaves as text with brackets.
std::string text_of(int64_t leaves, const std::vector<std::vector<int64_t>>& orders) {
  std::vector<TreeNode> nodes;
  std::vector<std::string> rows;
  for (const auto& order : orders) {
    const TreePlan plan = plan_tree(leaves, order);
    std::vector<std::string> places(static_cast<size_t>(plan.places));
    for (size_t k = 0; k < order.size(); ++k)
      for (const TreeStep& s : plan.steps[k]) {
        const std::string from = s.from < 0 ? std::to_string(order[k]) : places[s.from];
        std::string& to = places[s.to];
        to = s.copies ? from : "(" + std::min(to, from) + "+" + std::max(to, from) + ")";
      }
    for (size_t k = 0; k < plan.nodes.size(); ++k) {
      nodes.push_back(plan.nodes[k]);
      rows.push_back(places[plan.place_of[k]]);
    }
  }
  const TreeMerge merge = merge_tree(leaves, nodes);
  for (const auto& [to, from] : merge.additions) {
    const std::string a = rows[to], b = rows[from];
    rows[to] = "(" + std::min(a, b) + "+" + std::max(a, b) + ")";
  }
  return rows[merge.root];
}

TEST_CASE("the tree of sums is the same however the micro-batches are dealt out and in whatever order they end") {
  for (int64_t leaves = 1; leaves <= 13; ++leaves) {
    std::vector<int64_t> all(static_cast<size_t>(leaves));
    std::iota(all.begin(), all.end(), 0);
    const std::string one = text_of(leaves, {all});
    for (int64_t a = 0; a <= leaves; ++a)
      for (int64_t b = a; b <= leaves; ++b) {
        std::vector<std::vector<int64_t>> parts{
            {all.begin(), all.begin() + a}, {all.begin() + a, all.begin() + b}, {all.begin() + b, all.end()}};
        CHECK(text_of(leaves, parts) == one);
        for (auto& part : parts) std::reverse(part.begin(), part.end());
        CHECK(text_of(leaves, parts) == one);
        for (const auto& part : parts) {
          const TreePlan plan = plan_tree(leaves, part);
          CHECK(plan.nodes.size() <= 8);
          CHECK(plan.places <= 8);
        }
      }
  }
  CHECK(text_of(5, {{0, 1, 2, 3, 4}}) == "(((0+1)+(2+3))+4)");
  CHECK(plan_tree(1024, std::vector<int64_t>(1, 5)).nodes == std::vector<TreeNode>{{0, 5}});
}

// What a proof says of its training: plans with the same have the same bits.
std::string order_of(const small::Model& m, const std::string& devices, const CompileOptions& options) {
  const Plan plan = compile(m.g, parse_devices(devices), options);
  const EntryProof proof = prove(plan, plan.entries[0]);
  CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, proof.what);
  return proof.order;
}

struct Case {
  const char* devices;
  const char* strategy;
  int zero = 0;
  Recompute recompute = Recompute::kNone;
};

// All on devices of one kind, six or seven micro-batches.
void compare(const small::Model& m, const std::string& kind, int64_t micro_batches, const std::vector<Case>& cases,
             int64_t classes, Precision precision = Precision::kFloat32) {
  const auto options = [&](const Case& c, const std::string& strategy) {
    CompileOptions o = exactly(strategy, micro_batches, c.zero, c.recompute);
    o.precision = precision;
    return o;
  };
  const small::Trained one = small::train(m, kind + ":1", options({}, "replica"), 3, classes);
  const std::string order = order_of(m, kind + ":1", options({}, "replica"));
  for (const Case& c : cases) {
    std::string strategy = c.strategy;
    if (const size_t at = strategy.find('M'); at != strategy.npos)
      strategy.replace(at, 1, std::to_string(micro_batches));
    CAPTURE(kind);
    CAPTURE(c.devices);
    CAPTURE(strategy);
    CAPTURE(c.zero);
    CAPTURE(static_cast<int>(c.recompute));
    const small::Trained other = small::train(m, kind + c.devices, options(c, strategy), 3, classes);
    CHECK(other.losses == one.losses);
    CHECK(other.logits == one.logits);
    CHECK(other.variables == one.variables);
    CHECK(order_of(m, kind + c.devices, options(c, strategy)) == order);
  }
}

const std::vector<Case> kCases{
    {":1", "replica", 0, Recompute::kFull},
    {":2", "replica"},
    {":3", "replica"},
    {":4", "replica"},
    {":2", "replica(2, shares=[5,1])"},
    {":3", "replica(3, shares=[1,4,2])"},
    {":3", "replica(3, shares=[1,0,2])"},
    {":2", "replica", 1},
    {":3", "replica", 2},
    {":2", "replica", 3},
    {":2", "replica", 3, Recompute::kFull},
    {":4", "replica(2) > replica(2)"},
    {":2", "pipeline(2, micro_batches=M)"},
    {":3", "pipeline(3, micro_batches=M)"},
    {":2", "pipeline(2, micro_batches=M, schedule=gpipe)"},
    {":2", "pipeline(2, micro_batches=M, schedule=zb_h1)"},
    {":2", "pipeline(2, micro_batches=M, warmup=[3,1])"},
    {":2", "pipeline(2, micro_batches=M, schedule=interleaved, virtual_stages=2)"},
    {":4", "replica(2) > pipeline(2, micro_batches=M)"},
    {":4", "replica(2, shares=[2,1]) > pipeline(2, micro_batches=M, schedule=zb_h1)", 2, Recompute::kFull},
};

TEST_CASE("exact mode: the bits of one device, for replicas, pipelines, ZeRO and recompute") {
  small::Model gpt = small::gpt(14, OptimizerKind::kAdamW, 4);
  gpt.g.training.clip_norm = 0.1;
  compare(gpt, "ref", 7, kCases, 32);
  compare(gpt, "cpu", 7, kCases, 32);
  compare(gpt, "cpu", 7, {{":2", "replica", 3, Recompute::kFull}, {":2", "pipeline(2, micro_batches=M)"}}, 32,
          Precision::kBFloat16);
  compare(small::gpt(9, OptimizerKind::kLamb, 2), "ref", 6, {{":2", "replica", 1}, {":3", "replica", 3}}, 32);
  compare(small::gpt(9, OptimizerKind::kAdafactor, 2), "ref", 6, {{":2", "replica", 1}, {":3", "replica"}}, 32);
}

// The stages have terms of one gradient: where they are cut says nothing of the order of its sum.
TEST_CASE("exact mode: a matrix that is used many times") { compare(small::shared(7, 14), "ref", 7, kCases, 5); }

// What no sample is in, so that only the cuts of ZeRO could divide it: products of parameters, sums along one, running
// sums, softmax, a part of one.
small::Model of_parameters(int64_t batch) {
  using enum OpCode;
  small::Model m;
  const auto along = [](int64_t axis) { return Attrs{{"axes", std::vector<int64_t>{axis}}, {"keep_dims", true}}; };
  const TensorId x = m.input("x", {batch, 13});
  const TensorId product = m.op(k_matmul, {m.variable("a", {13, 11}), m.variable("b", {11, 13})});
  const TensorId v = m.variable("v", {13, 12});
  const TensorId directions = m.op(k_mul, {v, m.op(k_rsqrt, {m.op(k_reduce_sum, {m.op(k_square, {v})}, along(0))})});
  const TensorId chances = m.op(k_cumsum, {m.op(k_softmax, {m.variable("s", {12, 12})})}, {{"axis", int64_t{0}}});
  const TensorId part = m.op(k_slice, {m.variable("c", {16, 14})},
                             {{"starts", std::vector<int64_t>{2, 1}}, {"limits", std::vector<int64_t>{14, 11}}});
  const TensorId logits =
      m.op(k_matmul, {m.op(k_matmul, {m.op(k_matmul, {m.op(k_matmul, {x, product}), directions}), chances}), part});
  const TensorId penalty = m.op(k_matmul, {m.variable("d", {13, 11}), m.variable("e", {11, 13})});
  m.minimize(m.op(k_add, {m.op(k_reduce_mean, {m.op(k_square, {logits})}), m.op(k_sum_of_squares, {penalty})}),
             OptimizerKind::kAdagrad);
  m.g.outputs = {{"logits", logits}};
  return m;
}

TEST_CASE("exact mode: what is made of parameters alone is not cut by where ZeRO puts them") {
  const small::Model m = of_parameters(8);
  for (const int64_t micro_batches : {1, 2, 8})
    for (const std::string kind : {"ref", "cpu"})
      compare(m, kind, micro_batches,
              {{":2", "replica", 3},
               {":3", "replica", 3},
               {":4", "replica", 3, Recompute::kFull},
               {":4", "replica(2) > replica(2)", 3},
               {":3", "replica", 2}},
              3);
  for (const char* kind : {"ref", "cpu"}) {
    const small::Trained one = small::train(m, kind + std::string(":2"), exactly("split(2)", 4));
    for (const int zero : {0, 3})
      CHECK(one == small::train(m, kind + std::string(":4"), exactly("replica(2) > split(2)", 4, zero)));
  }
}

TEST_CASE("exact mode: replicas that have no micro-batch, or cannot share them, and a note that says so") {
  const small::Model gpt = small::gpt(12, OptimizerKind::kAdamW, 2);
  for (const int64_t micro_batches : {1, 2, 3})
    compare(gpt, "ref", static_cast<int>(micro_batches),
            {{":4", "replica"}, {":4", "replica(2) > replica(2)", 3}, {":3", "pipeline(2, micro_batches=M) > replica"}},
            32);
  const auto noted = [](const std::string& devices, const CompileOptions& options, const char* text) {
    const Plan plan = compile(small::mlp(8).g, parse_devices(devices, {0}), options);
    return std::any_of(plan.notes.begin(), plan.notes.end(),
                       [&](const std::string& note) { return note.find(text) != note.npos; });
  };
  CHECK(noted("ref:3", exactly("replica", 1), "3 replicas take whole micro-batches; there is one, which each"));
  CHECK(noted("ref:3", exactly("replica", 2), "there are 2, so 1 of them have nothing to do"));
  CHECK(noted("ref:3", exactly("replica", 4), "[4, 2, 2]"));  // samples
  CHECK(!noted("ref:3", exactly("replica", 3), "Exact mode"));
  CHECK(noted("ref:3", exactly("pipeline(2, micro_batches=2) > replica", 2), "differ between the stages"));
}

TEST_CASE("maxima and minima over micro-batches, exact or not") {
  for (const OpCode code : {OpCode::k_reduce_max, OpCode::k_reduce_min}) {
    small::Model m = small::mlp(7);
    m.g.outputs = {{"logits", m.op(code, {m.g.outputs[0].tensor}, {{"axes", std::vector<int64_t>{0}}})}};
    for (const std::string kind : {"ref", "cpu"})
      for (const bool exact : {false, true}) {
        CompileOptions options = exactly("replica", 3);
        options.exact = exact;
        const small::Trained one = small::train(m, kind + ":1", {.strategy = "local"}, 3);
        for (const Case& c : {Case{":1", "replica"}, Case{":3", "replica(3, shares=[1,0,2])"}, Case{":2", "split(2)"},
                              Case{":2", "replica(2, by=micro_batch)"}, Case{":2", "pipeline(2, micro_batches=3)"}}) {
          CAPTURE(kind);
          CAPTURE(c.strategy);
          options.strategy = c.strategy;
          const small::Trained other = small::train(m, kind + c.devices, options, 3);
          REQUIRE(other.logits.size() == 3);
          for (size_t i = 0; i < 3; ++i) CHECK(other.logits[i] == doctest::Approx(one.logits[i]).epsilon(1e-5));
        }
      }
  }
}

TEST_CASE("exact mode: split cuts are a part of the program, replicas around them are not") {
  const small::Model gpt = small::gpt(8, OptimizerKind::kAdamW, 2);
  const small::Trained one = small::train(gpt, "ref:2", exactly("split(2)", 4), 3, 32);
  CHECK(one == small::train(gpt, "ref:4", exactly("replica(2) > split(2)", 4), 3, 32));
  CHECK(one == small::train(gpt, "ref:4", exactly("replica(2) > split(2)", 4, 2), 3, 32));
}

TEST_CASE("exact mode: plans that are proven with one order have the same bits, and others need not") {
  const small::Model gpt = small::gpt(8, OptimizerKind::kAdamW, 2);
  std::map<std::string, small::Trained> trained;
  size_t alike = 0;
  for (const int64_t micro_batches : {2, 4})
    for (const auto& [devices, strategy] :
         std::vector<std::pair<const char*, const char*>>{{"ref:1", "replica"},
                                                          {"ref:2", "split(2)"},
                                                          {"ref:4", "replica(2) > split(2)"},
                                                          {"ref:4", "split(2) > replica(2)"},
                                                          {"ref:4", "pipeline(2, micro_batches=M) > split(2)"},
                                                          {"ref:2", "split(2, shares=[3,1])"},
                                                          {"ref:2", "split(2, shares=[1,3])"},
                                                          {"ref:4", "split(4)"},
                                                          {"ref:4", "split(2) > split(2)"},
                                                          {"ref:2", "split(2, factor=sequence)"},
                                                          {"ref:2", "split(2, factor=rows)"}})
      for (const int zero : {0, 2}) {
        std::string text = strategy;
        if (const size_t at = text.find('M'); at != text.npos) text.replace(at, 1, std::to_string(micro_batches));
        CAPTURE(text);
        const CompileOptions options = exactly(text, micro_batches, zero);
        const small::Trained found = small::train(gpt, devices, options, 3, 32);
        const auto [at, first] = trained.try_emplace(order_of(gpt, devices, options), found);
        alike += first ? 0 : 1;
        CHECK(found == at->second);
      }
  CHECK(alike >= 22);           // ZeRO has no part in it
  CHECK(trained.size() >= 12);  // cuts and numbers of micro-batches have
  std::vector<small::Trained> bits;
  for (const auto& [order, each] : trained)
    if (std::find(bits.begin(), bits.end(), each) == bits.end()) bits.push_back(each);
  CHECK(bits.size() * 2 > trained.size());
}

TEST_CASE("replicas of whole micro-batches without the tree train like one device") {
  const small::Model gpt = small::gpt(8, OptimizerKind::kAdamW, 2);
  CompileOptions options;
  options.accumulation = 4;
  const small::Trained one = small::train(gpt, "ref:1", options, 3, 32);
  for (const auto& [devices, strategy] : std::vector<std::pair<const char*, const char*>>{
           {"ref:2", "replica(2, by=micro_batch)"}, {"ref:3", "replica(3, shares=[2,1,1], by=micro_batch)"}})
    for (const int zero : {0, 1, 2, 3}) {
      options.strategy = strategy;
      options.zero = zero;
      const small::Trained other = small::train(gpt, devices, options, 3, 32);
      for (size_t s = 0; s < one.losses.size(); ++s)
        CHECK(other.losses[s] == doctest::Approx(one.losses[s]).epsilon(1e-5));
    }
}

}  // namespace
}  // namespace whale
