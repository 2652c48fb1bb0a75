// What a machine achieves, as it is measured, written, read, and chosen by.
#include "probe/probe.h"

#include <doctest/doctest.h>

#include <filesystem>
#include <set>
#include <thread>

#include "base/error.h"
#include "cost/collective_forms.h"
#include "cost/profile_text.h"
#include "probe/measure.h"
#include "trained.h"

namespace whale {
namespace {

void check_figures(const Probed& found, size_t devices) {
  REQUIRE(found.devices.size() == devices);
  for (const ProbedDevice& d : found.devices) {
    CHECK(d.f32.size() >= 1);
    for (const auto& product : d.f32) CHECK(product.flops_per_second > 1e6);
    CHECK(d.bytes_per_second > 1e6);
    CHECK(d.host.bytes_per_second > 1e6);
    CHECK(d.host.latency_seconds >= 0);
  }
  std::set<std::pair<int, int>> pairs;
  for (const ProbedLink& link : found.links) {
    CHECK(link.from < link.to);
    pairs.insert({link.from, link.to});
    CHECK(link.rates.bytes_per_second > 1e5);
    CHECK(link.rates.latency_seconds > 0);
  }
  CHECK(pairs.size() == devices * (devices - 1) / 2);
  CHECK(found.links.size() == pairs.size());
}

TEST_CASE("each device meets every other one once, and no two at once") {
  for (int n = 1; n <= 9; ++n) {
    CAPTURE(n);
    const std::vector<Group> groups = groups_of_pairs(n);
    CHECK(groups[0].parts == std::vector<std::vector<int32_t>>{[&] {
            std::vector<int32_t> all;
            for (int d = 0; d < n; ++d) all.push_back(d);
            return all;
          }()});
    std::set<std::vector<int32_t>> met;
    for (size_t g = 1; g < groups.size(); ++g) {
      std::set<int32_t> busy;
      for (const auto& pair : groups[g].parts) {
        REQUIRE(pair.size() == 2);
        CHECK(met.insert(pair).second);
        for (const int32_t d : pair) CHECK(busy.insert(d).second);
      }
    }
    CHECK(met.size() == static_cast<size_t>(n * (n - 1) / 2));
  }
}

TEST_CASE("devices and what is between them are measured, in one process and in ranks") {
  Backends backends(small::backends_folder());
  for (const char* kind : {"ref:1", "ref:3", "cpu:2"}) {
    if (kind == std::string("cpu:2") && !std::filesystem::exists(small::backends_folder() + "/libwhale_cpu.so"))
      continue;
    CAPTURE(kind);
    const std::vector<DeviceSpec> devices = parse_devices(kind);
    const Probed found = probe(backends, devices, {.seconds = 0.002});
    check_figures(found, devices.size());
    const Profile profile = profile_of_text(text_of(found.json()));
    CHECK(profile.device.bytes_per_second == found.profile().device.bytes_per_second);
    CHECK(profile.device.flops_per_second == found.profile().device.flops_per_second);
    CHECK((profile.link.latency_seconds == kMachineOfCores.link.latency_seconds) == (devices.size() == 1));
    CHECK(profile.bucket_bytes == kMachineOfCores.bucket_bytes);
  }
  std::vector<Probed> all(2);
  std::vector<std::thread> threads;
  std::vector<World> worlds = make_inproc_worlds(2);
  for (size_t r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      Backends mine;
      all[r] = probe(mine, parse_devices("ref:3"), {.seconds = 0.002, .world = worlds[r]});
    });
  for (std::thread& thread : threads) thread.join();
  check_figures(all[0], 3);
  CHECK(all[0].json() == all[1].json());
  CHECK(all[0].devices[2].rank == 1);
}

TEST_CASE("a probe can be cancelled, and refuses what is not to be measured") {
  Backends backends;
  std::atomic<bool> cancel{true};
  const auto code_of = [&](const char* devices, const std::atomic<bool>* token) {
    try {
      (void)probe(backends, parse_devices(devices), {.seconds = 0.002, .cancel = token});
    } catch (const Error& e) {
      return e.code();
    }
    return Code::kInternal;
  };
  CHECK(code_of("ref:2", &cancel) == Code::kCancelled);
  CHECK(code_of("ref:1,null:1", nullptr) == Code::kUnimplemented);
  CHECK(code_of("lag:2", nullptr) == Code::kUnimplemented);
}

TEST_CASE("a profile is figures by name, and what is none says so") {
  const Profile some = profile_of_text(R"({"link.bytes_per_second": 1e9, "bucket_bytes": 1024})");
  CHECK(some.link.bytes_per_second == 1e9);
  CHECK(some.bucket_bytes == 1024);
  CHECK(some.device.flops_per_second == kMachineOfCores.device.flops_per_second);
  CHECK(profile_of_text(R"({"probe": 1, "profile": {"passes": 2}})").passes == 2);
  const auto why = [](std::string_view text) {
    try {
      (void)profile_of_text(text);
    } catch (const Error& e) {
      CHECK(e.code() == Code::kInvalidArgument);
      return e.message();
    }
    return std::string("none");
  };
  CHECK(why("").starts_with("no profile: expected a JSON object"));
  CHECK(why("[1]").starts_with("no profile"));
  CHECK(why("{\"profile\": 3}").starts_with("no profile"));
  CHECK(why("{\"link.bytes\": 3}").starts_with("a profile has no figure 'link.bytes'; there are add_passes"));
  CHECK(why("{\"passes\": \"3\"}") == "figure 'passes' of the profile is \"3\", expected a number");
  CHECK(why("{\"bucket_bytes\": 1.5}") == "figure 'bucket_bytes' of the profile is 1.5, expected a whole number");
  CHECK(why("{\"link.bytes_per_second\": 0}").find("expected a number above 0") != std::string::npos);
  CHECK(why("{\"link.latency_seconds\": 2}").find("expected at most 1") != std::string::npos);
  CHECK(why("{}").ends_with("found an empty object"));
  CHECK(why("{\"probe\": 1, \"profile\": {}}").ends_with("found no figure in it"));
  CHECK(why("{\"link.latency_seconds\": -1}").find("expected a number from 0") != std::string::npos);
  CHECK(why("{\"link.bytes_per_second\": 1e999}") != "none");
}

TEST_CASE("the form of an all-reduce follows its size, the members and the link") {
  Profile profile = kMachineOfCores;
  profile.link = {1e9, 1e-5};
  profile.device.bytes_per_second = 1e15;  // additions are free
  // n - 1 messages of everything, or twice as many of an n-th: equal where bytes (1 - 2 / n) take a latency.
  for (const int64_t n : {4, 8, 64}) {
    const double equal = 1e4 / (1 - 2.0 / static_cast<double>(n));
    CHECK(choose_all_reduce({0.99 * equal, n}, profile) == AllReduceForm::kWhole);
    CHECK(choose_all_reduce({1.01 * equal, n}, profile) == AllReduceForm::kSlices);
  }
  CHECK(choose_all_reduce({1e9, 2}, profile) == AllReduceForm::kWhole);  // as many bytes, fewer messages
  // Two processes of eight: each byte twice over the wire instead of eight members' messages to sixteen.
  const GroupWork eight{64e6, 16, 2, 8, 256e3};
  CHECK(choose_all_reduce(eight, profile) == AllReduceForm::kChain);
  CHECK(all_reduce_seconds(AllReduceForm::kChain, eight, profile) ==
        doctest::Approx(2 * (1e-5 + 256e3 / 1e9) + 2 * 64e6 / 1e9));
  CHECK(all_reduce_seconds(AllReduceForm::kSlices, eight, profile) == doctest::Approx(2 * 8 * 15 * (1e-5 + 4e6 / 1e9)));
}

TEST_CASE("the form of an all-gather follows the link and the copies inside a process") {
  Profile profile = kMachineOfCores;
  profile.link = {1e9, 1e-5};
  profile.device.bytes_per_second = 1e10;
  const GroupWork eight{64e6, 16, 2, 8, 256e3};
  const double message = 1e-5 + 4e6 / 1e9;
  CHECK(gather_seconds(GatherForm::kEach, eight, profile) == doctest::Approx(8 * 15 * message));
  CHECK(gather_seconds(GatherForm::kOnce, eight, profile) ==
        doctest::Approx(8 * message + 2 * 1e-5 + 8 * 14 * 2 * 4e6 / 1e10));
  CHECK(choose_gather(eight, profile) == GatherForm::kOnce);
  CHECK(choose_gather({64e6, 16, 16, 1, 256e3}, profile) == GatherForm::kEach);  // one device each
  CHECK(choose_gather({64e6, 16, 1, 16, 256e3}, profile) == GatherForm::kEach);  // one process
}

}  // namespace
}  // namespace whale
