// Adasum between the members of a group, against the definition on whole vectors.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <thread>

#include "comm/transport.h"

namespace whale {
namespace {

using Vector = std::vector<double>;

Vector pair_of(const Vector& a, const Vector& b) {
  double ab = 0, aa = 0, bb = 0;
  for (size_t i = 0; i < a.size(); ++i) ab += a[i] * b[i], aa += a[i] * a[i], bb += b[i] * b[i];
  const double fa = aa == 0 ? 1 : 1 - ab / (2 * aa), fb = bb == 0 ? 1 : 1 - ab / (2 * bb);
  Vector y(a.size());
  for (size_t i = 0; i < a.size(); ++i) y[i] = fa * a[i] + fb * b[i];
  return y;
}

// `x`: the gradients of the members' own means.
Vector oracle(std::vector<Vector> x) {
  const size_t power = std::bit_floor(x.size());
  for (size_t m = power; m < x.size(); ++m) x[m - power] = pair_of(x[m - power], x[m]);
  x.resize(power);
  while (x.size() > 1) {
    std::vector<Vector> next;
    for (size_t m = 0; m < x.size(); m += 2) next.push_back(pair_of(x[m], x[m + 1]));
    x = std::move(next);
  }
  return x[0];
}

// Each member's result; members bring the parts of a sum.
std::vector<Vector> run(const std::vector<Vector>& parts, std::vector<int64_t> weights = {}) {
  const size_t n = parts.size();
  std::vector<int32_t> devices;
  for (size_t m = 0; m < n; ++m) devices.push_back(static_cast<int32_t>(m));
  const auto transport = make_inproc({{"replica", {devices}}});
  Backends backends;
  std::vector<std::unique_ptr<Device>> opened;
  for (size_t m = 0; m < n; ++m) opened.push_back(backends.get(DeviceKind::kRef).open({DeviceKind::kRef, {}}));
  std::vector<Vector> data = parts;
  std::vector<std::thread> threads;
  for (size_t m = 0; m < n; ++m)
    threads.emplace_back([&, m] {
      CollectiveSpec spec;
      spec.op = OpCode::k_adasum;
      const Operand x{data[m].data(), DType::kF64, {static_cast<int64_t>(data[m].size())}, false, nullptr};
      spec.in = spec.out = {x};
      spec.weights = weights;
      const auto bound = transport->bind(static_cast<int>(m), spec, *opened[m]);
      CHECK(bound->run(nullptr));
    });
  for (std::thread& t : threads) t.join();
  return data;
}

void check_equal(const std::vector<Vector>& results, const Vector& want) {
  for (const Vector& y : results) {
    CHECK(y == results[0]);
    for (size_t i = 0; i < want.size(); ++i) CHECK(y[i] == doctest::Approx(want[i]).epsilon(1e-12));
  }
}

TEST_CASE("adasum: one member is the identity, parallel gradients are averaged, orthogonal ones summed") {
  check_equal(run({{1, -2, 3}}), {1, -2, 3});
  // Parts of a sum over equal shares: the members' own gradients are `size` times as large.
  check_equal(run({{0.5, 1}, {0.5, 1}}), {1, 2});
  check_equal(run({{0.5, 1}, {1.5, 3}}), {2, 4});  // of (1, 2) and (3, 6)
  check_equal(run({{1, 0}, {0, 2}}), {2, 4});
  check_equal(run({{1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}, {0, 0, 0, 1}}), {4, 4, 4, 4});
  check_equal(run({{0, 0}, {0, 0}}), {0, 0});
}

TEST_CASE("adasum: any number of members, any weights, against the definition") {
  for (const size_t n : {2, 3, 4, 5, 6, 7, 8})
    for (const size_t elements : {1, 5, 5000}) {
      CAPTURE(n);
      CAPTURE(elements);
      std::vector<Vector> own(n, Vector(elements)), parts = own;
      std::vector<int64_t> weights;
      int64_t all = 0;
      for (size_t m = 0; m < n; ++m) weights.push_back(static_cast<int64_t>(m % 3) + 1), all += weights.back();
      for (const bool even : {true, false}) {
        for (size_t m = 0; m < n; ++m)
          for (size_t i = 0; i < elements; ++i) {
            own[m][i] = std::sin(static_cast<double>(3 * i + 7 * m * i + m));
            const double share =
                even ? 1.0 / static_cast<double>(n) : static_cast<double>(weights[m]) / static_cast<double>(all);
            parts[m][i] = own[m][i] * share;
          }
        const auto results = run(parts, even ? std::vector<int64_t>{} : weights);
        check_equal(results, oracle(own));
        CHECK(run(parts, even ? std::vector<int64_t>{} : weights) == results);
      }
    }
}

TEST_CASE("adasum: a member without samples changes nothing") { check_equal(run({{2, 4}, {0, 0}}, {3, 0}), {2, 4}); }

}  // namespace
}  // namespace whale
