// Several ranks in one process: they share a store and a wire of flat bytes.
#include <dlfcn.h>
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <thread>

#include "base/error.h"
#include "base/read_memory.h"
#include "caught.h"
#include "comm/courier_library.h"
#include "comm/post.h"
#include "comm/transport.h"
#include "data/convert.h"
#include "device/ref/ref.h"
#include "joined.h"
#include "plan/part.h"
#include "property.h"
#include "trained.h"
#include "world/world.h"

using namespace whale;
using namespace whale::test;

namespace {

// ---- collectives: the reference beside the transport among threads ------------------------------------------------
constexpr DType kTypes[] = {DType::kF32, DType::kF64, DType::kBF16};

struct Tensor {
  Dims dims;
  std::vector<char> bytes;
};

// What every member brings and gets in one random collective.
struct Case {
  CollectiveSpec spec;
  DType dtype{};
  std::vector<std::vector<Tensor>> in, out;  // by member and operand; all_reduce, adasum: in place
};

Tensor noise(const Dims& dims, DType dtype, Dice& dice) {
  const auto n = static_cast<size_t>(element_count(dims));
  Tensor t{dims, std::vector<char>(n * static_cast<size_t>(size_of(dtype)))};
  const std::vector<double> values = dice.reals(n);
  convert(DType::kF64, values.data(), dtype, t.bytes.data(), n);
  return t;
}
Tensor room(const Dims& dims, DType dtype) {
  return {dims, std::vector<char>(static_cast<size_t>(element_count(dims) * size_of(dtype)))};
}
std::vector<Interval> random_cuts(size_t members, int64_t extent, Dice& dice) {
  std::vector<int64_t> ends(members - 1);
  for (int64_t& e : ends) e = dice.between(0, extent);
  std::sort(ends.begin(), ends.end());
  ends.push_back(extent);
  std::vector<Interval> cuts;
  for (const int64_t e : ends) cuts.push_back({cuts.empty() ? 0 : cuts.back().end, e});
  return cuts;
}
Dims with(Dims dims, const SubAxis& sub_axis, const Interval& cut) {
  dims[sub_axis.dim] = sub_axis.outer * cut.size() * sub_axis.inner;
  return dims;
}

Case random_case(size_t members, Dice& dice) {
  constexpr OpCode kOps[] = {OpCode::k_all_reduce, OpCode::k_reduce_scatter, OpCode::k_all_gather,
                             OpCode::k_all_to_all, OpCode::k_shift,          OpCode::k_adasum};
  constexpr Combine kCombines[] = {Combine::kSum, Combine::kMax, Combine::kMin, Combine::kLogSumExp};
  Case c;
  c.spec.op = kOps[dice.below(std::ssize(kOps))];
  c.spec.combine = kCombines[dice.below(std::ssize(kCombines))];
  c.dtype = kTypes[dice.below(std::ssize(kTypes))];
  c.in.resize(members), c.out.resize(members);
  const SubAxis sub_axis{static_cast<int>(dice.below(2)), dice.between(1, 3), dice.between(1, 3)};
  const int64_t extent = dice.between(0, 9);
  const size_t operands =
      c.spec.op == OpCode::k_all_reduce || c.spec.op == OpCode::k_reduce_scatter || c.spec.op == OpCode::k_all_gather
          ? static_cast<size_t>(dice.between(1, 3))
          : 1;
  for (size_t i = 0; i < operands; ++i) {
    // Also those that are cut into slices and chunks, and lie where others read them.
    const int64_t longest = dice.below(c.spec.op == OpCode::k_all_reduce ? 3 : 12) == 0 ? 12000 : 40;
    Dims whole = {dice.between(1, 5), dice.between(1, 5), dice.between(1, longest)};
    whole[sub_axis.dim] = sub_axis.outer * extent * sub_axis.inner;
    const std::vector<Interval> cuts = random_cuts(members, extent, dice);
    SubAxis to{1 - sub_axis.dim, 1, dice.between(1, 2)};
    const int64_t to_extent = dice.between(1, 6);
    if (c.spec.op == OpCode::k_all_to_all) {
      whole[to.dim] = to_extent * to.inner;
      c.spec.to = {to, random_cuts(members, to_extent, dice)};
    }
    if (c.spec.op != OpCode::k_all_reduce && c.spec.op != OpCode::k_shift && c.spec.op != OpCode::k_adasum)
      c.spec.cuts.push_back({sub_axis, cuts});
    for (size_t m = 0; m < members; ++m) {
      const size_t before = (m + members - 1) % members;
      switch (c.spec.op) {
        case OpCode::k_reduce_scatter:
          c.in[m].push_back(noise(whole, c.dtype, dice));
          c.out[m].push_back(room(with(whole, sub_axis, cuts[m]), c.dtype));
          break;
        case OpCode::k_all_gather:
          c.in[m].push_back(noise(with(whole, sub_axis, cuts[m]), c.dtype, dice));
          c.out[m].push_back(room(whole, c.dtype));
          break;
        case OpCode::k_all_to_all:
          c.in[m].push_back(noise(with(whole, sub_axis, cuts[m]), c.dtype, dice));
          c.out[m].push_back(room(with(whole, to, c.spec.to.cuts[m]), c.dtype));
          break;
        case OpCode::k_shift:
          c.in[m].push_back(noise(with(whole, sub_axis, cuts[m]), c.dtype, dice));
          c.out[m].push_back(room(with(whole, sub_axis, cuts[before]), c.dtype));
          break;
        default: c.in[m].push_back(noise(whole, c.dtype, dice));
      }
    }
  }
  return c;
}

// Three calls, the later ones on what the earlier ones left; all bytes of all members.
std::vector<std::vector<char>> results(Case c, const std::vector<Transport*>& transports) {
  const auto backend = make_ref_backend();
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<std::unique_ptr<Collective>> bound;
  for (size_t m = 0; m < c.in.size(); ++m) {
    devices.push_back(backend->open({DeviceKind::kRef, {}, 0}));
    CollectiveSpec spec = c.spec;
    const auto operand = [&](Tensor& t) { return Operand{t.bytes.data(), c.dtype, t.dims, false, nullptr}; };
    for (Tensor& t : c.in[m]) spec.in.push_back(operand(t));
    for (Tensor& t : c.out[m]) spec.out.push_back(operand(t));
    if (c.out[m].empty()) spec.out = spec.in;
    bound.push_back(transports[m]->bind(static_cast<int>(m), spec, *devices[m]));
  }
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (size_t m = 0; m < bound.size(); ++m)
    threads.emplace_back([&, m] {
      for (int call = 0; call < 3; ++call) failures += !bound[m]->run(nullptr);
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(failures == 0);
  std::vector<std::vector<char>> all;
  for (const auto* side : {&c.in, &c.out})
    for (const auto& member : *side)
      for (const Tensor& t : member) all.push_back(t.bytes);
  return all;
}

// Messages do not arrive where it is cut; notices do.
class CutCourier final : public Courier {
 public:
  CutCourier(std::unique_ptr<Courier> inner, Receiver& receiver, const std::atomic<bool>& cut)
      : inner_(std::move(inner)), receiver_(receiver), cut_(cut) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void send(int to, const LetterHead& head, const void* body, size_t bytes, const Ticket& ticket) override {
    const bool message = head.kind == LetterHead::kMessage || head.kind == LetterHead::kLent;
    if (!cut_ || !message) return inner_->send(to, head, body, bytes, ticket);
    if (ticket.thing != nullptr) receiver_.sent(ticket);
  }
  void give_up(int rank) override { inner_->give_up(rank); }

 private:
  std::unique_ptr<Courier> inner_;
  Receiver& receiver_;
  const std::atomic<bool>& cut_;
};

// Counts what goes to another rank.
class CountingCourier final : public Courier {
 public:
  CountingCourier(std::unique_ptr<Courier> inner, std::atomic<int>& messages)
      : inner_(std::move(inner)), messages_(messages) {}
  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  void send(int to, const LetterHead& head, const void* body, size_t bytes, const Ticket& ticket) override {
    messages_ += to != rank() && (head.kind == LetterHead::kMessage || head.kind == LetterHead::kLent);
    inner_->send(to, head, body, bytes, ticket);
  }
  void give_up(int rank) override { inner_->give_up(rank); }

 private:
  std::unique_ptr<Courier> inner_;
  std::atomic<int>& messages_;
};

// ---- sessions -----------------------------------------------------------------------------------------------------
struct Ranks {
  size_t running = SIZE_MAX;  // of the ranks: those before it make steps
  std::vector<std::unique_ptr<Session>> sessions;
  std::vector<std::optional<Error>> errors;
  Ranks(const std::vector<Plan>& plans, SessionOptions options = {}, std::vector<World> worlds = {}) {
    if (worlds.empty()) worlds = make_inproc_worlds(static_cast<int>(plans.size()));
    sessions.resize(plans.size()), errors.resize(plans.size());
    std::vector<std::thread> threads;
    for (size_t r = 0; r < plans.size(); ++r)
      threads.emplace_back([&, r] {
        SessionOptions mine = options;
        mine.world = worlds[r];
        try {
          sessions[r] = std::make_unique<Session>(std::make_shared<const Plan>(plans[r]),
                                                  std::make_shared<Backends>(small::backends_folder()), mine);
        } catch (const Error& e) {
          errors[r] = e;
        }
      });
    for (std::thread& thread : threads) thread.join();
  }

  // A step on every rank; x of rank r is scaled by scales[r]. What each rank says of it.
  std::vector<std::optional<Error>> step(const Plan& plan, const std::vector<float>& scales,
                                         const std::vector<std::shared_ptr<const Cancel>>& cancels = {},
                                         int32_t label = 0) {
    std::vector<std::optional<Error>> ends(sessions.size());
    std::vector<RunHandle> handles(std::min(running, sessions.size()));
    const Entry& entry = plan.entries[0];
    std::vector<std::vector<float>> x(sessions.size());
    std::vector<std::vector<int32_t>> y(sessions.size());
    for (size_t r = 0; r < handles.size(); ++r) {
      std::vector<NamedHost> inputs;
      for (const PlanInput& input : entry.inputs) {
        const auto n = static_cast<size_t>(element_count(input.dims));
        if (input.dtype == DType::kI32) {
          y[r].resize(n, r == 0 ? 0 : label);
          inputs.push_back({input.name, {input.dtype, input.dims, y[r].data()}});
        } else {
          for (size_t i = 0; i < n; ++i) x[r].push_back(scales[r] * std::sin(static_cast<float>(i)));
          inputs.push_back({input.name, {input.dtype, input.dims, x[r].data()}});
        }
      }
      try {
        handles[r] = sessions[r]->step(inputs, {}, cancels.empty() ? nullptr : cancels[r]);
      } catch (const Error& e) {
        ends[r] = e;
      }
    }
    for (size_t r = 0; r < handles.size(); ++r) {
      if (ends[r]) continue;
      try {
        if (!handles[r].wait(60)) ends[r] = internal("it hangs");
      } catch (const Error& e) {
        ends[r] = e;
      }
    }
    return ends;
  }

  // A step of one rank alone, by which it catches up.
  std::optional<Error> step_of(size_t rank, const Plan& plan, float scale) {
    std::vector<std::unique_ptr<Session>> others(sessions.size());
    std::swap(others, sessions);
    sessions[0] = std::move(others[rank]);
    const size_t before = std::exchange(running, 1);
    const auto end = step(plan, std::vector<float>(sessions.size(), scale))[0];
    running = before;
    others[rank] = std::move(sessions[0]);
    std::swap(others, sessions);
    return end;
  }

  // All values that any rank holds, in the order of ranks and variables.
  std::vector<float> values() {
    std::vector<float> all;
    for (auto& session : sessions)
      for (const VariableInfo& v : session->variables()) {
        std::vector<float> some(static_cast<size_t>(element_count(v.dims)), -7.0f);
        session->read_here(v.name, {v.dtype, v.dims, some.data()});
        all.insert(all.end(), some.begin(), some.end());
      }
    return all;
  }
};

Plan plan_of(const std::string& strategy, const std::string& devices, int64_t accumulation = 0) {
  CompileOptions options;
  options.strategy = strategy;
  options.accumulation = accumulation;
  return compile(small::mlp().g, parse_devices(devices), options);
}

constexpr std::string_view kStrategies[] = {"replica", "pipeline(2, micro_batches=2)", "replica(2) > split(2)"};
int devices_for(std::string_view strategy) { return strategy.find('>') == strategy.npos ? 2 : 4; }

}  // namespace

namespace {

// `wires(n)`: of n ranks, another set each time.
void compare_collectives(uint64_t seed, int cases,
                         const std::function<std::vector<std::shared_ptr<Wire>>(int)>& wires_of) {
  Dice dice(seed);
  for (int i = 0; i < cases; ++i) {
    const auto members = static_cast<size_t>(dice.between(1, 6));
    const Case c = random_case(members, dice);
    CAPTURE(i);
    CAPTURE(static_cast<int>(c.spec.op));
    Group group{"replica", {{}}};
    for (size_t m = 0; m < members; ++m) group.parts[0].push_back(static_cast<int32_t>(m));
    const auto near = make_inproc({group});
    // All on one rank, each on its own, anyhow, or several side by side.
    std::vector<int32_t> ranks(members);
    const int64_t kind = dice.below(4);
    for (size_t m = 0; m < members; ++m)
      ranks[m] = kind == 0 ? 0 : kind == 1 ? static_cast<int32_t>(m) : static_cast<int32_t>(dice.below(3));
    if (kind == 3) std::sort(ranks.begin(), ranks.end());
    const auto wires = wires_of(static_cast<int>(members < 3 ? 3 : members));
    // All forms of an all-reduce, whatever its size.
    Profile profile = kMachineOfCores;
    profile.link = {dice.coin() ? 1e10 : 1e6, dice.coin() ? 1e-9 : 1.0};
    std::vector<std::unique_ptr<Transport>> by_rank;
    for (const auto& wire : wires) {
      by_rank.push_back(make_reference({group}, wire, ranks, profile, true));
      by_rank.back()->reset();
    }
    std::vector<Transport*> nears, fars;
    for (size_t m = 0; m < members; ++m) {
      nears.push_back(near.get());
      fars.push_back(by_rank[ranks[m]].get());
    }
    CHECK(results(c, nears) == results(c, fars));
  }
}

}  // namespace

TEST_CASE("every collective by messages gives the bits of the one in shared memory") {
  compare_collectives(5, 300, make_inproc_wires);
}

TEST_CASE("an all-gather brings a part to each other rank once, however many members that has") {
  Dice dice(11);
  const std::vector<int32_t> ranks = {0, 0, 0, 1, 1, 2};
  const size_t members = ranks.size();
  Group group{"replica", {{0, 1, 2, 3, 4, 5}}};
  std::atomic<int> messages{0};
  std::vector<std::shared_ptr<Post>> posts;
  std::vector<std::unique_ptr<Transport>> by_rank;
  Profile profile = kMachineOfCores;
  profile.link = {1e6, 1e-9};  // slow: copies inside a rank are nothing beside it
  for (const MakeCourier& make : make_inproc_couriers(3)) {
    posts.push_back(Post::open(3, [&](Courier::Receiver& receiver) -> std::unique_ptr<Courier> {
      return std::make_unique<CountingCourier>(make(receiver), messages);
    }));
    by_rank.push_back(make_reference({group}, posts.back()->next_wire(), ranks, profile, false));
    by_rank.back()->reset();
  }
  const auto near = make_inproc({group});
  std::vector<Transport*> nears(members, near.get()), fars;
  for (const int32_t rank : ranks) fars.push_back(by_rank[rank].get());
  Case c;
  c.spec.op = OpCode::k_all_gather, c.dtype = DType::kF32;
  c.in.resize(members), c.out.resize(members);
  const std::vector<Interval> cuts = {{0, 3}, {3, 10}, {10, 11}, {11, 20}, {20, 29}, {29, 30}};
  c.spec.cuts.push_back({{1, 1, 1}, cuts});
  for (size_t m = 0; m < members; ++m) {
    c.in[m].push_back(noise({4, cuts[m].size()}, c.dtype, dice));
    c.out[m].push_back(room({4, 30}, c.dtype));
  }
  const auto expected = results(c, nears);
  CHECK(results(c, fars) == expected);
  CHECK(messages == 3 * 2 * static_cast<int>(members));  // of three calls: each part to two other ranks
}

TEST_CASE("what is long goes in chunks, and all of it in little memory") {
  Dice dice(9);
  const size_t members = 3;
  Group group{"replica", {{0, 1, 2}}};
  const std::vector<int32_t> ranks = {0, 1, 2};
  const std::vector<std::shared_ptr<Wire>> wires = make_inproc_wires(3);
  std::vector<std::unique_ptr<Transport>> by_rank;
  std::vector<Transport*> nears, fars;
  const auto near = make_inproc({group});
  for (const auto& wire : wires) {
    by_rank.push_back(make_reference({group}, wire, ranks, kMachineOfCores, true));
    by_rank.back()->reset();
    nears.push_back(near.get()), fars.push_back(by_rank.back().get());
  }
  const int64_t n = 3'000'001;
  const std::vector<Interval> cuts = {{0, 5}, {5, 2'500'000}, {2'500'000, n}};
  const std::vector<Interval> columns = {{0, 2}, {2, 2}, {2, 3}};
  for (const OpCode op : {OpCode::k_all_gather, OpCode::k_all_to_all})
    for (const int64_t rows : {int64_t{1}, int64_t{3}}) {
      const bool gathers = op == OpCode::k_all_gather;
      if (!gathers && rows == 1) continue;
      Case c;
      c.spec.op = op, c.dtype = DType::kF32;
      c.in.resize(members), c.out.resize(members);
      if (!gathers) c.spec.to = {{0, 1, 1}, columns};
      for (int operand = 0; operand < (gathers ? 2 : 1); ++operand) {
        c.spec.cuts.push_back({{1, 1, 1}, cuts});
        for (size_t m = 0; m < members; ++m) {
          c.in[m].push_back(noise({rows, cuts[m].size()}, c.dtype, dice));
          c.out[m].push_back(room({gathers ? rows : columns[m].size(), n}, c.dtype));
        }
      }
      CAPTURE(rows);
      CAPTURE(gathers);
      const bool same = results(c, nears) == results(c, fars);
      CHECK(same);
      for (const auto& wire : wires) CHECK(wire->held() <= 16 << 20);
    }
}

TEST_CASE("every collective over UCX gives the bits of the one in shared memory") {
  if (ucx_folder().empty()) return;  // built without UCX
  const auto worlds = join(6);
  compare_collectives(6, 100, [&](int) {
    std::vector<std::shared_ptr<Wire>> wires;
    for (const auto& world : worlds) wires.push_back(world->next().wire);
    return wires;
  });
}

TEST_CASE("a rank that is not reached since another one is lost is not the lost one") {
  if (ucx_folder().empty()) return;
  struct Listener final : Courier::Receiver {
    Courier::Ticket accept(const LetterHead&, size_t, char*&) override { return {}; }
    void arrived(const Courier::Ticket&) noexcept override {}
    void sent(const Courier::Ticket&) noexcept override {}
    void lost(int rank, const std::string& why) noexcept override { ranks.push_back(rank), last = why; }
    std::vector<int> ranks;
    std::string last;
  } listener;
  void* library = dlopen((ucx_folder() + "/libwhale_ucx.so").c_str(), RTLD_NOW | RTLD_LOCAL);
  REQUIRE(library != nullptr);
  const auto* entry = static_cast<const CourierEntry*>(dlsym(library, WHALE_COURIER_SYMBOL));
  REQUIRE(entry != nullptr);
  CourierOptions options{.rank = 1, .size = 4, .near = {true, true, true, true}, .readable = {0, 0, 0, 0}};
  int of = 0;  // who is said to be at fault; -1: nobody
  options.publish = [](const std::string&) {};
  options.address_of = [&](int) -> std::string { throw error(Code::kUnavailable, "no address of {}", of).at_rank(of); };
  options.doubt = [](int, const std::string&) { return false; };
  options.has_left = [](int) { return false; };
  const std::unique_ptr<Courier> courier = entry->create(options, listener);
  courier->send(2, {}, nullptr, 0, {});
  courier->send(2, {}, nullptr, 0, {});
  CHECK(listener.ranks == std::vector<int>{0});  // once
  CHECK(listener.last == "no address of 0");
  of = 1;  // nobody hears of oneself
  courier->send(2, {}, nullptr, 0, {});
  of = -1;
  courier->send(3, {}, nullptr, 0, {});
  CHECK(listener.ranks == std::vector<int>{0, 2, 3});
}

TEST_CASE("sessions keep what they need of a world that is released") {
  if (ucx_folder().empty()) return;
  auto worlds = join(2);
  const Plan plan = plan_of("replica", "ref:2");
  Ranks ranks({plan, plan}, {}, {worlds[0]->next(), worlds[1]->next()});
  worlds.clear();
  REQUIRE_FALSE(ranks.errors[0]);
  for (int step = 0; step < 2; ++step)
    for (const auto& end : ranks.step(plan, {1, 1})) CHECK_FALSE(end);
}

// Of all sizes: what UCX sends at once, in pieces, and what is read where it lies.
void send_all_sizes(const World& a, const World& b, bool lends, uint32_t capacity) {
  const size_t sizes[] = {0, 1, 100, 3000, 8192, 70000, 1 << 20, 5 << 20, 12, 0, 100000};
  const uint64_t tag = capacity * 2 + lends;
  const auto sender = a.wire->open_sender(1, tag, capacity);
  const auto receiver = b.wire->open_receiver(0, tag);
  const auto byte = [](size_t k, size_t i, int run) { return static_cast<char>(k * 7 + i + static_cast<size_t>(run)); };
  for (int run = 0; run < 3; ++run) {
    CAPTURE(run);
    a.wire->begin_run(), b.wire->begin_run();
    const size_t read = run == 1 ? 3 : std::size(sizes);  // run 1 is aborted in the middle
    std::atomic<size_t> taken{0};
    bool settled = false;
    std::vector<std::vector<char>> lent(std::size(sizes));
    std::thread sends([&] {
      for (size_t i = 0; i < std::size(sizes); ++i) {
        if (capacity == 0) {  // paced by this test
          for (size_t now = taken; i >= now + 2 && now < read; now = taken) taken.wait(now);
          if (i >= taken + 2) return;
        }
        lent[i].resize(sizes[i]);
        char* to = lends ? lent[i].data() : sender->begin(sizes[i], nullptr);
        if (to == nullptr && !lends) return;
        for (size_t k = 0; k < sizes[i]; ++k) to[k] = byte(k, i, run);
        if (!lends)
          sender->end();
        else if (!sender->lend(to, sizes[i], nullptr))
          return;
      }
      settled = sender->settle(nullptr);
    });
    std::vector<char> place;
    for (size_t i = 0; i < read; ++i) {
      place.assign(sizes[i], 0);
      const char* from = place.data();
      if (lends)
        REQUIRE(receiver->take(place.data(), sizes[i], nullptr));
      else
        REQUIRE((from = receiver->begin(sizes[i], nullptr)) != nullptr);
      size_t wrong = 0;
      for (size_t k = 0; k < sizes[i]; ++k) wrong += from[k] != byte(k, i, run);
      CHECK(wrong == 0);
      if (!lends) receiver->end();
      ++taken;
      taken.notify_all();
    }
    if (run == 1) a.wire->abort(), b.wire->abort();
    sends.join();
    CHECK(settled == (run != 1));
  }
}

TEST_CASE("messages of any size come whole and in order, and what an aborted run left is dropped") {
  if (ucx_folder().empty()) return;
  const auto worlds = join(2);
  auto inproc = make_inproc_worlds(2);
  const World a = worlds[0]->next(), b = worlds[1]->next();
  for (const bool lends : {false, true})
    for (const uint32_t capacity : {0u, 2u}) {
      CAPTURE(lends);
      CAPTURE(capacity);
      send_all_sizes(a, b, lends, capacity);
      send_all_sizes(inproc[0], inproc[1], lends, capacity);
    }
}

TEST_CASE("memory that was lent and is gone is waited for until the run is aborted") {
  const char mine = 1;
  char seen = 0;
  if (!read_memory(getpid(), reinterpret_cast<uintptr_t>(&mine), &seen, 1)) return;  // here nothing is lent
  auto inproc = make_inproc_worlds(2);
  std::vector<std::shared_ptr<Worlds>> worlds;
  if (!ucx_folder().empty()) worlds = join(2);
  std::vector<std::vector<World>> all = {inproc};
  if (!worlds.empty()) all.push_back({worlds[0]->next(), worlds[1]->next()});
  for (const auto& pair : all) {
    const auto sender = pair[0].wire->open_sender(1, 1, 2);
    const auto receiver = pair[1].wire->open_receiver(0, 1);
    for (const auto& world : pair) world.wire->begin_run();
    constexpr size_t kBytes = 1 << 20;
    std::vector<char> place(kBytes);
    for (int message = 0; message < 2; ++message) {  // the first is copied where ranks do not know each other yet
      void* lent = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      REQUIRE(lent != MAP_FAILED);
      std::memset(lent, 7, kBytes);
      REQUIRE(sender->lend(static_cast<char*>(lent), kBytes, nullptr));
      if (message == 0) REQUIRE(receiver->take(place.data(), kBytes, nullptr));
      REQUIRE(mprotect(lent, kBytes, PROT_NONE) == 0);  // nothing else comes to lie there
    }
    std::atomic<int> took{-1};
    std::thread takes([&] { took = receiver->take(place.data(), kBytes, nullptr); });
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    CHECK(took == -1);
    pair[1].wire->abort();
    takes.join();
    CHECK(took == 0);
  }
}

TEST_CASE("what an aborted run has lent is not waited for by the next one, by whatever channels that goes") {
  auto worlds = make_inproc_worlds(2);
  Wire &a = *worlds[0].wire, &b = *worlds[1].wire;
  const auto sender = a.open_sender(1, 1, 2, true);
  a.begin_run(), b.begin_run();
  REQUIRE(sender->begin(1 << 20, nullptr) != nullptr);
  sender->end();
  a.abort(), b.abort();
  a.begin_run(), b.begin_run();
  std::atomic<int> settled{-1};
  std::thread settles([&] { settled = a.settle(nullptr); });
  for (int i = 0; i < 200 && settled == -1; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(100));
  a.abort();
  settles.join();
  CHECK(settled == 1);
}

TEST_CASE("ranks over UCX train what one process trains, end runs together, and open a session again and again") {
  if (ucx_folder().empty()) return;
  const auto worlds = join(2);
  for (const std::string_view strategy : kStrategies) {
    CAPTURE(strategy);
    const Plan plan = plan_of(std::string(strategy), fmt::format("ref:{}", devices_for(strategy)));
    std::vector<float> values[2];
    for (int far = 0; far < 2; ++far) {
      std::vector<World> mine;
      for (const auto& world : worlds)
        if (far == 1) mine.push_back(world->next());
      Ranks ranks({plan, plan}, {}, mine);
      REQUIRE_FALSE(ranks.errors[0]);
      for (int step = 0; step < 3; ++step)
        for (const auto& end : ranks.step(plan, {1, 1})) CHECK_FALSE(end);
      values[far] = ranks.values();
      const auto cancel = std::make_shared<Cancel>();
      cancel->trigger();
      for (const auto& end : ranks.step(plan, {1, 1}, {nullptr, cancel})) {
        REQUIRE(end);
        CHECK(end->code() == Code::kCancelled);
      }
      CHECK(ranks.values() == values[far]);
      for (const auto& end : ranks.step(plan, {1, 1})) CHECK_FALSE(end);
    }
    CHECK(values[0] == values[1]);
  }
}

TEST_CASE("a rank that is lost ends the runs of the others with the variables as they were") {
  const Plan plan = plan_of("replica", "ref:2");
  std::vector<std::shared_ptr<Post>> posts;
  std::vector<World> worlds;
  const auto store = make_inproc_store();
  for (const MakeCourier& make : make_inproc_couriers(2)) {
    posts.push_back(Post::open(2, make));
    worlds.push_back({store, posts.back()->next_wire()});
  }
  Ranks ranks({plan, plan}, {}, worlds);
  REQUIRE_FALSE(ranks.errors[0]);
  for (const auto& end : ranks.step(plan, {1, 1})) REQUIRE_FALSE(end);
  const std::vector<float> before = ranks.values();
  ranks.running = 1;  // as if the other's process had gone: nobody answers for it
  std::thread notices([&] { posts[0]->give_up(1, "rank 1 is lost: its process has ended"); });
  for (int step = 0; step < 2; ++step) {  // while it runs, and before
    const auto ends = ranks.step(plan, {1, 1});
    REQUIRE(ends[0]);
    CHECK(ends[0]->code() == Code::kUnavailable);
    CHECK(ends[0]->where().rank == 1);
    CHECK(ends[0]->damage() == Damage::kStep);
    CHECK(ends[0]->message().starts_with("rank 1 is lost: its process has ended"));
    CHECK(ranks.values() == before);
  }
  notices.join();
}

// Each of three ranks is known by what it says itself: the lost one cannot, and one is in no run.
TEST_CASE("when a rank is lost, what all others wait for is said in the words of the plan") {
  CompileOptions options;
  options.strategy = "replica";
  const Plan plan = compile(small::mlp(12).g, parse_devices("ref:4"), options);
  std::vector<std::shared_ptr<Post>> posts;
  std::vector<World> worlds;
  const auto store = make_inproc_store();
  for (const MakeCourier& make : make_inproc_couriers(4)) {
    posts.push_back(Post::open(4, make));
    worlds.push_back({store, posts.back()->next_wire()});
  }
  Ranks ranks({plan, plan, plan, plan}, {}, worlds);
  REQUIRE_FALSE(ranks.errors[0]);
  for (const auto& end : ranks.step(plan, {1, 1, 1, 1})) REQUIRE_FALSE(end);
  ranks.running = 2;  // rank 2 begins no step, and rank 3 is lost
  std::thread notices([&] {
    const auto waits = [&](size_t r) {
      return has(ranks.sessions[r]->flight_record(), "\"waits\":true,\"at\":\"all_reduce");
    };
    while (!waits(0) || !waits(1)) std::this_thread::yield();
    for (size_t r = 0; r < 3; ++r) posts[r]->give_up(3, "rank 3 is lost: its process has ended");
  });
  const auto ends = ranks.step(plan, {1, 1, 1, 1});
  notices.join();
  for (size_t r = 0; r < 2; ++r) {
    REQUIRE(ends[r]);
    CAPTURE(ends[r]->message());
    CHECK(ends[r]->where().rank == 3);
    CHECK(
        ends[r]->message() ==
        "rank 3 is lost: its process has ended; in step 1 ranks 0,1 wait for all_reduce of loss and 3 more (backward) "
        "among ranks 0-3");
  }
  const nlohmann::json record = nlohmann::json::parse(ranks.sessions[0]->flight_record());
  CHECK(record["error"] == ends[0]->message());
  REQUIRE(record["queues"].size() == 2);
  const auto& last = record["queues"][1]["instructions"].back();
  CHECK(record["queues"][1]["queue"] == "replica");
  CHECK((last["op"] == "all_reduce" && last["step"] == 1 && last["seconds"].is_null()));
  CHECK(last["devices"] == std::vector<int>{0, 1, 2, 3});
}

TEST_CASE("a rank that is there and begins no step ends it for the others, and the next steps meet") {
  CompileOptions options;
  options.strategy = "replica";
  const Plan plan = compile(small::mlp(12).g, parse_devices("ref:3"), options);
  std::vector<World> worlds = make_inproc_worlds(3);
  for (World& world : worlds) world.warns_after = 0.2, world.patience = 0.4;
  std::mutex mutex;
  std::vector<std::string> warnings;
  SessionOptions warned;
  warned.warn = [&](const std::string& text) {
    const std::lock_guard lock(mutex);
    warnings.push_back(text);
  };
  Ranks ranks({plan, plan, plan}, warned, worlds);
  REQUIRE_FALSE(ranks.errors[0]);
  for (const auto& end : ranks.step(plan, {1, 1, 1})) REQUIRE_FALSE(end);
  const std::vector<float> before = ranks.values();
  ranks.running = 2;
  const auto ends = ranks.step(plan, {1, 1, 1});
  for (size_t r = 0; r < 2; ++r) {
    REQUIRE(ends[r]);
    CAPTURE(ends[r]->message());
    CHECK(ends[r]->code() == Code::kDeadlineExceeded);
    CHECK(ends[r]->where().rank == 2);
    CHECK(ends[r]->damage() == Damage::kStep);
    CHECK(has(ends[r]->message(), "rank 2 has not begun step 1, which rank "));
    CHECK(has(ends[r]->message(),
              "; in step 1 ranks 0,1 wait for all_reduce of loss and 3 more (backward) among ranks "));
  }
  CHECK(ranks.values() == before);
  REQUIRE_FALSE(warnings.empty());
  CHECK(has(warnings[0], "rank 2 has not begun step 1, which rank "));
  // The late one hears of it, whenever it comes.
  ranks.running = SIZE_MAX;
  const auto late = ranks.step_of(2, plan, 1);
  REQUIRE(late);
  CHECK(late->code() == Code::kDeadlineExceeded);
  CHECK(late->where().rank == 2);
  CHECK(ranks.values() == before);
  Ranks others({plan, plan, plan});
  for (int step = 0; step < 2; ++step)
    for (const auto& end : others.step(plan, {1, 1, 1})) REQUIRE_FALSE(end);
  for (const auto& end : ranks.step(plan, {1, 1, 1})) CHECK_FALSE(end);
  CHECK(ranks.values() == others.values());
}

TEST_CASE("what is sent and does not arrive ends the step, with what all wait for") {
  const Plan plan = plan_of("replica", "ref:2");
  std::atomic<bool> cut{false};
  std::vector<World> worlds;
  std::vector<std::shared_ptr<Post>> posts;
  const auto store = make_inproc_store();
  for (const MakeCourier& make : make_inproc_couriers(2)) {
    posts.push_back(Post::open(2, [&](Courier::Receiver& receiver) -> std::unique_ptr<Courier> {
      return std::make_unique<CutCourier>(make(receiver), receiver, cut);
    }));
    worlds.push_back({store, posts.back()->next_wire()});
    worlds.back().patience = 0.4;
  }
  Ranks ranks({plan, plan}, {}, worlds);
  REQUIRE_FALSE(ranks.errors[0]);
  for (const auto& end : ranks.step(plan, {1, 1})) REQUIRE_FALSE(end);
  const std::vector<float> before = ranks.values();
  cut = true;
  for (const auto& end : ranks.step(plan, {1, 1})) {
    REQUIRE(end);
    CAPTURE(end->message());
    CHECK(end->code() == Code::kDeadlineExceeded);
    CHECK(has(end->message(), "nothing has moved in step 1 for 0.4"));
    CHECK(
        has(end->message(), "; in step 1 ranks 0,1 wait for all_reduce of loss and 3 more (backward) among ranks 0,1"));
  }
  CHECK(ranks.values() == before);
  cut = false;
  for (const auto& end : ranks.step(plan, {1, 1})) CHECK_FALSE(end);
}

TEST_CASE("ranks train what one process trains, bit by bit") {
  const small::Model m = small::gpt(12, OptimizerKind::kAdamW, 4);
  for (const char* strategy : {"replica", "split", "replica(2) > split(2)", "pipeline(2, micro_batches=4) > replica(2)",
                               "pipeline(4, micro_batches=4)"}) {
    CAPTURE(strategy);
    CompileOptions options;
    options.strategy = strategy;
    options.zero = std::string_view(strategy) == "replica" ? 3 : 0;
    Runner alone(m.g, "ref:4", options);
    for (const int ranks : {2, 3, 4}) {
      CAPTURE(ranks);
      Runner many(m.g, "ref:4", options, 7, ranks);
      Runner one(m.g, "ref:4", options);
      Dice dice(3);
      for (int step = 0; step < 2; ++step) {
        const Values inputs = random_inputs(m.g, 12, dice, 31);
        CHECK(many.step(inputs, {"loss"}) == one.step(inputs, {"loss"}));
      }
      CHECK(many.variables() == one.variables());
    }
  }
}

TEST_CASE("a loss that is not finite on one rank leaves all ranks as they were") {
  for (const std::string_view strategy : kStrategies) {
    CAPTURE(strategy);
    const Plan plan = plan_of(std::string(strategy), fmt::format("ref:{}", devices_for(strategy)));
    for (const size_t bad : {size_t{0}, size_t{1}}) {
      Ranks ranks({plan, plan});
      REQUIRE_FALSE(ranks.errors[0]);
      REQUIRE_FALSE(ranks.errors[1]);
      for (const auto& end : ranks.step(plan, {1, 1})) REQUIRE_FALSE(end);
      const std::vector<float> before = ranks.values();
      std::vector<float> scales = {1, 1};
      scales[bad] = std::numeric_limits<float>::infinity();
      // In a pipeline the first stage alone reads x.
      const bool reads = strategy.find("pipeline") == strategy.npos || bad == 0;
      for (const auto& end : ranks.step(plan, scales)) {
        CHECK(end.has_value() == reads);
        if (end) CHECK(end->code() == Code::kOutOfRange);
        if (end) CHECK(end->damage() == Damage::kStep);
      }
      if (reads) CHECK(ranks.values() == before);
      for (const auto& end : ranks.step(plan, {1, 1})) CHECK_FALSE(end);
      CHECK(ranks.values() != before);
      CHECK(ranks.sessions[0]->updates() == ranks.sessions[1]->updates());
      CHECK(ranks.sessions[0]->iteration() == ranks.sessions[1]->iteration());
    }
  }
}

TEST_CASE("a cancel, or input that is refused, on one rank stops all ranks") {
  for (const std::string_view strategy : kStrategies) {
    CAPTURE(strategy);
    const Plan plan = plan_of(std::string(strategy), fmt::format("ref:{}", devices_for(strategy)));
    Ranks ranks({plan, plan});
    REQUIRE_FALSE(ranks.errors[0]);
    const std::vector<float> before = ranks.values();
    const auto cancel = std::make_shared<Cancel>();
    cancel->trigger();
    for (const auto& end : ranks.step(plan, {1, 1}, {nullptr, cancel})) {
      REQUIRE(end);
      CHECK(end->code() == Code::kCancelled);
    }
    const auto ends = ranks.step(plan, {1, 1}, {}, 77);  // a label of rank 1 that no class has
    REQUIRE((ends[0] && ends[1]));
    CHECK(ends[0]->code() == Code::kInvalidArgument);
    CHECK(has(ends[0]->message(), "rank 1: "));
    CHECK(ends[0]->where().rank == 1);
    CHECK(ranks.values() == before);
    for (const auto& end : ranks.step(plan, {1, 1})) CHECK_FALSE(end);
    CHECK(ranks.values() != before);
  }
}

TEST_CASE("ranks that do not run the same are told so, before the first step") {
  const Plan plan = plan_of("replica", "ref:2"), other = plan_of("replica", "ref:2", 2);
  {
    const Ranks ranks({plan, other});
    for (const auto& e : ranks.errors) {
      REQUIRE(e);
      CHECK(e->code() == Code::kFailedPrecondition);
      CHECK(e->where().rank == 1);
      CHECK(has(e->message(), "rank 0 has '"));
    }
  }
  const Ranks ranks({plan, plan, plan});  // two devices for three ranks
  for (const auto& e : ranks.errors) {
    REQUIRE(e);
    CHECK(e->code() == Code::kInvalidArgument);
    CHECK(has(e->message(),
              "has none of the plan's 2 devices: launch at most 2 ranks (whale launch -n 2), or plan for at least "));
  }
}

TEST_CASE("a rank that closes, or does not open, ends the others' runs") {
  const Plan plan = plan_of("replica", "ref:2");
  const std::vector<World> worlds = make_inproc_worlds(2);
  Ranks ranks({plan, plan}, {}, worlds);
  for (const auto& end : ranks.step(plan, {1, 1})) REQUIRE_FALSE(end);
  ranks.sessions.pop_back();
  const std::vector<float> before = ranks.values();
  for (int again = 0; again < 2; ++again) {
    const auto ends = ranks.step(plan, {1, 1});
    REQUIRE(ends[0]);
    CHECK(ends[0]->code() == Code::kUnavailable);
    CHECK(has(ends[0]->message(), "rank 1: its session is closed"));
    CHECK(ends[0]->damage() == Damage::kStep);
  }
  CHECK(ranks.values() == before);

  Plan dear = plan_of("pipeline(2, micro_batches=2)", "ref:2");  // rank 1 has no back end for its device
  dear.devices[1].kind = DeviceKind::kCuda;
  Ranks others({dear, dear});
  CHECK_FALSE(others.errors[0]);
  REQUIRE(others.errors[1]);
  others.sessions.pop_back();
  const auto ends = others.step(dear, {1, 1});
  REQUIRE(ends[0]);
  CHECK(has(ends[0]->message(), "rank 1: "));
}

TEST_CASE("a rank holds what is here, and reads the whole with the others") {
  const Plan plan = plan_of("pipeline(2, micro_batches=2)", "ref:2");
  Ranks ranks({plan, plan});
  Session alone(std::make_shared<const Plan>(plan), std::make_shared<Backends>(small::backends_folder()));
  size_t here = 0, whole = 0;
  for (const VariableInfo& v : alone.variables()) {
    std::vector<float> expected(static_cast<size_t>(element_count(v.dims)));
    alone.read(v.name, {v.dtype, v.dims, expected.data()});
    for (auto& session : ranks.sessions) {
      std::vector<float> values(expected.size());
      const HostTensor to{v.dtype, v.dims, values.data()};
      here += session->read_here(v.name, to), whole += to.bytes();
    }
    for (int again = 0; again < 2; ++again)
      for (const auto& end : on_each(2, [&](size_t r) {
             std::vector<float> values(expected.size(), -7.0f);
             ranks.sessions[r]->read(v.name, {v.dtype, v.dims, values.data()});
             CHECK(values == expected);
           }))
        CHECK_FALSE(end);
  }
  CHECK(here * 2 == whole);

  // Who reads another variable, or none, is told so; the next call is as if nothing had been.
  const std::vector<VariableInfo> variables = alone.variables();
  const auto ends = on_each(2, [&](size_t r) {
    const VariableInfo& v = variables[r];
    std::vector<float> values(static_cast<size_t>(element_count(v.dims)));
    ranks.sessions[r]->read(v.name, {v.dtype, v.dims, values.data()});
  });
  for (size_t r = 0; r < 2; ++r) {
    REQUIRE(ends[r]);
    CHECK(ends[r]->code() == Code::kFailedPrecondition);
    CHECK(ends[r]->where().rank == static_cast<int>(1 - r));
  }
  const auto missing = on_each(2, [&](size_t r) {
    const VariableInfo& v = variables[0];
    std::vector<float> values(static_cast<size_t>(element_count(v.dims)));
    ranks.sessions[r]->read(r == 0 ? v.name : "none", {v.dtype, v.dims, values.data()});
  });
  REQUIRE((missing[0] && missing[1]));
  CHECK(missing[1]->code() == Code::kNotFound);
  CHECK(has(missing[0]->message(), "rank 1: there is no variable 'none'"));
  for (const auto& end : ranks.step(plan, {1, 1})) CHECK_FALSE(end);
}

TEST_CASE("every rank has the outputs, whoever hands them over; ranks that ask for different ones are told so") {
  for (const std::string_view strategy : kStrategies) {
    CAPTURE(strategy);
    CompileOptions options;
    options.strategy = strategy;
    const small::Model m = small::gpt(12, OptimizerKind::kAdamW, 4);
    const std::string devices = fmt::format("ref:{}", devices_for(strategy));
    Runner alone(m.g, devices, options), many(m.g, devices, options, 7, 2);
    Dice dice(3);
    std::vector<std::string> names = alone.session().output_names(RunMode::kEval);
    for (const int64_t batch : {12, 12, 7}) {  // also one that is planned on the way
      const Values inputs = random_inputs(m.g, batch, dice, 31);
      CHECK(many.eval(inputs, names) == alone.eval(inputs, names));
      CHECK(many.step(inputs, names) == alone.step(inputs, names));
      CHECK(many.step(inputs, {}) == alone.step(inputs, {}));
    }
  }
  const Plan plan = plan_of("replica", "ref:2");
  Ranks ranks({plan, plan});
  const std::vector<float> before = ranks.values();
  const Entry& entry = plan.entries[0];
  std::vector<float> x(static_cast<size_t>(element_count(entry.inputs[0].dims)), 0.5f);
  std::vector<int32_t> y(static_cast<size_t>(entry.batch));
  const auto run = [&](size_t r, bool wants, bool steps) {
    float loss = 0;
    std::vector<NamedHost> inputs, outputs;
    for (const PlanInput& input : entry.inputs)
      inputs.push_back(
          {input.name,
           {input.dtype, input.dims, input.dtype == DType::kI32 ? static_cast<void*>(y.data()) : x.data()}});
    if (wants) outputs.push_back({"loss", {DType::kF32, {}, &loss}});
    const RunHandle handle =
        steps ? ranks.sessions[r]->step(inputs, outputs) : ranks.sessions[r]->eval(inputs, outputs);
    if (!handle.wait(60)) throw internal("it hangs");
  };
  for (int times = 0; times < 20; ++times) {
    const auto ends = on_each(2, [&](size_t r) { run(r, r == 0 || times % 2 == 0, r == 0 || times % 2 != 0); });
    for (size_t r = 0; r < 2; ++r) {
      REQUIRE(ends[r]);
      CHECK(ends[r]->code() == Code::kFailedPrecondition);
      CHECK(ends[r]->damage() == Damage::kStep);
      CHECK(ends[r]->where().rank == static_cast<int>(1 - r));
      CHECK(has(ends[r]->message(), "runs something else"));
    }
  }
  CHECK(ranks.values() == before);
  for (const auto& end : on_each(2, [&](size_t r) { run(r, true, true); })) CHECK_FALSE(end);
  CHECK(ranks.values() != before);
}
