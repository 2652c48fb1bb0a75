// Times of a model's ops that were measured: how they are kept, interpolated, refused, and what plans make of them.
#include "cost/measured.h"

#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <cmath>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "cost/measured_layers.h"
#include "cost/plausible.h"
#include "cost/profile_text.h"
#include "plan/figures.h"
#include "probe/model_profile.h"
#include "simulate/simulate.h"
#include "trained.h"
#include "unit/caught.h"

namespace whale {
namespace {

OpShape product_of(int64_t m, int64_t k, int64_t n, DType dtype = DType::kF32) {
  const Attrs attrs = complete_attrs(def(code_of("matmul")), {});
  OpView view{.code = code_of("matmul"),
              .attrs = &attrs,
              .inputs = {{dtype, {m, k}}, {dtype, {k, n}}, {}},
              .present = {true, true, false},
              .outputs = {{dtype, {m, n}}}};
  return shape_of(view, cost_of(view));
}

void add(MeasuredDevice& to, const OpShape& shape, double seconds) {
  to.ops[shape.key].push_back({shape.numbers, seconds, shape.cost, 0});
}

TEST_CASE("measured: between points times go as a power of the size, and never fall where they rise") {
  const MeasuredTimes times({{1, 2e-3}, {8, 16e-3}, {2, 3e-3}});
  CHECK(times.at(1) == doctest::Approx(2e-3));
  CHECK(times.at(2) == doctest::Approx(3e-3));
  CHECK(times.at(8) == doctest::Approx(16e-3));
  CHECK(times.at(4) == doctest::Approx(std::sqrt(3e-3 * 16e-3)));  // half way in logarithms
  CHECK(times.at(32) == doctest::Approx(64e-3));                   // with the size
  CHECK(times.at(0.5) == doctest::Approx(2e-3 / 1.5));             // as behind it
  CHECK(times.at(0) == 0);
  CHECK(rc::check("monotone", [] {
    std::vector<std::pair<double, double>> points;
    double x = 1, y = 1e-6;
    const int n = *rc::gen::inRange(1, 6);
    for (int i = 0; i < n; ++i) {
      points.emplace_back(x, y);
      x *= 1 + *rc::gen::inRange(1, 40) / 10.0, y *= 1 + *rc::gen::inRange(0, 40) / 10.0;
    }
    const MeasuredTimes times(points);
    double last = 0;
    for (double at = 0.1; at < 2 * x; at *= 1.3) {
      const double now = times.at(at);
      RC_ASSERT(now >= last * (1 - 1e-12));
      last = now;
    }
  }));
}

TEST_CASE("measured: points of an op are those that differ by one multiple; others by their work") {
  MeasuredDevice device;
  for (const int64_t b : {2, 8, 32}) add(device, product_of(16 * b, 64, 48), 1e-4 * std::pow(b, 0.5));
  add(device, product_of(16 * 8, 128, 48), 9e-4);  // another model's width
  device.index();
  for (const int64_t b : {2, 3, 5, 8, 12, 32}) {
    const auto own = device.own(product_of(16 * b, 64, 48));
    REQUIRE(own);
    CHECK(own->at(1) == doctest::Approx(1e-4 * std::sqrt(static_cast<double>(b))));
    CHECK(own->at(8.0 / static_cast<double>(b)) == doctest::Approx(1e-4 * std::sqrt(8.0)));  // of another local batch
  }
  CHECK(device.own(product_of(16 * 8, 128, 48))->at(1) == doctest::Approx(9e-4));
  CHECK(device.own(product_of(16 * 8, 64, 24)));         // half of its columns: a multiple of one dimension
  CHECK_FALSE(device.own(product_of(16 * 9, 32, 49)));   // neither
  CHECK_FALSE(device.own(product_of(32 * 8, 128, 96)));  // twice all sizes is eight times the work
  const OpShape other = product_of(16 * 9, 32, 49);
  const auto by_work = device.of(other, 1e11, 1e10);
  REQUIRE(by_work);
  CHECK(by_work->at(1) > 1e-4);
  CHECK(by_work->at(1) < 9e-4);
  CHECK_FALSE(device.of(product_of(4, 4, 4, DType::kF64), 1e11, 1e10));  // of a type that was not measured
  // A start of an op says nothing of a large one.
  MeasuredDevice small;
  add(small, product_of(2, 2, 2), 5e-6);
  small.index();
  CHECK_FALSE(small.of(product_of(512, 512, 512), 1e11, 1e10));
  CHECK(small.of(product_of(2, 3, 2), 1e11, 1e10));
  // Products of 16 bits, asked for before a plan has its precision.
  MeasuredDevice half;
  add(half, product_of(32, 64, 48, DType::kBF16), 5e-5);
  half.index();
  CHECK(half.own(product_of(32, 64, 48))->at(1) == doctest::Approx(5e-5));
}

std::string text_with(const char* name, const Json& value) {
  MeasuredProfile profile;
  profile.model = "m", profile.digest = "0";
  profile.devices.push_back(std::make_unique<MeasuredDevice>());
  profile.devices[0]->kind = {.kind = "cpu", .type = "", .cores = 1};
  add(*profile.devices[0], product_of(8, 8, 8), 1e-5);
  profile.devices[0]->steps.push_back({4, 1e-3, 2e-3, 1e-3, 4e-3});
  Json json = json_of(profile);
  json[Json::json_pointer(name)] = value;
  return text_of(json);
}

TEST_CASE("measured: a profile is read as it was written; what cannot be right is refused by name") {
  const Profile read = profile_of_text(text_with("/devices/0/device", "cpu@0"));
  REQUIRE(read.measured);
  const MeasuredDevice* device = read.measured->of({.kind = "cpu", .type = "", .cores = 1});
  REQUIRE(device != nullptr);
  CHECK(device->own(product_of(8, 8, 8))->at(1) == doctest::Approx(1e-5));
  CHECK(device->passes(4) == doctest::Approx(3));
  CHECK(read.measured->of({.kind = "cpu", .type = "", .cores = 2}) == nullptr);
  CHECK(text_of(json_of(*read.measured)) == text_with("/devices/0/device", "cpu@0"));
  const char* point = "/devices/0/ops/0/points/0/seconds";
  const auto said = [](const char* name, const Json& value) {
    return message_of([&] { profile_of_text(text_with(name, value)); }, {Code::kInvalidArgument});
  };
  for (const Json& bad : {Json(-1.0), Json(0.0), Json(1e9), Json(nullptr), Json("nan"), Json("1")})
    CHECK_MESSAGE(has(said(point, bad), "'seconds'"), bad.dump());
  CHECK(has(said(point, 1e-20), "no device does"));  // of 1024 FLOPs
  CHECK(has(said("/units/seconds", "ms"), "expected 's'"));
  CHECK(has(said("/units/flops", "G"), "has flops in 'G', expected '1'"));
  CHECK(has(said("/units/bytes", "MB"), "has bytes in 'MB', expected 'B'"));
  CHECK(has(said("/units/samples", "k"), "has samples in 'k'"));
  for (const char* where : {"/unit", "/devices/0/unit", "/devices/0/time_unit", "/devices/0/ops/0/unit",
                            "/devices/0/ops/0/points/0/unit"}) {
    CHECK(has(said(where, "ms"), "\"ms\", expected \"s\": all times are in seconds"));
    CHECK(said(where, "s") == "");
  }
  CHECK(has(said("/schema", "whale.profile/9"), "measure again"));
  CHECK(has(said("/devices", Json::array()), "is empty"));
  CHECK(has(said("/devices/0/ops", Json::array()), "is empty"));
  CHECK(has(said("/devices/0/ops/0/points/0/numbers/0", 1.5), "a whole one"));
  CHECK(has(said("/devices/0/steps/0/samples", 0), "'samples'"));
  CHECK(has(said("/devices/0/steps/0/forward", -1), "'forward'"));
  CHECK(has(said("/devices/0/kind", "banana"), "has kind 'banana'"));
  CHECK(has(said("/devices/0/type", "V1000"), "'V1000' is not a type of device, nearest are V100-16GB"));
  CHECK(has(said(point, 86401), "at most 86400 (a day)"));
  CHECK(has(message_of([] { profile_of_text("{}", "here.json"); }), "'here.json': no profile: "));
  CHECK(has(message_of([] { profile_of_text(R"({"nodes": []})"); }), "no profile, but a cluster"));
  CHECK(has(message_of([] { profile_of_text("{\"passes\": 1,\n \"passes\": 2}"); }), "/passes is given twice"));
  CHECK(has(message_of([] { profile_of_text("{\"passes\":\n NaN}"); }), "line 2, column 2: "));
}

// A profile of a core that reaches 1e11 FLOP/s: three sizes of a product, steps of two batches.
struct Written {
  double unit = 1;         // of all times
  double small = 1;        // a factor of the time of the smallest size
  double step = 1;         // of a step's time
  const char* again = "";  // a further point of the largest size with so many seconds
  const char* steps = "";  // further steps
  const char* machine = R"(, "profile": {"device.flops_per_second": 1e11, "device.bytes_per_second": 2e10})";
  std::string text() const {
    std::string points;
    for (const int64_t rows : {64, 128, 256}) {
      const double flops = 2.0 * 512 * 512 * static_cast<double>(rows);
      points += fmt::format(
          "{}{{\"seconds\": {}, \"flops\": {}, \"bytes\": {}, \"numbers\": [{}, 512, 512, 512], \"samples\": {}}}",
          points.empty() ? "" : ", ", unit * (rows == 64 ? small : 1) * flops / 5e10, flops,
          4.0 * static_cast<double>(rows) * 1024, rows, rows / 64);
    }
    if (*again != 0)
      points += fmt::format(
          ", {{\"seconds\": {}, \"flops\": 134217728, \"bytes\": 1048576, \"numbers\": [256, 512, 512, 512], "
          "\"samples\": 4}}",
          again);
    constexpr const char* kText = R"json({{"schema": "whale.profile/1", "units": {{"seconds": "s"}},
      "model": {{"name": "m", "digest": "0"}},
      "devices": [{{"kind": "cpu", "cores": 1, "ops": [{{"op": "matmul(f32:2, f32:2)(f32:2)", "points": [{}]}}],
      "steps": [{{"samples": 4, "forward": {}, "backward": {}, "update": 0, "step": {}}}{}]}}]{}}})json";
    return fmt::format(fmt::runtime(kText), points, unit * 3e-3, unit * 6e-3, unit * step * 9e-3, steps, machine);
  }
};

TEST_CASE("measured: a profile that contradicts itself, or has times of another unit, is refused or doubted by name") {
  const auto said = [](const Written& written) {
    return message_of([&] { profile_of_text(written.text(), "p.json"); }, {Code::kInvalidArgument});
  };
  const auto doubts = [](const Written& written) { return profile_of_text(written.text(), "p.json").measured->doubts; };
  CHECK(doubts({}).empty());
  CHECK(doubts({.again = "0.0027"}).empty());  // the same again, to a hundredth
  CHECK(doubts({.unit = 5}).empty());
  CHECK(doubts({.unit = 0.2}).empty());

  for (const char* machine : {Written().machine, ""}) {
    const double more = *machine == 0 ? 10 : 1;  // where nobody knows what the device does
    CAPTURE(machine);
    const std::string slow = said({.unit = 1000 * more, .machine = machine}),
                      fast = said({.unit = 1e-3 / more, .machine = machine});
    CHECK(has(slow, "'p.json': the profile of cpu with 1 core has ops of "));
    CHECK(has(slow, "which by its rates take "));
    CHECK(has(slow, "are these in milliseconds"));
    CHECK(has(fast, "FLOP/s where 1e+11 are what it reaches"));
    const std::vector<std::string> some = doubts({.unit = 100 * more, .machine = machine});
    REQUIRE(some.size() == 1);
    CHECK(has(some[0], "has ops of"));
  }

  CHECK(has(said({.again = "0.01"}), "has two times of matmul(f32:2, f32:2)(f32:2) at size [256, 512, 512, 512]: "));
  REQUIRE(doubts({.again = "0.004"}).size() == 1);
  CHECK(has(doubts({.again = "0.004"})[0], "has two times"));

  const std::vector<std::string> falls = doubts({.small = 10, .step = 3});  // 6.7 ms, 1.3 of twice the size
  REQUIRE(falls.size() == 1);
  CHECK(has(falls[0], "at size [64, 512, 512, 512] and 0.00134218 at [128, 512, 512, 512], which is more work"));
  CHECK(has(said({.small = 200, .step = 20}), "which is more work: measure again"));

  CHECK(has(said({.step = 0.01}), "its forward, backward and update 0.009 together"));
  CHECK(has(said({.steps = R"(, {"samples": 4, "forward": 1, "backward": 1, "update": 0, "step": 2})"}),
            "has two steps of 4 samples"));
  CHECK(has(said({.steps = R"(, {"samples": 8, "forward": 1e-4, "backward": 1e-4, "update": 0, "step": 2e-4})"}),
            "a step of 4 samples takes 0.009 seconds and one of 8 takes 0.0002"));
  CHECK(doubts({.steps = R"(, {"samples": 8, "forward": 1e-3, "backward": 2e-3, "update": 0, "step": 3e-3})"}).size() ==
        1);
}

TEST_CASE("measured: layers that cannot be, and a profile of another graph") {
  MeasuredProfile profile;
  profile.devices.push_back(std::make_unique<MeasuredDevice>());
  profile.devices[0]->kind = {.kind = "null", .type = "V100-32GB"};
  const auto with = [&](std::vector<std::pair<int64_t, double>> sizes) {
    profile.devices[0]->layers.clear(), profile.doubts.clear();
    for (const auto& [samples, seconds] : sizes)
      profile.devices[0]->layers.push_back(
          {1, samples, {{seconds, seconds, 0}, {seconds, seconds, 0}, {seconds, seconds, 0}}});
    return message_of([&] { check_plausible(profile, nullptr); });
  };
  CHECK(with({{1, 1e-3}, {2, 1.8e-3}, {4, 1e-3}}).empty());
  CHECK(profile.doubts.empty());
  CHECK(has(with({{1, 1e-3}, {1, 3e-3}}), "has layers at 1 samples and 1 way(s) twice"));
  CHECK(has(with({{1, 1e-3}, {2, 1e-5}}), "says that all layers take 0.006 seconds at 1 samples and 6e-05 at 2"));
  const auto against = [&](double flops) {
    std::vector<std::string> doubts;
    const std::string said = message_of([&] { check_layers(profile, flops, 30, doubts); });
    return said.empty() ? fmt::format("{} doubts", doubts.size()) : said;
  };
  (void)with({{4, 10e-3}});  // 30 ms forward on a device of 13.8 TFLOP/s in f32 and 81 in f16
  CHECK(against(50e9) == "0 doubts");
  CHECK(against(500e9) == "0 doubts");
  CHECK(has(against(500e12), "says that forward takes 0.03 seconds of 4 samples in 1 way(s)"));
  CHECK(against(20e12) == "1 doubts");
  (void)with({{4, 10}});
  CHECK(has(against(5e9), "are these in milliseconds"));

  // The digest is that of the graph.
  const small::Model m = small::mlp(8), other = small::mlp(8, OptimizerKind::kAdamW);
  const std::vector<DeviceSpec> devices = parse_devices("ref", {0});
  ModelProfileOptions options;
  options.seconds = 0.01;
  Json measured = profile_model(std::make_shared<Backends>(), m.g, devices, options);
  for (Json& device : measured.at("devices")) device.erase("steps");  // a busy machine's say little
  const auto noted = [&](const Graph& g) {
    CompileOptions compiled;
    compiled.strategy = "local", compiled.profile = profile_of_text(text_of(measured), "p.json");
    const Plan plan = compile(g, devices, compiled);
    return std::ranges::any_of(plan.notes, [](const std::string& n) {
      return has(n, "The profile 'p.json' was measured with another graph");
    });
  };
  CHECK(!noted(m.g));
  CHECK(noted(other.g));
}

// Times by a rule of the test's own, of all instructions of a one-device plan at some batches.
template <class Rule>
std::unique_ptr<MeasuredDevice> by_rule(const Graph& g, const DeviceSpec& device, const std::vector<int64_t>& batches,
                                        Rule rule) {
  CompileOptions options;
  options.strategy = "local", options.train_batches = batches;
  const Plan plan = compile(g, {device}, options);
  auto out = std::make_unique<MeasuredDevice>();
  for (const int64_t b : batches) {
    const Entry* entry = plan.find_entry("train", b);
    REQUIRE(entry != nullptr);
    const Program& program = entry->programs[0];
    for (const Segment& s : program.segments)
      for (const Instruction& i : s.instructions)
        if (i.kernel() != nullptr) {
          const OpShape shape = measured_shape(i, program.buffers);
          auto& points = out->ops[shape.key];
          if (std::ranges::none_of(points, [&](const auto& p) { return p.numbers == shape.numbers; }))
            points.push_back({shape.numbers, rule(i, b), shape.cost, b});
        }
  }
  out->index();
  return out;
}

CompileOptions with(std::shared_ptr<const MeasuredProfile> measured, const char* strategy) {
  CompileOptions options;
  options.strategy = strategy;
  options.profile.measured = std::move(measured);
  return options;
}

double seconds_of(const Plan& plan) { return times_of(plan, plan.entries[0], SIZE_MAX)->seconds; }

TEST_CASE("measured: a simulated step is the sum of what was measured, of a plan file too") {
  const small::Model m = small::gpt(6);
  const DeviceSpec device = parse_devices("null", {0})[0];
  auto profile = std::make_shared<MeasuredProfile>();
  profile->model = "gpt";
  profile->devices.push_back(by_rule(m.g, device, {6}, [](const Instruction& i, int64_t) {
    return 1e-3 * static_cast<double>(1 + i.name.size() % 7);
  }));
  profile->devices[0]->kind = kind_of(device, 1);
  const Plan plan = compile(m.g, {device}, with(profile, "local"));
  // The rule by hand, but that instructions of one shape share the time of the first of them.
  double sum = 0, others = 0;
  const CostModel cost = cost_of(plan);
  for (const Segment& s : plan.entries[0].programs[0].segments)
    for (const Instruction& i : s.instructions) {
      const OpShape shape = measured_shape(i, plan.entries[0].programs[0].buffers);
      if (i.kernel() == nullptr) {
        others += op_seconds(OpCost{i.flops, i.bytes}, cost.device);
        continue;
      }
      const auto& points = profile->devices[0]->ops.at(shape.key);
      const auto at = std::ranges::find_if(points, [&](const auto& p) { return p.numbers == shape.numbers; });
      REQUIRE(at != points.end());
      sum += at->seconds;
    }
  CHECK(sum > 0.05);
  CHECK(seconds_of(plan) == doctest::Approx(sum).epsilon(0.01));
  CHECK(others < 0.01 * sum);
  const std::vector<uint8_t> bytes = serialize(plan);
  const Plan read = deserialize(bytes.data(), bytes.size());
  REQUIRE(read.profile.measured);
  CHECK(seconds_of(read) == doctest::Approx(seconds_of(plan)));
  CHECK(serialize(read) == bytes);
  CHECK(std::ranges::any_of(plan.notes, [](const std::string& n) { return has(n, "are measured"); }));
}

TEST_CASE("measured: shares of replicas are the best of all, where the ratio of speeds varies with size") {
  const int64_t batch = 24;
  const small::Model m = small::mlp(batch);
  std::vector<DeviceSpec> devices = parse_devices("V100-32GB:1|P100-16GB:1", {0});
  REQUIRE(devices.size() == 2);
  const std::vector<int64_t> batches{1, 2, 3, 4, 6, 8, 12, 16, 24};
  // One is fast for few samples and grows fast; the other starts slowly.
  const auto rule = [](size_t kind, double b) { return kind == 0 ? 1e-3 * std::pow(b, 1.3) : 8e-3 * std::pow(b, 0.5); };
  auto profile = std::make_shared<MeasuredProfile>();
  profile->model = "mlp";
  for (size_t k = 0; k < 2; ++k) {
    profile->devices.push_back(by_rule(m.g, devices[k], batches, [&](const Instruction& i, int64_t b) {
      return i.flops > 0 && i.phase != Phase::kUpdate ? rule(k, static_cast<double>(b)) : 1e-9;
    }));
    profile->devices.back()->kind = kind_of(devices[k], 1);
  }
  const Plan plan = compile(m.g, devices, with(profile, "replica"));
  const Ints got{samples_of(plan.entries[0], plan.entries[0].rows[0]),
                 samples_of(plan.entries[0], plan.entries[0].rows[1])};
  int64_t best = 0;
  double least = 1e9;
  for (int64_t mine = 1; mine < batch; ++mine)
    if (const double slowest = std::max(rule(0, static_cast<double>(mine)), rule(1, static_cast<double>(batch - mine)));
        slowest < least)
      least = slowest, best = mine;
  CHECK(got[0] + got[1] == batch);
  CHECK(std::abs(got[0] - best) <= 1);  // octaves between which times are interpolated
  CHECK(samples_of(compile(m.g, devices, with(nullptr, "replica")).entries[0], plan.entries[0].rows[0]) > 0);
}

TEST_CASE("measured: stages are cut by what was measured") {
  small::Model m = small::gpt(8, OptimizerKind::kSgd, 6);
  const std::vector<DeviceSpec> devices = parse_devices("V100-32GB:2", {0});
  const auto blocks_of_first = [&](double first_block) {
    auto profile = std::make_shared<MeasuredProfile>();
    profile->model = "gpt";
    profile->devices.push_back(by_rule(m.g, devices[0], {8}, [&](const Instruction& i, int64_t) {
      return i.flops > 0 ? (i.verb() == "embedding" ? first_block : 1e-3) : 1e-9;
    }));
    profile->devices[0]->kind = kind_of(devices[0], 1);
    const Plan plan = compile(m.g, devices, with(profile, "pipeline(2, micro_batches=1)"));
    int64_t variables = 0;
    for (const PlanVariable& v : plan.variables) variables += v.mesh == 0 && v.role == Role::kParameter;
    return variables;
  };
  CHECK(blocks_of_first(1e-3) > blocks_of_first(40e-3));  // a slow embedding leaves less for the first stage
}

TEST_CASE("measured: a profile of another model is refused, one of other devices is said") {
  const small::Model m = small::mlp(8, OptimizerKind::kSgd, 64, 128),
                     other = small::mlp(8, OptimizerKind::kSgd, 65, 97);
  const DeviceSpec device = parse_devices("null", {0})[0];
  auto profile = std::make_shared<MeasuredProfile>();
  profile->model = "mlp-of-another-width";
  profile->devices.push_back(by_rule(other.g, device, {8}, [](const Instruction&, int64_t) { return 1e-3; }));
  profile->devices[0]->kind = kind_of(device, 1);
  const std::string said =
      message_of([&] { compile(m.g, {device}, with(profile, "local")); }, {Code::kInvalidArgument});
  CHECK(has(said, "mlp-of-another-width"));
  CHECK(has(said, "has hardly an op of model 'mlp'"));
  const DeviceSpec gpu = parse_devices("T4", {0})[0];
  const Plan plan = compile(other.g, {gpu}, with(profile, "local"));
  CHECK(std::ranges::any_of(plan.notes, [](const std::string& n) { return has(n, "The profile has none of T4"); }));
}

TEST_CASE("measured: steps of a model are run on devices, and each instruction of its plans has a time") {
  const small::Model m = small::gpt(4);
  const auto backends = std::make_shared<Backends>();
  ModelProfileOptions options;
  options.seconds = 0.01;
  const std::vector<DeviceSpec> devices = parse_devices("ref:2", {0});
  const Json json = profile_model(backends, m.g, devices, options);
  const Profile profile = profile_of_text(text_of(json));
  REQUIRE(profile.measured);
  const MeasuredDevice* device = profile.measured->of(kind_of(devices[0], 2));
  REQUIRE(device != nullptr);
  CHECK(device->steps.size() == 3);  // of 4, 2 and 1 samples
  for (const MeasuredStep& s : device->steps) {
    CHECK(s.forward > 0);
    CHECK(s.backward > 0);
    CHECK(s.step > 0);
  }
  CompileOptions with;
  with.strategy = "replica", with.profile = profile;
  const Plan plan = compile(m.g, devices, with);
  const Program& program = plan.entries[0].programs[0];
  for (const Segment& s : program.segments)
    for (const Instruction& i : s.instructions)
      if (i.kernel() != nullptr && i.phase != Phase::kUpdate)
        CHECK_MESSAGE(device->own(measured_shape(i, program.buffers)), i.name);
  CHECK(has(
      message_of([&] { profile_model(backends, m.g, parse_devices("null:1", {0}), options); }, {Code::kUnimplemented}),
      "not profiled"));
  options.samples = {5};
  CHECK(has(message_of([&] { profile_model(backends, m.g, devices, options); }, {Code::kInvalidArgument}),
            "a local batch of 5"));
}

TEST_CASE("measured: times of layers are shared among their instructions") {
  MeasuredDevice device;
  for (const int64_t samples : {1, 4})
    for (const int64_t ways : {1, 2}) {
      MeasuredLayers layers{.ways = ways, .samples = samples, .layers = {}};
      for (int k = 0; k < 4; ++k) {
        const double seconds = 1e-3 * (k + 1) * static_cast<double>(samples) / static_cast<double>(ways);
        layers.layers.push_back({seconds, 2 * seconds, 0});
      }
      device.layers.push_back(layers);
    }
  const std::vector<MeasuredLayer> at = layers_at(device, 1, 2);
  REQUIRE(at.size() == 4);
  CHECK(at[2].forward == doctest::Approx(6e-3));
  CHECK(at[2].backward == doctest::Approx(12e-3));
  CHECK(layers_at(device, 4, 4)[1].forward == doctest::Approx(2e-3));  // half of two ways'
  std::vector<Scope> scopes(5);
  for (size_t s = 1; s < scopes.size(); ++s) scopes[s].kind = ScopeKind::kName, scopes[s].parent = 0;
  scopes[1].name = "block0", scopes[2].name = "mlp2", scopes[2].parent = 1, scopes[3].name = "block1",
  scopes[4].name = "head";
  const Blocks blocks = blocks_of(scopes);
  CHECK(blocks.count == 2);
  CHECK(blocks.of_scope == std::vector<int32_t>{kNone, 0, 0, 1, kNone});
}

}  // namespace
}  // namespace whale
