// What is estimated without making the plan against what the plan says.
#include "report/estimate.h"

#include <set>

#include "cluster/device_kinds.h"
#include "compile/prepare.h"
#include "golden.h"
#include "plan_case.h"
#include "simulate/simulate.h"
#include "task/condense.h"

using namespace whale;
using namespace whale::golden;

namespace {

struct Row {
  const char *devices, *strategy;
  int zero = 0;
  int64_t accumulation = 0;
  Recompute recompute = Recompute::kNone;
  uint32_t offload = 0;
  std::optional<Precision> precision = {};
  std::optional<DType> gradient_dtype = {};
};

CompileOptions options_of(const Row& row) {
  CompileOptions options{.strategy = row.strategy, .accumulation = row.accumulation, .precision = row.precision};
  options.zero = row.zero, options.recompute = row.recompute, options.offload = row.offload;
  options.gradient_dtype = row.gradient_dtype, options.verify_passes = false;
  return options;
}

bool is_condensed(const Graph& graph, const Row& row, double least_bytes = 0) {
  Graph scoped = graph;
  const bool pipeline = std::string_view(row.strategy).find("micro_batches") != std::string_view::npos;
  scoped.training.accumulation = pipeline ? 2 : row.accumulation;
  const std::vector<DeviceSpec> devices = parse_devices(row.devices);
  const TaskGraphs tasks =
      form_task_graphs(scoped, devices, row.strategy, CostModel(devices, 1, kMachineOfCores), false);
  return condense(scoped, tasks, least_bytes, 0, kinds_of(devices)).has_value();
}

// Calls body(mine, its) with the memory that the estimate and the plan give each device.
template <class Body>
void each_device(const Estimate& e, const Plan& plan, Body body) {
  const Entry& entry = plan.entries[0];
  size_t seen = 0;
  for (const Estimate::Class& c : e.classes)
    for (const int32_t d : c.devices) {
      CAPTURE(d);
      ++seen;
      CHECK(c.seconds > 0);
      body(c.memory, memory_of(plan, entry, static_cast<size_t>(entry.rows[d].program)));
    }
  CHECK(seen == plan.devices.size());
}

void check_within_two_percent(const Graph& graph, const Row& row) {
  CAPTURE(row.strategy);
  CAPTURE(row.zero);
  const CompileOptions options = options_of(row);
  const std::vector<DeviceSpec> devices = parse_devices(row.devices);
  each_device(estimate(graph, devices, options), compile(graph, devices, options),
              [](const MemoryFigures& e, const MemoryFigures& want) {
                const MemoryClasses &mine = e.device, &its = want.device;
                CHECK(mine.parameters == doctest::Approx(its.parameters).epsilon(0.001));
                CHECK(mine.state == doctest::Approx(its.state).epsilon(0.001));
                CHECK(mine.total() == doctest::Approx(its.total()).epsilon(0.02));
              });
}

// Of a few layers, against that of all.
void check_seconds_of_all_layers(const Graph& graph, const Row& row) {
  CAPTURE(row.strategy);
  const std::vector<DeviceSpec> devices = parse_devices(row.devices);
  CompileOptions options = options_of(row);
  const double seconds = estimate(graph, devices, options).seconds;
  options.fetch = {"loss"};  // all layers are looked at
  CHECK(seconds == doctest::Approx(estimate(graph, devices, options).seconds).epsilon(0.02));
}

// Layers of squares without scopes of their own; `shared`: all have the first one's weights; `aside`: a mean in
// the first third is added behind the last layer.
Graph squares(int64_t layers, bool shared, bool aside = false) {
  using enum OpCode;
  small::Model m;
  TensorId h = m.input("x", {1024, 512});
  const TensorId target = m.input("target", {1024, 512});
  TensorId w = kNone, early = kNone;
  for (int64_t l = 0; l < layers; ++l) {
    if (l == 0 || !shared) w = m.variable(fmt::format("w{}", l), {512, 512});
    h = m.op(k_add, {h, m.op(k_tanh, {m.op(k_matmul, {h, w})})});
    if (aside && l + 2 == layers / 3) early = m.op(k_reduce_mean, {h}, {{"axes", Dims{1}}, {"keep_dims", true}});
  }
  if (aside) h = m.op(k_add, {h, early});
  m.minimize(m.op(k_reduce_mean, {m.op(k_squared_difference, {h, target})}), OptimizerKind::kAdamW);
  return m.g;
}

}  // namespace

TEST_CASE("an estimate's memory is the plan's, on every device") {
  Gpt s;
  s.batch = 16, s.layers = 4, s.dim = 64, s.heads = 8, s.seq = 32;
  const Graph graph = graph_of(s);
  for (const Row& row :
       {Row{"null:8", "split(8)"},
        {"null:8", "pipeline(4, micro_batches=8) > split(2)", 1},
        {"null:8", "replica(2) > pipeline(2, micro_batches=4, schedule=zb_v) > split(2)", 3},
        {"null:4", "pipeline(2, micro_batches=4, schedule=interleaved, virtual_stages=2) > replica(2)", 2},
        {"null:4", "pipeline(4, micro_batches=8, warmup=[7,5,2,1])"},
        {"null:8", "pipeline(4, micro_batches=8, schedule=zb_h1, warmup=[6,4,3,2]) > split(2)", 1},
        {"null:3", "replica(3, shares=[3,2,1])", 1},
        {"null:5", "replica(2) > split(3, shares=[[2,1,1],[1,1]])", 1, 4},
        {"null:2", "replica(2)", 0, 2, Recompute::kFull},
        {"null:2", "replica(2)", 1, 2, Recompute::kSelective, kOffloadAll},
        {"null-1MB:2", "replica(2)"}}) {
    CAPTURE(row.strategy);
    const CompileOptions options = options_of(row);
    const std::vector<DeviceSpec> devices = parse_devices(row.devices);
    const Estimate e = estimate(graph, devices, options);
    const bool fits = devices[0].memory_bytes == 0;
    CHECK((missing_bytes(e, devices) > 0) == !fits);
    CHECK(e.seconds > 0);
    if (!fits) {
      CHECK_THROWS(compile(graph, devices, options));
      continue;
    }
    each_device(e, compile(graph, devices, options), [](const MemoryFigures& mine, const MemoryFigures& want) {
      for (const auto& [m, its] : {std::pair{&mine.device, &want.device}, std::pair{&mine.host, &want.host}}) {
        CHECK(m->parameters == its->parameters);
        CHECK(m->gradients == its->gradients);
        CHECK(m->state == its->state);
        CHECK(m->copies == its->copies);
        CHECK(m->activations == its->activations);
      }
    });
  }
}

TEST_CASE("an estimate of a deep model is within 2 % of the plan, of a few of its layers") {
  Gpt s;
  s.batch = 16, s.layers = 26, s.dim = 1024, s.heads = 8, s.seq = 128;
  const Graph graph = graph_of(s);
  for (const Row& row : {Row{"null:1", "local"},
                         {"null:1", "local", 0, 4},
                         {"null:4", "replica", 0},
                         {"null:4", "replica", 1, 4},
                         {"null:4", "replica", 2, 4},
                         {"null:4", "replica", 3, 4},
                         {"null:4", "split(4)"},
                         {"null:4", "split(4)", 0, 0, Recompute::kSelective},
                         {"null:4", "split(4)", 0, 0, Recompute::kFull, 0, Precision::kBFloat16},
                         {"null:4", "pipeline(4, micro_batches=8)", 0, 0, Recompute::kFull},
                         {"null:4", "pipeline(4, micro_batches=8, schedule=gpipe)"},
                         {"null:3", "pipeline(3, micro_batches=4)"},
                         {"null:4", "pipeline(4, micro_batches=8, warmup=[7,5,2,1])"},
                         {"null:4", "pipeline(2, micro_batches=8, schedule=interleaved, virtual_stages=2) > split(2)"},
                         {"null:8", "replica(2) > pipeline(2, micro_batches=4) > split(2)", 1, 0, Recompute::kNone, 0,
                          Precision::kBFloat16},
                         {"null:8", "replica(2) > pipeline(2, micro_batches=4) > split(2)", 3},
                         {"null:3", "replica(3, shares=[3,2,1])", 1},
                         {"null:3", "split(3, shares=[2,1,1])"}}) {
    CHECK(is_condensed(graph, row));
    check_within_two_percent(graph, row);
  }
}

TEST_CASE("an estimate of a deep model on unlike devices is within 2 % of the plan, of a few of its layers") {
  Gpt s;
  s.batch = 16, s.layers = 26, s.dim = 1024, s.heads = 8, s.seq = 128;
  const Graph graph = graph_of(s);
  for (const Row& row : {Row{"V100-32GB:2,P100-16GB:2", "replica", 1, 4},
                         {"V100-32GB:2,P100-16GB:2", "split(4)"},
                         {"V100-32GB:2,P100-16GB:2", "pipeline(4, micro_batches=8)", 0, 0, Recompute::kFull},
                         {"4xV100-32GB + 4xP100-16GB", "pipeline(4, micro_batches=8) > replica(2)", 1},
                         {"4xV100-32GB + 4xP100-16GB", "replica(2) > pipeline(4, micro_batches=4)", 1},
                         {"4xV100-32GB + 4xT4", "replica(2) > pipeline(2, micro_batches=4) > split(2)", 3, 0,
                          Recompute::kNone, 0, Precision::kFloat16}}) {
    CHECK(is_condensed(graph, row));
    check_within_two_percent(graph, row);
    check_seconds_of_all_layers(graph, row);
  }
}

// A split cuts the first layer unlike the others, and has more places of a table to weigh while it does.
TEST_CASE("an estimate of a deep model with a tied embedding and unlike shares is within 2 % of the plan") {
  Gpt s;
  s.batch = 96, s.layers = 24, s.dim = 1536, s.heads = 12, s.seq = 1024, s.vocab = 50304, s.tied = true;
  const Graph graph = graph_of(s);
  const Row row{"3xA100-80GB|9xT4", "replica(4) > split(3)", 1, 0, Recompute::kNone, 0, Precision::kBFloat16};
  CHECK(is_condensed(graph, row));
  check_within_two_percent(graph, row);
  check_seconds_of_all_layers(graph, row);
}

TEST_CASE("an estimate of a deep model without scopes, or with shared weights, is within 2 % of the plan") {
  const Graph plain = squares(40, false), shared = squares(40, true);
  CHECK(is_condensed(plain, {"null:1", "local"}));
  CHECK(!is_condensed(shared, {"null:1", "local"}));  // one gradient is made of all layers
  for (const Row& row : {Row{"null:1", "local"},
                         {"null:4", "replica(4)", 1, 4},
                         {"null:4", "split(4)", 0, 0, Recompute::kFull},
                         {"null:4", "pipeline(4, micro_batches=4)"},
                         {"null:8", "pipeline(2, micro_batches=4) > replica(4)", 2},
                         {"null:4", "pipeline(4, micro_batches=8, schedule=zb_h1)"},
                         {"null:4", "pipeline(4, micro_batches=1)"}}) {
    check_within_two_percent(plain, row);
    check_within_two_percent(shared, row);
  }
}

// What passes from one virtual stage of a device to another is kept for all micro-batches under way there, and nothing
// else is.
TEST_CASE("virtual stages that pass a value to one another have each its own micro-batches under way") {
  const Graph graph = squares(24, false, true);
  const Row row{"ref:4", "pipeline(4, micro_batches=8, virtual_stages=3)"};
  check_within_two_percent(graph, row);
  const Plan plan = compile(graph, parse_devices(row.devices), options_of(row));
  const Entry& entry = plan.entries[0];
  const auto total = [&](int32_t d) {
    return memory_of(plan, entry, static_cast<size_t>(entry.rows[d].program)).device.total();
  };
  CHECK(total(3) < total(0));
  std::set<int32_t> versions;
  for (const Buffer& b : entry.programs[entry.rows[3].program].buffers) versions.insert(b.versions);
  CHECK(versions == std::set<int32_t>{1, 4, 8});
}

// What is summed in 16 bits and clipped is there again in 32 when all else is gone.
TEST_CASE("an estimate of clipped gradients is within 2 % of the plan") {
  Gpt s;
  s.batch = 64, s.layers = 32, s.dim = 1024, s.heads = 4, s.seq = 16, s.vocab = 256;
  for (const OptimizerKind kind : {OptimizerKind::kSgd, OptimizerKind::kAdafactor, OptimizerKind::kAdamW}) {
    s.optimizer = kind, s.clip_norm = 1;
    const Graph graph = graph_of(s);
    for (const int64_t micro_batches : {0, 4})
      for (const int zero : {0, 3}) {
        Row row{"null:2", "replica(2)", zero, micro_batches};
        check_within_two_percent(graph, row);
        row.gradient_dtype = DType::kBF16;
        check_within_two_percent(graph, row);
      }
  }
}

TEST_CASE("stages that wait for each other are estimated one after the other") {
  const Graph graph = squares(16, false);
  const std::vector<DeviceSpec> devices = parse_devices("null:4");
  for (const char* strategy : {"pipeline(4, micro_batches=1)", "pipeline(4, micro_batches=4)", "replica(4)"}) {
    CAPTURE(strategy);
    const CompileOptions options = options_of({"null:4", strategy});
    const Plan plan = compile(graph, devices, options);
    const double seconds = times_of(plan, plan.entries[0], SIZE_MAX)->seconds;
    CHECK(estimate(graph, devices, options).seconds == doctest::Approx(seconds).epsilon(0.02));
  }
}

TEST_CASE("a deep model is condensed only where its layers are alike") {
  Gpt s;
  s.batch = 8, s.layers = 32, s.dim = 64, s.heads = 4, s.seq = 16;
  const Graph graph = graph_of(s);
  CHECK(is_condensed(graph, {"null:4", "pipeline(4, micro_batches=4)"}));
  CHECK(!is_condensed(graph, {"null:4", "pipeline(2, micro_batches=4, schedule=zb_v) > split(2)"}));
  CHECK(!is_condensed(graph, {"null:2", "replica(2, by=micro_batch)", 0, 4}));
  Graph read = graph;  // a layer in between is handed out
  read.outputs.push_back({"middle", read.op(static_cast<OpId>(read.ops.size() / 2)).outputs[0]});
  CHECK(!is_condensed(read, {"null:1", "local"}));
  Graph odd = graph;  // layers of two kinds, in no order that repeats
  size_t layer = 0;
  for (Op& op : odd.ops)
    if (op.code == OpCode::k_gelu && ++layer > 0 && layer * layer % 11 < 5) op.code = OpCode::k_relu;
  CHECK(!is_condensed(odd, {"null:1", "local"}));
}

// What the model makes memory worth is found again from its source: a plan keeps what it was told of the machine.
TEST_CASE("property: where memory is worth more to a model, its plan keeps the profile, and other batches the worth") {
  int dearer = 0;
  for (uint64_t n = 1; n <= 150; ++n) {
    test::Dice dice(test::Dice(n).next());
    const test::PlanCase c = test::random_plan_case(dice, 8);
    CAPTURE(test::to_string(c));
    try {
      const Graph graph = test::graph_of(c);
      CompileOptions options = test::options_of(c, graph);
      options.profile.device.flops_per_second = dice.coin() ? 1e4 : 1e7;  // so that a step is long for its parameters
      const std::vector<DeviceSpec> devices = parse_devices(fmt::format("null:{}", c.devices));
      const CostModel usual(devices, options.memory_price, options.profile, graph.training.precision);
      const Scoped made = prepare(graph, devices, options, options.memory_price);
      CHECK(made.tasks.cost.freed_bytes_per_second <= usual.freed_bytes_per_second);
      dearer += made.tasks.cost.freed_bytes_per_second < usual.freed_bytes_per_second;
      const Plan plan = compile(graph, devices, options);
      CHECK(attrs_of(plan.profile) == attrs_of(options.profile));
      const std::vector<uint8_t> bytes = serialize(plan);
      Plan again = deserialize(bytes.data(), bytes.size());
      for (Entry& entry : again.entries) entry = compile_entry(again, entry.name, entry.batch);
      CHECK(print(again) == print(plan));
    } catch (const Error&) {
    }
  }
  CHECK(dearer > 20);
}

TEST_CASE("where the price of memory changes nothing, what does not fit is not planned again") {
  const Graph graph = graph_of(Gpt{.layers = 24, .batch = 10, .seq = 64, .dim = 64, .heads = 4, .vocab = 64});
  CompileOptions options{.strategy = "replica", .accumulation = 2};
  options.zero = 3, options.bucket_bytes = 65536, options.verify_passes = false;
  size_t whole = 0;  // plans that were made to the end
  options.dump = [&](std::string_view pass, const std::string&) { whole += pass == "plan"; };
  CHECK_THROWS_AS(compile(graph, parse_devices("null-8MB:4"), options), Error);
  CHECK(whole == 0);
}
