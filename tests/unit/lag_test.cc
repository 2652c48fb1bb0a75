// Devices that are late at random, in memory that nobody else reaches: plans give the bits they give on devices in
// time, and whoever reaches around the queues is caught.
#include <doctest/doctest.h>

#include <unistd.h>
#include <cerrno>

#include "trained.h"

using namespace whale;

namespace {

struct Plain {
  const char* strategy;
  int devices;
  PlanOptions options = {};
  int64_t accumulation = 0;
};

// Whether the host can read a byte there, without trying it itself.
bool readable(const void* address) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const ssize_t n = write(ends[1], address, 1);
  const bool faulted = n < 0 && errno == EFAULT;
  close(ends[0]), close(ends[1]);
  return !faulted;
}

}  // namespace

TEST_CASE("lag: its memory is out of everybody's reach but its queues'") {
  Backends backends;
  const std::unique_ptr<Device> one = backends.get(DeviceKind::kLag).open({.kind = DeviceKind::kLag, .cores = {}});
  const std::unique_ptr<Device> other = backends.get(DeviceKind::kLag).open({.kind = DeviceKind::kLag, .cores = {}});
  constexpr size_t kBytes = 10000;
  std::vector<void*> held;
  for (int k = 0; k < 20; ++k) held.push_back((k % 2 ? one : other)->allocate(kBytes));
  for (void* memory : held) CHECK(!readable(memory));
  const double value = 3.5;
  double seen = 0;
  one->copy_in(held[1], &value, sizeof value);
  other->copy_in(held[2], held[1], sizeof value);  // a peer's
  other->copy_out(&seen, held[2], sizeof seen);
  CHECK(seen == value);
  // What is released is there again, as zeros.
  one->release(held[1], kBytes);
  held[1] = one->allocate(kBytes);
  one->copy_out(&seen, held[1], sizeof seen);
  CHECK(seen == 0);
  for (size_t k = 0; k < held.size(); ++k) (k % 2 ? one : other)->release(held[k], kBytes);
}

TEST_CASE("lag: a list of devices says the seed of their delays") {
  CHECK(to_string(parse_devices("lag:3", {})) == "lag:3");
  CHECK(to_string(parse_devices("lag@7*3,lag:1", {})) == "lag@7*3,lag:1");
  CHECK(parse_devices("lag@7", {})[0].index == 7);
  CHECK(to_string(parse_devices("lag_cpu@7*3,lag_cpu:1", {})) == "lag_cpu@7*3,lag_cpu:1");
  CHECK_THROWS_AS(parse_devices("lag@x", {}), Error);
}

TEST_CASE("lag: plans train what they train on devices that are in time") {
  const Plain plains[] = {
      {"replica", 3, {.zero = 1}},
      {"replica(2) > split(2)", 4, {.bucket_bytes = 64}},
      {"replica", 2, {.zero = 3, .recompute = Recompute::kFull}, 2},
      {"pipeline(2, micro_batches=4)", 2, {}},
      {"pipeline(2, micro_batches=4, schedule=zb_h1) > split(2)", 4, {}},
      {"pipeline(3, micro_batches=4, warmup=[4,1,1])", 3, {}},
      {"replica(2) > pipeline(2, micro_batches=2, schedule=interleaved, virtual_stages=2)", 4, {.zero = 2}},
      {"replica", 2, {.offload = kOffloadState | kOffloadActivations | kOffloadParameters | kOffloadGradients}},
      {"split", 4, {.exact = true}},
  };
  const small::Model m = small::gpt(12, OptimizerKind::kAdamW, 4);
  for (const Plain& plain : plains) {
    CAPTURE(plain.strategy);
    CompileOptions options{plain.options};
    options.strategy = plain.strategy;
    options.accumulation = plain.accumulation;
    for (const auto& [late, in_time] :
         {std::pair(DeviceKind::kLag, DeviceKind::kRef), std::pair(DeviceKind::kLagCpu, DeviceKind::kCpu)}) {
      CAPTURE(name_of(late));
      Plan plan = compile(m.g, parse_devices(fmt::format("{}:{}", name_of(late), plain.devices)), options);
      const SessionOptions one_thread{.threads = 1};
      for (DeviceSpec& d : plan.devices) d.kind = in_time;
      const small::Trained wanted = small::train(plan, 2, 31, one_thread);
      for (int seed = 1; seed <= 3; ++seed) {
        for (DeviceSpec& d : plan.devices) d.kind = late, d.index = seed;
        CHECK(small::train(plan, 2, 31, one_thread) == wanted);
      }
    }
  }
}
