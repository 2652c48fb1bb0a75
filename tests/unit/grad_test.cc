// The passes of engine/grad: structure of the graphs they make. Numbers are checked by the ref device's tests.
#include <doctest/doctest.h>

#include <map>

#include <algorithm>
#include <set>

#include "base/error.h"
#include "grad/passes.h"
#include "ops/op.h"

using namespace whale;

namespace {

struct Builder {
  Graph g;
  TensorId input(const char* name, Dims dims, DType dtype = DType::kF32, int batch_dim = 0) {
    g.tensors.push_back(
        {.name = name, .dtype = dtype, .dims = std::move(dims), .kind = TensorKind::kInput, .batch_dim = batch_dim});
    g.inputs.push_back(static_cast<TensorId>(g.tensors.size() - 1));
    return g.inputs.back();
  }
  TensorId variable(const char* name, Dims dims, Role role = Role::kParameter) {
    const bool matrix = dims.size() >= 2;
    g.tensors.push_back({.name = name, .dtype = DType::kF32, .dims = std::move(dims), .kind = TensorKind::kVariable});
    const auto id = static_cast<TensorId>(g.tensors.size() - 1);
    g.variables.push_back({.tensor = id,
                           .role = role,
                           .trainable = role == Role::kParameter,
                           .decay = matrix,
                           .init = {},
                           .state_name = ""});
    return id;
  }
  TensorId op(OpCode code, std::vector<TensorId> inputs, Attrs attrs = {}, std::string name = {}) {
    return g.op(append_op(g, code, std::move(inputs), std::move(attrs), 0, std::move(name))).outputs[0];
  }
};

using enum OpCode;

Builder mlp(int64_t batch = 8) {
  Builder b;
  const TensorId x = b.input("x", {batch, 4}), y = b.input("y", {batch}, DType::kI32);
  const TensorId w1 = b.variable("w1", {4, 16}), b1 = b.variable("b1", {16}), w2 = b.variable("w2", {16, 3});
  const TensorId h = b.op(k_relu, {b.op(k_matmul, {x, w1, b1}, {}, "fc1")}, {}, "act");
  const TensorId logits = b.op(k_matmul, {h, w2}, {}, "fc2");
  b.g.training.loss = b.op(k_reduce_mean, {b.op(k_cross_entropy, {logits, y}, {}, "ce")}, {}, "loss");
  b.g.outputs = {{"logits", logits}};
  return b;
}

void check(const Graph& g) {
  verify(g);
  verify_ops(g);
}

std::vector<std::string> names(const Graph& g, Phase phase) {
  std::vector<std::string> all;
  for (const Op& op : g.ops)
    if (op.phase == phase) all.push_back(def(op.code).name);
  return all;
}
using Names = std::vector<std::string>;

const Op* find(const Graph& g, OpCode code) {
  for (const Op& op : g.ops)
    if (op.code == code) return &op;
  return nullptr;
}
int64_t count(const Graph& g, OpCode code) {
  return std::count_if(g.ops.begin(), g.ops.end(), [&](const Op& op) { return op.code == code; });
}

Graph trained(Graph g) {
  using Pass = void (*)(Graph&);
  const Pass clean_all = [](Graph& graph) { clean(graph); };
  for (const Pass pass : {Pass{canonicalise}, Pass{apply_precision}, clean_all, Pass{differentiate},
                          Pass{split_weights}, Pass{add_updates}, clean_all, Pass{assign_regions}}) {
    pass(g);
    check(g);
  }
  return g;
}

// One transformer block with everything that makes following the batch hard: merged rows, packed heads, constants.
Builder transformer(int64_t n, int64_t t = 6) {
  Builder b;
  const int64_t d = 8, heads = 2, v = 11;
  const TensorId ids = b.input("ids", {n, t}, DType::kI32), labels = b.input("labels", {n, t}, DType::kI32);
  const TensorId table = b.variable("table", {v, d}), pos = b.variable("pos", {t, d}), gamma = b.variable("gamma", {d});
  const TensorId wqkv = b.variable("wqkv", {d, 3 * d}), wo = b.variable("wo", {d, d});
  TensorId x = b.op(k_add, {b.op(k_embedding, {table, ids}), pos}, {}, "x");
  x = b.op(k_dropout, {x}, {{"rate", 0.1}});
  TensorId h = b.op(k_rms_norm, {x, gamma}, {}, "norm");
  h = b.op(k_reshape, {h}, {{"shape", Dims{n * t, d}}});
  h = b.op(k_matmul, {h, wqkv});
  h = b.op(k_reshape, {h}, {{"shape", Dims{n, t, 3 * heads, d / heads}}});
  h = b.op(k_attention, {h}, {{"causal", true}, {"kv_heads", heads}, {"dropout", 0.1}});
  h = b.op(k_reshape, {h}, {{"shape", Dims{n, t, d}}});
  x = b.op(k_add, {x, b.op(k_matmul, {h, wo})});
  const TensorId mask =
      b.op(k_fill, {}, {{"shape", Dims{n, t, 1}}, {"value", 0.5}, {"dtype", std::string("f32")}}, "mask");
  x = b.op(k_mul, {x, mask});
  x = b.op(k_slice, {x}, {{"starts", Dims{0, 1, 0}}, {"limits", Dims{n, t, d}}});
  const TensorId y = b.op(k_slice, {labels}, {{"starts", Dims{0, 1}}, {"limits", Dims{n, t}}});
  const TensorId logits = b.op(k_matmul, {x, table}, {{"transpose_b", true}}, "head");
  const TensorId loss = b.op(k_cross_entropy, {logits, y}, {}, "ce");
  const TensorId ignored = b.op(k_fill, {}, {{"shape", Dims{}}, {"value", -100.0}, {"dtype", std::string("i32")}});
  const TensorId counted = b.op(k_cast, {b.op(k_not_equal, {y, ignored})}, {{"dtype", std::string("f32")}});
  b.g.training.loss =
      b.op(k_div, {b.op(k_reduce_sum, {loss}), b.op(k_reduce_sum, {counted}, {}, "counted")}, {}, "loss");
  b.g.training.optimizer.kind = OptimizerKind::kAdamW;
  b.g.training.clip_norm = 1;
  return b;
}

}  // namespace

TEST_CASE("differentiate an MLP") {
  Graph g = mlp().g;
  canonicalise(g);
  CHECK(find(g, k_reduce_mean) == nullptr);
  REQUIRE(find(g, k_fill) != nullptr);
  CHECK(attr_float(find(g, k_fill)->attrs, "value") == doctest::Approx(1.0 / 8));
  clean(g);
  differentiate(g);
  clean(g);
  check(g);
  CHECK(names(g, Phase::kForward) == Names{"matmul", "relu", "matmul", "cross_entropy", "reduce_sum", "fill", "mul"});
  // Nothing asks for the gradient by x; the bias' gradient comes with the weight's.
  CHECK(names(g, Phase::kBackward) ==
        Names{"fill", "cross_entropy_grad", "matmul", "matmul_weight_grad", "relu_grad", "matmul_weight_grad"});
  REQUIRE(g.gradients.size() == 3);
  CHECK(g.gradients[0].name == "w1");
  CHECK(g.gradients[1].name == "b1");
  CHECK(g.gradients[2].name == "w2");
  for (size_t i = 0; i < 3; ++i) CHECK(g.tensor(g.gradients[i].tensor).dims == g.tensor(g.variables[i].tensor).dims);
  // The seed of the backward pass is the constant 1/8 for each row.
  CHECK(g.tensor(find(g, k_cross_entropy_grad)->inputs[0]).dims == Dims{8});
}

TEST_CASE("uses of a parameter are summed from the last to the first, each as soon as it is there") {
  Builder b;
  const TensorId x = b.input("x", {2, 4}), w = b.variable("w", {4, 4});
  const TensorId h1 = b.op(k_matmul, {x, w}, {}, "first"), h2 = b.op(k_matmul, {h1, w}, {}, "second"),
                 h3 = b.op(k_matmul, {h2, w}, {}, "third");
  b.g.training.loss = b.op(k_reduce_sum, {h3});
  differentiate(b.g);
  check(b.g);
  const Op sum = b.g.op(b.g.tensor(b.g.gradients[0].tensor).producer);
  REQUIRE(sum.code == k_add);
  const Op inner = b.g.op(b.g.tensor(sum.inputs[0]).producer);
  REQUIRE(inner.code == k_add);
  const auto use = [&](TensorId grad) { return b.g.op(b.g.op(b.g.tensor(grad).producer).origin).name; };
  CHECK(use(inner.inputs[0]) == "third");
  CHECK(use(inner.inputs[1]) == "second");
  CHECK(use(sum.inputs[1]) == "first");
  // What the first use adds is made when the others' sum is there.
  CHECK(b.g.tensor(sum.inputs[1]).producer > b.g.tensor(inner.outputs[0]).producer);
}

TEST_CASE("an op without a gradient is an error only when a parameter is behind it") {
  Builder b;
  const TensorId x = b.input("x", {2, 4}), w = b.variable("w", {4, 4});
  b.op(k_batch_stats, {x}, {}, "harmless");
  const TensorId stats = b.op(k_batch_stats, {b.op(k_matmul, {x, w})}, {}, "culprit");
  b.g.training.loss = b.op(k_cast, {b.op(k_reduce_sum, {stats})}, {{"dtype", std::string("f32")}});
  try {
    differentiate(b.g);
    FAIL("no error");
  } catch (const Error& e) {
    CHECK(e.code() == Code::kUnimplemented);
    CHECK(e.where().op == "culprit");
    CHECK(e.message().find("batch_stats") != std::string::npos);
  }
}

TEST_CASE("updates: state, step scalars, clipping") {
  struct Case {
    OptimizerKind kind;
    std::set<std::string> state_names;
    OpCode op;
  };
  for (const Case& c : std::vector<Case>{{OptimizerKind::kSgd, {}, k_sgd},
                                         {OptimizerKind::kAdam, {"m", "v"}, k_adam},
                                         {OptimizerKind::kAdamW, {"m", "v"}, k_adam},
                                         {OptimizerKind::kLamb, {"m", "v"}, k_lamb_apply},
                                         {OptimizerKind::kAdagrad, {"h"}, k_adagrad},
                                         {OptimizerKind::kAdafactor, {"row", "col", "v"}, k_rsqrt}}) {
    Builder b = mlp();
    b.g.training.optimizer.kind = c.kind;
    b.g.training.clip_norm = 0.5;
    const Graph g = trained(b.g);
    std::set<std::string> state_names;
    for (const Variable& v : g.variables) {
      CHECK(v.next != kNone);
      if (v.role == Role::kState) state_names.insert(v.state_name);
    }
    CHECK(state_names == c.state_names);
    CHECK(count(g, k_clip_factor) == 1);
    REQUIRE(find(g, c.op) != nullptr);
    for (const Op& op : g.ops) CHECK((op.region == Region::kEpilogue) == (op.phase == Phase::kUpdate));
  }
}

TEST_CASE("updates: a parameter with the name of another one's state is refused, with both names") {
  Builder b = mlp();
  const TensorId first = b.g.variables[0].tensor, second = b.g.variables[1].tensor;
  b.g.tensor(second).name = b.g.tensor(first).name + "/m";
  CHECK_NOTHROW(trained(b.g));
  b.g.training.optimizer.kind = OptimizerKind::kAdam;
  const std::string what = fmt::format("parameter '{}/m' has the name of the optimizer's state 'm' of parameter '{}'",
                                       b.g.tensor(first).name, b.g.tensor(first).name);
  CHECK_THROWS_WITH_AS(trained(b.g), doctest::Contains(what.c_str()), Error);
}

TEST_CASE("updates: one op a parameter, decay by variable, nothing unreached is touched") {
  Builder b = mlp();
  const TensorId unused = b.variable("unused", {3});
  b.g.training.optimizer = {.kind = OptimizerKind::kSgd, .momentum = 0.9, .weight_decay = 0.1};
  const Graph g = trained(b.g);
  CHECK(count(g, k_sgd) == 3);
  std::vector<int64_t> decays;
  for (const Op& op : g.ops)
    if (op.code == k_sgd) decays.push_back(attr_ints(op.attrs, "decays")[0]);
  CHECK(decays == std::vector<int64_t>{1, 0, 1});
  for (const Variable& v : g.variables)
    CHECK((v.next == kNone) ==
          (g.tensor(v.tensor).name == g.tensor(unused).name || g.tensor(v.tensor).name == "unused"));
}

TEST_CASE("rebatch gives the graph that the other batch size would have given") {
  Graph small = transformer(2).g;
  const Graph large = transformer(12).g;
  check(small);
  CHECK(print(rebatch(small, 12)) == print(large));
  CHECK(print(rebatch(large, 2)) == print(small));
  CHECK(print(rebatch(small, 2)) == print(small));
  // A batch of the size of another dimension is still the batch.
  CHECK(print(rebatch(transformer(6).g, 5)) == print(transformer(5).g));
  CHECK(print(rebatch(mlp(8).g, 3)) == print(mlp(3).g));
}

TEST_CASE("rebatch refuses what it cannot follow") {
  Builder b;
  const TensorId x = b.input("x", {4, 6});
  b.g.outputs = {{"y", b.op(k_slice, {x}, {{"starts", Dims{1, 0}}, {"limits", Dims{4, 6}}}, "cut")}};
  const auto refused = [](const Graph& g, int64_t batch, const std::string& words) {
    CAPTURE(words);
    std::string said;
    try {
      rebatch(g, batch);
    } catch (const Error& e) {
      said = e.message();
    }
    CAPTURE(said);
    CHECK(said.find(words) != std::string::npos);
  };
  b.g.ops.back().location = "model.py:12";
  refused(b.g, 8, "model.py:12: op 'cut' (slice) mixes the samples of 'x' with each other, or picks some");
  refused(b.g, 2, "Feed whole batches of 4, or build the graph for the other size");
  const auto one_op = [&](OpCode code, const Attrs& attrs, const char* words) {
    Builder c;
    const TensorId left = c.input("x", {4, 6}), right = code == k_matmul ? left : c.variable("w", {4, 6});
    c.g.outputs = {{"y", c.op(code, {left, right}, attrs, "meet")}};
    refused(c.g, 2, words);
  };
  one_op(k_matmul, {{"transpose_b", true}},
         "op 'meet' (matmul) gives [2, 2] for a batch of 2 where the rest of the graph has [2, 4]");
  one_op(k_add, {}, "op 'meet' (add) puts 'w' beside the samples, whose size does not follow the batch");
  CHECK_THROWS_AS(rebatch(mlp().g, 0), Error);
  Builder two;
  two.input("a", {4});
  two.input("b", {5});
  CHECK_THROWS_AS(rebatch(two.g, 8), Error);
}

TEST_CASE("inference drops dropout, running updates and training") {
  Builder b = transformer(2);
  const Graph g = for_inference(b.g);
  check(g);
  CHECK(find(g, k_dropout) == nullptr);
  CHECK(attr_float(find(g, k_attention)->attrs, "dropout") == 0);
  REQUIRE(g.training.loss != kNone);
  CHECK(g.tensor(g.training.loss).name == "loss");
  CHECK(g.training.optimizer.kind == OptimizerKind::kNone);
}

TEST_CASE("batch norm becomes statistics, one fused normalization and the running update") {
  Builder b;
  const TensorId x = b.input("x", {2, 4, 4, 3});
  const auto norm = [&](TensorId t, const std::string& n) {
    const TensorId gamma = b.variable((n + ".gamma").c_str(), {3}), beta = b.variable((n + ".beta").c_str(), {3});
    const TensorId mean = b.variable((n + ".mean").c_str(), {3}, Role::kBuffer),
                   var = b.variable((n + ".var").c_str(), {3}, Role::kBuffer);
    return b.op(k_batch_norm, {t, gamma, beta, mean, var}, {}, n);
  };
  const TensorId w1 = b.variable("w1", {3, 3, 3, 3}), w2 = b.variable("w2", {3, 1, 1, 3});
  const Attrs pad{{"padding", std::vector<int64_t>{1, 1, 1, 1}}};
  TensorId h = b.op(k_relu, {norm(b.op(k_conv, {x, w1}, pad), "bn1")});
  const TensorId main = norm(b.op(k_conv, {h, w2}), "bn2");
  const TensorId shortcut = b.op(k_conv, {x, w2}, {}, "shortcut");  // made after the norm that it joins
  h = b.op(k_relu, {b.op(k_add, {main, shortcut})});
  b.g.training.loss = b.op(k_reduce_mean, {b.op(k_square, {h})});
  b.g.training.optimizer.kind = OptimizerKind::kSgd;
  const Graph inference = for_inference(b.g);
  check(inference);
  CHECK(count(inference, k_batch_norm_inference) == 2);
  const Graph g = trained(b.g);
  CHECK(count(g, k_batch_norm_apply) == 2);
  CHECK(count(g, k_relu) == 0);
  CHECK(count(g, k_batch_stats) == 2);
  CHECK(count(g, k_batch_norm_running) == 2);
  CHECK(count(g, k_batch_norm_grad) == 2);
  for (const Op& op : g.ops) {
    if (op.code != k_batch_norm_apply) continue;
    CHECK(attr_bool(op.attrs, "relu"));
    CHECK(attr_int(op.attrs, "count") == 32);
  }
  for (const Variable& v : g.variables) CHECK(v.next != kNone);
}

TEST_CASE("bf16: products in bf16, each parameter cast once, gradients and loss in f32") {
  Builder b = transformer(2);
  b.g.training.precision = Precision::kBFloat16;
  const Graph g = trained(b.g);
  for (const NamedTensor& t : g.gradients) CHECK(g.tensor(t.tensor).dtype == DType::kF32);
  CHECK(g.tensor(g.training.loss).dtype == DType::kF32);
  for (const Op& op : g.ops) {
    if (op.code == k_matmul || op.code == k_attention || op.code == k_matmul_weight_grad)
      CHECK(g.tensor(op.inputs[0]).dtype == DType::kBF16);
    // No gradient of a parameter goes through bf16: the product itself writes f32.
    if (op.code == k_matmul_weight_grad || op.code == k_embedding_grad)
      CHECK(g.tensor(op.outputs[0]).dtype == DType::kF32);
    if (op.code == k_embedding_grad) CHECK(g.tensor(op.inputs[0]).dtype == DType::kBF16);
    if (op.code == k_cross_entropy) CHECK(g.tensor(op.inputs[0]).dtype == DType::kBF16);
    if (op.code == k_add && op.phase == Phase::kForward) CHECK(g.tensor(op.outputs[0]).dtype == DType::kBF16);
  }
  std::set<TensorId> cast;
  for (const Op& op : g.ops)
    if (op.code == k_cast && g.tensor(op.inputs[0]).kind == TensorKind::kVariable) {
      CHECK(cast.insert(op.inputs[0]).second);
      CHECK(op.region == Region::kPrologue);
    }
  CHECK(cast.size() == 4);  // table (tied head), wqkv, wo, pos; gamma stays f32
}

TEST_CASE("f64: everything") {
  Builder b = transformer(2);
  b.g.training.precision = Precision::kFloat64;
  const Graph g = trained(b.g);
  for (const Tensor& t : g.tensors)
    if (is_float(t.dtype)) CHECK(t.dtype == DType::kF64);
}

TEST_CASE("clean: common subexpressions, constants, cancelling pairs; never random ops") {
  Builder b;
  const TensorId x = b.input("x", {4, 6});
  const TensorId a = b.op(k_exp, {x}), same = b.op(k_exp, {x});
  const TensorId d1 = b.op(k_dropout, {x}, {{"rate", 0.5}, {"key", int64_t{7}}}),
                 d2 = b.op(k_dropout, {x}, {{"rate", 0.5}, {"key", int64_t{7}}});
  const std::vector<int64_t> swap{1, 0};
  const TensorId t = b.op(k_transpose, {b.op(k_transpose, {x}, {{"perm", swap}})}, {{"perm", swap}});
  const TensorId r = b.op(k_reshape, {b.op(k_reshape, {x}, {{"shape", Dims{24}}})}, {{"shape", Dims{4, 6}}});
  const TensorId up =
      b.op(k_cast, {b.op(k_cast, {x}, {{"dtype", std::string("f64")}})}, {{"dtype", std::string("f32")}});
  const TensorId down =
      b.op(k_cast, {b.op(k_cast, {x}, {{"dtype", std::string("bf16")}})}, {{"dtype", std::string("f32")}}, "rounded");
  b.op(k_exp, {a}, {}, "dead");
  TensorId sum = b.op(k_add, {a, same});
  for (const TensorId other : {d1, d2, t, r, up, down}) sum = b.op(k_add, {sum, other});
  const TensorId one = b.op(k_fill, {}, {{"shape", Dims{}}, {"value", 1.0}, {"dtype", std::string("f32")}});
  b.g.outputs = {{"y", b.op(k_mul, {sum, one})}};
  clean(b.g);
  check(b.g);
  CHECK(count(b.g, k_exp) == 1);
  CHECK(count(b.g, k_dropout) == 2);
  CHECK(count(b.g, k_transpose) == 0);
  CHECK(count(b.g, k_reshape) == 0);
  CHECK(count(b.g, k_cast) == 2);  // the narrowing pair rounds: it stays
  CHECK(count(b.g, k_mul) == 0);
  CHECK(count(b.g, k_add) == 7);
}

TEST_CASE("clean: a constant takes the place of ops where its type holds what they make") {
  struct Case {
    std::vector<const char*> dtypes;  // of a fill, and what it is cast to in turn
    double value;
    int64_t casts;  // that stay
  };
  for (const Case& c : std::vector<Case>{{{"bf16", "f32"}, 0.1, 1},
                                         {{"bf16", "f32"}, 0.5, 0},
                                         {{"f16", "f32"}, 0.1, 1},
                                         {{"f16", "f32"}, 1e6, 1},
                                         {{"bf16", "f16"}, 0.1, 1},
                                         {{"f32", "f64"}, 0.1, 1},
                                         {{"f32", "bf16"}, 0.1, 0},
                                         {{"f32", "bf16", "f32"}, 0.1, 1},
                                         {{"f64", "f32", "f64"}, 0.1, 1},
                                         {{"i32", "f32"}, 16777217, 0},
                                         {{"i32", "f32", "f64"}, 16777217, 1},
                                         {{"f32", "i32"}, 2.5, 1}}) {
    CAPTURE(c.dtypes.back());
    CAPTURE(c.value);
    Builder b;
    TensorId x = kNone;
    for (const char* dtype : c.dtypes)
      x = x == kNone ? b.op(k_fill, {}, {{"shape", Dims{2}}, {"value", c.value}, {"dtype", std::string(dtype)}})
                     : b.op(k_cast, {x}, {{"dtype", std::string(dtype)}});
    b.g.outputs = {{"y", x}};
    clean(b.g);
    check(b.g);
    CHECK(count(b.g, k_cast) == c.casts);
  }
}

TEST_CASE("regions: the count of labels is a prologue of the whole batch when there are micro-batches") {
  const Graph one = trained(transformer(4).g);
  for (const Op& op : one.ops)
    if (op.code == k_not_equal) CHECK(op.region == Region::kBody);
  Builder b = transformer(4);
  b.g.training.accumulation = 2;
  const Graph g = trained(b.g);
  int64_t counted = 0, losses = 0;
  for (const Op& op : g.ops) {
    if (op.code == k_not_equal) CHECK(op.region == Region::kPrologue);
    if (op.code == k_reduce_sum && op.phase == Phase::kForward)
      (op.region == Region::kPrologue ? counted : losses) += 1;
    if (op.code == k_cross_entropy || op.code == k_cross_entropy_grad || op.code == k_matmul)
      CHECK(op.region == Region::kBody);
    if (op.code == k_clip_factor || op.code == k_adam) CHECK(op.region == Region::kEpilogue);
    for (const TensorId id : op.inputs) {
      if (id == kNone || g.tensor(id).producer == kNone) continue;
      const Region from = g.op(g.tensor(id).producer).region;
      CHECK(from <= op.region);  // prologue reads no body, body no epilogue
    }
  }
  CHECK(counted == 1);
  CHECK(losses == 1);
}

TEST_CASE("random ops keep stable keys, and their gradients use the same") {
  const Graph g = trained(transformer(2).g);
  std::map<uint64_t, int> keys;
  for (const Op& op : g.ops) {
    if (!has_flag(op.code, kRandom)) continue;
    CHECK(op.key != 0);
    ++keys[op.key];
  }
  CHECK(keys.size() == 2);
  for (const auto& [key, uses] : keys) CHECK(uses == 2);
}
