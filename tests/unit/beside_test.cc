// Curves of products and what runs beside each other, in the times of plans.
#include <cmath>

#include <doctest/doctest.h>

#include "cluster/device_types.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "cost/curve.h"
#include "cost/interference.h"
#include "plan/figures.h"
#include "simulate/beside.h"
#include "simulate/simulate.h"
#include "small_models.h"

namespace whale {
namespace {

Plan plan_for(const small::Model& m, const char* devices, const char* strategy, bool overlap = true) {
  CompileOptions options;
  options.strategy = strategy;
  options.overlap = overlap;
  return compile(m.g, parse_devices(devices, {0, 1}), options);
}

double seconds_of(const Plan& plan) { return times_of(plan, plan.entries[0], SIZE_MAX)->seconds; }
double seconds_without_interference(const Plan& plan) {
  return makespan(simulate(plan, plan.entries[0], seconds_by(cost_of(plan), plan, plan.entries[0])));
}

std::optional<Product> product(OpCode code, std::vector<TensorType> in, std::vector<TensorType> out, double flops,
                               const Attrs& attrs = {}) {
  OpView view{.code = code, .attrs = &attrs, .inputs = std::move(in), .present = {}, .outputs = std::move(out)};
  view.present.assign(view.inputs.size(), true);
  return product_of(view, {flops, 0});
}

TEST_CASE("products: sizes follow from elements and FLOPs") {
  const auto f32 = [](Dims dims) { return TensorType{DType::kF32, std::move(dims)}; };
  const auto same = [](const std::optional<Product>& p, double batch, double m, double n, double k) {
    REQUIRE(p);
    CHECK(p->batch == doctest::Approx(batch));
    CHECK(p->m == doctest::Approx(m));
    CHECK(p->n == doctest::Approx(n));
    CHECK(p->k == doctest::Approx(k));
  };
  same(product(OpCode::k_matmul, {f32({4, 128, 64}), f32({64, 256})}, {f32({4, 128, 256})}, 2. * 512 * 64 * 256), 1,
       512, 256, 64);
  same(product(OpCode::k_matmul, {f32({6, 128, 64}), f32({6, 64, 256})}, {f32({6, 128, 256})}, 2. * 6 * 128 * 64 * 256),
       6, 128, 256, 64);
  same(product(OpCode::k_matmul_weight_grad, {f32({512, 64}), f32({512, 256})}, {f32({64, 256})}, 2. * 512 * 64 * 256),
       1, 64, 256, 512);
  // 8 pictures of 32 x 32 x 16, 3 x 3 filters: products of 144 by 64.
  same(product(OpCode::k_conv, {f32({8, 16, 32, 32}), f32({64, 16, 3, 3})}, {f32({8, 64, 32, 32})},
               2. * 8 * 1024 * 144 * 64),
       1, 8 * 1024, 64, 144);
  // Rows are those of the first operand as it lies in memory: a sum over many samples has no long ones.
  CHECK(product(OpCode::k_matmul_weight_grad, {f32({1 << 16, 64}), f32({1 << 16, 256})}, {f32({64, 256})},
                2. * (1 << 16) * 64 * 256)
            ->row == 64);
  CHECK(!product(OpCode::k_add, {f32({512, 512}), f32({512, 512})}, {f32({512, 512})}, 512 * 512));
  CHECK(!product(OpCode::k_relu, {f32({512, 512})}, {f32({512, 512})}, 512 * 512));
}

TEST_CASE("curves in plans: large products at the rate of the table, small ones slower, more work never faster") {
  const DeviceCurve& v100 = *curve_of_type("V100-32GB");
  CHECK(product_stretch({1, 128 * 80, 128 * 8, 8192}, v100) < 1.01);  // tiles fill all processors, eight times
  // Four tiles of 64, in eight parts of k: 32 of 80 processors, by tiles that are slower.
  CHECK(product_stretch({1, 128, 128, 8192}, v100) == doctest::Approx(80.0 / 32 * std::pow(4, 0.3305)).epsilon(0.04));
  CHECK(curve_of_type("XEON-CORE") == nullptr);
  CHECK(curve_of_type("") == nullptr);
  const DeviceSpec device = parse_devices("V100-32GB:1", {})[0];
  const DeviceRates rates = CostModel({device}, 1, kMachineOfCores).rates_of(device, false);
  REQUIRE(rates.curve == &v100);
  const Product p{1, 4096, 4096, 4096};
  const OpCost cost{p.flops(), p.bytes()};
  CHECK(op_seconds(cost, p, rates) == doctest::Approx(op_seconds(cost, rates)).epsilon(0.1));
  double before = 0;
  for (double part = 1.0 / 4096; part <= 1; part *= 2) {
    const double now = op_seconds(cost, p, rates, part);
    CHECK(now >= before);
    CHECK(now >= op_seconds({cost.flops * part, cost.bytes * part}, rates));
    before = now;
  }
}

TEST_CASE("curves in plans: no instruction of a model of usual sizes is far from the roofline, and none below it") {
  for (const char* type : {"V100-32GB:2", "A100-40GB:2", "T4:2"}) {
    const Plan plan = plan_for(small::gpt(8, OptimizerKind::kAdamW, 2, 512, 512, 4096, 8), type, "replica");
    const Entry& entry = plan.entries[0];
    const CostModel cost = cost_of(plan);
    const Duration seconds = seconds_by(cost, plan, entry);
    size_t stretched = 0;
    for (const Segment& segment : entry.programs[0].segments)
      for (const Instruction& i : segment.instructions) {
        if (i.kernel() == nullptr) continue;
        CAPTURE(i.name);
        const double roofline = op_seconds(OpCost{i.flops, i.bytes}, cost.rates_of(plan.devices[0], false));
        CHECK(seconds(i, 0) >= roofline);
        CHECK(seconds(i, 0) <= 4 * roofline);
        stretched += seconds(i, 0) > 1.02 * roofline;
      }
    CHECK(stretched > 5);
  }
}

// The part of a batch at which two types are done together shifts with the batch: a T4 is filled by less than a V100.
TEST_CASE("curves in plans: shares follow the size of the work") {
  const auto part_of_fast = [](int64_t batch) {
    const Plan plan = plan_for(small::mlp(batch, OptimizerKind::kSgd, 1024, 1024), "V100-32GB:1,T4:1", "replica");
    const auto& rows = plan.entries[0].rows;
    return static_cast<double>(samples_of(plan.entries[0], rows[0])) / static_cast<double>(batch);
  };
  const double small = part_of_fast(256), large = part_of_fast(1 << 16);
  CHECK(large > 0.6);
  CHECK(small != doctest::Approx(large).epsilon(0.02));
}

TEST_CASE("interference: gradients summed beside the backward pass slow it, and are never worse than behind it") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 4, 512, 512, 1024, 8);
  for (const char* devices : {"A100-40GB:2", "V100-16GB:2", "T4:2", "L4:2"}) {
    CAPTURE(devices);
    const Plan beside = plan_for(m, devices, "replica"), behind = plan_for(m, devices, "replica", false);
    CHECK(seconds_of(beside) > 1.0005 * seconds_without_interference(beside));
    CHECK(seconds_of(beside) < 1.01 * seconds_of(behind));
  }
  // Devices of which nothing is known.
  const Plan plain = plan_for(m, "null:2", "replica");
  CHECK(seconds_of(plain) == doctest::Approx(seconds_without_interference(plain)));
}

TEST_CASE("interference: cores that compute and communicate do one after the other") {
  const small::Model m = small::gpt(8, OptimizerKind::kAdamW, 4, 32, 64, 64, 4);
  const Plan plan = plan_for(m, "cpu@0,cpu@1", "replica");
  const Entry& entry = plan.entries[0];
  const Besides besides = besides_of(plan, entry);
  const Duration seconds = seconds_by(cost_of(plan), plan, entry);
  double work = 0;  // of the cores of one device
  const Program& p = entry.programs[entry.rows[0].program];
  for (const ScheduleRow& row : p.schedule)
    for (const Instruction& i : p.segments[row.segment].instructions)
      if (besides.kind(i, 0) != kNone) work += seconds(i, 0);
  CHECK(seconds_of(plan) >= 0.999 * work);
  CHECK(seconds_of(plan) <= 1.2 * work);
}

TEST_CASE("interference: as work of these kinds that begins together, of every GPU of the table") {
  for (const DeviceType& type : device_types()) {
    if (!type.is_gpu()) continue;
    CAPTURE(type.name);
    const Plan plan = plan_for(small::mlp(8), fmt::format("{}:2", type.name).c_str(), "replica");
    const Besides besides = besides_of(plan, plan.entries[0]);
    REQUIRE(besides.rates[0] != nullptr);
    const Interference constants = interference_of(type.sheet.name).constants;
    for (const bool far : {false, true}) {
      const PerLoad<double> alone{3, 2, 1, 1.5};
      Clock clock;
      const size_t machine = clock.machine(*besides.rates[0]);
      double end = 0;
      std::vector<Clock::Item> items;
      for (const int kind : {0, far ? 2 : 1, 3, 4}) {
        const size_t load = kind > 2 ? static_cast<size_t>(kind - 1) : kind == 0 ? 0u : 1u;
        items.push_back(clock.work(clock.resource(), alone[load]));
        clock.runs_on(items.back(), machine, kind);
      }
      CHECK(clock.run().items.empty());
      for (const Clock::Item i : items) end = std::max(end, clock.end(i));
      CHECK(end == doctest::Approx(together_seconds(alone, constants, far)));
    }
  }
}

}  // namespace
}  // namespace whale
