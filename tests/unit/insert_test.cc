// Where tensors are: shardings through factors, and the reshards that appear.
#include <doctest/doctest.h>

#include <algorithm>
#include <functional>

#include "grad/passes.h"
#include "rewrite/fold.h"
#include "rewrite/fuse.h"
#include "rewrite/order.h"
#include "shard/insert.h"
#include "unit/caught.h"
#include "unit/small_models.h"
#include "unit/tasks.h"

using namespace whale;
using enum OpCode;

namespace {

struct Laid {
  std::string strategy = "replica";
  int64_t micro_batches = 1;
  int zero = 0;
};

Graph training(Graph g, const TaskGraphs& tasks) {
  canonicalise(g);
  decompose_splits(g, tasks);
  fold_bias(g, tasks);
  apply_precision(g);
  clean(g);
  differentiate(g);
  split_weights(g);
  add_updates(g);
  clean(g);
  fold_activation(g, tasks);
  assign_regions(g);
  return g;
}

ShardedGraph laid_out(small::Model m, int64_t devices, const Laid& how) {
  const TaskGraphs tasks = small::tasks_of(m.g, devices, how.strategy);
  ShardedGraph lg = small::lay_out(training(m.g, tasks), tasks,
                                   {.micro_batches = how.micro_batches, .fetch_gradients = {}, .zero = how.zero});
  verify(lg);
  return lg;
}
ShardedGraph laid_out(const small::Model& m, int64_t micro_batches, int64_t devices) {
  return laid_out(m, devices, Laid{.micro_batches = micro_batches});
}
ShardedGraph forward_only(small::Model m, int64_t devices) {
  const TaskGraphs tasks = small::tasks_of(m.g, devices, "");
  return small::lay_out(m.g, tasks, {.fetch_gradients = {}});
}

int count(const ShardedGraph& lg, OpCode code) {
  return static_cast<int>(
      std::count_if(lg.graph.ops.begin(), lg.graph.ops.end(), [&](const Op& op) { return op.code == code; }));
}
const Op* find(const ShardedGraph& lg, const std::string& name) {
  for (const Op& op : lg.graph.ops)
    if (op.name == name) return &op;
  return nullptr;
}
std::string sharding_of(const ShardedGraph& lg, const std::string& tensor) {
  for (size_t t = 0; t < lg.graph.tensors.size(); ++t)
    if (lg.graph.tensors[t].name == tensor) return to_string(lg.shardings[t]);
  return "no such tensor";
}

}  // namespace

TEST_CASE("parts of sub-axes of merged dimensions") {
  SubAxisPart sub;
  // b of [b * t]: outer 1, inner t
  CHECK(find_sub_axis_part({0, 1, 1}, 24, {0, 1, 8}, 3, sub));
  CHECK(sub == SubAxisPart{1, 8});
  CHECK(sub_axis_part({2, 4, 1}, sub) == SubAxis{2, 4, 8});
  CHECK(!find_sub_axis_part({0, 1, 1}, 24, {1, 1, 8}, 3, sub));
  CHECK(!find_sub_axis_part({0, 1, 16}, 2, {0, 1, 8}, 3, sub));
}

TEST_CASE("one device: no reshards at all") {
  for (const small::Model& m : {small::mlp(), small::gpt(), small::resnet()}) {
    const ShardedGraph lg = laid_out(m, 1, 1);
    for (const OpCode code : {k_all_reduce, k_all_gather, k_local_slice, k_accumulate}) CHECK(count(lg, code) == 0);
  }
}

TEST_CASE("replicas: activations are cut, gradients and the loss are all-reduced, nothing is gathered") {
  const ShardedGraph lg = laid_out(small::mlp(), 1, 2);
  CHECK(sharding_of(lg, "logits") == "no such tensor");
  CHECK(sharding_of(lg, "fc2") == "R,S0");
  CHECK(sharding_of(lg, "w1") == "R,R");
  CHECK(count(lg, k_all_reduce) == 4);  // three parameters and the loss
  CHECK(count(lg, k_all_gather) == 0);
  CHECK(count(lg, k_local_slice) == 0);
  for (const NamedTensor& f : lg.fetches)
    CHECK(to_string(lg.shardings[f.tensor]) == (f.name == "loss" ? "R,R" : "R,S0"));
}

TEST_CASE("a transformer needs one all-reduce a parameter and one a global sum") {
  const ShardedGraph lg = laid_out(small::gpt(), 1, 3);
  const size_t parameters = std::count_if(lg.graph.variables.begin(), lg.graph.variables.end(),
                                          [](const Variable& v) { return v.role == Role::kParameter; });
  CHECK(count(lg, k_all_reduce) == static_cast<int>(parameters) + 2);  // the sum of the loss, the count of labels
  CHECK(count(lg, k_all_gather) == 0);
  CHECK(count(lg, k_local_slice) == 0);  // the gradient of the loss is produced already cut
}

TEST_CASE("batch statistics are global: their all-reduce is in the forward pass") {
  const ShardedGraph lg = laid_out(small::resnet(), 1, 2);
  int forward = 0, backward = 0;
  for (const Op& op : lg.graph.ops) {
    if (op.code != k_all_reduce || lg.graph.tensor(op.outputs[0]).dtype != DType::kF64) continue;
    (op.phase == Phase::kForward ? forward : backward) += 1;
  }
  CHECK(forward == 2);
  CHECK(backward == 2);
}

TEST_CASE("micro-batches: sums are accumulated in the body, updates run after it") {
  const ShardedGraph lg = laid_out(small::mlp(), 4, 2);
  CHECK(sharding_of(lg, "fc2") == "S0,S0");
  CHECK(count(lg, k_accumulate) == 4);
  CHECK(count(lg, k_all_reduce) == 4);
  for (const Op& op : lg.graph.ops) {
    if (has_flag(op.code, kUpdateOp) || op.code == k_all_reduce) CHECK(op.region == Region::kEpilogue);
    if (op.code == k_accumulate || op.code == k_matmul || op.code == k_matmul_weight_grad)
      CHECK(op.region == Region::kBody);
  }
}

TEST_CASE("a denominator that no parameter enters is hoisted to the prologue") {
  const ShardedGraph lg = laid_out(small::gpt(), 3, 2);
  REQUIRE(lg.input_forms.size() == 1);
  CHECK(lg.graph.tensor(lg.input_forms[0].first).name == "targets.whole");
  CHECK(sharding_of(lg, "targets.whole") == "R,S0");
  const Op* count_op = find(lg, "count.whole");
  REQUIRE(count_op);
  CHECK(count_op->region == Region::kPrologue);
}

namespace {
// The mean of squares, each with a weight of its sample.
TensorId weighted_mean(small::Model& m) {
  const TensorId x = m.input("x", {6, 4}), weights = m.input("weights", {6, 3});
  const TensorId h = m.op(k_matmul, {x, m.variable("w", {4, 3})}, {}, "h");
  const TensorId each = m.op(k_mul, {m.op(k_square, {h}), weights}, {}, "each");
  return m.op(k_div, {m.op(k_reduce_sum, {each}), m.op(k_reduce_sum, {weights}, {}, "total")}, {}, "mean");
}
}  // namespace

TEST_CASE("what parameters and a hoisted denominator make is hoisted with it") {
  for (const OpCode code : {k_mul, k_div}) {
    small::Model m;
    const TensorId mean = weighted_mean(m);
    m.minimize(m.op(code, {mean, m.op(k_exp, {m.variable("scale", {})})}, {}, "loss"), OptimizerKind::kSgd);
    const ShardedGraph lg = laid_out(m, 3, 2);
    const Op* total = find(lg, "total.whole");
    REQUIRE(total);
    CHECK(total->region == Region::kPrologue);
    for (const Op& op : lg.graph.ops)  // samples and parameters meet in the body alone
      if (op.code == k_matmul || op.code == k_square || op.name == "each") CHECK(op.region == Region::kBody);
  }
}

TEST_CASE("what is not linear in a mean over samples is refused with micro-batches, and named") {
  const auto refused = [](const std::function<TensorId(small::Model&, TensorId)>& loss) {
    small::Model m;
    const TensorId mean = weighted_mean(m);
    m.minimize(loss(m, mean), OptimizerKind::kSgd);
    m.g.ops.back().location = "model.py:7";
    CHECK_NOTHROW(laid_out(m, 1, 2));
    return message_of([&] { laid_out(m, 2, 1); }, {Code::kInvalidArgument});
  };
  for (const OpCode code : {k_square, k_sqrt}) {
    const std::string message =
        refused([&](small::Model& m, TensorId mean) { return m.op(code, {mean}, {}, "curved"); });
    CHECK_MESSAGE(message.starts_with("model.py:7: op 'curved' (" + std::string(def(code).name) + ") "), message);
    for (const char* part : {"behind a sum or mean", "2 micro-batches", "before the mean", "accumulation 1"})
      CHECK_MESSAGE(has(message, part), message);
    CHECK_MESSAGE(!has(message, "before the loss"), message);
  }
  const std::string product = refused([](small::Model& m, TensorId mean) {  // of two tasks
    return m.op(k_mul, {mean, m.op(k_stop_gradient, {mean})}, {}, "product");
  });
  CHECK_MESSAGE(product.starts_with("model.py:7: op 'product' (mul) "), product);
}

TEST_CASE("statistics of the batch with micro-batches are refused with what to do") {
  const std::string message = message_of([] { laid_out(small::resnet(), 2, 1); });
  CHECK_MESSAGE(has(message, "accumulation 1"), message);
}

TEST_CASE("a nonlinear use of a batch reduction before the loss is an error with micro-batches only") {
  small::Model m = small::mlp();
  // x minus its mean over the batch, through a parameter.
  const TensorId scaled = m.op(k_mul, {m.g.inputs[0], m.variable("scale", {4})});
  const TensorId centred =
      m.op(k_sub, {scaled, m.op(k_reduce_sum, {scaled}, {{"axes", std::vector<int64_t>{0}}}, "total")}, {}, "centre");
  m.g.training.loss = m.op(k_reduce_sum, {m.op(k_square, {centred})}, {}, "spread");
  CHECK_NOTHROW(laid_out(m, 1, 2));
  const std::string message = message_of([&] { laid_out(m, 2, 1); });
  CHECK_MESSAGE((has(message, "total") && has(message, "2 micro-batches")), message);
}

TEST_CASE("what has no factor along the samples is gathered, and sliced again behind it") {
  small::Model m;
  m.g.name = "sorted";
  const TensorId x = m.input("x", {6, 4}), w = m.variable("w", {4, 4});
  const TensorId h = m.op(k_matmul, {x, w}, {}, "h");
  const TensorId total = m.op(k_cumsum, {h}, {{"axis", int64_t{0}}}, "scan");  // needs the samples before
  m.minimize(m.op(k_reduce_sum, {m.op(k_mul, {total, x})}, {}, "loss"), OptimizerKind::kSgd);
  const ShardedGraph lg = laid_out(m, 1, 2);
  CHECK(count(lg, k_all_gather) >= 1);
  CHECK(sharding_of(lg, "scan") == "R,R");
  CHECK(count(lg, k_local_slice) >= 1);
  const std::string message = message_of([&] { laid_out(m, 2, 1); });
  CHECK_MESSAGE(has(message, "scan"), message);
}

TEST_CASE("one sample cannot be cut: everyone computes it") {
  const ShardedGraph lg = laid_out(small::mlp(1), 1, 4);
  CHECK(count(lg, k_all_reduce) == 0);
}

TEST_CASE("inputs that disagree on the batch are named") {
  small::Model m = small::mlp();
  m.input("z", {5, 2});
  const std::string message = message_of([&] { forward_only(m, 2); });
  CHECK_MESSAGE(has(message, "'z' has 5"), message);
}

TEST_CASE("bias and relu fold into the product") {
  const ShardedGraph lg = laid_out(small::mlp(), 1, 1);
  const Op* fc1 = find(lg, "fc1");
  REQUIRE(fc1);
  CHECK(fc1->inputs[2] != kNone);
  CHECK(attr_string(fc1->attrs, "activation") == "relu");
  CHECK(count(lg, k_relu) == 0);
}

TEST_CASE("chains of elementwise ops become one op with the same operands and result") {
  small::Model m;
  m.g.name = "chain";
  const TensorId x = m.input("x", {8, 16}), y = m.input("y", {8, 16}), w = m.variable("w", {16});
  const TensorId a = m.op(k_exp, {m.op(k_mul, {x, w})}), b = m.op(k_add, {m.op(k_sub, {a, y}), w}, {}, "result");
  m.g.outputs = {{"out", b}};
  ShardedGraph lg = forward_only(m, 2);
  fuse_elementwise(lg);
  verify(lg);
  REQUIRE(lg.graph.ops.size() == 1);
  CHECK(lg.graph.ops[0].code == k_fused);
  CHECK(lg.graph.ops[0].inputs.size() == 3);
  CHECK(sharding_of(lg, "result") == "R,S0");
  // An intermediate that someone else reads stays.
  m.g.outputs.push_back({"middle", a});
  lg = forward_only(m, 1);
  fuse_elementwise(lg);
  CHECK(lg.graph.ops.size() == 2);
}

TEST_CASE("buckets keep the order of readiness and reach their size") {
  ShardedGraph lg = laid_out(small::gpt(), 1, 2);
  form_buckets(lg, 4096);
  verify(lg);
  int64_t buckets = 0;
  for (const Op& op : lg.graph.ops) {
    if (op.code != k_all_reduce || op.inputs.size() < 2) continue;
    ++buckets;
    int64_t bytes = 0;
    for (size_t i = 0; i + 1 < op.inputs.size(); ++i) bytes += bytes_of(lg.graph.tensor(op.inputs[i]));
    CHECK(bytes < 4096);  // the last member made it full
  }
  CHECK(buckets > 2);
  ShardedGraph one = laid_out(small::gpt(), 1, 2);
  form_buckets(one, int64_t{1} << 40);
  CHECK(count(one, k_all_reduce) == 3);  // the loss and the count of labels are wanted before the gradients are
}

TEST_CASE("a weight's gradient comes before that of the activation, updates right behind") {
  ShardedGraph lg = laid_out(small::gpt(6, OptimizerKind::kAdamW, 3, 64, 32), 1, 1);
  order_ops(lg);
  shorten_lives(lg);
  group_updates(lg, 1);
  order_ops(lg);
  verify(lg);
  size_t first_update = 0, last_backward = 0;
  for (size_t i = 0; i < lg.graph.ops.size(); ++i) {
    if (has_flag(lg.graph.ops[i].code, kUpdateOp) && !first_update) first_update = i;
    if (lg.graph.ops[i].phase == Phase::kBackward) last_backward = i;
    if (lg.graph.ops[i].code != k_matmul_weight_grad || i + 1 >= lg.graph.ops.size()) continue;
    const Op& next = lg.graph.ops[i - 1];  // the product for the same gradient must not stand before it
    if (next.code == k_matmul) CHECK(next.inputs[0] != lg.graph.ops[i].inputs[1]);
  }
  CHECK(first_update > 0);
  CHECK(first_update < last_backward);
}

// ---- splits -------------------------------------------------------------------------------------------------------
TEST_CASE("Megatron's pairs come out of the costs: columns, then rows, for attention and the feed-forward") {
  for (const int64_t ways : {2, 4}) {
    const ShardedGraph lg = laid_out(small::gpt(8, OptimizerKind::kAdamW, 2, 64, 128, 4096, 8), ways,
                                     {.strategy = fmt::format("split({})", ways)});
    CAPTURE(ways);
    for (const std::string p : {"h0.", "h1."}) {
      CAPTURE(p);
      CHECK(sharding_of(lg, p + "up.w") == "R,S1");        // columns
      CHECK(sharding_of(lg, p + "up.b") == "R,S0");        // as the columns
      CHECK(sharding_of(lg, p + "down.w") == "R,S0");      // rows
      CHECK(sharding_of(lg, p + "qkv.w") == "R,S1:3x16");  // heads: of queries, keys and values each its own
      CHECK(sharding_of(lg, p + "qkv.b") == "R,S0:3x16");
      CHECK(sharding_of(lg, p + "attention") == "R,S2");
      CHECK(sharding_of(lg, p + "proj.w") == "R,S0:1x16");  // rows, those of a head together
    }
    CHECK(sharding_of(lg, "wte") == "R,S0");  // the vocabulary, of the table and of the tied head
  }
}

TEST_CASE("a cut vocabulary: whole logits are nowhere") {
  for (const char* strategy : {"split(2)", "replica(2) > split(2)", "split(4)"}) {
    CAPTURE(strategy);
    const int64_t devices = std::string(strategy) == "split(2)" ? 2 : 4;
    const ShardedGraph lg =
        laid_out(small::gpt(8, OptimizerKind::kAdamW, 1, 64, 128, 4096, 8), devices, {.strategy = strategy});
    for (const Op& op : lg.graph.ops) {
      const bool moves =
          op.code == k_all_gather || op.code == k_all_reduce || op.code == k_all_to_all || op.code == k_reduce_scatter;
      if (!moves) continue;
      for (const TensorId id : op.outputs)
        if (id != kNone)
          CHECK_MESSAGE(element_count(lg.graph.tensor(id).dims) < 8 * 64 * 4096, lg.graph.tensor(id).name);
    }
  }
}
