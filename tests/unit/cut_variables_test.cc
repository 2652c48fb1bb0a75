// Variables that a plan cuts over its devices: read, written, initialized, saved and loaded as if they were whole.
#include <doctest/doctest.h>

#include <cstdlib>
#include <filesystem>
#include <numeric>
#include <random>

#include "base/error.h"
#include "device/ref/ref.h"
#include "hand_plan.h"
#include "run/executor.h"
#include "session/initialize.h"
#include "session/session.h"

namespace whale {
namespace {

using Values = std::vector<float>;

AxisSharding shard(int dim, int64_t outer = 1, int64_t inner = 1, bool state = false) {
  AxisSharding l;
  l.placement = Placement::kShard;
  l.sub_axis = {dim, outer, inner};
  l.state = state;
  return l;
}

// The hand plan over 6 devices of a mesh [2, 3] with uneven shares, and more variables, cut in all ways.
Plan cut_plan(int variant) {
  test::HandOptions o;
  o.devices = 6;
  o.batch = 12;
  Plan plan = test::hand_plan(o);
  plan.meshes[0].axes = {{"replica", 2, {3, 1}, {1, 4}}, {"split", 3, {2, 0, 5}, {}}};
  plan.variables[0].storage_sharding.axes.resize(2);
  plan.entries[0].outputs[0].cut_by = {false, false};
  plan.entries[0].outputs[1].cut_by = {true, true};
  for (DeviceRow& row : plan.entries[0].rows) row.coordinates = {row.device / 3, row.device % 3};
  const AxisSharding whole;
  const std::vector<std::pair<Dims, std::vector<AxisSharding>>> list = {
      {{7, 9}, {whole, shard(0)}},
      {{7, 9}, {whole, shard(1)}},
      {{8, 9}, {shard(0), shard(1)}},
      {{4, 30, 2}, {whole, shard(1, 2, 3)}},  // the middle sub-axis of 2 * 5 * 3
      {{4, 30, 2}, {shard(2), shard(1, 2, 3)}},
      {{11}, {shard(0, 1, 1, true), whole}},        // ZeRO
      {{11, 3}, {shard(0, 1, 1, true), shard(0)}},  // both axes cut one sub-axis
      {{}, {whole, whole}},
      {{0, 5}, {whole, shard(1)}},
      {{3, 4, 5, 6}, {shard(1), shard(3)}},
      {{90000, 3}, {shard(0, 1, 1, true), shard(1)}},  // several blocks of initial values
  };
  for (size_t i = 0; i < list.size(); ++i) {
    plan.variables.push_back(test::hand_variable("v" + std::to_string(i), list[i].first, 0, 2));
    PlanVariable& v = plan.variables.back();
    v.init = {.kind = InitKind::kNormal, .a = 0, .b = 1, .file = {}, .key = {}};
    if (variant == 1) v.storage_sharding.axes = list[i].second;
    if (variant == 2)  // the other way round
      for (size_t a = 0; a < 2; ++a) v.storage_sharding.axes[a] = list[i].second[1 - a];
    if (i % 4 == 3) v.role = Role::kState;
  }
  return plan;
}

Values read_all(Session& session, const PlanVariable& v) {
  Values values(static_cast<size_t>(element_count(v.dims)), -1);
  session.read(v.name, {v.dtype, v.dims, values.data()});
  return values;
}

std::unique_ptr<Machine> open(const Plan& plan) {
  std::vector<std::unique_ptr<Device>> devices;
  for (const DeviceSpec& spec : plan.devices) devices.push_back(make_ref_backend()->open(spec));
  return std::make_unique<Machine>(plan, std::move(devices));
}

TEST_CASE("cut variables: any run of bytes is read and written, and every device holds its part") {
  std::mt19937 random(5);
  for (const int variant : {0, 1, 2}) {
    const Plan plan = cut_plan(variant);
    const auto machine = open(plan);
    for (size_t v = 0; v < plan.variables.size(); ++v) {
      const PlanVariable& variable = plan.variables[v];
      CAPTURE(variant);
      CAPTURE(variable.name);
      const size_t n = static_cast<size_t>(element_count(variable.dims));
      Values whole(n);
      std::iota(whole.begin(), whole.end(), 1.0f);
      machine->write_variable(v, 0, whole.data(), n * 4);
      for (int i = 0; n > 0 && i < 40; ++i) {
        const size_t begin = random() % (n * 4), bytes = std::min<size_t>(random() % (n * 4 - begin + 1), 4000);
        std::vector<char> some(bytes, 'x');
        machine->read_variable(v, 0, begin, some.data(), bytes);
        CHECK(std::equal(some.begin(), some.end(), reinterpret_cast<const char*>(whole.data()) + begin));
        const size_t first = begin / 4, count = std::min<size_t>(n - first, random() % 50);
        for (size_t k = 0; k < count; ++k) whole[first + k] = -static_cast<float>(random() % 1000);
        machine->write_variable(v, first * 4, whole.data() + first, count * 4);
      }
      size_t held = 0;
      for (size_t d = 0; d < machine->size(); ++d) {
        const Part part =
            part_of(variable.dims, variable.storage_sharding, plan.meshes[0].axes, plan.entries[0].rows[d].coordinates);
        const auto* local = static_cast<const float*>(machine->memory(d).variable(v));
        REQUIRE(local != nullptr);
        REQUIRE(machine->memory(d).variable_bytes(v) == static_cast<size_t>(element_count(part.extents())) * 4);
        size_t wrong = 0;
        for_each_run(variable.dims, part, [&](int64_t logical, int64_t at, int64_t elements) {
          for (int64_t k = 0; k < elements; ++k) wrong += local[at + k] != whole[logical + k];
          held += static_cast<size_t>(elements);
        });
        CHECK(wrong == 0);
      }
      CHECK(held >= n);
    }
  }
}

TEST_CASE("cut variables: a session initializes, saves and loads them like whole ones") {
  char name[] = "/tmp/whale_cut_XXXXXX";
  const std::filesystem::path folder = mkdtemp(name);
  const auto backends = std::make_shared<Backends>();
  std::vector<std::unique_ptr<Session>> sessions;
  std::vector<std::shared_ptr<const Plan>> plans;
  for (const int variant : {0, 1, 2}) {
    plans.push_back(std::make_shared<const Plan>(cut_plan(variant)));
    sessions.push_back(std::make_unique<Session>(plans.back(), backends, SessionOptions{}));
  }
  for (const PlanVariable& v : plans[0]->variables)
    for (size_t s = 1; s < sessions.size(); ++s) {
      CAPTURE(v.name);
      CHECK(read_all(*sessions[s], v) == read_all(*sessions[0], v));
    }
  // Written through one plan, saved, and loaded through the others; a step runs in between.
  for (const PlanVariable& v : plans[1]->variables) {
    Values values(static_cast<size_t>(element_count(v.dims)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 1000) / 8 + 1;
    sessions[1]->write(v.name, {v.dtype, v.dims, values.data()});
    CHECK(read_all(*sessions[1], v) == values);
  }
  std::vector<float> x = test::hand_batch(12);
  float loss = 0;
  sessions[1]->step({{"x", {DType::kF32, {12, test::kWidth}, x.data()}}}, {{"loss", {DType::kF32, {}, &loss}}}).wait();
  CHECK(loss > 0);
  sessions[1]->save(folder / "ckpt");
  for (const size_t s : {0, 2}) {
    sessions[s]->load(folder / "ckpt");
    CHECK(sessions[s]->iteration() == 1);
    for (const PlanVariable& v : plans[0]->variables) CHECK(read_all(*sessions[s], v) == read_all(*sessions[1], v));
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("cut variables: a program that takes another part than the device holds is refused") {
  Plan plan = test::hand_plan();
  plan.variables[0].storage_sharding.axes = {shard(0)};
  const auto machine = open(plan);
  CHECK_THROWS_WITH_AS(Executor(*machine, plan.entries[0]), doctest::Contains("'w' has 8 bytes"), Error);
}

}  // namespace
}  // namespace whale
