#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <thread>

#include "base/error.h"
#include "device/null/null.h"
#include "device/ref/ref.h"
#include "hand_pipeline.h"
#include "hand_plan.h"
#include "run/executor.h"
#include "run/report.h"

// Counts every allocation of the process while it is told to.
namespace {
std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};
[[gnu::noinline]] void* counted(size_t bytes, size_t alignment) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
  void* memory = alignment > __STDCPP_DEFAULT_NEW_ALIGNMENT__
                     ? std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)
                     : std::malloc(bytes == 0 ? 1 : bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
[[gnu::noinline]] void released(void* memory) { std::free(memory); }
}  // namespace
void* operator new(size_t bytes) { return counted(bytes, 0); }
void* operator new[](size_t bytes) { return counted(bytes, 0); }
void* operator new(size_t bytes, std::align_val_t alignment) { return counted(bytes, static_cast<size_t>(alignment)); }
void* operator new[](size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept { return counted(bytes, 0); }
void* operator new[](size_t bytes, const std::nothrow_t&) noexcept { return counted(bytes, 0); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { released(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { released(memory); }
void operator delete(void* memory) noexcept { released(memory); }
void operator delete[](void* memory) noexcept { released(memory); }
void operator delete(void* memory, size_t) noexcept { released(memory); }
void operator delete[](void* memory, size_t) noexcept { released(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { released(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { released(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { released(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { released(memory); }

namespace whale {
namespace {

using test::HandOptions;

// A device whose kernels call a hook with (device, name) before they run.
using Hook = std::function<void(int, const std::string&)>;
struct Contexts {  // of the kernels, by device and name
  std::mutex mutex;
  std::map<std::pair<int, std::string>, const RowContext*> map;
};
class HookedDevice final : public Device {
 public:
  HookedDevice(int index, std::unique_ptr<Device> inner, const Hook& hook, Contexts& contexts)
      : index_(index), inner_(std::move(inner)), hook_(hook), contexts_(contexts) {}
  void enter_thread(Queue queue) override { inner_->enter_thread(queue); }
  void* allocate(size_t bytes) override { return inner_->allocate(bytes); }
  void release(void* memory, size_t bytes) override { inner_->release(memory, bytes); }
  std::unique_ptr<Kernel> bind(const KernelSpec& spec) override {
    {
      const std::lock_guard lock(contexts_.mutex);
      contexts_.map[{index_, spec.name}] = spec.row;
    }
    return std::make_unique<HookedKernel>(index_, spec.name, inner_->bind(spec), hook_);
  }
  void copy_in(void* to, const void* from, size_t bytes) override { inner_->copy_in(to, from, bytes); }
  void copy_out(void* to, const void* from, size_t bytes) override { inner_->copy_out(to, from, bytes); }
  void combine(Combine combine, DType dtype, void* to, const void* a, const void* b, size_t n) override {
    inner_->combine(combine, dtype, to, a, b, n);
  }

 private:
  class HookedKernel final : public Kernel {
   public:
    HookedKernel(int device, std::string name, std::unique_ptr<Kernel> inner, const Hook& hook)
        : device_(device), name_(std::move(name)), inner_(std::move(inner)), hook_(hook) {}
    void run() override {
      if (hook_) hook_(device_, name_);
      inner_->run();
    }

   private:
    int device_;
    std::string name_;
    std::unique_ptr<Kernel> inner_;
    const Hook& hook_;
  };
  int index_;
  std::unique_ptr<Device> inner_;
  const Hook& hook_;
  Contexts& contexts_;
};

struct Ended {
  RunState state;
  bool committed = false;
  static void call(void* self, std::optional<Error>& error, bool committed) {
    static_cast<Ended*>(self)->committed = committed;
    static_cast<Ended*>(self)->state.finish(std::move(error));
  }
};

struct Rig {
  Plan plan;
  Hook hook;
  Contexts contexts;
  std::unique_ptr<Machine> machine;
  std::unique_ptr<Executor> executor;
  Cancel cancel;
  float loss = 0;
  std::vector<float> p;

  explicit Rig(const HandOptions& o = {}) : Rig(test::hand_plan(o)) {}
  explicit Rig(Plan made, std::optional<World> world = {}) : plan(std::move(made)) {
    if (world) world->ranks = ranks_of_devices(world->size(), plan.devices.size());
    std::vector<std::unique_ptr<Device>> devices;
    const auto backend = plan.devices[0].kind == DeviceKind::kNull ? make_null_backend() : make_ref_backend();
    for (size_t d = 0; d < plan.devices.size(); ++d)
      devices.push_back(
          world && world->ranks[d] != world->rank()
              ? nullptr
              : std::make_unique<HookedDevice>(static_cast<int>(d), backend->open(plan.devices[d]), hook, contexts));
    machine = std::make_unique<Machine>(plan, std::move(devices), std::move(world));
    for (size_t v = 0; v < plan.variables.size(); ++v) {
      const std::vector<float> ones(static_cast<size_t>(element_count(plan.variables[v].dims)), 1.0f);
      machine->write_variable(v, 0, ones.data(), ones.size() * 4);
    }
    executor = std::make_unique<Executor>(*machine, plan.entries[0]);
    p.resize(static_cast<size_t>(plan.entries[0].batch * test::kWidth));
  }

  std::optional<Error> step(const std::vector<float>& x, double rate, bool* committed = nullptr,
                            bool timeline = false) {
    Ended ended;
    executor->inputs()[0] = x.data();
    executor->outputs() = {&loss, p.data()};
    StepValues values;
    values.learning_rate = rate;
    values.cancel = &cancel.flag();
    values.timeline = timeline;
    executor->start(values, &Ended::call, &ended);
    CHECK_MESSAGE(ended.state.wait(30), "the step must not hang");
    machine->team().wait_idle();
    if (committed != nullptr) *committed = ended.committed;
    return ended.state.error();
  }

  std::vector<float> read(size_t variable) {
    std::vector<float> values(static_cast<size_t>(element_count(plan.variables[variable].dims)));
    machine->read_variable(variable, 0, 0, values.data(), values.size() * 4);
    return values;
  }
  std::vector<float> w(size_t device = 0) {
    std::vector<float> values(test::kWidth);
    machine->memory(device).device().copy_out(values.data(), machine->memory(device).variable(0), values.size() * 4);
    return values;
  }
};

TEST_CASE("every cut of the batch trains like one device") {
  for (const int devices : {1, 2, 3, 5})
    for (const int64_t micro_batches : {1, 2, 3})
      for (const bool overlap : {true, false}) {
        CAPTURE(devices);
        CAPTURE(micro_batches);
        HandOptions o;
        o.devices = devices;
        o.batch = 7;  // uneven: with 5 devices and 3 micro-batches some are empty
        o.micro_batches = micro_batches;
        o.overlap = overlap;
        Rig rig(o);
        test::HandModel model;
        for (int step = 0; step < 5; ++step) {
          const std::vector<float> x = test::hand_batch(o.batch, step), w = model.w;
          const float loss = model.step(x, 0.0078125f);
          REQUIRE_FALSE(rig.step(x, 0.0078125));
          CHECK(rig.loss == doctest::Approx(loss).epsilon(1e-6));
          for (size_t i = 0; i < x.size(); ++i)
            CHECK(rig.p[i] == doctest::Approx(x[i] * w[i % test::kWidth]).epsilon(1e-6));
        }
        for (size_t d = 0; d < static_cast<size_t>(devices); ++d) {
          CHECK(rig.w(d) == rig.w(0));
          for (size_t k = 0; k < model.w.size(); ++k) CHECK(rig.w(d)[k] == doctest::Approx(model.w[k]).epsilon(1e-6));
        }
      }
}

void check_steady(Rig rig) {
  const std::vector<float> x = test::hand_batch(rig.plan.entries[0].batch);
  rig.executor->inputs()[0] = x.data();
  rig.executor->outputs() = {&rig.loss, rig.p.data()};
  StepValues values;
  values.timeline = true;
  int64_t steady = -1;
  for (int step = 0; step < 4; ++step) {
    Ended ended;
    allocations = 0;
    counting = step > 0;
    rig.executor->start(values, &Ended::call, &ended);
    ended.state.wait(-1);
    rig.machine->team().wait_idle();
    counting = false;
    steady = allocations;
    CHECK(steady == 0);
  }
  CHECK_MESSAGE(steady == 0, "counted at least once");
}

TEST_CASE("the steady step allocates nothing") {
  for (const DeviceKind kind : {DeviceKind::kNull, DeviceKind::kRef}) {
    HandOptions o;
    o.devices = 3;
    o.micro_batches = 2;
    o.kind = kind;
    check_steady(Rig(o));
    test::PipelineOptions pipeline;
    pipeline.kind = kind;
    check_steady(Rig(test::hand_pipeline(pipeline)));
  }
}

TEST_CASE("the steady step of two ranks allocates nothing") {
  HandOptions o;
  o.devices = 3;
  o.micro_batches = 2;
  for (const Plan& plan : {test::hand_plan(o), test::hand_pipeline({})}) {
    std::vector<std::unique_ptr<Rig>> rigs;
    for (const World& world : make_inproc_worlds(2)) rigs.push_back(std::make_unique<Rig>(plan, world));
    const std::vector<float> x = test::hand_batch(plan.entries[0].batch);
    for (auto& rig : rigs) {
      rig->executor->inputs()[0] = x.data();
      rig->executor->outputs() = {&rig->loss, rig->p.data()};
    }
    for (int step = 0; step < 12; ++step) {
      Ended ended[2];
      allocations = 0;
      counting = step > 8;
      for (size_t r = 0; r < 2; ++r) rigs[r]->executor->start({}, &Ended::call, &ended[r]);
      for (size_t r = 0; r < 2; ++r) {
        CHECK(ended[r].state.wait(30));
        rigs[r]->machine->team().wait_idle();
      }
      counting = false;
      CHECK(allocations == 0);
      CHECK(rigs[0]->loss == rigs[1]->loss);
      CHECK(rigs[0]->p == rigs[1]->p);
    }
  }
}

TEST_CASE("a pipeline of two devices with two versions trains like one device") {
  for (const int64_t micro_batches : {1, 2, 4, 8})
    for (const int32_t capacity : {1, 2, 3})
      for (const bool queues : {false, true}) {
        CAPTURE(micro_batches);
        CAPTURE(capacity);
        CAPTURE(queues);
        test::PipelineOptions o;
        o.micro_batches = micro_batches;
        o.link_capacity = capacity;
        o.queues = queues;
        Rig rig(test::hand_pipeline(o));
        CHECK(rig.machine->memory(1).variable(0) == nullptr);  // each device holds its own stage only
        CHECK(rig.machine->memory(0).variable(1) == nullptr);
        test::PipelineModel model;
        for (int step = 0; step < 4; ++step) {
          const std::vector<float> x = test::hand_batch(o.batch, step), w0 = model.w0, w1 = model.w1;
          const float loss = model.step(x, 0.0078125f);
          REQUIRE_FALSE(rig.step(x, 0.0078125));
          CHECK(rig.loss == doctest::Approx(loss).epsilon(1e-5));
          for (size_t i = 0; i < x.size(); ++i)
            CHECK(rig.p[i] == doctest::Approx(x[i] * w0[i % test::kWidth] * w1[i % test::kWidth]).epsilon(1e-5));
        }
        for (size_t k = 0; k < model.w0.size(); ++k) {
          CHECK(rig.read(0)[k] == doctest::Approx(model.w0[k]).epsilon(1e-5));
          CHECK(rig.read(1)[k] == doctest::Approx(model.w1[k]).epsilon(1e-5));
        }
      }
}

TEST_CASE("a pipeline stops as a whole") {
  const std::vector<float> ones(test::kWidth, 1.0f);
  test::PipelineOptions o;
  const auto x = test::hand_batch(o.batch);
  for (const char* at : {"a", "q0", "p", "da"}) {
    CAPTURE(at);
    Rig rig(test::hand_pipeline(o));
    int runs = 0;
    rig.hook = [&](int, const std::string& name) {
      if (name == at && ++runs == 2) throw error(Code::kUnavailable, "the device fell over");
    };
    bool committed = true;
    const std::optional<Error> error = rig.step(x, 0.01, &committed);
    REQUIRE(error);
    CHECK(error->where().op == at);
    CHECK_FALSE(committed);
    CHECK(rig.read(0) == ones);
    CHECK(rig.read(1) == ones);
    rig.hook = nullptr;
    test::PipelineModel model;  // what lay in the links is forgotten
    const float loss = model.step(x, 0.0078125f);
    REQUIRE_FALSE(rig.step(x, 0.0078125));
    CHECK(rig.loss == doctest::Approx(loss).epsilon(1e-5));
  }
}

TEST_CASE("a pipeline whose last stage is late changes nothing when the loss is not finite") {
  for (const bool late : {false, true}) {
    CAPTURE(late);
    test::PipelineOptions o;
    Rig rig(test::hand_pipeline(o));
    rig.hook = [&](int device, const std::string& name) {  // the first stage has long been ready to update
      if (late && device == 1 && name == "late") std::this_thread::sleep_for(std::chrono::milliseconds(20));
    };
    auto x = test::hand_batch(o.batch);
    x[5] = std::numeric_limits<float>::infinity();
    bool committed = false;
    const std::optional<Error> error = rig.step(x, 0.01, &committed);
    REQUIRE(error);
    CHECK(error->code() == Code::kOutOfRange);
    CHECK(error->damage() != Damage::kSession);
    CHECK_FALSE(committed);
    CHECK(rig.read(0) == std::vector<float>(test::kWidth, 1.0f));
    CHECK(rig.read(1) == std::vector<float>(test::kWidth, 1.0f));
  }
}

TEST_CASE("an evaluation of a pipeline runs the links that the outputs need") {
  test::PipelineOptions o;
  o.update = false;
  Rig rig(test::hand_pipeline(o));
  std::atomic<int> squares{0};
  rig.hook = [&](int, const std::string& name) { squares += name == "s"; };
  const auto x = test::hand_batch(o.batch);
  Ended ended;
  rig.executor->inputs()[0] = x.data();
  rig.executor->outputs() = {nullptr, rig.p.data()};
  rig.executor->narrow_to_outputs();
  rig.executor->start({}, &Ended::call, &ended);
  REQUIRE(ended.state.wait(30));
  CHECK_FALSE(ended.state.error());
  CHECK(squares == 0);
  CHECK(rig.p == x);
  rig.machine->team().wait_idle();
  rig.executor->inputs()[0] = nullptr;
  CHECK_THROWS_WITH_AS(rig.executor->narrow_to_outputs(), doctest::Contains("input 'x' is missing"), Error);
}

TEST_CASE("kernels read the begin of the sample cut that their instruction names") {
  HandOptions o;
  o.devices = 1;
  o.micro_batches = 2;
  Plan plan = test::hand_plan(o);
  plan.entries[0].rows[0].samples.push_back({{100, 106}, {{100, 102}, {103, 106}}});
  for (Segment& segment : plan.entries[0].programs[0].segments)
    for (Instruction& instruction : segment.instructions)
      if (instruction.name == "s" || instruction.name == "zero_l") instruction.as<work::Kernel>()->samples = 1;
  Rig rig(plan);
  std::vector<std::pair<std::string, int64_t>> seen;
  rig.hook = [&](int device, const std::string& name) {
    seen.emplace_back(name, rig.contexts.map.at({device, name})->batch_begin);
  };
  REQUIRE_FALSE(rig.step(test::hand_batch(o.batch), 0.01));
  const auto begins = [&](const std::string& name) {
    std::vector<int64_t> list;
    for (const auto& [n, begin] : seen)
      if (n == name) list.push_back(begin);
    return list;
  };
  CHECK(begins("p") == std::vector<int64_t>{0, 3});
  CHECK(begins("s") == std::vector<int64_t>{100, 103});
  CHECK(begins("zero_g") == std::vector<int64_t>{0});
  CHECK(begins("zero_l") == std::vector<int64_t>{100});
  CHECK(begins("update w") == std::vector<int64_t>{0});
}

TEST_CASE("a failing kernel fails the step, with op and device, and leaves the variables") {
  for (const int bad_device : {0, 2}) {
    HandOptions o;
    o.devices = 3;
    Rig rig(o);
    const auto x = test::hand_batch(o.batch);
    rig.hook = [&](int device, const std::string& name) {
      if (device == bad_device && name == "g") throw error(Code::kUnavailable, "the device fell over");
    };
    bool committed = true;
    const std::optional<Error> error = rig.step(x, 0.01, &committed);
    REQUIRE(error);
    CHECK(error->code() == Code::kUnavailable);
    CHECK(error->where().op == "g");
    CHECK(error->where().device == bad_device);
    CHECK(error->damage() == Damage::kStep);
    CHECK_FALSE(committed);
    for (size_t d = 0; d < 3; ++d) CHECK(rig.w(d) == std::vector<float>(test::kWidth, 1.0f));
    rig.hook = nullptr;
    test::HandModel model;
    model.step(x, 0.01f);
    REQUIRE_FALSE(rig.step(x, 0.01));  // and the next one works
    for (size_t k = 0; k < model.w.size(); ++k) CHECK(rig.w()[k] == doctest::Approx(model.w[k]).epsilon(1e-6));
  }
}

TEST_CASE("memory that runs out is an error that says what for, and where") {
  HandOptions o;
  o.devices = 3;
  Rig rig(o);
  rig.hook = [&](int device, const std::string& name) {
    if (device == 1 && name == "g") throw std::bad_alloc();
  };
  const std::optional<Error> step = rig.step(test::hand_batch(o.batch), 0.01);
  REQUIRE(step);
  CHECK(step->code() == Code::kResourceExhausted);
  CHECK(step->message().find("too little memory to run op 'g'") != std::string::npos);
  CHECK(step->where().device == 1);
  const Error other = as_error(std::runtime_error("odd"), "hold the variables");
  CHECK(other.code() == Code::kInternal);
  CHECK(other.message() == "cannot hold the variables: odd");
}

TEST_CASE("a failure inside the update breaks the session, and says so") {
  HandOptions o;
  o.devices = 2;
  Rig rig(o);
  rig.hook = [&](int device, const std::string& name) {
    if (device == 1 && name == "update w") throw error(Code::kUnavailable, "the device fell over");
  };
  const std::optional<Error> error = rig.step(test::hand_batch(o.batch), 0.01);
  REQUIRE(error);
  CHECK(error->damage() == Damage::kSession);
}

TEST_CASE("a cancel takes effect before the first update and not after it") {
  struct Case {
    const char* at;
    int device;
    bool applied;
  };
  for (const Case& c : {Case{"zero_g", 0, false}, Case{"s", 1, false}, Case{"add l", 2, false},
                        Case{"update w", 0, true}, Case{"update w", 2, true}}) {
    CAPTURE(c.at);
    HandOptions o;
    o.devices = 3;
    Rig rig(o);
    rig.hook = [&](int device, const std::string& name) {
      if (device == c.device && name == c.at) rig.cancel.trigger();
    };
    bool committed = false;
    const auto x = test::hand_batch(o.batch);
    const std::optional<Error> error = rig.step(x, 0.01, &committed);
    CHECK(committed == c.applied);
    CHECK(error.has_value() == !c.applied);
    if (error) {
      CHECK(error->code() == Code::kCancelled);
      CHECK(error->damage() == Damage::kStep);
    }
    test::HandModel model;
    if (c.applied) model.step(x, 0.01f);
    for (size_t d = 0; d < 3; ++d)  // all devices or none
      for (size_t k = 0; k < model.w.size(); ++k) CHECK(rig.w(d)[k] == doctest::Approx(model.w[k]).epsilon(1e-6));
  }
}

TEST_CASE("a cancel at any moment leaves all devices alike") {
  HandOptions o;
  o.devices = 4;
  o.micro_batches = 2;
  const auto x = test::hand_batch(o.batch);
  int applied = 0, stopped = 0;
  Rig rig(o);
  (void)rig.step(x, 0.01);
  const auto began = std::chrono::steady_clock::now();
  (void)rig.step(x, 0.01);
  const auto one_step = std::chrono::steady_clock::now() - began;
  for (int i = 0; i < 60; ++i) {
    rig.~Rig();
    new (&rig) Rig(o);
    std::thread canceller([&] {
      std::this_thread::sleep_for(one_step * i / 40);
      rig.cancel.trigger();
    });
    bool committed = false;
    const std::optional<Error> error = rig.step(x, 0.01, &committed);
    canceller.join();
    CHECK(error.has_value() == !committed);
    ++(committed ? applied : stopped);
    test::HandModel expected;
    if (committed) expected.step(x, 0.01f);
    for (size_t d = 0; d < 4; ++d)
      for (size_t k = 0; k < expected.w.size(); ++k) CHECK(rig.w(d)[k] == doctest::Approx(expected.w[k]).epsilon(1e-6));
  }
  MESSAGE(applied << " steps were applied, " << stopped << " cancelled");
}

// Ranks of a device each.
struct Rigs {
  std::vector<std::unique_ptr<Rig>> all;

  template <class Set>
  Rigs(int ranks, Set set) {
    HandOptions o;
    o.devices = ranks;
    const Plan plan = test::hand_plan(o);
    for (World world : make_inproc_worlds(ranks)) {
      set(world);
      all.push_back(std::make_unique<Rig>(plan, world));
    }
  }
  void sleep_at_work(size_t rank, int milliseconds) {
    all[rank]->hook = [=](int, const std::string& name) {
      if (name == "g") std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    };
  }
  // A step of the first ones.
  std::vector<std::optional<Error>> step(size_t ranks) {
    const std::vector<float> x = test::hand_batch(HandOptions().batch);
    std::vector<std::optional<Error>> errors(ranks);
    std::vector<std::thread> threads;
    for (size_t r = 0; r < ranks; ++r) threads.emplace_back([&, r] { errors[r] = all[r]->step(x, 0.01); });
    for (std::thread& thread : threads) thread.join();
    return errors;
  }
};

TEST_CASE("a rank that is at work is waited for, and nobody is warned of it") {
  Rigs rigs(2, [](World& world) { world.patience = 20, world.warns_after = 1; });
  rigs.sleep_at_work(1, 2500);
  std::atomic<int> warnings{0};
  for (auto& rig : rigs.all) rig->machine->warn = [&](const std::string&) { ++warnings; };
  for (const auto& error : rigs.step(2)) CHECK_MESSAGE(!error, (error ? error->message() : ""));
  CHECK(warnings == 0);
}

TEST_CASE("a rank that is at one instruction for longer than the patience is given up, and named") {
  Rigs rigs(3, [](World& world) { world.patience = 1; });
  rigs.sleep_at_work(1, 6000);
  const auto errors = rigs.step(3);
  for (const size_t r : {0, 2}) {
    REQUIRE(errors[r]);
    CHECK(errors[r]->code() == Code::kDeadlineExceeded);
    CHECK_MESSAGE(errors[r]->where().rank == 1, errors[r]->message());
    CHECK_MESSAGE(errors[r]->message().find("rank 1 is at ") != std::string::npos, errors[r]->message());
  }
  CHECK(errors[1]);
}

TEST_CASE("a rank whose letters do not come is doubted, and one that has left ends the run") {
  std::mutex mutex;
  std::vector<int> doubted;
  std::atomic<bool> left{false};
  Rigs rigs(2, [&](World& world) {
    world.patience = 30, world.warns_after = 0.8;
    world.doubt = [&](int rank, const std::string&, double, const std::function<bool()>& stands) {
      CHECK(stands());
      const std::lock_guard lock(mutex);
      doubted.push_back(rank);
      left = true;
    };
    world.has_left = [&](int rank) { return rank == 1 && left; };
  });
  rigs.all.pop_back();  // its process goes on, and its wire says nothing
  const auto error = rigs.step(1)[0];
  REQUIRE(error);
  CHECK(error->code() == Code::kUnavailable);
  CHECK_MESSAGE(error->message().starts_with("rank 1 has left the meeting of the ranks"), error->message());
  CHECK(doubted == std::vector<int>{1});
}

TEST_CASE("a rank that had begun and has left does not end what the others still do") {
  Rigs rigs(3, [](World& world) {
    world.patience = 30, world.warns_after = 4;
    world.has_left = [](int rank) { return rank == 2; };
  });
  rigs.sleep_at_work(1, 1600);
  for (const auto& error : rigs.step(3)) CHECK_MESSAGE(!error, (error ? error->message() : ""));
}

TEST_CASE("a rank that has not begun is warned of once, and then ends the run") {
  Rigs rigs(2, [](World& world) { world.patience = 2, world.warns_after = 0.2; });
  std::vector<std::string> warnings;
  rigs.all[0]->machine->warn = [&](const std::string& text) { warnings.push_back(text); };
  const auto error = rigs.step(1)[0];
  REQUIRE(error);
  CHECK(error->where().rank == 1);
  REQUIRE(warnings.size() == 1);
  CHECK_MESSAGE(warnings[0].starts_with("rank 1 has not begun step 0, which rank 0 waits for since "), warnings[0]);
}

// One asks while the other has just moved, and is asked when it has just been answered.
TEST_CASE("two ranks that wait for a third do not keep each other waiting") {
  Rigs rigs(3, [](World& world) { world.patience = 0.4; });
  rigs.sleep_at_work(1, 100);
  for (const auto& error : rigs.step(2)) {
    REQUIRE(error);
    CHECK(error->code() == Code::kDeadlineExceeded);
    CHECK(error->where().rank == 2);
  }
}

TEST_CASE("a token that was triggered before the run stops it") {
  Rig rig;
  rig.cancel.trigger();
  const std::optional<Error> error = rig.step(test::hand_batch(6), 0.01);
  REQUIRE(error);
  CHECK(error->code() == Code::kCancelled);
}

TEST_CASE("a cancel ends even a wait that nothing else would end") {
  HandOptions o;
  o.devices = 2;
  Rig rig(o);
  rig.hook = [&](int device, const std::string& name) {
    if (device != 1 || name != "g") return;
    std::this_thread::sleep_for(std::chrono::milliseconds(30));  // device 0 sleeps in the all-reduce by now
    rig.cancel.trigger();
    std::this_thread::sleep_for(std::chrono::milliseconds(200));  // device 1 is busy; device 0 must notice by itself
  };
  const std::optional<Error> error = rig.step(test::hand_batch(o.batch), 0.01);
  REQUIRE(error);
  CHECK(error->code() == Code::kCancelled);
}

TEST_CASE("a non-finite loss stops the step before the update") {
  HandOptions o;
  o.devices = 3;
  Rig rig(o);
  auto x = test::hand_batch(o.batch);
  x[3] = std::numeric_limits<float>::infinity();
  bool committed = false;
  const std::optional<Error> error = rig.step(x, 0.01, &committed);
  REQUIRE(error);
  CHECK(error->code() == Code::kOutOfRange);
  CHECK_FALSE(committed);
  for (size_t d = 0; d < 3; ++d) CHECK(rig.w(d) == std::vector<float>(test::kWidth, 1.0f));
}

TEST_CASE("a timeline holds every instruction once, in order, and the report adds up") {
  HandOptions o;
  o.devices = 2;
  o.micro_batches = 2;
  Rig rig(o);
  REQUIRE_FALSE(rig.step(test::hand_batch(o.batch), 0.01, nullptr, true));
  const auto trace = nlohmann::json::parse(to_chrome_trace(rig.executor->timeline(), rig.plan, rig.executor->entry()));
  size_t updates = 0, feeds = 0, reductions = 0;
  for (const auto& event : trace["traceEvents"]) {
    if (event["ph"] != "X") continue;
    CHECK(event["dur"].get<double>() >= 0);
    updates += event["name"] == "update w";
    feeds += event["args"]["op"] == "feed";
    reductions += event["args"]["op"] == "all_reduce";
  }
  CHECK(updates == 2);
  CHECK(feeds == 4);
  CHECK(reductions == 4);
  for (const auto& device : rig.executor->timeline())
    for (const auto& queue : device)
      for (size_t i = 1; i < queue.records.size(); ++i) CHECK(queue.records[i - 1].end <= queue.records[i].begin);
  const auto report = nlohmann::json::parse(report_json(*rig.machine, rig.executor.get()));
  REQUIRE(report["devices"].size() == 2);
  const auto& bytes = report["devices"][0]["bytes"];
  CHECK(bytes["parameters"] == test::kWidth * 4);
  CHECK(bytes["total"].get<int64_t>() == bytes["parameters"].get<int64_t>() + bytes["gradients"].get<int64_t>() +
                                             bytes["state"].get<int64_t>() + bytes["activations"].get<int64_t>() +
                                             bytes["inputs"].get<int64_t>() + bytes["buffers"].get<int64_t>() +
                                             bytes["workspace"].get<int64_t>());
}

TEST_CASE("only what the wanted outputs need is run and read") {
  HandOptions o;
  o.update = false;
  o.name = "eval";
  Rig rig(o);
  std::atomic<int> squares{0};
  rig.hook = [&](int, const std::string& name) { squares += name == "s"; };
  const auto x = test::hand_batch(o.batch);
  Ended ended;
  rig.executor->inputs()[0] = x.data();
  rig.executor->outputs() = {nullptr, rig.p.data()};
  rig.executor->narrow_to_outputs();
  rig.executor->start({}, &Ended::call, &ended);
  ended.state.wait(-1);
  CHECK_FALSE(ended.state.error());
  CHECK(squares == 0);
  CHECK(rig.p == x);  // w is one
  rig.machine->team().wait_idle();
  rig.executor->inputs()[0] = nullptr;
  rig.executor->outputs() = {&rig.loss, nullptr};
  CHECK_THROWS_WITH_AS(rig.executor->narrow_to_outputs(), doctest::Contains("input 'x' is missing"), Error);
}

TEST_CASE("what a device cannot run is an error with op and device when the entry is bound") {
  Plan plan = test::hand_plan();
  for (auto& instruction : plan.entries[0].programs[1].segments[1].instructions)
    if (instruction.name == "q") instruction.as<work::Kernel>()->op = OpCode::k_all_gather;  // not a kernel
  std::vector<std::unique_ptr<Device>> devices;
  for (int d = 0; d < 2; ++d) devices.push_back(make_ref_backend()->open({DeviceKind::kRef, {}, 0}));
  Machine machine(plan, std::move(devices));
  try {
    Executor executor(machine, plan.entries[0]);
    FAIL("binding must fail");
  } catch (const Error& e) {
    CHECK(e.code() == Code::kUnimplemented);
    CHECK(e.where().op == "q");
    CHECK(e.where().device == 1);
  }
}

}  // namespace
}  // namespace whale
