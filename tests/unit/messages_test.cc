// What a newcomer reads: every message says what was wanted, what was found, where, and what to do.
#include <doctest/doctest.h>

#include <algorithm>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "unit/caught.h"
#include "unit/small_models.h"

using namespace whale;

TEST_CASE("messages of strategies that do not fit") {
  struct Row {
    const char *strategy, *devices;
    std::vector<const char*> parts;
  };
  const Row rows[] = {
      // Counts.
      {"replica(3)", "null:4", {"'replica(3)'", "default strategy", "wants 3", "4 are there", "leave the count out"}},
      {"split(8)", "null:4", {"'split(8)'", "wants 8", "4 are there", "smaller count"}},
      {"replica(2) > split(3)", "null:4", {"'replica(2) > split(3)'", "wants 6", "4 are there", "more devices"}},
      {"stage(1) > replica", "null:2", {"'stage(1) > replica'", "wants 1", "2 are there", "leave a count out"}},
      {"replica(2) > pipeline(3)", "null:4", {"wants 6", "4 are there", "change the number of devices"}},
      {"pipeline(90)", "null:90", {"'pipeline(90)'", "90 stages", "at most", "nest replica or split"}},
      {"local", "null:2", {"one device", "2 are there", "cpu:1"}},
      // Shares.
      {"replica(3, shares=[1,2])", "null:3", {"2 entries", "expected 3", "each replica", "change the list"}},
      {"replica(2, shares=[0,0])", "null:2", {"[0, 0]", "add up to 0", "give at least one"}},
      {"split(2, shares=[1,-1])", "null:2", {"'shares'", "[1,-1]", "numbers >= 0"}},
      // Scopes in the wrong order, names that nobody has.
      {"stage(2) > pipeline(2)", "null:4", {"pipeline inside a stage", "pipeline > stage"}},
      {"pipeline(2) > pipeline(2)", "null:4", {"pipeline inside a pipeline", "one is enough"}},
      {"split(2, factor=hats)", "null:2", {"'hats'", "columns", "heads", "vocabulary", "leave it out"}},
      {"split(2, factor=experts)", "null:2", {"a factor 'experts'", "columns", "heads", " b,", "leave it out"}},
      {"replicas(2)", "null:2", {"unknown scope 'replicas'", "replica, split, stage, pipeline or cluster"}},
      {"replica(2, ways=2)", "null:2", {"no parameter 'ways'", "count, shares, by, device_order"}},
      {"replica(two)", "null:2", {"'count'", "'two'", "whole number from 1"}},
      {"replica(0)", "null:2", {"'count'", "'0'", "whole number from 1"}},
      {"replica(2", "null:2", {"at character 10", "',' or ')'", "the end"}},
      {"replica(2) split(2)", "null:4", {"at character 12", "'>' or the end", "split(2)"}},
      {"pipeline(2, schedule=fast)", "null:2", {"'schedule'", "'fast'", "gpipe, 1f1b, interleaved"}},
      {"pipeline(2, schedule=1f1b, virtual_stages=3)", "null:2", {"'1f1b'", "3 virtual stages", "expected 1"}},
      {"pipeline(2, micro_batches=4, warmup=[1,2])", "null:2", {"[1,2]", "stage 1", "do not rise"}},
      {"pipeline(2, micro_batches=4, warmup=[3,2,1])", "null:2", {"3 depths for 2 stages"}},
      {"pipeline(2, micro_batches=4, warmup=[5,1])", "null:2", {"5 forward passes", "4 micro-batches", "at most"}},
      {"pipeline(2, micro_batches=4, warmup=[2,0])", "null:2", {"'warmup'", "[2,0]", "from 1"}},
      {"pipeline(2, micro_batches=4, warmup=2)", "null:2", {"'warmup'", "'2'", "a list such as [3,2,1]"}},
      {"pipeline(2, schedule=gpipe, micro_batches=4, warmup=[2,1])", "null:2", {"'gpipe'", "take 1f1b or zb_h1"}},
      {"pipeline(2, virtual_stages=2, micro_batches=4, warmup=[2,1])",
       "null:2",
       {"'interleaved'", "take 1f1b or zb_h1"}},
      {"attic: split(2); replica", "null:2", {"no scope is called 'attic'", "none with a name"}},
  };
  for (const Row& row : rows) {
    CompileOptions options;
    options.strategy = row.strategy;
    const std::string message = message_of([&] { compile(small::gpt(8).g, parse_devices(row.devices, {0}), options); },
                                           {Code::kInvalidArgument});
    INFO(row.strategy, " on ", row.devices, ": ", message);
    CHECK(!message.empty());
    for (const char* part : row.parts) CHECK_MESSAGE(has(message, part), part);
  }
}

TEST_CASE("experts are the batch of products where there are gates, in the scope or around it") {
  using enum OpCode;
  small::Model m;
  const TensorId x = m.input("x", {4, 6, 8});
  const Op gate = m.g.op(append_op(m.g, k_moe_gate, {m.op(k_matmul, {x, m.variable("gate", {8, 4})})},
                                   {{"k", int64_t{1}}, {"capacity", int64_t{3}}}, m.scope));
  TensorId h = m.op(k_moe_dispatch, {x, gate.outputs[0]}, {{"experts", int64_t{4}}, {"capacity", int64_t{3}}});
  h = m.op(k_reshape, {h}, {{"shape", Dims{4, 12, 8}}});
  m.g.scopes[m.enter(ScopeKind::kSplit, 2)].factor = "experts";
  h = m.op(k_matmul, {h, m.variable("expert", {4, 8, 8})});
  m.scope = 0;
  h = m.op(k_reshape, {h}, {{"shape", Dims{4, 4, 3, 8}}});
  h = m.op(k_moe_combine, {h, gate.outputs[0], gate.outputs[1]});
  m.minimize(m.op(k_reduce_mean, {h}), OptimizerKind::kSgd);
  const Plan plan = compile(m.g, parse_devices("null:2", {0}), {});
  const auto expert = std::find_if(plan.variables.begin(), plan.variables.end(),
                                   [](const PlanVariable& v) { return v.name == "expert"; });
  REQUIRE(expert != plan.variables.end());
  const auto& axes = expert->storage_sharding.axes;
  CHECK(std::any_of(axes.begin(), axes.end(),
                    [](const AxisSharding& a) { return a.placement == Placement::kShard && a.sub_axis.dim == 0; }));
}

TEST_CASE("messages of options that would be without effect") {
  const auto refusal = [](const CompileOptions& options) {
    return message_of([&] { compile(small::gpt(8).g, parse_devices("null:2", {0}), options); },
                      {Code::kInvalidArgument});
  };
  const std::string shares = refusal({{.state_shares = {2, 1}}, "replica(2)"});
  for (const char* part : {"2 shares of state", "without ZeRO", "zero 1, 2 or 3", "leave them out"})
    CHECK_MESSAGE(has(shares, part), shares);
  CHECK(refusal({{.zero = 1, .state_shares = {2, 1}}, "replica(2)"}) == "");
  CHECK(refusal({{.state_shares = {2, 1}, .update = UpdateForm::kSliced}, "replica(2)"}) == "");
  const std::string runs = refusal({.strategy = "pipeline(2, micro_batches=4)", .accumulation = 2});
  for (const char* part : {"accumulation 2", "micro_batches=4", "leave one out"}) CHECK_MESSAGE(has(runs, part), runs);
  CHECK(refusal({.strategy = "pipeline(2, micro_batches=4)", .accumulation = 4}) == "");
}

TEST_CASE("options without effect are noted") {
  CompileOptions options;
  options.strategy = "split(2)";
  options.zero = 1;
  const auto notes = [&] { return compile(small::gpt(8).g, parse_devices("null:2", {0}), options).notes; };
  const auto about = [](const std::string& note) { return note.starts_with("ZeRO 1 cuts over replicas"); };
  const auto split = notes();
  CHECK(std::any_of(split.begin(), split.end(), about));
  options.strategy = "replica(2)";
  const auto replica = notes();
  CHECK(std::none_of(replica.begin(), replica.end(), about));
  const auto changes = [](const std::string& note) { return has(note, "changes the result"); };
  options = {{.gradient_dtype = DType::kBF16}, "pipeline(2)"};
  const auto stages = notes();
  CHECK(std::any_of(stages.begin(), stages.end(), [](const std::string& n) { return has(n, "nothing is rounded"); }));
  CHECK(std::none_of(stages.begin(), stages.end(), changes));
  options.strategy = "replica(2)";
  const auto rounded = notes();
  CHECK(std::any_of(rounded.begin(), rounded.end(), changes));
  // What gradients have anyway is no option: a note of rounding would be untrue, and exact mode has nothing against it.
  for (const Precision precision : {Precision::kFloat32, Precision::kBFloat16}) {
    options.gradient_dtype.reset();
    options.precision = precision;
    const auto plan = [&] { return print(compile(small::gpt(8).g, parse_devices("null:2", {0}), options)); };
    const std::string own = plan();
    options.gradient_dtype = DType::kF32;
    CHECK(plan() == own);
    const auto same = notes();
    CHECK(std::none_of(same.begin(), same.end(), changes));
  }
  options.precision.reset();
  options.exact = true;
  CHECK_NOTHROW(notes());
  options.gradient_dtype = DType::kBF16;
  CHECK_THROWS_AS(notes(), Error);
}

TEST_CASE("options of training are refused for a graph that is not trained, each by its name") {
  small::Model untrained = small::gpt(8);
  untrained.g.training.loss = kNone;
  untrained.g.training.optimizer = {};
  const auto refusal = [&](const CompileOptions& options) {
    return message_of([&] { compile(untrained.g, parse_devices("null:2", {0}), options); }, {Code::kInvalidArgument});
  };
  const std::pair<const char*, CompileOptions> given[] = {
      {"accumulation", {.accumulation = 2}},
      {"bucket_bytes", {{.bucket_bytes = 512}}},
      {"zero", {{.zero = 1}}},
      {"state_shares", {{.zero = 1, .state_shares = {2, 1}}}},
      {"recompute", {{.recompute = Recompute::kFull}}},
      {"recompute", {{.stage_recompute = {Recompute::kNone}}}},
      {"gradient_dtype", {{.gradient_dtype = DType::kBF16}}},
      {"adasum", {{.adasum = true}}},
      {"update", {{.update = UpdateForm::kSliced}}},
      {"offload of state, gradients", {{.offload = kOffloadState | kOffloadGradients}}},
      {"offload of activations", {{.offload = kOffloadActivations | kOffloadParameters}}},
  };
  for (const auto& [name, options] : given) {
    const std::string message = refusal(options);
    CHECK_MESSAGE(has(message, name), message);
    CHECK_MESSAGE(has(message, "which has no loss with an optimizer"), message);
  }
  // What an evaluation has a use for: parameters that wait elsewhere, the same bits, comparisons.
  CHECK(refusal({{.overlap = false, .fusion = false, .offload = kOffloadParameters, .matmul_chunks = 2}}) == "");
  CHECK(refusal({{.exact = true}, "replica(2)"}) == "");
}

TEST_CASE("offload of state that the optimizer does not keep is noted") {
  const auto noted = [](OptimizerKind kind) {
    const Plan plan = compile(small::mlp(8, kind).g, parse_devices("null:2", {0}), {{.offload = kOffloadState}});
    return std::any_of(plan.notes.begin(), plan.notes.end(),
                       [](const std::string& note) { return has(note, "Offload of state: the optimizer keeps none"); });
  };
  CHECK(noted(OptimizerKind::kSgd));
  CHECK_FALSE(noted(OptimizerKind::kAdam));
}

TEST_CASE("scopes that cut their devices at different places are both named") {
  using enum OpCode;
  small::Model m;
  const auto layer = [&m](const char* name, TensorId x, int64_t outer, int64_t inner) {
    const ScopeId around = m.scope;
    m.g.scopes[m.enter(ScopeKind::kReplica, outer)].name = name;
    m.enter(ScopeKind::kSplit, inner);
    const TensorId y = m.op(k_matmul, {x, m.variable(std::string(name) + ".w", {12, 12})});
    m.scope = around;
    return y;
  };
  TensorId x = m.input("x", {12, 12});
  x = layer("first", x, 3, 2);
  x = layer("second", x, 2, 3);
  m.minimize(m.op(k_reduce_mean, {x}), OptimizerKind::kSgd);
  const std::string message =
      message_of([&] { compile(m.g, parse_devices("null:6", {0}), {}); }, {Code::kUnimplemented});
  for (const char* part : {"'replica(3) > split(2)'", "'replica(2) > split(3)'", "(first", "(second"})
    CHECK_MESSAGE(has(message, part), message);
}

TEST_CASE("what a plan file cannot hold is refused by planning, with the limit") {
  const auto refusal = [](const Graph& graph, const char* devices, const CompileOptions& options) {
    return message_of([&] { compile(graph, parse_devices(devices, {0}), options); }, {Code::kResourceExhausted});
  };
  const small::Model many = small::mlp(70'000);
  const std::string flight =
      refusal(many.g, "null:2", {.strategy = "pipeline(2, micro_batches=70000, schedule=gpipe)"});
  for (const char* part : {"schedule 'gpipe' has 70000 micro-batches in flight", "at most 65536", "1f1b"})
    CHECK_MESSAGE(has(flight, part), flight);
  small::Model large;
  TensorId x = large.input("x", {1 << 23, 1 << 20});
  const TensorId w = large.variable("w", {1 << 20, 1 << 20});
  std::vector<TensorId> values;
  for (int i = 0; i < 40; ++i) values.push_back(x = large.op(OpCode::k_tanh, {large.op(OpCode::k_matmul, {x, w})}));
  large.minimize(large.op(OpCode::k_reduce_mean, {x}), OptimizerKind::kSgd);
  const std::string memory = refusal(large.g, "null:1", {});
  for (const char* part : {"entry 'train' take", "at most 1125899906842624 (1 PiB)"})
    CHECK_MESSAGE(has(memory, part), memory);
  small::Model tensor;
  tensor.g.outputs.push_back({"y", tensor.op(OpCode::k_tanh, {tensor.input("x", {1 << 23, 1 << 22})})});
  CHECK(has(refusal(tensor.g, "null:1", {}), "the most that a tensor may have"));
}
