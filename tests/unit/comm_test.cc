#include <doctest/doctest.h>
#include <sys/resource.h>
#include <vector>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "comm/counter.h"
#include "comm/transport.h"
#include "device/ref/ref.h"
#include "plan/part.h"

namespace whale {
namespace {

struct Ring {  // members of one group, each on a thread of its own
  std::vector<std::unique_ptr<Device>> devices;
  std::unique_ptr<Transport> transport;
  explicit Ring(int members) {
    Group group{"replica", {{}}};
    const auto backend = make_ref_backend();
    for (int m = 0; m < members; ++m) {
      group.parts[0].push_back(m);
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
    for (const size_t size : sizes) data[m].emplace_back(size);
    for (auto& part : data[m]) spec.in.push_back(operand(part));
    spec.out = spec.in;
    bound.push_back(ring.transport->bind(m, spec, *ring.devices[m]));
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
      CollectiveSpec spec{{.op = OpCode::k_all_reduce}, {operand(data[m])}, {operand(data[m])}};
      bound.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
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
  // A dimension of 2 * 5 * 3: the middle sub-axis is cut.
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
    spec.cuts = {{{1, 2, 3}, cuts}};
    bound.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
  }
  ring.run([&](size_t m) { bound[m]->run(nullptr); });
  std::vector<float> expected(60);
  std::iota(expected.begin(), expected.end(), 0.0f);
  for (size_t m = 0; m < 3; ++m) CHECK(whole[m] == expected);
}

// ---- cuts: every collective against the parts of one whole tensor -----------------------------------------------
using Values = std::vector<float>;

// Several calls, so that a late member meets an early one's next call; `check` looks at each member's result.
template <class Check>
void run_thrice(Ring& ring, const std::vector<std::unique_ptr<Collective>>& bound, std::vector<Values>& results,
                Check check) {
  for (int call = 0; call < 3; ++call) {
    for (Values& values : results) std::fill(values.begin(), values.end(), -1.0f);
    std::atomic<int> failures{0};
    ring.run([&](size_t m) { failures += !bound[m]->run(nullptr); });
    CHECK(failures == 0);
    for (size_t m = 0; m < results.size(); ++m) check(m);
  }
}

Values iota(const Dims& dims) {
  Values whole(static_cast<size_t>(element_count(dims)));
  std::iota(whole.begin(), whole.end(), 1.0f);
  return whole;
}
Values cut(const Dims& dims, const Values& whole, const Part& part) {
  Values local(static_cast<size_t>(element_count(part.extents())));
  for_each_run(dims, part, [&](int64_t logical, int64_t at, int64_t n) {
    std::copy_n(whole.begin() + logical, n, local.begin() + at);
  });
  return local;
}
Part part_at(const Dims& dims, const SubAxis& sub_axis, const Interval& at) {
  const int64_t extent = dims[sub_axis.dim] / (sub_axis.outer * sub_axis.inner);
  return part_of(dims, {SubAxisCut{sub_axis, extent, at}});
}
Operand tensor(Values& values, Dims dims) { return {values.data(), DType::kF32, std::move(dims), false, nullptr}; }
std::vector<Interval> cuts_of(const std::vector<int64_t>& sizes) {
  std::vector<Interval> cuts;
  for (const int64_t n : sizes) {
    const int64_t at = cuts.empty() ? 0 : cuts.back().end;
    cuts.push_back({at, at + n});
  }
  return cuts;
}

void check_reduce_scatter(const Dims& dims, const SubAxis& sub_axis, const std::vector<int64_t>& sizes,
                          Combine combine) {
  CAPTURE(to_string(dims));
  CAPTURE(static_cast<int>(combine));
  const size_t members = sizes.size();
  const size_t n = static_cast<size_t>(element_count(dims));
  Ring ring(static_cast<int>(members));
  std::vector<Values> x(members, Values(n)), all(members, Values(n)), part(members), gathered(members, Values(n, -1));
  std::vector<std::unique_ptr<Collective>> reduce, scatter, gather;
  for (size_t m = 0; m < members; ++m) {
    for (size_t i = 0; i < n; ++i) x[m][i] = all[m][i] = 1.0f / static_cast<float>(3 + (i * 17 + m * 31) % 1009) - 0.3f;
    CollectiveSpec spec;
    spec.op = OpCode::k_all_reduce;
    spec.combine = combine;
    spec.in = spec.out = {tensor(all[m], dims)};
    reduce.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
    spec.op = OpCode::k_reduce_scatter;
    spec.cuts = {{sub_axis, cuts_of(sizes)}};
    const Dims local = part_at(dims, sub_axis, spec.cuts[0].cuts[m]).extents();
    part[m].resize(static_cast<size_t>(element_count(local)));
    spec.in = {tensor(x[m], dims)};
    spec.out = {tensor(part[m], local)};
    scatter.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
    spec.op = OpCode::k_all_gather;
    spec.in = spec.out;
    spec.out = {tensor(gathered[m], dims)};
    gather.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
  }
  Values expected = x[0];
  const auto combined = [&](float a, float b) {
    switch (combine) {
      case Combine::kSum: return a + b;
      case Combine::kMax: return std::max(a, b);
      case Combine::kMin: return std::min(a, b);
      case Combine::kLogSumExp: return std::log(std::exp(a) + std::exp(b));
    }
    return a;
  };
  for (size_t m = 1; m < members; ++m)
    for (size_t i = 0; i < n; ++i) expected[i] = combined(expected[i], x[m][i]);
  std::atomic<int> failures{0};
  ring.run([&](size_t m) {
    failures += !scatter[m]->run(nullptr);
    failures += !gather[m]->run(nullptr);
    failures += !reduce[m]->run(nullptr);
  });
  CHECK(failures == 0);
  for (size_t m = 0; m < members; ++m) {
    CHECK(std::memcmp(gathered[m].data(), all[m].data(), n * 4) == 0);
    CHECK(part[m] == cut(dims, gathered[m], part_at(dims, sub_axis, cuts_of(sizes)[m])));
    if (combine != Combine::kLogSumExp) CHECK(gathered[m] == expected);
    for (size_t i = 0; i < n; i += 97) CHECK(gathered[m][i] == doctest::Approx(expected[i]).epsilon(1e-5));
  }
}

TEST_CASE("reduce-scatter and all-gather give the bits of an all-reduce, for uneven and empty cuts") {
  for (const Combine combine : {Combine::kSum, Combine::kMax, Combine::kMin, Combine::kLogSumExp}) {
    check_reduce_scatter({5, 7}, {0, 1, 1}, {5}, combine);
    check_reduce_scatter({6, 4}, {0, 1, 1}, {2, 4}, combine);
    check_reduce_scatter({2, 2 * 5 * 3, 2}, {1, 2, 3}, {2, 0, 3}, combine);
    check_reduce_scatter({70, 600}, {0, 1, 1}, {30, 1, 0, 39}, combine);  // large
    check_reduce_scatter({3, 20000}, {1, 1, 1}, {9000, 11000}, combine);  // pieces of more than a chunk
  }
}

// `to` in the coordinates of x where both sub-axes are of one dimension.
void check_all_to_all(const Dims& dims, const SubAxis& from, const std::vector<int64_t>& sizes, const SubAxis& to,
                      const std::vector<int64_t>& to_sizes) {
  CAPTURE(to_string(dims));
  CAPTURE(sizes.size());
  const size_t members = sizes.size();
  Ring ring(static_cast<int>(members));
  const std::vector<Interval> cuts = cuts_of(sizes), to_cuts = cuts_of(to_sizes);
  Values whole = iota(dims);
  std::vector<Values> x(members), y(members);
  std::vector<std::unique_ptr<Collective>> bound;
  for (size_t m = 0; m < members; ++m) {
    const Part before = part_at(dims, from, cuts[m]), after = part_at(dims, to, to_cuts[m]);
    x[m] = cut(dims, whole, before);
    y[m].assign(static_cast<size_t>(element_count(after.extents())), -1);
    CollectiveSpec spec;
    spec.op = OpCode::k_all_to_all;
    spec.in = {tensor(x[m], before.extents())};
    spec.out = {tensor(y[m], after.extents())};
    spec.cuts = {{from, cuts}};
    spec.to = {to, to_cuts};
    if (from.dim == to.dim && from.inner > to.inner)
      spec.to.sub_axis.outer = to.outer / cuts.back().end * cuts[m].size();
    if (from.dim == to.dim && from.inner < to.inner)
      spec.to.sub_axis.inner = to.inner / cuts.back().end * cuts[m].size();
    bound.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
  }
  run_thrice(ring, bound, y, [&](size_t m) { CHECK(y[m] == cut(dims, whole, part_at(dims, to, to_cuts[m]))); });
}

TEST_CASE("all-to-all moves a cut from one sub-axis to another") {
  check_all_to_all({4, 6}, {0, 1, 1}, {2, 2}, {1, 1, 1}, {3, 3});
  check_all_to_all({4, 6}, {1, 1, 1}, {2, 3, 1}, {0, 1, 1}, {0, 3, 1});
  check_all_to_all({3, 5, 4, 2}, {1, 1, 1}, {5, 0, 0}, {2, 1, 1}, {1, 2, 1});
  check_all_to_all({2, 2 * 5 * 3, 3, 4 * 2}, {1, 2, 3}, {1, 4}, {3, 1, 2}, {3, 1});
  check_all_to_all({2, 2 * 5 * 3, 3, 4 * 2}, {3, 1, 2}, {0, 1, 1, 2}, {1, 2, 3}, {2, 2, 0, 1});
  check_all_to_all({2, 3 * 4, 3}, {1, 1, 4}, {2, 1}, {1, 3, 1}, {1, 3});  // two sub-axes of one dimension
  check_all_to_all({2, 3 * 4, 3}, {1, 3, 1}, {1, 3}, {1, 1, 4}, {1, 2});
  check_all_to_all({2 * 3 * 5 * 4 * 2}, {0, 2, 40}, {2, 1}, {0, 30, 2}, {3, 1});
  check_all_to_all({2 * 3 * 5 * 4 * 2}, {0, 30, 2}, {3, 1}, {0, 2, 40}, {2, 1});
}

TEST_CASE("shift: everyone gets what the member before has, of any size, and the first what the last has") {
  const std::vector<int64_t> sizes{3, 1, 4, 2};
  const size_t n = sizes.size();
  Ring ring(static_cast<int>(n));
  std::vector<Values> x(n), y(n);
  std::vector<std::unique_ptr<Collective>> bound;
  for (size_t m = 0; m < n; ++m) {
    x[m] = iota({sizes[m], 5});
    for (float& value : x[m]) value += static_cast<float>(100 * m);
    const int64_t rows = sizes[(m + n - 1) % n];
    y[m].assign(static_cast<size_t>(rows * 5), -1);
    CollectiveSpec spec;
    spec.op = OpCode::k_shift;
    spec.in = {tensor(x[m], {sizes[m], 5})};
    spec.out = {tensor(y[m], {rows, 5})};
    bound.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
  }
  run_thrice(ring, bound, y, [&](size_t m) { CHECK(y[m] == x[(m + n - 1) % n]); });
}

// Without values, as the null device, and counting what it is asked to do.
class Without final : public Device {
 public:
  explicit Without(std::atomic<int>& asked) : asked_(asked) {}
  void enter_thread(Queue) override {}
  void* allocate(size_t) override { return nullptr; }
  void release(void*, size_t) override {}
  std::unique_ptr<Kernel> bind(const KernelSpec&) override { return nullptr; }
  bool has_values() const override { return false; }
  void copy_in(void*, const void*, size_t) override { ++asked_; }
  void copy_out(void*, const void*, size_t) override { ++asked_; }
  void combine(Combine, DType, void*, const void*, const void*, size_t) override { ++asked_; }

 private:
  std::atomic<int>& asked_;
};

TEST_CASE("devices without values meet, and do nothing for what is large") {
  const Dims whole_dims{50'000, 4}, part_dims{50'000, 1};  // rows of a few bytes, one by one: minutes, for large models
  const SubAxis columns{1, 1, 1};
  for (const OpCode op : {OpCode::k_all_reduce, OpCode::k_reduce_scatter, OpCode::k_all_gather}) {
    CAPTURE(static_cast<int>(op));
    Ring ring(4);
    std::atomic<int> asked{0}, failures{0};
    std::vector<Values> whole(4, Values(200'000)), part(4, Values(50'000));
    std::vector<std::unique_ptr<Collective>> bound;
    for (size_t m = 0; m < 4; ++m) {
      ring.devices[m] = std::make_unique<Without>(asked);
      CollectiveSpec spec;
      spec.op = op;
      spec.in = spec.out = {tensor(whole[m], whole_dims)};
      if (op != OpCode::k_all_reduce) spec.cuts = {{columns, cuts_of({1, 1, 1, 1})}};
      if (op == OpCode::k_reduce_scatter) spec.out = {tensor(part[m], part_dims)};
      if (op == OpCode::k_all_gather) spec.in = {tensor(part[m], part_dims)};
      bound.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
    }
    ring.run([&](size_t m) { failures += !bound[m]->run(nullptr); });
    CHECK(failures == 0);
    CHECK(asked == 0);
  }
}

TEST_CASE("the parts of a group work by themselves") {
  const auto backend = make_ref_backend();
  std::vector<std::unique_ptr<Device>> devices;
  for (int d = 0; d < 5; ++d) devices.push_back(backend->open({DeviceKind::kRef, {}, 0}));
  const std::vector<std::vector<int32_t>> parts = {{3, 0}, {1, 2}};  // device 4 is in none
  const auto transport = make_inproc({{"split", parts}});
  std::vector<Values> x(4, Values(8)), y(4, Values(16));
  std::vector<std::unique_ptr<Collective>> bound;
  for (int d = 0; d < 4; ++d) {
    const size_t i = static_cast<size_t>(d);
    std::fill(x[i].begin(), x[i].end(), static_cast<float>(d));
    CollectiveSpec spec;
    spec.op = OpCode::k_all_gather;
    spec.in = {tensor(x[i], {8})};
    spec.out = {tensor(y[i], {16})};
    spec.cuts = {{{0, 1, 1}, {{0, 8}, {8, 16}}}};
    bound.push_back(transport->bind(d, spec, *devices[i]));
    if (d == 0) CHECK_THROWS_AS(transport->bind(4, spec, *devices[4]), Error);
  }
  std::vector<std::thread> threads;
  for (size_t d = 0; d < 4; ++d) threads.emplace_back([&, d] { bound[d]->run(nullptr); });
  for (auto& thread : threads) thread.join();
  for (size_t d : {0, 3}) CHECK((y[d][0] == 3 && y[d][15] == 0));
  for (size_t d : {1, 2}) CHECK((y[d][0] == 1 && y[d][15] == 2));
}

// ---- links ------------------------------------------------------------------------------------------------------
// What device d needs of what device s has, as boxes; both parts are one box.
std::vector<Transfer> intersect(const std::vector<Part>& sources, const std::vector<Part>& targets, int first_target) {
  std::vector<Transfer> list;
  for (size_t s = 0; s < sources.size(); ++s)
    for (size_t t = 0; t < targets.size(); ++t) {
      Transfer transfer{static_cast<int32_t>(s), static_cast<int32_t>(t) + first_target, {}, {}};
      bool some = true;
      for (size_t d = 0; d < sources[s].dims.size(); ++d) {
        if (sources[s].dims[d].empty() || targets[t].dims[d].empty()) {
          some = false;
          break;
        }
        const Interval a = sources[s].dims[d][0], b = targets[t].dims[d][0];
        const int64_t begin = std::max(a.begin, b.begin), end = std::max(begin, std::min(a.end, b.end));
        transfer.source.push_back({begin - a.begin, end - a.begin});
        transfer.target.push_back({begin - b.begin, end - b.begin});
        some = some && end > begin;
      }
      if (some) list.push_back(transfer);
    }
  return list;
}

// Senders cut `from`, receivers cut `to`. `shared`: both are the same devices.
void check_link(const Dims& dims, const std::vector<Part>& from, const std::vector<Part>& to, bool shared, int capacity,
                bool hole) {
  CAPTURE(to_string(dims));
  CAPTURE(shared);
  CAPTURE(capacity);
  const size_t first = shared ? 0 : from.size(), count = first + to.size();
  const auto backend = make_ref_backend();
  std::vector<std::unique_ptr<Device>> devices;
  for (size_t d = 0; d < count; ++d) devices.push_back(backend->open({DeviceKind::kRef, {}, 0}));
  const auto transport = make_inproc({});
  Link link{"x", capacity, intersect(from, to, static_cast<int>(first))};
  Transfer dropped;
  if (hole) {
    dropped = link.transfers.back();
    link.transfers.pop_back();
  }
  const auto links = transport->open_links({{"other", 1, {}}, link});
  std::vector<Values> x(from.size()), y(to.size());
  std::vector<std::unique_ptr<Collective>> sends, receives;
  for (size_t s = 0; s < from.size(); ++s) {
    x[s].resize(static_cast<size_t>(element_count(from[s].extents())));
    sends.push_back(links->bind(1, static_cast<int>(s), tensor(x[s], from[s].extents()), true, *devices[s]));
  }
  for (size_t t = 0; t < to.size(); ++t) {
    y[t].resize(static_cast<size_t>(element_count(to[t].extents())));
    receives.push_back(
        links->bind(1, static_cast<int>(t + first), tensor(y[t], to[t].extents()), false, *devices[t + first]));
  }
  const Values whole = iota(dims);
  const auto message = [&](int j) {
    Values values = whole;
    for (float& v : values) v += static_cast<float>(1000 * j);
    return values;
  };
  std::atomic<int> failures{0}, wrong{0};
  const auto send = [&](size_t s, int j) {
    const Values local = cut(dims, message(j), from[s]);
    std::copy(local.begin(), local.end(), x[s].begin());
    failures += !sends[s]->run(nullptr);
  };
  const auto receive = [&](size_t t, int j) {
    std::fill(y[t].begin(), y[t].end(), -1.0f);
    if ((j + static_cast<int>(t)) % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
    failures += !receives[t]->run(nullptr);
    Values expected = cut(dims, message(j), to[t]);
    if (hole && dropped.to == static_cast<int32_t>(t + first)) {
      Part gone;
      for (const Interval& i : dropped.target) gone.dims.push_back({i});
      for_each_run(to[t].extents(), gone,
                   [&](int64_t at, int64_t, int64_t n) { std::fill_n(expected.begin() + at, n, 0.0f); });
    }
    wrong += y[t] != expected;
  };
  for (int run = 0; run < 2; ++run) {
    std::vector<std::thread> threads;
    constexpr int kMessages = 24;
    if (shared) {
      for (size_t d = 0; d < from.size(); ++d)
        threads.emplace_back([&, d] {
          for (int j = 0; j < kMessages; j += capacity) {  // as many under way as the capacity is
            for (int k = j; k < std::min(j + capacity, kMessages); ++k) send(d, k);
            for (int k = j; k < std::min(j + capacity, kMessages); ++k) receive(d, k);
          }
        });
    } else {
      for (size_t s = 0; s < from.size(); ++s)
        threads.emplace_back([&, s] {
          for (int j = 0; j < kMessages; ++j) send(s, j);
        });
      for (size_t t = 0; t < to.size(); ++t)
        threads.emplace_back([&, t] {
          for (int j = 0; j < kMessages; ++j) receive(t, j);
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK(failures == 0);
    CHECK(wrong == 0);
    links->reset();
  }
}

TEST_CASE("links bring every piece to its place, in order, also from a device to itself") {
  const auto rows = [](const Dims& dims, const std::vector<int64_t>& sizes, int dim) {
    std::vector<Part> parts;
    for (const Interval& i : cuts_of(sizes)) parts.push_back(part_at(dims, {dim, 1, 1}, i));
    return parts;
  };
  const Dims dims = {5, 6, 2};
  for (const int capacity : {1, 2, 3})
    for (const bool hole : {false, true}) {
      check_link(dims, rows(dims, {2, 3}, 0), rows(dims, {4, 2}, 1), false, capacity, hole);
      check_link(dims, rows(dims, {5}, 0), rows(dims, {1, 0, 5}, 1), false, capacity, hole);
      check_link(dims, rows(dims, {2, 0, 3}, 0), rows(dims, {1, 1, 4}, 1), true, capacity, hole);
      check_link(dims, rows(dims, {1, 4}, 0), rows(dims, {3, 2}, 0), true, capacity, hole);
      check_link({3}, rows({3}, {3}, 0), rows({3}, {3}, 0), false, capacity, hole);
    }
  check_link({300, 70}, rows({300, 70}, {100, 200}, 0), rows({300, 70}, {35, 35}, 1), false, 2, false);
}

TEST_CASE("a send waits for free capacity, a receive for its message; abort ends both") {
  const auto backend = make_ref_backend();
  const auto a = backend->open({DeviceKind::kRef, {}, 0}), b = backend->open({DeviceKind::kRef, {}, 0});
  const std::vector<Interval> all = {{0, 4}};
  const auto links = make_inproc({})->open_links({{"x", 2, {{0, 1, all, all}}}, {"y", 1, {{1, 0, all, all}}}});
  Values x(4, 1), y(4);
  const auto send = links->bind(0, 0, tensor(x, {4}), true, *a), wait = links->bind(1, 0, tensor(y, {4}), false, *a),
             receive = links->bind(0, 1, tensor(y, {4}), false, *b);
  CHECK(send->run(nullptr));
  CHECK(send->run(nullptr));  // a capacity of 2
  std::atomic<int> ended{0};
  std::thread sender([&] {
    CHECK_FALSE(send->run(nullptr));
    ++ended;
  });
  std::thread waiter([&] {
    CHECK_FALSE(wait->run(nullptr));
    ++ended;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(ended == 0);
  links->abort();
  sender.join();
  waiter.join();
  CHECK(ended == 2);
  CHECK_FALSE(receive->run(nullptr));
  links->reset();  // the messages that lay there are gone
  x = {7, 7, 7, 7};
  CHECK(send->run(nullptr));
  CHECK(receive->run(nullptr));
  CHECK(y == x);

  struct Stopper : Lookout {
    Links& links;
    explicit Stopper(Links& l) : links(l) {}
    void look() override { links.abort(); }
  } stopper(*links);
  CHECK_FALSE(wait->run(&stopper));
}

TEST_CASE("links that do not fit their tensors are refused") {
  const auto device = make_ref_backend()->open({DeviceKind::kRef, {}, 0});
  const auto transport = make_inproc({});
  Values x(4);
  CHECK_THROWS_AS(transport->open_links({{"x", 0, {}}}), Error);
  CHECK_THROWS_AS(transport->open_links({{"x", 1, {{0, 1, {{0, 2}}, {{0, 3}}}}}}), Error);
  const auto links = transport->open_links({{"x", 1, {{0, 1, {{2, 6}}, {{0, 4}}}}}});
  CHECK_THROWS_AS(links->bind(0, 0, tensor(x, {4}), true, *device), Error);
  CHECK_THROWS_AS(links->bind(1, 0, tensor(x, {4}), true, *device), Error);
  CHECK_THROWS_AS(links->bind(0, 1, tensor(x, {2, 2}), false, *device), Error);
}

TEST_CASE("abort wakes everybody who waits in a collective") {
  Ring ring(3);
  std::vector<std::vector<float>> data(3, std::vector<float>(100000));
  std::vector<std::unique_ptr<Collective>> bound;
  for (size_t m = 0; m < 3; ++m) {
    CollectiveSpec spec{{.op = OpCode::k_all_reduce}, {operand(data[m])}, {operand(data[m])}};
    bound.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
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
    CollectiveSpec spec{{.op = OpCode::k_all_reduce}, {operand(m == 0 ? a : b)}, {operand(m == 0 ? a : b)}};
    bound.push_back(ring.transport->bind(static_cast<int>(m), spec, *ring.devices[m]));
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

// A queue that waits for another's last instruction is not woken by each of those before.
TEST_CASE("a counter's sleepers sleep until what they wait for is there") {
  constexpr uint32_t kAdvances = 20'000;
  for (const int sleepers : {1, 3}) {
    CAPTURE(sleepers);
    Counter counter;
    std::vector<long> switches(static_cast<size_t>(sleepers));
    std::vector<std::thread> threads;
    for (int k = 0; k < sleepers; ++k)
      threads.emplace_back([&, k] {
        rusage before{}, after{};
        getrusage(RUSAGE_THREAD, &before);
        CHECK(counter.wait(kAdvances - static_cast<uint32_t>(k)));
        getrusage(RUSAGE_THREAD, &after);
        switches[k] = after.ru_nvcsw - before.ru_nvcsw;
      });
    for (uint32_t n = 0; n < kAdvances; ++n) {
      counter.advance(1);
      if (n % 16 == 0) std::this_thread::yield();
    }
    for (std::thread& t : threads) t.join();
    for (const long n : switches) CHECK(n < 100);
  }
}

// Whoever comes when others are woken is not forgotten: each waits for a value of its own, again and again.
TEST_CASE("a counter wakes all who wait, whatever they wait for") {
  constexpr uint32_t kRounds = 3000, kThreads = 4;
  Counter turn;  // thread k has the turns k, k + kThreads, ..
  std::vector<std::thread> threads;
  for (uint32_t k = 0; k < kThreads; ++k)
    threads.emplace_back([&, k] {
      for (uint32_t n = k; n < kRounds * kThreads; n += kThreads) {
        if (!turn.wait(n)) return;
        turn.advance(1);
      }
    });
  for (std::thread& t : threads) t.join();
  CHECK(turn.wait(kRounds * kThreads));
}

}  // namespace
}  // namespace whale
