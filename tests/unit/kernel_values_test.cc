// What the prover calls a tensor is that tensor, in numbers; what it calls of one order has the same bits.
#include <doctest/doctest.h>

#include <cstdio>
#include <cstdlib>

#include "proof_case.h"
#include "unit/small_models.h"
#include "values_mill.h"

namespace whale::test {
namespace {

using enum OpCode;
const Ints kSquare{4, 4}, kRow{1, 4, 4};

// A graph of squares of numbers and of parameters.
struct Squares : small::Model {
  explicit Squares(Dice& dice) : dice_(dice) {
    g.name = "values";
    all = {input("x", {4, 4}), input("z", {4, 4}), variable("w", {4, 4}), variable("u", {4, 4})};
    ids_ = input("ids", {4}, DType::kI32);
    all.push_back(op(k_matmul, {some(), some()}));
    all.push_back(spread(variable("v", {4})));
    all.push_back(
        op(k_fill, {},
           {{"shape", kSquare}, {"value", static_cast<double>(dice.below(3))}, {"dtype", std::string("f32")}}));
  }
  TensorId some() { return all[dice_.below(std::ssize(all))]; }
  TensorId spread(TensorId id) { return op(k_broadcast_to, {id}, {{"shape", kSquare}}); }
  TensorId shaped(TensorId id, const Ints& shape) { return op(k_reshape, {id}, {{"shape", shape}}); }
  // Products, sums, slices and what is the same all along.
  void add_linear() {
    constexpr OpCode kTwo[] = {k_add, k_add, k_add, k_sub, k_mul, k_mul, k_matmul, k_matmul};
    constexpr OpCode kOne[] = {k_neg, k_tanh, k_exp};
    const int64_t kind = dice_.below(10);
    if (kind < 6)
      all.push_back(op(kTwo[dice_.below(std::ssize(kTwo))], {some(), some()}));
    else if (kind == 6)
      all.push_back(op(k_transpose, {some()}, {{"perm", Ints{1, 0}}}));
    else if (kind == 7)
      all.push_back(op(k_cumsum, {some()}, {{"axis", dice_.below(2)}}));
    else if (kind == 8)
      all.push_back(spread(op(k_reduce_sum, {some()}, {{"axes", Ints{dice_.below(2)}}})));
    else
      all.push_back(op(kOne[dice_.below(std::ssize(kOne))], {some()}));
  }
  // Lookups, windows, groups, normalizations, other shapes.
  void add_other() {
    const int64_t axis = dice_.below(2);
    const auto part = [&](int64_t begin, int64_t n) {
      Ints starts{0, 0}, limits{4, 4};
      starts[axis] = begin, limits[axis] = begin + n;
      return op(k_slice, {some()}, {{"starts", starts}, {"limits", limits}});
    };
    const auto pooled = [&](OpCode code) {
      const Attrs window{{"window", Ints{3}}, {"strides", Ints{1}}, {"padding", Ints{1, 1}}};
      return shaped(op(code, {shaped(some(), kRow)}, window), kSquare);
    };
    const auto filtered = [&](int64_t groups) {
      const TensorId filter = variable("f" + std::to_string(g.ops.size()), {4, 3, 4 / groups});
      return shaped(op(k_conv, {shaped(some(), kRow), filter}, {{"padding", Ints{1, 1}}, {"groups", groups}}), kSquare);
    };
    const auto low = [&](int64_t n) { return axis == 0 ? Ints{n, 0} : Ints{0, n}; };
    switch (dice_.below(16)) {
      case 0: all.push_back(op(k_embedding, {some(), ids_})); break;
      case 1: all.push_back(op(k_gather, {some(), ids_}, {{"axis", axis}})); break;
      case 2: all.push_back(op(k_concat, {part(dice_.below(3), 2), part(dice_.below(3), 2)}, {{"axis", axis}})); break;
      case 3: all.push_back(op(k_pad, {part(dice_.below(3), 2)}, {{"low", low(1)}, {"high", low(1)}})); break;
      case 4: all.push_back(pooled(k_avg_pool)); break;
      case 5: all.push_back(pooled(k_max_pool)); break;
      case 6: all.push_back(filtered(1)); break;
      case 7: all.push_back(filtered(2)); break;
      case 8: all.push_back(op(dice_.coin() ? k_softmax : k_log_softmax, {some()})); break;
      case 9: all.push_back(spread(op(k_reduce_max, {some()}, {{"axes", Ints{axis}}}))); break;
      case 10: all.push_back(op(k_where, {op(k_greater, {some(), some()}), some(), some()})); break;
      case 11: all.push_back(shaped(op(k_transpose, {shaped(some(), {2, 8})}, {{"perm", Ints{1, 0}}}), kSquare)); break;
      case 12: all.push_back(op(k_layer_norm, {some(), variable("n" + std::to_string(g.ops.size()), {4})})); break;
      case 13:
        all.push_back(op(k_dropout, {some()}, {{"rate", 0.4}, {"key", static_cast<int64_t>(g.ops.size())}}));
        break;
      case 14: all.push_back(op(k_iota, {}, {{"shape", kSquare}, {"dim", axis}, {"dtype", std::string("f32")}})); break;
      default: all.push_back(dice_.coin() ? op(k_relu, {some()}) : op(k_maximum, {some(), some()})); break;
    }
  }
  std::vector<TensorId> all;

 private:
  Dice& dice_;
  TensorId ids_;
};

// `wide`: of all ops, and with gradients.
Graph random_graph(Dice& dice, bool wide) {
  Squares m(dice);
  for (int64_t n = dice.between(4, 9); n > 0; --n)
    if (wide && dice.coin())
      m.add_other();
    else
      m.add_linear();
  for (size_t k = 0; k < m.all.size(); ++k) m.g.outputs.push_back({"o" + std::to_string(k), m.all[k]});
  if (wide && dice.coin())
    m.minimize(m.op(k_reduce_sum,
                    {m.op(k_add, {m.op(k_tanh, {m.all.back()}), m.op(k_matmul, {m.all[m.all.size() - 2], m.all[2]})})}),
               OptimizerKind::kSgd);
  return m.g;
}

struct Counts {
  int64_t compared = 0, of_one_order = 0;
};
Counts compare_values(uint64_t first, uint64_t count, bool exact) {
  Counts counts;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Dice dice(seed);
    const Plan plan =
        plan_of(random_graph(dice, seed % 2 == 1), "null:1", "replica(1)", [](CompileOptions& o) { o.fusion = false; });
    Mill mill(dice, plan, exact);
    for (int n = 0; n < 1500; ++n) mill.turn();
    counts.compared += mill.compared, counts.of_one_order += mill.of_one_order;
    CHECK_MESSAGE(mill.wrong.empty(), "seed " << seed << (exact ? ", exact: " : ": ") << mill.wrong);
  }
  MESSAGE(counts.compared << " values compared, " << counts.of_one_order << " elements of one order");
  return counts;
}

}  // namespace

TEST_CASE("property: what proofs call a tensor is that tensor") {
  CHECK(compare_values(1, 60, false).compared > 3000);
  CHECK(compare_values(1, 60, true).of_one_order > 3000);
}

// Not a test: WHALE_HUNT="first count exact".
TEST_CASE("hunt for values that are not what proofs call them" * doctest::skip()) {
  unsigned long long first = 0, count = 1000, exact = 0;
  if (const char* text = std::getenv("WHALE_HUNT")) std::sscanf(text, "%llu %llu %llu", &first, &count, &exact);
  compare_values(first, count, exact != 0);
}

}  // namespace whale::test
