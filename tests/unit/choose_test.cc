// The choice of every cut: what it says, and what it costs. That the inserted reshards give what was chosen is verified
// after the pass, in every plan of these tests.
#include <doctest/doctest.h>

#include <algorithm>
#include <tuple>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "grad/passes.h"
#include "shard/insert.h"
#include "unit/small_models.h"
#include "unit/tasks.h"

using namespace whale;

namespace {

struct Chosen {
  Graph graph;
  TaskGraphs tasks;
  Choices choices;

  size_t op(const std::string& name) const {
    const auto at = std::find_if(graph.ops.begin(), graph.ops.end(), [&](const Op& op) { return op.name == name; });
    REQUIRE(at != graph.ops.end());
    return static_cast<size_t>(at - graph.ops.begin());
  }
  std::string lies(const std::string& name) const {
    return to_string(choices.shardings[graph.ops[op(name)].outputs[0]]);
  }
};

Chosen chosen(small::Model m, int64_t devices, const std::string& strategy, const ShardOptions& options = {}) {
  const TaskGraphs tasks = small::tasks_of(m.g, devices, strategy);
  canonicalise(m.g);
  clean(m.g);
  differentiate(m.g);
  add_updates(m.g);
  clean(m.g);
  assign_regions(m.g);
  place_in_stages(m.g, tasks);
  return {m.g, tasks, choose_cuts(m.g, tasks, options)};
}

}  // namespace

TEST_CASE("factors of a table are those of each op") {
  const Chosen c = chosen(small::gpt(), 1, "");
  FactorTable table;
  for (const Op& op : c.graph.ops) {
    CAPTURE(op.name);
    const Factors &known = table.of(c.graph, op), own = factors_of(c.graph, op);
    CHECK(known.linear == own.linear);
    REQUIRE(known.list.size() == own.list.size());
    for (size_t k = 0; k < own.list.size(); ++k) {
      const Factor &a = known.list[k], &b = own.list[k];
      CHECK(std::tie(a.name, a.kind, a.extent, a.inputs, a.outputs, a.partial, a.unit) ==
            std::tie(b.name, b.kind, b.extent, b.inputs, b.outputs, b.partial, b.unit));
    }
  }
}

TEST_CASE("choices: Megatron's pair of a wide MLP, with nothing inserted") {
  const Chosen c = chosen(small::mlp(8, OptimizerKind::kSgd, 512, 2048), 2, "split(2)");
  CHECK(c.lies("fc1") == "R,S1");
  CHECK(c.lies("fc2") == "R,P(sum)");
  for (const Op& op : c.graph.ops) CHECK_FALSE(has_flag(op.code, kCollective));
}

TEST_CASE("choices: a reshard is charged to who asks for it, by the closed form") {
  const Chosen c = chosen(small::mlp(8, OptimizerKind::kSgd, 512, 2048), 4, "split(4)");
  // fc2's parts of a sum [8, 3]: the loss needs them whole.
  const double bytes = 8 * 3 * 4;
  const Price& loss = c.choices.prices[c.op("ce")];
  CHECK(loss.moved_bytes == doctest::Approx(2 * bytes * 3 / 4));
  CHECK(loss.move_seconds == doctest::Approx(all_reduce_seconds(bytes, 4, c.tasks.cost.link)));
  const Op& fc1 = c.graph.ops[c.op("fc1")];
  CHECK(c.choices.prices[c.op("fc1")].compute_seconds ==
        doctest::Approx(op_seconds(cost_of(view_of(c.graph, fc1)), c.tasks.cost.device) / 4));
  CHECK(c.choices.prices[c.op("fc1")].moved_bytes == 0);
}

TEST_CASE("choices: the gradients of replicas are summed once, whatever the micro-batches") {
  const small::Model m = small::mlp(8, OptimizerKind::kSgd);
  double bytes = 0;
  for (const Variable& v : m.g.variables) bytes += static_cast<double>(element_count(m.g.tensor(v.tensor).dims)) * 4;
  for (const int64_t micro_batches : {1, 2, 4}) {
    CAPTURE(micro_batches);
    const Chosen c = chosen(m, 2, "replica(2)", {.micro_batches = micro_batches});
    double moved = 0;
    for (const Price& price : c.choices.prices) moved += price.moved_bytes;
    // Sums of scalars besides: the loss and its denominator.
    CHECK(moved >= bytes);
    CHECK(moved < bytes + 64);
  }
}

TEST_CASE("choices: ZeRO 2 brings each gradient to its part as soon as it is there") {
  const Chosen c = chosen(small::mlp(8, OptimizerKind::kAdam), 2, "replica(2)", {.zero = 2});
  size_t settled = 0;
  for (const NamedTensor& gradient : c.graph.gradients)
    if (const auto to = c.choices.settled.find(gradient.tensor); to != c.choices.settled.end())
      settled += to->second.axes[1].placement == Placement::kShard;
  CHECK(settled == c.graph.gradients.size());
}

TEST_CASE("choices: a gradient that one op moves is there for the other gradients of that op") {
  // Experts narrower than a token: for the gradient of their input alone, gathering weights is less than moving the
  // gradient of their result, which the gradient of the weights moves anyway.
  small::Model m;
  const TensorId x = m.op(OpCode::k_matmul, {m.input("x", {32, 16, 64}), m.variable("in", {64, 64})});
  const TensorId logits = m.op(OpCode::k_matmul, {x, m.variable("router", {64, 4})});
  const TensorId slot = m.op(OpCode::k_moe_gate, {logits}, {{"capacity", int64_t{8}}});
  TensorId y = m.op(OpCode::k_moe_dispatch, {x, slot}, {{"experts", int64_t{4}}, {"capacity", int64_t{8}}});
  m.enter(ScopeKind::kSplit, 4);
  m.g.scopes.back().factor = "experts";
  y = m.op(OpCode::k_reshape, {y}, {{"shape", Ints{4, 256, 64}}});
  y = m.op(OpCode::k_tanh, {m.op(OpCode::k_matmul, {y, m.variable("up", {4, 64, 8})})});
  y = m.op(OpCode::k_matmul, {y, m.variable("down", {4, 8, 64})});
  y = m.op(OpCode::k_reshape, {y}, {{"shape", Ints{4, 32, 8, 64}}});
  m.scope = 0;
  y = m.op(OpCode::k_moe_combine, {y, slot});
  m.minimize(m.op(OpCode::k_reduce_mean, {m.op(OpCode::k_square, {y})}, {}, "loss"), OptimizerKind::kSgd);
  m.g.outputs = {{"y", y}};
  const Chosen c = chosen(std::move(m), 4, "replica(4)", {.micro_batches = 8});
  int products = 0;
  for (size_t i = 0; i < c.graph.ops.size(); ++i) {
    const Op& op = c.graph.ops[i];
    if (op.code != OpCode::k_matmul || c.graph.tensor(op.inputs[1]).dims.size() != 3) continue;
    ++products;
    CAPTURE(op.name);
    const OpCut& cut = c.choices.cuts[1][i];
    REQUIRE(cut.present());
    CHECK(factors_of(c.graph, op).list[cut.factor].name == "b");
  }
  CHECK(products == 6);  // two, and two gradients of each
}

// As mixtures of experts are: batched products with a bias and an activation between them.
TEST_CASE("choices: fewer parts than devices are cut along all that is between the ops that are asked") {
  using enum OpCode;
  for (const int64_t parts : {3, 5}) {
    CAPTURE(parts);
    small::Model m;
    m.g.name = "batched";
    const TensorId x = m.input("x", {8, 64}, DType::kF32), y = m.input("y", {8}, DType::kI32);
    const TensorId each = m.op(k_broadcast_to, {x}, {{"shape", Ints{parts, 8, 64}}}, "each");
    const TensorId up = m.op(k_matmul, {each, m.variable("up.weight", {parts, 64, 256})}, {}, "up");
    const TensorId act =
        m.op(k_gelu, {m.op(k_add, {up, m.variable("up.bias", {parts, 1, 256})}, {}, "up.add")}, {}, "act");
    const TensorId down = m.op(k_matmul, {act, m.variable("down.weight", {parts, 256, 64})}, {}, "down");
    const TensorId logits = m.op(k_reduce_sum, {down}, {{"axes", Ints{0}}, {"keep_dims", false}}, "logits");
    m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, y}, {}, "ce")}, {}, "loss"), OptimizerKind::kAdamW);
    const Chosen c = chosen(m, 4, "split(4, factor=b)");
    for (const char* name : {"up", "up.add", "act", "down"}) CHECK(c.lies(name) == "R,S0");
    for (const Variable& v : c.graph.variables) CHECK(to_string(c.choices.shardings[v.tensor]) == "R,S0");
  }
}

// A split inside of machines, replicas between them: each axis has its own link, shared by all who use it at once.
TEST_CASE("links of axes are those between their devices") {
  small::Model m = small::mlp(64, OptimizerKind::kSgd, 512, 2048);
  const std::vector<DeviceSpec> devices = parse_devices("4 nodes of 8xA100-80GB", {0});
  const CostModel cost(devices, 1, kMachineOfCores);
  const TaskGraphs tasks = form_task_graphs(m.g, devices, "replica(4) > split(8)", cost, false);
  CHECK(tasks.link(0, 1).bytes_per_second == devices[0].figures.inside.bytes_per_second);
  CHECK(tasks.link(0, 0).bytes_per_second ==
        doctest::Approx(devices[0].figures.network.bytes_per_second / 8));  // 8 groups leave each node
  const TaskGraphs wide = form_task_graphs(m.g, devices, "split(32)", cost, false);
  CHECK(wide.link(0, 0).bytes_per_second == doctest::Approx(devices[0].figures.network.bytes_per_second));
  const TaskGraphs plain = small::tasks_of(m.g, 4, "split(4)");
  CHECK(plain.link(0, 0) == plain.cost.link);
}

TEST_CASE("choices of a plan: strategies can be compared") {
  const Graph g = small::mlp(64, OptimizerKind::kSgd, 512, 2048).g;
  const std::vector<DeviceSpec> devices(4, DeviceSpec{DeviceKind::kRef, {}, 0});
  const auto moved = [&](const char* strategy) {
    CompileOptions options;
    options.strategy = strategy;
    const ChoiceReport report = choices_of(compile(g, devices, options));
    CHECK(report.strategy == strategy);
    return report.step.moved_bytes;
  };
  // The parameters are a hundred times larger than the activations.
  CHECK(moved("split(4)") * 10 < moved("replica(4)"));
}
