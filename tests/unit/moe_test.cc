// Mixture of experts: who gets which place, and that parts of the experts, tokens and features give the whole.
#include <doctest/doctest.h>

#include <cmath>
#include <numeric>

#include "base/error.h"
#include "cpu_compare.h"
#include "ops/moe.h"

namespace whale::test {
namespace {

using Values = std::vector<double>;
using C = OpCode;

std::vector<Values> gate(Dims dims, Values logits, const Attrs& attrs) {
  Input x = f32(std::move(dims));
  x.values = std::move(logits);
  const auto want = run_op(DeviceKind::kRef, 1, C::k_moe_gate, attrs, {x}),
             got = run_op(DeviceKind::kCpu, 1, C::k_moe_gate, attrs, {x});
  CHECK(want[0] == got[0]);
  CHECK(want[3] == got[3]);
  return want;
}

// Slots of a real gate, so that no two tokens share a place.
Input slots_of(const Dims& logits, const Attrs& attrs) {
  const Values slots = run_op(DeviceKind::kRef, 1, C::k_moe_gate, attrs, {f32(logits)})[0];
  return {DType::kI32, {logits[0], logits[1], attr_int(attrs, "k")}, slots};
}

Attrs with(Attrs attrs, const char* name, Attr value) {
  attrs[name] = std::move(value);
  return attrs;
}

double softmax(const Values& row, size_t i) {
  double sum = 0;
  for (const double v : row) sum += std::exp(v);
  return std::exp(row[i]) / sum;
}

}  // namespace

TEST_CASE("moe_gate: places in order of tokens, the rest is dropped and counted") {
  // Three experts, two places each; tokens choose 0, 0, 0, 2.
  const auto r = gate({1, 4, 3}, {2, 1, 0, 5, 1, 0, 3, 1, 0, 0, 1, 2}, {{"k", int64_t{1}}, {"capacity", int64_t{2}}});
  CHECK(r[0] == Values{0, 1, -1, 4});
  CHECK(r[3] == Values{1});
  CHECK(r[1][0] == doctest::Approx(softmax({2, 1, 0}, 0)));
  CHECK(r[1][2] == 0);
}

TEST_CASE("moe_gate: first choices of all tokens stand before second ones") {
  // Expert 1 is the second choice of token 0 and the first of tokens 1 and 2.
  const auto r = gate({1, 3, 3}, {2, 1, 0, 1, 2, 0, 0, 2, 1}, {{"k", int64_t{2}}, {"capacity", int64_t{2}}});
  CHECK(r[0] == Values{0, -1, 2, 1, 3, 4});
  CHECK(r[3] == Values{1});
}

TEST_CASE("moe_gate: ties go to the lowest index, groups do not see each other") {
  const auto r = gate({2, 2, 4}, Values(16, 0.0), {{"k", int64_t{2}}, {"capacity", int64_t{2}}, {"normalize", true}});
  CHECK(r[0] == Values{0, 2, 1, 3, 0, 2, 1, 3});
  for (const double w : r[1]) CHECK(w == doctest::Approx(0.5));
  CHECK(r[3] == Values{0, 0});
  for (const double aux : r[2]) CHECK(aux == doctest::Approx(1));  // shares 1, 0, 0, 0 times means 1/4, times 4
}

TEST_CASE("moe_gate: capacity from its factor") {
  const auto capacity = [](double factor, int64_t k, int64_t tokens, int64_t experts) {
    return moe_capacity({{"capacity_factor", factor}, {"k", k}}, tokens, experts);
  };
  CHECK(capacity(1.0, 1, 8, 4) == 2);
  CHECK(capacity(1.25, 1, 8, 4) == 3);
  CHECK(capacity(1.0, 2, 8, 4) == 4);
  CHECK(capacity(0.1, 1, 8, 4) == 1);
  CHECK(capacity(100, 1, 8, 4) == 8);
  CHECK(moe_capacity({{"capacity", int64_t{5}}, {"capacity_factor", 1.0}}, 8, 4) == 5);
}

TEST_CASE("moe ops refuse what does not fit") {
  const Input logits = f32({2, 4, 3}), slot{DType::kI32, {2, 4, 1}, Values(8, 0)};
  const auto refused = [](C op, const Attrs& attrs, const std::vector<Input>& inputs) {
    CHECK_THROWS_AS(run_op(DeviceKind::kRef, 1, op, attrs, inputs), Error);
  };
  refused(C::k_moe_gate, {{"k", int64_t{4}}}, {logits});
  refused(C::k_moe_gate, {{"capacity_factor", 0.0}}, {logits});
  refused(C::k_moe_dispatch, {{"experts", int64_t{3}}, {"capacity", int64_t{0}}}, {f32({2, 4, 5}), slot});
  refused(C::k_moe_dispatch, {{"experts", int64_t{3}}, {"capacity", int64_t{2}}}, {f32({2, 5, 5}), slot});
  refused(C::k_moe_combine, {}, {f32({3, 1, 2, 5}), slot});
}

TEST_CASE("cpu mixture of experts agrees with ref: odd sizes, bf16, dropped tokens") {
  for (const bool normalize : {false, true}) {
    for (const auto& [dims, k, c] : {std::tuple<Dims, int64_t, int64_t>{{3, 17, 5}, 2, 4},
                                     {{1, 64, 8}, 1, 9},
                                     {{5, 40, 33}, 3, 2},
                                     {{2, 1, 1}, 1, 1}}) {
      const Attrs attrs{{"k", k}, {"capacity", c}, {"normalize", normalize}};
      const Input slot = slots_of(dims, attrs);
      const int64_t g = dims[0], s = dims[1], e = dims[2];
      compare(C::k_moe_gate, attrs, {f32(dims)});
      compare(C::k_moe_gate_grad, attrs, {f32(dims), slot, f32({g, s, k}), f32({g})});
      compare(C::k_moe_gate_grad, attrs, {f32(dims), slot, f32({g, s, k}), absent()});
      compare(C::k_moe_gate_grad, attrs, {f32(dims), slot, absent(), f32({g})});
      for (const int64_t d : {1, 35, 300}) {
        for (const auto type : {f32, bf16}) {
          const Attrs sizes{{"experts", e}, {"capacity", c}};
          compare(C::k_moe_dispatch, sizes, {type({g, s, d}), slot});
          compare(C::k_moe_dispatch, sizes, {type({g, s, d}), slot, f32({g, s, k})});
          compare(C::k_moe_combine, {}, {type({e, g, c, d}), slot});
          compare(C::k_moe_combine, {}, {type({e, g, c, d}), slot, f32({g, s, k})});
          compare(C::k_moe_weight_grad, {}, {type({g, s, d}), type({e, g, c, d}), slot});
          if (e < 3) continue;
          compare(C::k_moe_dispatch, {{"experts", int64_t{2}}, {"capacity", c}, {"expert_begin", int64_t{1}}},
                  {type({g, s, d}), slot});
          compare(C::k_moe_combine, {{"expert_begin", int64_t{1}}}, {type({2, g, c, d}), slot});
        }
      }
    }
  }
}

TEST_CASE("parts of the experts give the whole: dispatch by parts, combine and its weights by sums") {
  const int64_t g = 2, s = 9, e = 5, k = 2, c = 3, d = 4;
  const Attrs attrs{{"k", k}, {"capacity", c}};
  const Input slot = slots_of({g, s, e}, attrs);
  Input x = f32({g, s, d}), weight = f32({g, s, k}), y = f32({e, g, c, d});
  for (Input* t : {&x, &weight, &y})
    for (int64_t i = 0; i < element_count(t->dims); ++i) t->values.push_back(std::sin(static_cast<double>(i) + 1));
  const auto ref = [](C op, const Attrs& a, const std::vector<Input>& in) {
    return run_op(DeviceKind::kRef, 1, op, a, in)[0];
  };
  const Values dispatched = ref(C::k_moe_dispatch, {{"experts", e}, {"capacity", c}}, {x, slot, weight});
  const Values combined = ref(C::k_moe_combine, {}, {y, slot, weight});
  const Values products = ref(C::k_moe_weight_grad, {}, {x, y, slot});
  Values parts, combined_sum(combined.size()), products_sum(products.size());
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 4}, {4, 5}}) {
    const Attrs here{{"expert_begin", begin}};
    const Values part =
        ref(C::k_moe_dispatch, with(with(here, "experts", end - begin), "capacity", c), {x, slot, weight});
    parts.insert(parts.end(), part.begin(), part.end());
    Input some{DType::kF32, {end - begin, g, c, d}, {}};
    some.values.assign(y.values.begin() + begin * g * c * d, y.values.begin() + end * g * c * d);
    const Values a = ref(C::k_moe_combine, here, {some, slot, weight});
    const Values b = ref(C::k_moe_weight_grad, here, {x, some, slot});
    for (size_t i = 0; i < a.size(); ++i) combined_sum[i] += a[i];
    for (size_t i = 0; i < b.size(); ++i) products_sum[i] += b[i];
  }
  CHECK(parts == dispatched);
  for (size_t i = 0; i < combined.size(); ++i) CHECK(combined_sum[i] == doctest::Approx(combined[i]).epsilon(1e-6));
  for (size_t i = 0; i < products.size(); ++i) CHECK(products_sum[i] == doctest::Approx(products[i]).epsilon(1e-6));
}

}  // namespace whale::test
