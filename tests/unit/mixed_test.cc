// Devices of unlike speed and memory: who gets what, and that it changes no result.
#include <doctest/doctest.h>

#include <algorithm>

#include "cluster/device_kinds.h"
#include "cluster/devices.h"
#include "compile/automatic.h"
#include "compile/compile.h"
#include "compile/source_check.h"
#include "plan/figures.h"
#include "simulate/simulate.h"
#include "trained.h"
#include "unit/caught.h"

namespace whale {
namespace {

// Devices of these FLOP/s (in 1e9) whose memory and starts are of no account.
std::vector<DeviceSpec> of_speeds(const char* kind, const std::vector<double>& speeds) {
  std::vector<DeviceSpec> out;
  for (const double speed : speeds) {
    out.push_back(parse_devices(kind, {0})[0]);
    out.back().figures.f32_flops_per_second = speed * 1e9;
    out.back().figures.bytes_per_second = 1e15, out.back().figures.seconds_per_op = 1e-12;
    out.back().figures.inside = {1e15, 1e-12};
  }
  return out;
}

CompileOptions with(const char* strategy) {
  CompileOptions options;
  options.strategy = strategy;
  return options;
}

Ints samples_of(const Plan& plan) {
  Ints out;
  for (const DeviceRow& row : plan.entries[0].rows) out.push_back(samples_of(plan.entries[0], row));
  return out;
}

double seconds_of(const Plan& plan) { return times_of(plan, plan.entries[0], SIZE_MAX)->seconds; }

TEST_CASE("mixed: replicas get samples by speed") {
  const small::Model m = small::mlp(12);
  CHECK(samples_of(compile(m.g, of_speeds("null", {3, 1}), with("replica"))) == Ints{9, 3});
  CHECK(samples_of(compile(m.g, of_speeds("null", {1, 2, 3}), with("replica"))) == Ints{2, 4, 6});
  CHECK(samples_of(compile(m.g, of_speeds("null", {1, 1, 1}), with("replica"))) == Ints{4, 4, 4});
  // What is written stays.
  CHECK(samples_of(compile(m.g, of_speeds("null", {3, 1}), with("replica(2, shares=[1,1])"))) == Ints{6, 6});
  // Replicas of two: as fast as their ways together; equal ones inside.
  const Plan nested = compile(m.g, of_speeds("null", {2, 2, 1, 1}), with("replica(2) > split(2)"));
  CHECK(samples_of(nested) == Ints{8, 8, 4, 4});
}

// What does not go by samples (updates, starts) is little beside what does.
const small::Model& wide() {
  static const small::Model model = small::mlp(24576, OptimizerKind::kSgd, 64, 64);
  return model;
}
// In 24ths of the batch.
Ints parts_of(const std::vector<DeviceSpec>& devices) {
  Ints out;
  for (const int64_t n : samples_of(compile(wide().g, devices, with("replica")))) out.push_back((n + 512) / 1024);
  return out;
}

TEST_CASE("mixed: devices that nobody has measured are as fast as their cores") {
  CHECK(parts_of(parse_devices("cpu@0,cpu@1*2", {0, 1})) == Ints{12, 6, 6});
  CHECK(parts_of(parse_devices("cpu@0-2,cpu@3", {0, 1, 2, 3})) == Ints{18, 6});
  CHECK(parts_of(parse_devices("cpu@0*3", {0})) == Ints{8, 8, 8});
  // Figures of their own are of what they reach there.
  std::vector<DeviceSpec> probed = parse_devices("cpu@0,cpu@1*2", {0, 1});
  for (DeviceSpec& d : probed) d.figures.f32_flops_per_second = 1e9, d.figures.bytes_per_second = 1e9;
  CHECK(parts_of(probed) == Ints{8, 8, 8});
}

TEST_CASE("mixed: cores of the same number on two nodes are two cores") {
  std::vector<DeviceSpec> devices = parse_devices("cpu@0*3", {0});
  devices[2].node = 1;
  CHECK(sharers_of(devices) == std::vector<int64_t>{2, 2, 1});
  CHECK(parts_of(devices) == Ints{6, 6, 12});
}

TEST_CASE("mixed: ways of a split get parts by speed, in units of what is cut") {
  const Plan plan = compile(small::mlp(12, OptimizerKind::kSgd, 4, 16).g, of_speeds("null", {3, 1}), with("split"));
  REQUIRE(plan.meshes[0].axes[0].shares.size() == 2);
  CHECK(plan.meshes[0].axes[0].shares[0] == 3 * plan.meshes[0].axes[0].shares[1]);
}

TEST_CASE("mixed: a slow stage gets less to do") {
  const small::Model m = small::gpt(6, OptimizerKind::kSgd, 6);
  const auto layers_of = [&](const std::vector<double>& speeds) {
    const Plan plan = compile(m.g, of_speeds("null", speeds), with("pipeline(2, micro_batches=3)"));
    std::vector<double> flops;
    for (const DeviceRow& row : plan.entries[0].rows)
      flops.push_back(step_of(plan.entries[0].programs[row.program]).flops);
    return flops[0] / (flops[0] + flops[1]);
  };
  CHECK(layers_of({1, 1}) == doctest::Approx(0.5).epsilon(0.15));
  CHECK(layers_of({2, 1}) == doctest::Approx(2.0 / 3).epsilon(0.1));
  CHECK(layers_of({1, 2}) == doctest::Approx(1.0 / 3).epsilon(0.15));
}

TEST_CASE("mixed: a cut beside a slow link is nearly as fast as the best of all cuts") {
  using enum OpCode;
  small::Model m;
  TensorId x = m.input("x", {512, 1024});
  const TensorId y = m.input("y", {512, 1024});
  for (int k = 0; k < 8; ++k)
    x = m.op(k_relu, {m.op(k_matmul, {x, m.variable("w" + std::to_string(k), {1024, 1024})})});
  m.minimize(m.op(k_reduce_mean, {m.op(k_squared_difference, {x, y})}), OptimizerKind::kAdamW);
  for (const char* devices :
       {"2xV100-32GB:1~10Gb/s@30us", "2xT4:1~5Gb/s@30us", "T4:1~5Gb/s@30us|V100-32GB:1~5Gb/s@30us"}) {
    CAPTURE(devices);
    const std::vector<DeviceSpec> mine = parse_devices(devices, {0});
    const char* strategy = "pipeline(2, micro_batches=8, warmup=[2,1])";
    const double planned = seconds_of(compile(m.g, mine, with(strategy)));
    double best = std::numeric_limits<double>::infinity();
    for (size_t begin = 1; begin < m.g.ops.size(); ++begin) {
      CompileOptions options = with(strategy);
      options.stages.begins = {static_cast<int64_t>(begin)};
      try {
        best = std::min(best, seconds_of(compile(m.g, mine, options)));
      } catch (const Error&) {  // no cut there
      }
    }
    CHECK(planned < 1.1 * best);
  }
}

TEST_CASE("mixed: stages are cut for the devices that the order of a scope gives them") {
  const small::Model m = small::gpt(6, OptimizerKind::kSgd, 6);
  const auto first_stage = [&](const char* strategy) {
    const Plan plan = compile(m.g, of_speeds("null", {2, 2, 1, 1}), with(strategy));
    double of_first = 0, all = 0;
    for (size_t s = 0; s < plan.meshes.size(); ++s)
      for (const int32_t d : plan.meshes[s].devices) {
        const DeviceRow& row = plan.entries[0].rows[d];
        const double flops = step_of(plan.entries[0].programs[row.program]).flops;
        all += flops, of_first += s == 0 ? flops : 0;
      }
    return of_first / all;
  };
  CHECK(first_stage("pipeline(2, micro_batches=3) > replica(2)") > 0.6);
  CHECK(first_stage("replica(2, device_order=[0,2,1,3]) > pipeline(2, micro_batches=3)") > 0.6);
  CHECK(first_stage("replica(2) > pipeline(2, micro_batches=3)") == doctest::Approx(0.5).epsilon(0.15));
}

TEST_CASE("mixed: who has no room gets less than by speed") {
  const small::Model m = small::gpt(32, OptimizerKind::kAdamW, 2, 32);
  std::vector<DeviceSpec> devices = of_speeds("null", {1, 1});
  const Plan alike = compile(m.g, devices, with("replica"));
  CHECK(samples_of(alike) == Ints{16, 16});
  int64_t held = 0;
  for (const DeviceRow& row : alike.entries[0].rows)
    held = std::max(held, memory_of(alike, alike.entries[0], static_cast<size_t>(row.program)).device.total());
  devices[0].memory_bytes = held * 3 / 4, devices[1].memory_bytes = held * 2;
  const Plan plan = compile(m.g, devices, with("replica"));
  const Ints samples = samples_of(plan);
  CHECK(samples[0] < 16);
  CHECK(samples[0] + samples[1] == 32);
  CHECK(memory_of(plan, plan.entries[0], static_cast<size_t>(plan.entries[0].rows[0].program)).device.total() <=
        devices[0].memory_bytes);
}

TEST_CASE("mixed: a plan for unlike devices trains what one device trains") {
  const small::Model m = small::gpt(12, OptimizerKind::kAdamW, 4);
  const small::Trained one = small::train(compile(m.g, parse_devices("ref:1"), with("replica")));
  for (const char* strategy : {"replica", "split", "replica(2) > split(2)", "replica(2) > pipeline(2, micro_batches=3)",
                               "pipeline(2, micro_batches=3) > replica(2)", "pipeline(4, micro_batches=2)", "auto"}) {
    CAPTURE(strategy);
    const Plan plan = compile(m.g, of_speeds("ref", {4, 1, 2, 1}), with(strategy));
    CHECK(small::distance(small::train(plan), one) < 2e-5);
    // From a file, and for another batch, with the same shares.
    const std::vector<uint8_t> bytes = serialize(plan);
    const Plan again = deserialize(bytes.data(), bytes.size());
    CHECK(again.meshes == plan.meshes);
    CHECK_NOTHROW(verify_source(again));
    CHECK_NOTHROW(compile_entry(again, "train", 7));
  }
}

// Shares are dealt by the source's ops; what passes make of them differs in what is small.
TEST_CASE("mixed: no other shares of a batch are faster on the clock by a hundredth") {
  const small::Model m = small::mlp(9);
  for (const std::vector<double>& speeds : {std::vector<double>{2, 1}, {5, 2}, {1.5, 1}, {4, 3}}) {
    const auto devices = of_speeds("null", speeds);
    const double ours = seconds_of(compile(m.g, devices, with("replica")));
    for (int k = 1; k < 9; ++k)
      CHECK(ours <=
            seconds_of(compile(m.g, devices, with(fmt::format("replica(2, shares=[{},{}])", k, 9 - k).c_str()))) *
                1.01);
  }
}

TEST_CASE("auto: as good as what one would try by hand, and says why the others lose") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 4, 16);
  const std::vector<DeviceSpec> devices = parse_devices("2xT4:2~25Gb/s");
  const Found found = search(m.g, devices, {});
  REQUIRE(found.fits());
  for (const char* strategy : {"replica", "split(2)", "replica(2) > split(2)",
                               "replica(2) > pipeline(2, micro_batches=4)", "pipeline(4, micro_batches=4)"}) {
    CAPTURE(strategy);
    const bool two = std::string_view(strategy) == "split(2)";
    const std::vector<DeviceSpec> mine = two ? std::vector<DeviceSpec>{devices[0], devices[1]} : devices;
    if (!two) CHECK(found.winner().seconds <= seconds_of(compile(m.g, mine, with(strategy))) * (1 + 1e-9));
  }
  CHECK(found.winner().simulated);
  for (size_t k = 1; k < found.list.size(); ++k) CHECK(!found.list[k].lost.empty());
  const Plan plan = compile(m.g, devices, with("auto"));
  CHECK(plan.strategy == found.winner().candidate.strategy);
  CHECK(has(plan.notes.at(0), "Strategy auto chose"));
  CHECK(seconds_of(plan) == doctest::Approx(found.winner().seconds));
}

TEST_CASE("auto: of unlike devices never slower than those of one type; those left out are named") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 4, 16);
  const double mixed = search(m.g, parse_devices("V100:2|P100:2~1Gb/s"), {}).winner().seconds;
  CHECK(mixed <= search(m.g, parse_devices("V100:2"), {}).winner().seconds * (1 + 1e-9));
  CHECK(mixed <= search(m.g, parse_devices("P100:2~1Gb/s"), {}).winner().seconds * (1 + 1e-9));
  const Plan plan = compile(m.g, parse_devices("V100:2|P100:2~1Gb/s"), with("auto"));
  REQUIRE(plan.devices.size() < 4);  // a slow network is worse than none
  CHECK(std::ranges::any_of(plan.notes, [](const std::string& n) { return has(n, "device(s) stay idle"); }));
}

TEST_CASE("auto: a slow network is worth no more than what is behind it") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 4, 16);
  const auto best = [&](const char* devices) { return search(m.g, parse_devices(devices), {}).winner().seconds; };
  CHECK(best("2xV100:2~1Mb/s") <= best("V100:2") * (1 + 1e-9));
  CHECK(best("2xV100:2~1Mb/s|T4:1~1Mb/s") <= best("V100:2") * (1 + 1e-9));
  CHECK(best("V100:4~1Mb/s|V100:2~1Mb/s") <= best("V100:4") * (1 + 1e-9));
}

TEST_CASE("auto: what a model has written stays; the rest is looked for") {
  using enum OpCode;
  small::Model m;
  const TensorId x = m.input("x", {64, 512}), y = m.input("y", {64, 512});
  m.enter(ScopeKind::kReplica, 2);
  const TensorId h = m.op(k_tanh, {m.op(k_matmul, {x, m.variable("w", {512, 512})})});
  m.minimize(m.op(k_reduce_mean, {m.op(k_squared_difference, {h, y})}), OptimizerKind::kAdamW);
  const Plan plan = compile(m.g, parse_devices("V100:4"), with("auto"));
  CHECK(plan.devices.size() == 2);  // as many as are written
  CHECK(has(plan.strategy, "replica(2)"));
  const Found found = search(m.g, parse_devices("V100:4"), {});
  CHECK(found.winner().candidate.strategy.empty());
  CHECK(std::ranges::any_of(found.list, [](const Judged& j) { return j.candidate.accumulation > 0; }));
}

// The Whale paper's classifier of many classes (section 2.2): nearly all parameters are in one product, whose gradient
// is larger than what it computes.
TEST_CASE("auto: one part with most of the parameters is split, the rest replicated") {
  using enum OpCode;
  small::Model m;
  const TensorId x = m.input("x", {1024, 512}), y = m.input("y", {1024}, DType::kI32);
  TensorId h = x;
  for (int l = 0; l < 6; ++l) h = m.op(k_tanh, {m.op(k_matmul, {h, m.variable(fmt::format("w{}", l), {512, 512})})});
  m.enter(ScopeKind::kName);
  m.g.scopes.back().name = "head";
  const TensorId logits = m.op(k_matmul, {h, m.variable("classes", {512, 50000})});
  m.minimize(m.op(k_reduce_mean, {m.op(k_cross_entropy, {logits, y})}), OptimizerKind::kSgd);
  const std::vector<DeviceSpec> devices = parse_devices("4xV100:1~50Gb/s");
  const Found found = search(m.g, devices, {});
  REQUIRE(found.fits());
  const double part = seconds_of(compile(m.g, devices, with("replica(4); head: split(4)")));
  CHECK(part < 0.5 * seconds_of(compile(m.g, devices, with("replica(4)"))));
  CHECK(found.winner().seconds <= part);
  CHECK(std::ranges::any_of(found.list, [](const Judged& j) { return has(j.candidate.strategy, "; head: split(4)"); }));
}

TEST_CASE("auto: from the present strategy only what is near it; ranks all have a device") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 8, 16);
  CompileOptions options;
  options.search.present = "replica(2) > pipeline(4, micro_batches=8)";
  const Found near = search(m.g, parse_devices("7xV100:1~50Gb/s"), options);  // one of eight is lost
  REQUIRE(near.fits());
  for (const Judged& j : near.list) {
    CAPTURE(j.candidate.strategy);
    CHECK(has(j.candidate.strategy, "pipeline("));  // two to eight stages
  }
  CHECK(near.list.size() + near.not_tried > 3 * near.list.size());
  options.search.present.clear(), options.search.ranks = 2;
  const small::Model tiny = small::gpt(2, OptimizerKind::kSgd, 1, 8, 8, 8, 1);
  const std::vector<DeviceSpec> devices = parse_devices("2xV100:1~1Mb/s");
  for (const Judged& j : search(tiny.g, devices, options).list) CHECK(j.candidate.devices.size() == 2);
  CHECK(search(tiny.g, devices, {}).winner().candidate.devices.size() == 1);
}

TEST_CASE("mixed: messages of a stage go beside its work") {
  const small::Model m = small::gpt(6, OptimizerKind::kSgd, 6);
  for (const char* devices : {"V100:1~1Gb/s|V100:1~1Gb/s", "T4:1~5Gb/s|A100:1~5Gb/s"}) {
    CAPTURE(devices);
    const Plan plan = compile(m.g, parse_devices(devices), with("pipeline(2, micro_batches=3)"));
    for (const Program& program : plan.entries[0].programs) CHECK(step_of(program).flops > 1e5);
  }
}

TEST_CASE("auto: memory first; what fits nowhere says how near it came") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 4, 16);
  const auto of_memory = [&](int64_t bytes) {
    std::vector<DeviceSpec> devices = of_speeds("null", {1, 1});
    for (DeviceSpec& d : devices) d.memory_bytes = bytes;
    return devices;
  };
  const Found roomy = search(m.g, of_memory(1 << 30), {});
  REQUIRE(roomy.fits());
  int64_t least = roomy.winner().bytes;
  for (const Judged& j : roomy.list)
    if (j.bytes > 0) least = std::min(least, j.bytes);
  const Found tight = search(m.g, of_memory(least), {});
  REQUIRE(tight.fits());
  CHECK(tight.winner().bytes <= least);
  CHECK(tight.winner().seconds >= roomy.winner().seconds * (1 - 1e-9));
  const std::string message = message_of([&] { compile(m.g, of_memory(4096), with("auto")); });
  CHECK(has(message, "nearest is"));
  CHECK(has(message, "missing"));
}

TEST_CASE("auto: the cheapest step, or the fastest within a budget") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 4, 16);
  const std::vector<DeviceSpec> devices = parse_devices("H100:2|T4:2");
  CompileOptions options;
  const Found fast = search(m.g, devices, options);
  options.search.objective = Objective::kPrice;
  const Found cheap = search(m.g, devices, options);
  CHECK(cheap.winner().price <= fast.winner().price);
  CHECK(cheap.winner().seconds >= fast.winner().seconds * (1 - 1e-9));
  const std::vector<Judged> front = pareto_front(fast);
  for (size_t k = 1; k < front.size(); ++k) {
    CHECK(front[k].price >= front[k - 1].price);
    CHECK(front[k].seconds < front[k - 1].seconds);
  }
  options.search.objective = Objective::kThroughput;
  options.search.most_price = cheap.winner().price * (1 + 1e-6);
  CHECK(search(m.g, devices, options).winner().price <= options.search.most_price);
  options.search.most_price = cheap.winner().price / 2;
  CHECK(!search(m.g, devices, options).fits());
}

TEST_CASE("predict: a row for each count and batch; more devices are never slower") {
  const small::Model m = small::gpt(16, OptimizerKind::kAdamW, 4, 16);
  const Json rows = predict(m.g, parse_devices("V100:4"), {}, {1, 2, 4}, {8, 16});
  REQUIRE(rows.size() == 6);
  for (const Json& row : rows) {
    CHECK(row["samples_per_second"].get<double>() ==
          doctest::Approx(row["batch"].get<double>() / row["seconds"].get<double>()));
    CHECK(row["bytes"].get<int64_t>() > 0);
  }
  CHECK_THROWS_AS(predict(m.g, parse_devices("V100:2"), {}, {3}, {}), Error);
}

}  // namespace
}  // namespace whale
