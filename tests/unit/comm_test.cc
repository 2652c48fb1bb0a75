#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "comm/transport.h"
#include "device/ref/ref.h"

namespace whale {
namespace {

struct Ring {  // members of one group, each on a thread of its own
  std::vector<std::unique_ptr<Device>> devices;
  std::unique_ptr<Transport> transport;
  explicit Ring(int members) {
    Group group{"replica", {}};
    const auto backend = make_ref_backend();
    for (int m = 0; m < members; ++m) {
      group.devices.push_back(m);
      devices.push_back(backend->open({DeviceKind::kRef, {}, 0}));
    }
    transport = make_inproc({group});
  }
  template <class Body>
  void run(Body body) {
    std::vector<std::thread> threads;
    for (size_t m = 0; m < devices.size(); ++m) threads.emplace_back([&, m] { body(m); });
    for (auto& thread : threads) thread.join();
  }
};

Operand operand(std::vector<float>& values) {
  return {values.data(), DType::kF32, {static_cast<int64_t>(values.size())}, false, nullptr};
}

// A bucket of three buffers whose values are whole numbers: sums are exact, whatever the order.
void check_all_reduce(int members, const std::vector<size_t>& sizes, Combine combine) {
  CAPTURE(members);
  CAPTURE(sizes.back());
  Ring ring(members);
  std::vector<std::vector<std::vector<float>>> data(static_cast<size_t>(members));
  std::vector<std::unique_ptr<Collective>> bound;
  for (int m = 0; m < members; ++m) {
    CollectiveSpec spec;
    spec.op = OpCode::k_all_reduce;
    spec.combine = combine;
    for (const size_t size : sizes) data[static_cast<size_t>(m)].emplace_back(size);
    for (auto& part : data[static_cast<size_t>(m)]) spec.in.push_back(operand(part));
    spec.out = spec.in;
    bound.push_back(ring.transport->bind(0, m, spec, *ring.devices[static_cast<size_t>(m)]));
  }
  for (int call = 0; call < 5; ++call) {  // several, so that a late member meets an early one's next call
    for (size_t m = 0; m < data.size(); ++m)
      for (size_t p = 0; p < sizes.size(); ++p)
        for (size_t i = 0; i < sizes[p]; ++i)
          data[m][p][i] = static_cast<float>((i % 13) * (m + 1) + p + static_cast<size_t>(call));
    std::atomic<int> failures{0};
    ring.run([&](size_t m) { failures += !bound[m]->run(nullptr); });
    CHECK(failures == 0);
    size_t wrong = 0;
    const size_t n = static_cast<size_t>(members);
    for (size_t m = 0; m < n; ++m)
      for (size_t p = 0; p < sizes.size(); ++p)
        for (size_t i = 0; i < sizes[p]; ++i) {
          const size_t extra = p + static_cast<size_t>(call);
          const size_t sum = (i % 13) * n * (n + 1) / 2 + n * extra, max = (i % 13) * n + extra;
          wrong += data[m][p][i] != static_cast<float>(combine == Combine::kSum ? sum : max);
        }
    CHECK(wrong == 0);
  }
}

TEST_CASE("all-reduce of a bucket equals the closed form for 1 to 8 members") {
  for (int members = 1; members <= 8; ++members) {
    check_all_reduce(members, {1, 5, 7}, Combine::kSum);       // small: one meeting
    check_all_reduce(members, {33, 20000, 3}, Combine::kSum);  // large: slices that end inside buffers
    check_all_reduce(members, {70000, 16, 4097}, Combine::kMax);
  }
}

TEST_CASE("all-reduce adds in the order of the members, so that every run gives the same bits") {
  const size_t n = 9000;
  std::vector<float> first;
  for (int repeat = 0; repeat < 4; ++repeat) {
    Ring ring(4);
    std::vector<std::vector<float>> data(4, std::vector<float>(n));
    std::vector<std::unique_ptr<Collective>> bound;
    for (size_t m = 0; m < 4; ++m) {
      for (size_t i = 0; i < n; ++i) data[m][i] = 1.0f / static_cast<float>(3 + i + 1000 * m);
      CollectiveSpec spec{OpCode::k_all_reduce, Combine::kSum, {operand(data[m])}, {operand(data[m])}, {}, {}};
      bound.push_back(ring.transport->bind(0, static_cast<int>(m), spec, *ring.devices[m]));
    }
    std::vector<float> expected(n);
    for (size_t i = 0; i < n; ++i) expected[i] = ((data[0][i] + data[1][i]) + data[2][i]) + data[3][i];
    ring.run([&](size_t m) {
      std::this_thread::sleep_for(std::chrono::milliseconds((m * 7 + static_cast<size_t>(repeat) * 3) % 5));
      bound[m]->run(nullptr);
    });
    for (size_t m = 0; m < 4; ++m) CHECK(std::memcmp(data[m].data(), expected.data(), n * 4) == 0);
  }
}

TEST_CASE("all-gather puts uneven and empty parts in their places") {
  // A dimension of 2 * 5 * 3: the middle digit is cut.
  const std::vector<Interval> cuts = {{0, 2}, {2, 2}, {2, 5}};
  Ring ring(3);
  std::vector<std::vector<float>> part(3), whole(3, std::vector<float>(2 * 30));
  std::vector<std::unique_ptr<Collective>> bound;
  for (size_t m = 0; m < 3; ++m) {
    for (int row = 0; row < 2 * 2; ++row)
      for (int64_t e = cuts[m].begin; e < cuts[m].end; ++e)
        for (int inner = 0; inner < 3; ++inner) part[m].push_back(static_cast<float>(row * 15 + e * 3 + inner));
    CollectiveSpec spec;
    spec.op = OpCode::k_all_gather;
    spec.in = {{part[m].data(), DType::kF32, {2, 2 * cuts[m].size() * 3}, false, nullptr}};
    spec.out = {{whole[m].data(), DType::kF32, {2, 30}, false, nullptr}};
    spec.digit = {1, 2, 3};
    spec.cuts = cuts;
    bound.push_back(ring.transport->bind(0, static_cast<int>(m), spec, *ring.devices[m]));
  }
  ring.run([&](size_t m) { bound[m]->run(nullptr); });
  std::vector<float> expected(60);
  std::iota(expected.begin(), expected.end(), 0.0f);
  for (size_t m = 0; m < 3; ++m) CHECK(whole[m] == expected);
}

TEST_CASE("abort wakes everybody who waits in a collective") {
  Ring ring(3);
  std::vector<std::vector<float>> data(3, std::vector<float>(100000));
  std::vector<std::unique_ptr<Collective>> bound;
  for (size_t m = 0; m < 3; ++m) {
    CollectiveSpec spec{OpCode::k_all_reduce, Combine::kSum, {operand(data[m])}, {operand(data[m])}, {}, {}};
    bound.push_back(ring.transport->bind(0, static_cast<int>(m), spec, *ring.devices[m]));
  }
  std::atomic<int> aborted{0};
  ring.run([&](size_t m) {  // the third member never comes
    if (m < 2) {
      aborted += !bound[m]->run(nullptr);
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ring.transport->abort();
    }
  });
  CHECK(aborted == 2);
  ring.transport->reset();
  ring.run([&](size_t m) { CHECK_MESSAGE(bound[m]->run(nullptr), "usable again after reset"); });
}

TEST_CASE("members that disagree about a collective get an error, not garbage") {
  Ring ring(2);
  std::vector<float> a(100), b(90);
  std::vector<std::unique_ptr<Collective>> bound;
  for (size_t m = 0; m < 2; ++m) {
    CollectiveSpec spec{
        OpCode::k_all_reduce, Combine::kSum, {operand(m == 0 ? a : b)}, {operand(m == 0 ? a : b)}, {}, {}};
    bound.push_back(ring.transport->bind(0, static_cast<int>(m), spec, *ring.devices[m]));
  }
  std::atomic<int> errors{0};
  ring.run([&](size_t m) {
    try {
      bound[m]->run(nullptr);
    } catch (const Error& e) {
      errors += e.code() == Code::kInternal;
    }
  });
  CHECK(errors == 2);
}

TEST_CASE("a counter's waiters see every advance, and look out while they sleep") {
  Counter counter;
  std::atomic<int> reached{0};
  std::vector<std::thread> threads;
  for (uint32_t target = 1; target <= 4; ++target)
    threads.emplace_back([&, target] { reached += counter.wait(target); });
  for (int i = 0; i < 4; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    counter.advance(1);
  }
  for (auto& thread : threads) thread.join();
  CHECK(reached == 4);

  struct Stopper : Lookout {
    Counter& counter;
    explicit Stopper(Counter& c) : counter(c) {}
    void look() override { counter.abort(); }
  } stopper(counter);
  CHECK_FALSE(counter.wait(100, &stopper));
  counter.reset();
  counter.advance(1);
  CHECK(counter.wait(1));
}

}  // namespace
}  // namespace whale
