// Plans that are right, which a proof once refused for a number in them: infinities, constants that are zero in their
// type or none at all, tensors without elements.
#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <sstream>
#include <string>

#include "plan/in_float64.h"
#include "plan_damage.h"
#include "proof_case.h"
#include "unit/caught.h"
#include "unit/small_models.h"

using namespace whale;
using namespace whale::test;

namespace {

using enum OpCode;

const std::string kF32 = "f32";

TensorId number(small::Model& m, Dims dims, double value) {
  return m.op(k_fill, {}, {{"shape", std::move(dims)}, {"value", value}, {"dtype", kF32}});
}

// The mean of the square of x w, and of what `more` makes of x w.
Graph model(const std::function<TensorId(small::Model&, TensorId)>& more) {
  small::Model m;
  m.g.name = "numbers";
  const TensorId h = m.op(k_matmul, {m.input("x", {4, 4}), m.variable("w", {4, 4})}, {}, "mm");
  const TensorId loss = m.op(k_reduce_mean, {m.op(k_square, {h})});
  m.minimize(m.op(k_add, {loss, more(m, h)}, {}, "loss"), OptimizerKind::kSgd);
  return m.g;
}

struct How {
  const char* devices;
  const char* strategy;
  bool exact = false;
  int64_t accumulation = 1;
};
constexpr How kHow[] = {{"null:1", "local"},
                        {"null:2", "replica"},
                        {"null:3", "split(3)"},
                        {"null:2", "pipeline(2, micro_batches=2)"},
                        {"null:4", "replica(2) > split(2)", false, 2},
                        {"null:1", "local", true},
                        {"null:2", "replica", true, 2}};

void check_proven(const char* what, const Graph& graph) {
  for (const How& how : kHow) {
    const Plan plan = plan_of(graph, how.devices, how.strategy, [&](CompileOptions& o) {
      o.exact = how.exact;
      if (how.accumulation > 1) o.accumulation = how.accumulation;
    });
    const Proof proof = prove(plan);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven,
                  what << ", " << how.strategy << (how.exact ? ", exact: " : ": ") << text(proof));
  }
}

}  // namespace

TEST_CASE("proof: the program's own infinities") {
  for (const double infinity : {-std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()}) {
    const auto masked = [&](small::Model& m, TensorId h) {
      const TensorId later = m.op(k_greater, {h, number(m, {4, 4}, 0)});
      return m.op(k_where, {later, number(m, {4, 4}, infinity), h});
    };
    check_proven("a mask by choice", model([&](small::Model& m, TensorId h) {
                   return m.op(k_reduce_mean, {m.op(k_square, {m.op(k_softmax, {masked(m, h)})})});
                 }));
    check_proven("a mask that is added", model([&](small::Model& m, TensorId h) {
                   const TensorId later = m.op(k_greater, {h, number(m, {4, 4}, 0)});
                   const TensorId mask = m.op(k_where, {later, number(m, {4, 4}, infinity), number(m, {4, 4}, 0)});
                   return m.op(k_reduce_mean, {m.op(k_square, {m.op(k_softmax, {m.op(k_add, {h, mask})})})});
                 }));
    check_proven("the larger of both", model([&](small::Model& m, TensorId h) {
                   return m.op(k_reduce_mean, {m.op(k_maximum, {h, number(m, {4, 4}, infinity)})});
                 }));
  }
}

TEST_CASE("proof: tensors without elements") {
  const auto columns = [](small::Model& m, TensorId h, int64_t begin, int64_t end) {
    return m.op(k_slice, {h}, {{"starts", Ints{0, begin}}, {"limits", Ints{4, end}}, {"strides", Ints{1, 1}}});
  };
  check_proven("the sum of no columns", model([&](small::Model& m, TensorId h) {
                 return m.op(k_reduce_sum, {m.op(k_square, {columns(m, h, 1, 1)})});
               }));
  check_proven(
      "put together with some", model([&](small::Model& m, TensorId h) {
        const TensorId all = m.op(k_concat, {h, columns(m, h, 3, 3), columns(m, h, 0, 1)}, {{"axis", int64_t{1}}});
        return m.op(k_reduce_mean, {m.op(k_square, {all})});
      }));
  check_proven("a product over none", model([&](small::Model& m, TensorId h) {
                 const TensorId zero = m.op(k_matmul, {columns(m, h, 0, 0), m.variable("v", {0, 4})});
                 return m.op(k_reduce_mean, {m.op(k_square, {m.op(k_add, {h, zero})})});
               }));
  check_proven("a parameter without elements", model([&](small::Model& m, TensorId h) {
                 return m.op(k_reduce_sum, {m.op(k_square, {m.op(k_matmul, {h, m.variable("u", {4, 0})})})});
               }));
  check_proven(
      "a norm of none", model([&](small::Model& m, TensorId h) {
        const TensorId pairs = m.op(k_reshape, {h}, {{"shape", Ints{4, 2, 2}}});
        const TensorId none =
            m.op(k_slice, {pairs}, {{"starts", Ints{0, 1, 0}}, {"limits", Ints{4, 1, 2}}, {"strides", Ints{1, 1, 1}}});
        return m.op(k_reduce_sum, {m.op(k_layer_norm, {none, m.variable("gain", {2}), m.variable("bias", {2})})});
      }));
}

TEST_CASE("proof: constants that are zero in their type, or none") {
  for (const double tiny : {1e-46, 1e-60, -1e-60})
    check_proven("zero in f32", model([&](small::Model& m, TensorId h) {
                   return m.op(k_reduce_mean, {m.op(k_add, {m.op(k_square, {h}), number(m, {4, 4}, tiny)})});
                 }));
  check_proven("a product that is zero in f32", model([&](small::Model& m, TensorId h) {
                 const TensorId tiny = m.op(k_mul, {number(m, {4, 4}, 1e-30), number(m, {4, 4}, 1e-30)});
                 return m.op(k_reduce_mean, {m.op(k_add, {m.op(k_square, {h}), tiny})});
               }));
  const double none = std::numeric_limits<double>::quiet_NaN();
  for (const double by : {0.0, none})
    check_proven("none", model([&](small::Model& m, TensorId h) {
                   const TensorId made = m.op(k_div, {number(m, {4, 4}, 0), number(m, {4, 4}, by)});
                   return m.op(k_reduce_mean, {m.op(k_mul, {h, made})});
                 }));
}

TEST_CASE("proof: a gradient that is one number goes back through a window to the part that the device has") {
  small::Model m;
  m.g.name = "pooled";
  const TensorId h = m.op(k_relu, {m.op(k_mul, {m.input("x", {8, 12, 12, 3}), m.variable("w", {12, 12, 3})})});
  const TensorId pooled =
      m.op(k_avg_pool, {h}, {{"window", Ints{2, 2}}, {"strides", Ints{1, 1}}, {"padding", Ints{0, 0, 0, 0}}});
  m.minimize(m.op(k_reduce_mean, {pooled}, {}, "loss"), OptimizerKind::kSgd);
  for (const char* strategy : {"split(2, factor=d2)", "split(3, factor=d2)", "split(4, factor=d2)"}) {
    Graph g = m.g;
    const Plan plan = plan_of(g, fmt::format("null:{}", strategy[6]), strategy);
    const Proof proof = prove(plan);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, strategy << ": " << text(proof));
  }
}

TEST_CASE("proof: of the float64 form of a plan in f16 nothing is said, and of which plan it is") {
  const Plan plan =
      plan_of(small::mlp(8).g, "null:1", "local", [](CompileOptions& o) { o.precision = Precision::kFloat16; });
  CHECK(prove(plan).verdict == ProofVerdict::kProven);
  const Proof wide = prove(in_float64(plan));
  CHECK(wide.verdict == ProofVerdict::kNotCovered);
  CHECK_MESSAGE(has(text(wide), "prove that plan"), text(wide));
  Plan other = plan_of(small::mlp(8).g, "null:1", "local");
  for (Buffer& b : other.entries[0].programs[0].buffers)
    if (b.kind == BufferKind::kStep) b.ref = static_cast<int32_t>(StepScalar::kLossScale);
  CHECK(prove(other).verdict == ProofVerdict::kRefuted);
}

TEST_CASE("proof: sparse updates have one order, whatever part of its table a device has") {
  small::Model m;
  m.g.name = "table";
  const TensorId ids = m.input("ids", {4, 3}, DType::kI32);
  const TensorId h = m.op(k_embedding, {m.variable("table", {8, 4}), ids});
  m.minimize(m.op(k_reduce_mean, {m.op(k_square, {h})}, {}, "loss"), OptimizerKind::kSgd);
  m.g.training.optimizer.sparse_updates = true;
  const auto order = [&](const char* devices, int zero) {
    const Plan plan =
        plan_of(m.g, devices, "replica", [&](CompileOptions& o) { o.exact = true, o.accumulation = 2, o.zero = zero; });
    const EntryProof proof = prove(plan, plan.entries[0]);
    CHECK_MESSAGE(proof.verdict == ProofVerdict::kProven, proof.what);
    return proof.order;
  };
  const std::string one = order("null:1", 0);
  CHECK(!one.empty());
  for (const int zero : {0, 1, 2, 3}) CHECK_MESSAGE(order("null:2", zero) == one, zero);
}

// On one device alone the sum of a parameter's gradient begins anew with each micro-batch.
EntryProof without_sum(Plan& plan, int32_t device, const std::string& parameter) {
  Entry& entry = plan.entries[0];
  DeviceRow& row = entry.rows[device];
  entry.programs.push_back(entry.programs[row.program]);  // a program of its own
  row.program = static_cast<int32_t>(entry.programs.size()) - 1;
  for (Segment& s : entry.programs.back().segments)
    for (Instruction& i : s.instructions)
      if (is_op(i, "accumulate") && has(i.name, parameter + ".grad")) {
        i.as<work::Kernel>()->op = OpCode::k_cast;
        i.as<work::Kernel>()->attrs = {{"dtype", kF32}};
        i.in = {i.in[1]};
      }
  return prove(plan, entry);
}

TEST_CASE("proof: what a sum lacks is said as samples, and whose they are") {
  Plan plan = plan_of(small::mlp(8).g, "null:4", "replica(2) > split(2)",
                      [](CompileOptions& o) { o.accumulation = 2, o.fusion = false; });
  const Proof whole = prove(plan);
  CHECK_MESSAGE(whole.verdict == ProofVerdict::kProven, text(whole));
  const EntryProof proof = without_sum(plan, 2, "w1");
  CHECK(proof.verdict == ProofVerdict::kRefuted);
  CHECK_MESSAGE(has(proof.what, "it is without samples 2 to 3, which device 2 has in micro-batch 0"), proof.what);
  const auto leads_there = [](const std::string& step) {
    return step.starts_with("that was made of ") && step.ends_with("on device 2");
  };
  CHECK_MESSAGE(std::ranges::any_of(proof.path, leads_there), fmt::format("{}", fmt::join(proof.path, "\n")));
}

// The example of docs/proof.md: WHALE_EXAMPLE="gpt3.plan 37 block59.attention.qkv.weight".
TEST_CASE("example of a failed proof" * doctest::skip()) {
  const char* example = std::getenv("WHALE_EXAMPLE");
  REQUIRE(example != nullptr);
  std::istringstream words(example);
  std::string file, parameter;
  int32_t device = 0;
  words >> file >> device >> parameter;
  std::ifstream in(file, std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
  Plan plan = deserialize(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  fmt::print("{}", text(Proof{ProofVerdict::kRefuted, {without_sum(plan, device, parameter)}, ""}));
}

TEST_CASE("proof: in 16 bits a sum that no parameter reaches is rounded as on one device, in micro-batches too") {
  // The sum over the batch of such a product is made before the micro-batches, of a copy of the product whose only
  // reader is a cast: it is rounded all the same, as the program's product has another reader.
  for (const Precision precision : {Precision::kBFloat16, Precision::kFloat16}) {
    small::Model m;
    m.g.name = "copied";
    const TensorId x = m.input("x", {8, 4, 4}), h = m.op(k_matmul, {x, x});
    const TensorId of_inputs = m.op(k_reduce_mean, {m.op(k_exp, {h})});
    const TensorId trained = m.op(k_matmul, {h, m.variable("w", {4, 3})});
    m.minimize(m.op(k_add, {of_inputs, m.op(k_reduce_mean, {m.op(k_square, {trained})})}, {}, "loss"),
               OptimizerKind::kSgd);
    m.g.training.precision = precision;
    check_proven("of inputs", m.g);
  }
}

TEST_CASE("proof: a sum of a model without a batch lacks no samples") {
  small::Model m;
  m.g.name = "no batch";
  const TensorId h = m.op(k_matmul, {m.input("x", {4, 6}, DType::kF32, -1), m.variable("w", {6, 4})}, {}, "mm");
  m.minimize(m.op(k_reduce_mean, {m.op(k_square, {h})}, {}, "loss"), OptimizerKind::kSgd);
  Plan plan = plan_of(m.g, "null:2", "split(2)", [](CompileOptions& o) { o.fusion = false; });
  CHECK(plan.entries[0].batch <= 0);
  Entry& entry = plan.entries[0];
  for (Program& p : entry.programs)
    for (Segment& s : p.segments)
      std::erase_if(s.instructions, [](const Instruction& i) { return i.kind() == InstructionKind::kCollective; });
  const EntryProof proof = prove(plan, entry);
  CHECK(proof.verdict != ProofVerdict::kProven);
  CHECK(!has(proof.what, "without sample"));
}

TEST_CASE("proof: of an update of many parameters the path has the operands of the one that is wrong") {
  small::Model m;
  m.g.name = "many";
  TensorId h = m.input("x", {4, 4});
  for (int n = 0; n < 6; ++n) h = m.op(k_relu, {m.op(k_matmul, {h, m.variable(fmt::format("w{}", n), {4, 4})})});
  m.minimize(m.op(k_reduce_mean, {h}, {}, "loss"), OptimizerKind::kAdam);
  Plan plan = plan_of(m.g, "null:1", "local");
  for (Segment& s : plan.entries[0].programs[0].segments)
    for (Instruction& i : s.instructions)
      if (is_op(i, "adam")) {
        REQUIRE(i.in.size() > 20);                      // one instruction for all
        i.in[i.in.size() - 3] = i.in[i.in.size() - 7];  // the gradient of another
      }
  const EntryProof proof = prove(plan, plan.entries[0]);
  CHECK(proof.verdict == ProofVerdict::kRefuted);
  CHECK_MESSAGE(has(proof.what, "reads it, w0.grad as operand"), proof.what);
  CHECK_MESSAGE(proof.path.size() == 4, proof.path.size());
}
