// The options of a plan stay with it: smaller batches, evaluation and what is read from its file are planned alike.
#include <doctest/doctest.h>

#include "base/error.h"
#include "schema/graph_file.h"
#include "simulate/simulate.h"
#include "trained.h"

namespace whale {
namespace {

// One plan for each option, each unlike what is usual.
std::vector<PlanOptions> unusual() {
  std::vector<PlanOptions> all;
  const auto one = [&](auto&& set) { set(all.emplace_back()); };
  one([](PlanOptions& o) { o.bucket_bytes = 512; });
  one([](PlanOptions& o) { o.overlap = false; });
  one([](PlanOptions& o) { o.fusion = false; });
  one([](PlanOptions& o) { o.zero = 3; });
  one([](PlanOptions& o) { o.zero = 1, o.state_shares = {3, 1}; });
  one([](PlanOptions& o) { o.recompute = Recompute::kSelective; });
  one([](PlanOptions& o) { o.stage_recompute = {Recompute::kFull}; });
  one([](PlanOptions& o) { o.gradient_dtype = DType::kBF16; });
  one([](PlanOptions& o) { o.accumulate_dtype = DType::kBF16; });
  one([](PlanOptions& o) { o.adasum = true; });
  one([](PlanOptions& o) { o.exact = true; });
  one([](PlanOptions& o) { o.offload = kOffloadState; });
  one([](PlanOptions& o) { o.update = UpdateForm::kSliced; });
  one([](PlanOptions& o) { o.matmul_chunks = 2; });
  one([](PlanOptions& o) { o.zero = 3, o.prefetch = 1; });
  return all;
}

Plan plan_of(const PlanOptions& options) {
  CompileOptions given{options};
  given.strategy = "replica";
  given.accumulation = 2;
  return compile(small::gpt(8).g, parse_devices("ref:2", {0}), given);
}

std::string text_of(const PlanOptions& options) {
  std::string text;
  for (const auto& [name, value] : attrs_of(options)) text += name + " ";
  return text;
}

TEST_CASE("options of a plan: every one is named, and comes back from a file") {
  std::string names;
  for (const PlanOptions& options : unusual()) {
    CAPTURE(text_of(options));
    CHECK(!attrs_of(options).empty());
    CHECK(attrs_of(options_of(attrs_of(options))) == attrs_of(options));
    const Plan plan = plan_of(options);
    const std::vector<uint8_t> bytes = serialize(plan);
    const Plan read = deserialize(bytes.data(), bytes.size());
    CHECK(attrs_of(read.options) == attrs_of(options));
    for (const auto& [name, value] : attrs_of(options)) names += " " + name;
  }
  each_option(PlanOptions(), [&](const char* name, const auto&, OptionRule) {
    CAPTURE(name);
    CHECK(names.find(name) != names.npos);
  });
  CHECK(attrs_of(PlanOptions()).empty());
}

TEST_CASE("options of a plan: an entry that is made again, also after reading, has the same instructions") {
  for (const PlanOptions& options : unusual()) {
    CAPTURE(text_of(options));
    const Plan plan = plan_of(options);
    const std::vector<uint8_t> bytes = serialize(plan);
    Plan again = deserialize(bytes.data(), bytes.size());
    for (Entry& entry : again.entries) {
      entry = compile_entry(again, entry.name, entry.batch);
    }
    CHECK(print(again) == print(plan));
  }
}

TEST_CASE("options of a plan: unknown ones, other types and values out of range are refused") {
  const auto refused = [](const Attrs& attrs) {
    try {
      options_of(attrs);
    } catch (const Error& e) {
      return e.message();
    }
    return std::string();
  };
  CHECK(refused({{"warp", int64_t{1}}}) == "option 'warp' is unknown; a newer libwhale may know it");
  CHECK(refused({{"zero", int64_t{4}}}) == "option 'zero': it is 4, expected 0 to 3");
  CHECK(refused({{"zero", int64_t{-1}}}) == "option 'zero': it is -1, expected 0 to 3");
  CHECK(refused({{"zero", true}}) == "option 'zero' is of another type");
  CHECK(refused({{"offload", int64_t{16}}}) == "option 'offload': it is 16, expected 0 to 15");
  CHECK(refused({{"stage_recompute", std::vector<int64_t>{0, 3}}}) ==
        "option 'stage_recompute': it is 3, expected 0 to 2");
  CHECK(!refused({{"gradient_dtype", std::string("f12")}}).empty());
}

// Devices with slow links, whose products are cut into chunks and whose steps take longer.
TEST_CASE("what a plan knew of the machine stays with it: reports, other batches and its file") {
  Profile slow = kMachineOfCores;
  slow.link.bytes_per_second /= 64, slow.device.flops_per_second /= 3, slow.bucket_bytes = 1000;
  CHECK(attrs_of(slow).size() == 3);
  const auto made = [](const Profile& profile) {
    CompileOptions options;
    options.strategy = "split(2)", options.profile = profile;
    return compile(small::gpt(16, OptimizerKind::kAdamW, 2, 64, 64, 64).g, parse_devices("null:2"), options);
  };
  const Plan usual = made(kMachineOfCores), plan = made(slow);
  const std::vector<uint8_t> bytes = serialize(plan);
  const Plan read = deserialize(bytes.data(), bytes.size());
  CHECK(attrs_of(read.profile) == attrs_of(slow));
  const auto seconds = [](const Plan& p) { return times_of(p, p.entries[0], SIZE_MAX)->seconds; };
  CHECK(seconds(plan) > 2 * seconds(usual));
  CHECK(seconds(read) == seconds(plan));
  // Another batch is planned with it, and not as for the usual machine.
  const Entry other = compile_entry(read, "train", 16), unlike = compile_entry(usual, "train", 16);
  CHECK(print(other.programs[0]) == print(plan.entries[0].programs[0]));
  CHECK(print(unlike.programs[0]) != print(other.programs[0]));
  CHECK(cost_of(read).link.bytes_per_second == slow.link.bytes_per_second);
  CHECK_THROWS_WITH_AS(profile_of({{"link.bytes_per_second", -1.0}}), doctest::Contains("expected a number above 0"),
                       Error);
  CHECK_THROWS_WITH_AS(profile_of({{"link.bytes_per_second", int64_t{1}}}), doctest::Contains("another type"), Error);
  CHECK_THROWS_WITH_AS(profile_of({{"warp", 1.0}}), doctest::Contains("unknown"), Error);
}

}  // namespace
}  // namespace whale
