// Cuts and types of stages beside all there are: every way to cut, every type of every stage.
#include "search/stage_cuts.h"

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <cmath>
#include <functional>

#include "unit/caught.h"

using namespace whale;

namespace {

double some(int below) { return static_cast<double>(*rc::gen::inRange(0, below)) / 10; }

StageCutsProblem random_problem() {
  StageCutsProblem p;
  const int layers = *rc::gen::inRange(1, 6), types = *rc::gen::inRange(1, 4);
  for (int t = 0; t < types; ++t) {
    StageDevices devices{.count = *rc::gen::inRange(0, 3), .memory_bytes = 2 + some(120), .seconds = {}};
    for (int l = 0; l < layers; ++l) devices.seconds.push_back(some(30));
    p.types.push_back(devices);
  }
  for (int l = 0; l < layers; ++l) {
    p.state_bytes.push_back(some(20));
    p.activation_bytes.push_back(some(20));
    p.output_bytes.push_back(some(20));
  }
  for (int t = 0; t < types; ++t) {
    p.latency_seconds.emplace_back();
    p.seconds_per_byte.emplace_back();
    for (int s = 0; s < types; ++s) {
      p.latency_seconds.back().push_back(some(4));
      p.seconds_per_byte.back().push_back(some(6));
    }
  }
  p.micro_batches = *rc::gen::inRange(1, 5);
  if (*rc::gen::inRange(0, 4) == 0)
    for (int i = *rc::gen::inRange(1, 5); i > 0; --i) p.order.push_back(*rc::gen::inRange(0, types));
  return p;
}

double brute_force(const StageCutsProblem& p) {
  const int layers = static_cast<int>(p.output_bytes.size());
  double best = INFINITY;
  for (int mask = 0; mask < 1 << (layers - 1); ++mask) {
    std::vector<int> cuts{0};
    for (int l = 1; l < layers; ++l)
      if ((mask >> (l - 1) & 1) != 0) cuts.push_back(l);
    cuts.push_back(layers);
    std::vector<int> types(cuts.size() - 1, 0);
    const std::function<void(size_t)> place = [&](size_t i) {
      if (i == types.size()) {
        best = std::min(best, slowest_stage_seconds(p, cuts, types));
        return;
      }
      for (size_t t = 0; t < p.types.size(); ++t) {
        types[i] = static_cast<int>(t);
        place(i + 1);
      }
    };
    place(0);
  }
  return best;
}

// Four equal layers on two devices, one of them three times as fast.
StageCutsProblem two_types() {
  return {.types = {{.count = 1, .memory_bytes = 10, .seconds = {1, 1, 1, 1}},
                    {.count = 1, .memory_bytes = 10, .seconds = {3, 3, 3, 3}}},
          .state_bytes = {1, 1, 1, 1},
          .activation_bytes = {1, 1, 1, 1},
          .output_bytes = {0, 0, 0, 0},
          .latency_seconds = {{0, 0}, {0, 0}},
          .seconds_per_byte = {{0, 0}, {0, 0}},
          .micro_batches = 4,
          .order = {}};
}

}  // namespace

TEST_CASE("cuts and types of stages: no way to cut and to place is faster") {
  CHECK(rc::check("equal to brute force", [] {
    const StageCutsProblem p = random_problem();
    const double best = brute_force(p);
    if (std::isinf(best)) {
      RC_ASSERT(has(message_of([&] { cut_stages(p); }, {Code::kInvalidArgument}), "no cuts"));
      return;
    }
    const StageCuts found = cut_stages(p);
    RC_ASSERT(std::abs(found.slowest_seconds - best) <= 1e-9 * (1 + best));
    RC_ASSERT(std::abs(slowest_stage_seconds(p, found.cuts, found.types) - best) <= 1e-9 * (1 + best));
  }));
}

TEST_CASE(
    "cuts of stages: the faster device takes three layers of four; memory may forbid it; a dear link leaves one idle") {
  StageCutsProblem p = two_types();
  CHECK(cut_stages(p).slowest_seconds == doctest::Approx(3));
  // The first of two stages keeps two micro-batches: three layers need 3 + 6 there, 3 + 3 at the end.
  p.types[0].memory_bytes = 6;
  StageCuts found = cut_stages(p);
  CHECK(found.slowest_seconds == doctest::Approx(3));
  CHECK(found.types == std::vector<int>{1, 0});
  CHECK(found.cuts == std::vector<int>{0, 1, 4});
  p.order = {0, 1};
  CHECK(cut_stages(p).slowest_seconds == doctest::Approx(6));
  p = two_types();
  p.latency_seconds = {{0, 1}, {1, 0}};
  found = cut_stages(p);
  CHECK(found.types == std::vector<int>{0});
  CHECK(found.slowest_seconds == doctest::Approx(4));
}

TEST_CASE("cuts of stages: tables that do not belong together are refused") {
  StageCutsProblem p = two_types();
  p.state_bytes.pop_back();
  CHECK(has(message_of([&] { cut_stages(p); }), "bytes of state by layer has 3 entries, expected 4"));
  p = two_types();
  p.types[1].seconds[2] = NAN;
  CHECK(has(message_of([&] { cut_stages(p); }), "seconds by layer has nan"));
  p = two_types();
  p.order = {2};
  CHECK(has(message_of([&] { cut_stages(p); }), "type 2"));
  p = two_types();
  p.types[0].memory_bytes = p.types[1].memory_bytes = 1;
  CHECK(has(message_of([&] { cut_stages(p); }), "no cuts of 4 layers fit"));
}
