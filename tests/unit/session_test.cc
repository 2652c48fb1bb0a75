// Sessions on the reference device, through the planner: what a user of the C ABI sees.
#include "session/session.h"

#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "base/error.h"
#include "checkpoint/describe.h"
#include "checkpoint_kit.h"
#include "cluster/devices.h"
#include "compile/compile.h"
#include "plan/figures.h"
#include "session/cores.h"
#include "session/initialize.h"
#include "small_models.h"
#include "trained.h"
#include "unit/caught.h"

namespace whale {
namespace {

struct Folder {
  std::filesystem::path path;
  Folder() {
    char name[] = "/tmp/whale_session_XXXXXX";
    path = mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

struct Batch {
  std::vector<float> x;
  std::vector<int32_t> y;
  explicit Batch(int64_t size, int64_t step = 0) : x(static_cast<size_t>(size * 4)), y(static_cast<size_t>(size)) {
    for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i * 3 + static_cast<size_t>(step) * 11));
    for (size_t i = 0; i < y.size(); ++i) y[i] = static_cast<int32_t>((i + static_cast<size_t>(step)) % 3);
  }
  NamedHost nx() { return {"x", {DType::kF32, {static_cast<int64_t>(y.size()), 4}, x.data()}}; }
  NamedHost ny() { return {"y", {DType::kI32, {static_cast<int64_t>(y.size())}, y.data()}}; }
  std::vector<NamedHost> inputs() { return {nx(), ny()}; }
};

struct Job {
  Session session;
  float loss = -1;
  explicit Job(const std::string& devices = "ref:2", int64_t batch = 8, OptimizerKind kind = OptimizerKind::kAdamW,
               SessionOptions options = {}, const std::string& strategy = "", int64_t hidden = 16)
      : session(std::make_shared<const Plan>(
                    compile(small::mlp(batch, kind, 4, hidden).g, parse_devices(devices), with(strategy))),
                std::make_shared<Backends>(), options) {}
  static CompileOptions with(const std::string& strategy) {
    CompileOptions options;
    options.strategy = strategy;
    return options;
  }
  NamedHost out() { return {"loss", {DType::kF32, {}, &loss}}; }
  float step(Batch batch, const Cancel* = nullptr) {
    session.step(batch.inputs(), {out()}).wait();
    return loss;
  }
  std::vector<float> read(const std::string& name) {
    const TensorType type = session.variable_type(name);
    std::vector<float> values(static_cast<size_t>(element_count(type.dims)));
    session.read(name, {type.dtype, type.dims, values.data()});
    return values;
  }
  std::vector<std::vector<float>> everything() {
    std::vector<std::vector<float>> values;
    for (const VariableInfo& variable : session.variables()) values.push_back(read(variable.name));
    return values;
  }
};

// The code of the Error that body throws; 0: none. Its message must hold `text`.
template <class Body>
int code_of_error(const std::string& text, Body body) {
  try {
    body();
  } catch (const Error& e) {
    CHECK_MESSAGE(e.message().find(text) != std::string::npos, e.message());
    return static_cast<int>(e.code());
  }
  return 0;
}
#define CHECK_CODE(expected, text, ...) CHECK(code_of_error(text, [&] { __VA_ARGS__; }) == static_cast<int>(expected))

void check_close(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b, double bound) {
  REQUIRE(a.size() == b.size());
  double worst = 0;
  for (size_t v = 0; v < a.size(); ++v) {
    REQUIRE(a[v].size() == b[v].size());
    for (size_t i = 0; i < a[v].size(); ++i) worst = std::max(worst, std::abs(static_cast<double>(a[v][i]) - b[v][i]));
  }
  CHECK(worst <= bound);
}

TEST_CASE("session: several devices train like one, for even and uneven shares") {
  Job one("ref:1", 8, OptimizerKind::kSgd);
  Job even("ref:4", 8, OptimizerKind::kSgd), uneven("ref:3", 8, OptimizerKind::kSgd, {}, "replica(3, shares=[4,3,1])");
  CHECK(even.everything() == one.everything());
  for (int step = 0; step < 6; ++step) {
    const float loss = one.step(Batch(8, step));
    CHECK(even.step(Batch(8, step)) == doctest::Approx(loss).epsilon(1e-5));
    CHECK(uneven.step(Batch(8, step)) == doctest::Approx(loss).epsilon(1e-5));
  }
  check_close(even.everything(), one.everything(), 1e-5);
  check_close(uneven.everything(), one.everything(), 1e-5);
  CHECK(one.session.iteration() == 6);
  CHECK(one.session.updates() == 6);
}

TEST_CASE("session: cut plans train like one device, and read each other's checkpoints") {
  const Folder folder;
  const std::string at = folder.path / "ckpt";
  Job one("ref:1", 8, OptimizerKind::kAdamW);
  for (int step = 0; step < 3; ++step) one.step(Batch(8, step));
  one.session.save(at);
  for (int step = 3; step < 6; ++step) one.step(Batch(8, step));
  for (const auto& [devices, strategy] : std::vector<std::pair<const char*, const char*>>{
           {"ref:2", "split(2)"}, {"ref:4", "replica(2) > split(2)"}, {"ref:2", "pipeline(2, micro_batches=4)"}}) {
    CAPTURE(strategy);
    Job job(devices, 8, OptimizerKind::kAdamW, {}, strategy);
    job.session.load(at);
    for (int step = 3; step < 6; ++step) job.step(Batch(8, step));
    CHECK(job.loss == doctest::Approx(one.loss).epsilon(1e-4));
    check_close(job.everything(), one.everything(), 1e-4);
  }
}

TEST_CASE("session: training makes the loss smaller, and two runs give the same bits") {
  Job a, b;
  a.session.set_learning_rate(0.05);
  b.session.set_learning_rate(0.05);
  const float first = a.step(Batch(8));
  for (int step = 0; step < 30; ++step) a.step(Batch(8));
  CHECK(a.loss < 0.8f * first);
  for (int step = 0; step < 31; ++step) b.step(Batch(8));
  CHECK(a.everything() == b.everything());
}

TEST_CASE("session: bad inputs and outputs are refused by name, and change nothing") {
  Job job;
  const auto before = job.everything();
  Batch batch(8), small(3);
  const auto out = job.out();
  NamedHost extra = batch.nx(), wrong_type = batch.ny(), flat = batch.nx(), no_data = batch.nx();
  extra.name = "z";
  wrong_type.tensor.dtype = DType::kI64;
  flat.tensor.dims = {32};
  no_data.tensor.data = nullptr;
  NamedHost wrong_out = out, unknown_out = out;
  wrong_out.tensor.dims = {1};
  unknown_out.name = "lost";
  CHECK_CODE(Code::kInvalidArgument, "input 'y' is missing", job.session.step({batch.nx()}, {out}));
  CHECK_CODE(Code::kInvalidArgument, "no input 'z'", job.session.step({batch.nx(), batch.ny(), extra}, {out}));
  CHECK_CODE(Code::kInvalidArgument, "given twice", job.session.step({batch.nx(), batch.ny(), batch.nx()}, {out}));
  CHECK_CODE(Code::kInvalidArgument, "'y' is i64, expected i32", job.session.step({batch.nx(), wrong_type}, {out}));
  CHECK_CODE(Code::kInvalidArgument, "shape [32]", job.session.step({flat, batch.ny()}, {out}));
  CHECK_CODE(Code::kInvalidArgument, "no data", job.session.step({no_data, batch.ny()}, {out}));
  CHECK_CODE(Code::kInvalidArgument, "same number", job.session.step({batch.nx(), small.ny()}, {out}));
  CHECK_CODE(Code::kInvalidArgument, "at most 8", Batch large(16); job.session.step(large.inputs(), {out}));
  CHECK_CODE(Code::kInvalidArgument, "output 'loss' has shape [1]", job.session.step(batch.inputs(), {wrong_out}));
  CHECK_CODE(Code::kInvalidArgument, "no output 'lost'", job.session.step(batch.inputs(), {unknown_out}));
  CHECK(job.session.iteration() == 0);
  CHECK(job.everything() == before);
  job.step(Batch(8));
  CHECK(job.session.iteration() == 1);
}

TEST_CASE("session: a smaller last batch is the mean over its own samples") {
  Job large("ref:3", 8, OptimizerKind::kSgd), small("ref:1", 5, OptimizerKind::kSgd);
  for (int step = 0; step < 3; ++step)
    CHECK(large.step(Batch(5, step)) == doctest::Approx(small.step(Batch(5, step))).epsilon(1e-5));
  check_close(large.everything(), small.everything(), 1e-5);
  CHECK(large.step(Batch(2, 9)) > 0);  // fewer samples than devices
  CHECK(large.step(Batch(8, 10)) > 0);
}

TEST_CASE("session: evaluation uses the same parameters, changes none, and needs only what is asked for") {
  Job job("ref:2");
  job.step(Batch(8));
  const auto before = job.everything();
  Batch batch(8, 3);
  const std::vector<TensorType> types = job.session.output_types(RunMode::kEval, {batch.nx()}, {"logits"});
  REQUIRE(types.size() == 1);
  CHECK(types[0].dims == Dims{8, 3});
  std::vector<float> logits(24, 99);
  const NamedHost out{"logits", {DType::kF32, {8, 3}, logits.data()}};
  job.session.eval({batch.nx()}, {out}).wait();
  CHECK(std::none_of(logits.begin(), logits.end(), [](float v) { return v == 99; }));
  CHECK_CODE(Code::kInvalidArgument, "input 'y' is missing", job.session.eval({batch.nx()}, {job.out()}));
  float loss = 0;
  const NamedHost loss_out{"loss", {DType::kF32, {}, &loss}};
  job.session.eval(batch.inputs(), {loss_out}).wait();
  CHECK(job.everything() == before);
  CHECK(job.session.iteration() == 1);
  const float stepped = job.step(Batch(8, 3));  // the loss before the update
  CHECK(loss == doctest::Approx(stepped).epsilon(1e-5));
  // Samples keep their places, for any size of the batch.
  Batch few(3, 3);
  std::vector<float> three(9);
  job.session.eval({few.nx()}, {{"logits", {DType::kF32, {3, 3}, three.data()}}}).wait();
  job.session.eval({batch.nx()}, {out}).wait();
  for (size_t i = 0; i < three.size(); ++i) CHECK(three[i] == doctest::Approx(logits[i]).epsilon(1e-5));
}

TEST_CASE("session: variables are read and written whole") {
  Job job;
  std::vector<float> values(3);
  CHECK_CODE(Code::kNotFound, "no variable 'nobody'", job.session.read("nobody", {DType::kF32, {3}, values.data()}));
  CHECK_CODE(Code::kInvalidArgument, "'b1'", job.session.read("b1", {DType::kF32, {3}, values.data()}));
  CHECK_CODE(Code::kInvalidArgument, "'b1'", job.session.write("b1", {DType::kF64, {16}, values.data()}));
  std::vector<float> b(16, 0.25f);
  job.session.write("b1", {DType::kF32, {16}, b.data()});
  CHECK(job.read("b1") == b);
  bool state = false;
  for (const VariableInfo& variable : job.session.variables()) state = state || variable.name == "b1/m";
  CHECK(state);
  // What was written is what the devices use.
  Job other;
  const float without = other.step(Batch(8)), with = job.step(Batch(8));
  CHECK(without != with);
}

TEST_CASE("session: the learning rate by hand and by the schedule") {
  Job job("ref:1", 8, OptimizerKind::kSgd);
  const double scheduled = job.session.learning_rate();
  CHECK(scheduled == doctest::Approx(1e-3));
  const auto before = job.everything();
  job.session.set_learning_rate(0);
  CHECK(job.session.learning_rate() == 0);
  job.step(Batch(8));
  CHECK(job.everything() == before);
  job.session.set_learning_rate(-1);
  CHECK(job.session.learning_rate() == scheduled);
  job.step(Batch(8));
  CHECK(job.everything() != before);
  CHECK_CODE(Code::kInvalidArgument, "learning rate", job.session.set_learning_rate(std::nan("")));
}

TEST_CASE("session: training goes on from a checkpoint, on other devices too") {
  const Folder folder;
  const std::string at = folder.path / "ckpt";
  Job whole;
  for (int step = 0; step < 3; ++step) whole.step(Batch(8, step));
  whole.session.save(at);
  for (int step = 3; step < 6; ++step) whole.step(Batch(8, step));
  for (const char* devices : {"ref:2", "ref:4"}) {
    SessionOptions options;
    options.seed = 99;  // the checkpoint's replaces it
    Job resumed(devices, 8, OptimizerKind::kAdamW, options);
    resumed.session.load(at);
    CHECK(resumed.session.iteration() == 3);
    CHECK(resumed.session.updates() == 3);
    CHECK(resumed.session.seed() == 0);
    for (int step = 3; step < 6; ++step) resumed.step(Batch(8, step));
    if (std::string(devices) == "ref:2")
      CHECK(resumed.everything() == whole.everything());
    else
      check_close(resumed.everything(), whole.everything(), 1e-4);
  }
}

TEST_CASE("session: a checkpoint that does not fit leaves the session as it is") {
  const Folder folder;
  const std::string at = folder.path / "ckpt";
  Job wide("ref:1", 8, OptimizerKind::kAdamW, {}, "", 24);
  wide.session.save(at);
  Job job;
  job.step(Batch(8));
  const auto before = job.everything();
  CHECK_CODE(Code::kInvalidArgument, "this model needs", job.session.load(at));
  CHECK_CODE(Code::kNotFound, "no checkpoint", job.session.load(folder.path / "nowhere"));
  Job plain("ref:1", 8, OptimizerKind::kSgd);
  plain.session.save(at);  // replaces the wide one
  CHECK_CODE(Code::kInvalidArgument, "(checkpoint", job.session.load(at));
  CHECK(job.everything() == before);
  CHECK(job.session.iteration() == 1);
  std::filesystem::create_directory(folder.path / "mine");
  std::filesystem::create_directory(folder.path / "mine" / "thesis");
  job.session.save(folder.path / "mine");  // beside what is there
  CHECK(std::filesystem::exists(folder.path / "mine" / "thesis"));
  job.session.load(folder.path / "mine");
  CHECK(job.session.report().find(R"("checksums":true)") != std::string::npos);
}

// Trained by one optimizer, loaded by another one. "": it loads; the state that is left out is that of the checkpoint.
TEST_CASE("session: a checkpoint knows its optimizer, and no other one goes on from its state") {
  using enum OptimizerKind;
  const std::map<OptimizerKind, std::string> names = {{kSgd, "sgd"},         {kAdam, "adam"},
                                                      {kAdamW, "adamw"},     {kLamb, "lamb"},
                                                      {kAdagrad, "adagrad"}, {kAdafactor, "adafactor"}};
  const Folder folder;
  for (const auto& [saved, name] : names) {
    const std::string at = folder.path / name;
    Job from("ref:1", 8, saved);
    from.step(Batch(8));
    from.session.save(at);
    CHECK(open_checkpoint(at).index.meta.optimizer == name);
    CHECK(has(describe(open_checkpoint(at)), "optimizer " + name + "\n"));
    for (const auto& [kind, own] : names) {
      CAPTURE(name);
      CAPTURE(own);
      Job to("ref:2", 8, kind);
      const auto before = to.everything();
      if (kind != saved && kind != kSgd) {
        CHECK_CODE(Code::kInvalidArgument,
                   "the optimizer differs (checkpoint '" + at + "': " + name + "; this job: " + own,
                   to.session.load(at));
        CHECK(to.everything() == before);
        continue;
      }
      to.session.load(at);
      CHECK(to.read("w1") == from.read("w1"));
      const std::string loaded = to.session.report();
      CHECK(has(loaded, R"("optimizer":")" + name + "\""));
      CHECK(has(loaded, R"("left_out":[])") == (kind == saved));
    }
  }
}

// As libwhale wrote them before the index said the optimizer: names of state tell what they can.
TEST_CASE("session: a checkpoint that does not know its optimizer is judged by its state") {
  using enum OptimizerKind;
  const Folder folder;
  const std::string at = folder.path / "ckpt", json = at + "/whale.json";
  Job from("ref:1", 8, kAdam);
  from.session.save(at);
  CheckpointIndex index = parse_index(json, kit::content(json));
  index.meta.optimizer.clear();
  kit::put(json, to_text(index));
  CHECK_FALSE(has(describe(open_checkpoint(at)), "optimizer adam"));
  Job same("ref:1", 8, kLamb), other("ref:1", 8, kAdagrad), plain("ref:1", 8, kSgd);
  same.session.load(at);  // as ever: nothing says that it is another one
  CHECK(has(same.session.report(), R"("optimizer":null)"));
  plain.session.load(at);
  CHECK_CODE(Code::kInvalidArgument, "one with state 'm', 'v'; this job: adagrad", other.session.load(at));
}

TEST_CASE("session: one run at a time; the variables wait for it") {
  Job job("ref:2", 8, OptimizerKind::kSgd, {}, "", 2048);
  Batch batch(8);
  bool refused = false;
  for (int i = 0; i < 50 && !refused; ++i) {
    const RunHandle first = job.session.step(batch.inputs(), {job.out()});
    const int code = code_of_error("under way", [&] { job.session.step(batch.inputs(), {job.out()}).wait(); });
    refused = code == static_cast<int>(Code::kFailedPrecondition);
    job.read("b1");
    CHECK(first.done());
    CHECK(first.wait(0));
  }
  CHECK(refused);
}

TEST_CASE("session: a cancelled step did not happen") {
  Job job;
  const auto before = job.everything();
  const auto cancel = std::make_shared<Cancel>();
  cancel->trigger();
  Batch batch(8);
  const RunHandle run = job.session.step(batch.inputs(), {job.out()}, cancel);
  CHECK_CODE(Code::kCancelled, "cancelled", run.wait());
  CHECK_CODE(Code::kCancelled, "cancelled", run.wait());  // as often as it is asked
  CHECK(job.everything() == before);
  CHECK(job.session.iteration() == 0);
  CHECK(job.step(Batch(8)) > 0);
}

TEST_CASE("session: a loss that is not finite") {
  Batch batch(8);
  batch.x[5] = std::numeric_limits<float>::quiet_NaN();
  Job job("ref:2", 8, OptimizerKind::kSgd);
  const auto before = job.everything();
  CHECK_CODE(Code::kOutOfRange, "step 0 is not finite", job.session.step(batch.inputs(), {job.out()}).wait());
  CHECK(job.everything() == before);
  CHECK(job.session.iteration() == 0);
  SessionOptions pass;
  pass.nan_policy = NanPolicy::kPass;
  Job lenient("ref:2", 8, OptimizerKind::kSgd, pass);
  CHECK(std::isnan(lenient.step(batch)));
}

TEST_CASE("session: copies of a variable on devices of unlike kinds are refused by name") {
  if (small::backends_folder().empty()) return;  // the suite of the thread sanitizer has reference devices alone
  const auto refused = [](const Graph& g, const std::string& devices, const CompileOptions& options) -> std::string {
    try {
      Session(std::make_shared<const Plan>(compile(g, parse_devices(devices, {0, 1}), options)),
              std::make_shared<Backends>(small::backends_folder()), {});
    } catch (const Error& e) {
      CHECK(e.code() == Code::kInvalidArgument);
      return e.message();
    }
    return "";
  };
  const Graph mlp = small::mlp(8, OptimizerKind::kAdamW).g;
  for (const char* devices : {"cpu:1,ref:1", "ref:1,cpu:1"}) {
    CAPTURE(devices);
    CompileOptions exact{.strategy = "replica", .accumulation = 2};
    exact.exact = true;
    for (const CompileOptions& options : {CompileOptions{.strategy = "replica"}, exact}) {
      const std::string message = refused(mlp, devices, options);
      for (const char* part :
           {"variable 'w1'", "device 0", "device 1", "'ref'", "'cpu@", "devices of one kind", "pipeline"})
        CHECK_MESSAGE(message.find(part) != message.npos, message);
    }
    CHECK(refused(mlp, devices, {{.zero = 1}, "replica"}) != "");
    small::Model statistics;  // nothing but running statistics has copies that a step writes
    const TensorId x = statistics.input("x", {8, 4});
    const TensorId normed = statistics.op(
        OpCode::k_batch_norm,
        {x, statistics.input("gamma", {4}, DType::kF32, -1), statistics.input("beta", {4}, DType::kF32, -1),
         statistics.variable("mean", {4}, Role::kBuffer), statistics.variable("var", {4}, Role::kBuffer)});
    const TensorId product = statistics.op(OpCode::k_matmul, {normed, statistics.variable("w", {4, 4})});
    statistics.minimize(statistics.op(OpCode::k_reduce_mean, {product}), OptimizerKind::kSgd);
    CHECK(refused(statistics.g, devices, {{.zero = 3}, "replica"}).find("variable 'mean'") != std::string::npos);
    CHECK(refused(mlp, devices, {{.zero = 3}, "replica"}) == "");
    CHECK(refused(mlp, devices, {.strategy = "pipeline(2, micro_batches=2)"}) == "");
    CHECK(refused(small::gpt(4).g, devices, {.strategy = "pipeline(2, micro_batches=2)"}) == "");  // a tied table
    Graph frozen = mlp;  // no step writes anything
    frozen.training.loss = kNone;
    CHECK(refused(frozen, devices, {.strategy = "replica"}) == "");
  }
  CHECK(refused(mlp, "cpu:1,ref:1,cpu:1,ref:1", {.strategy = "pipeline(2, micro_batches=2) > replica(2)"}) != "");
}

TEST_CASE("session: a gradient that is not a number reaches its parameter, clipped by the norm of all or not") {
  small::Model m;
  const TensorId w = m.variable("w", {4}), b = m.variable("b", {4});
  m.g.variables[0].init = {.kind = InitKind::kZeros, .file = {}, .key = {}};
  const TensorId x = m.input("x", {2, 4});
  // The square root of zero has no gradient, and the loss is finite.
  const TensorId root = m.op(OpCode::k_sqrt, {m.op(OpCode::k_square, {w})});
  m.minimize(m.op(OpCode::k_reduce_mean, {m.op(OpCode::k_add, {m.op(OpCode::k_mul, {x, b}), root})}),
             OptimizerKind::kSgd);
  for (const char* devices : {"ref:1", "cpu:1", "cpu:2"})
    for (const double clip_norm : {0.0, 1.0}) {
      if (devices[0] == 'c' && small::backends_folder().empty()) continue;
      CAPTURE(devices);
      CAPTURE(clip_norm);
      m.g.training.clip_norm = clip_norm;
      Session session(std::make_shared<const Plan>(compile(m.g, parse_devices(devices, {0, 1}))),
                      std::make_shared<Backends>(small::backends_folder()), {});
      std::vector<float> batch(8, 1), values(4);
      float loss = -1;
      const auto step = [&] {
        session.step({{"x", {DType::kF32, {2, 4}, batch.data()}}}, {{"loss", {DType::kF32, {}, &loss}}}).wait();
      };
      step();
      CHECK(std::isfinite(loss));
      session.read("w", {DType::kF32, {4}, values.data()});
      CHECK(std::isnan(values[0]));
      session.read("b", {DType::kF32, {4}, values.data()});
      CHECK(std::isfinite(values[0]));
      CHECK_CODE(Code::kOutOfRange, "step 1 is not finite", step());
    }
}

TEST_CASE("session: released while a run is under way") {
  for (int i = 0; i < 5; ++i) {
    Batch batch(8);
    float loss = 0;
    RunHandle run;
    {
      Job job("ref:2", 8, OptimizerKind::kSgd, {}, "", 512);
      run = job.session.step(batch.inputs(), {{"loss", {DType::kF32, {}, &loss}}});
    }
    CHECK(run.done());
  }
}

TEST_CASE("session: timeline and report") {
  Job job;
  CHECK_CODE(Code::kFailedPrecondition, "tracing", job.session.timeline());
  job.session.set_trace(true);
  job.step(Batch(8));
  CHECK(nlohmann::json::parse(job.session.timeline())["traceEvents"].size() > 10);
  const auto report = nlohmann::json::parse(job.session.report());
  CHECK(report["devices"].size() == 2);
  CHECK(report["devices"][1]["bytes"]["parameters"] == (4 * 16 + 16 + 16 * 3) * 4);
}

TEST_CASE("session: a device takes what its own programs need, not what others' do") {
  Job job("ref:2", 8, OptimizerKind::kAdamW, {}, "replica(2, shares=[3,1])");
  job.step(Batch(8));
  const Plan& plan = job.session.plan();
  const auto report = nlohmann::json::parse(job.session.report());
  std::vector<int64_t> totals;
  for (size_t d = 0; d < 2; ++d) {
    const auto& bytes = report["devices"][d]["bytes"];
    totals.push_back(bytes["total"].get<int64_t>() - bytes["workspace"].get<int64_t>());
    int64_t planned = 0;
    for (const Entry& entry : plan.entries)
      planned = std::max(planned, memory_of(plan, entry, static_cast<size_t>(entry.rows[d].program)).device.total());
    CHECK(totals[d] == planned);
  }
  CHECK(totals[1] < totals[0]);
}

TEST_CASE("session: in a child after fork every call says so") {
  Job job;
  const pid_t child = fork();
  if (child == 0) {
    int right = 0;
    Batch batch(8);
    const auto count = [&](auto body) {
      try {
        body();
      } catch (const Error& e) {
        right += e.code() == Code::kFailedPrecondition;
      }
    };
    count([&] { job.session.step(batch.inputs(), {}); });
    count([&] { job.session.save("/tmp/never"); });
    count([&] { job.session.iteration(); });
    _exit(right);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK(job.step(Batch(8)) > 0);
}

// ---- initial values ---------------------------------------------------------------------------------------------
std::vector<float> draw(InitKind kind, double a, double b, uint64_t seed = 1, std::string_view name = "w",
                        size_t n = 100000) {
  std::vector<float> values(n);
  initial_values({.kind = kind, .a = a, .b = b, .file = {}, .key = {}}, seed, name, DType::kF32, 0, n, values.data());
  return values;
}

std::pair<double, double> moments(const std::vector<float>& values) {
  double sum = 0, squares = 0;
  for (const float v : values) sum += v, squares += static_cast<double>(v) * v;
  const double n = static_cast<double>(values.size()), mean = sum / n;
  return {mean, std::sqrt(squares / n - mean * mean)};
}

TEST_CASE("initial values have the distribution they claim") {
  const auto [mean, deviation] = moments(draw(InitKind::kNormal, 3, 0.5));
  CHECK(mean == doctest::Approx(3).epsilon(0.003));
  CHECK(deviation == doctest::Approx(0.5).epsilon(0.01));
  const std::vector<float> uniform = draw(InitKind::kUniform, -2, 6);
  CHECK(*std::min_element(uniform.begin(), uniform.end()) >= -2);
  CHECK(*std::max_element(uniform.begin(), uniform.end()) < 6);
  CHECK(moments(uniform).first == doctest::Approx(2).epsilon(0.02));
  CHECK(moments(uniform).second == doctest::Approx(8 / std::sqrt(12.0)).epsilon(0.01));
  const std::vector<float> truncated = draw(InitKind::kTruncatedNormal, 1, 2);
  CHECK(*std::min_element(truncated.begin(), truncated.end()) >= -3);
  CHECK(*std::max_element(truncated.begin(), truncated.end()) <= 5);
  CHECK(moments(truncated).second == doctest::Approx(2 * 0.8796).epsilon(0.01));  // of a normal cut at two deviations
  CHECK(std::count_if(truncated.begin(), truncated.end(), [](float v) { return v == -3 || v == 5; }) ==
        0);  // redrawn, not clamped
}

TEST_CASE("initial values depend on seed, name and element only") {
  const std::vector<float> all = draw(InitKind::kTruncatedNormal, 0, 1);
  CHECK(draw(InitKind::kTruncatedNormal, 0, 1, 2) != all);
  CHECK(draw(InitKind::kTruncatedNormal, 0, 1, 1, "v") != all);
  std::vector<float> part(1001);
  std::vector<double> wide(1001);
  const Initializer init{.kind = InitKind::kTruncatedNormal, .a = 0, .b = 1, .file = {}, .key = {}};
  initial_values(init, 1, "w", DType::kF32, 5000, part.size(), part.data());
  initial_values(init, 1, "w", DType::kF64, 5000, wide.size(), wide.data());
  for (size_t i = 0; i < part.size(); ++i) {
    CHECK(part[i] == all[5000 + i]);
    CHECK(wide[i] == static_cast<double>(part[i]));
  }
}

TEST_CASE("session: a loss that is not finite leaves running statistics as they were") {
  for (const char* devices : {"ref:1", "ref:2", "ref:3"}) {
    CAPTURE(devices);
    Session session(std::make_shared<const Plan>(compile(small::resnet().g, parse_devices(devices), {})),
                    std::make_shared<Backends>(), {});
    std::vector<float> x(6 * 8 * 8 * 3, 0.5f), before(8), after(8);
    x[77] = std::numeric_limits<float>::quiet_NaN();
    std::vector<int32_t> y(6, 1);
    float loss = 0;
    session.read("stem.mean", {DType::kF32, {8}, before.data()});
    CHECK_CODE(Code::kOutOfRange, "the step was not applied",
               session
                   .step({{"x", {DType::kF32, {6, 8, 8, 3}, x.data()}}, {"y", {DType::kI32, {6}, y.data()}}},
                         {{"loss", {DType::kF32, {}, &loss}}})
                   .wait());
    session.read("stem.mean", {DType::kF32, {8}, after.data()});
    CHECK(after == before);
    CHECK(session.updates() == 0);
  }
}

TEST_CASE("cores: the plan's where they are free, else the least used; named ones or an error") {
  const auto spec = [](std::vector<int> cores, bool named = false) {
    return DeviceSpec{.kind = DeviceKind::kCpu, .cores = std::move(cores), .named = named};
  };
  const auto cores = [](const std::vector<DeviceSpec>& specs) {
    std::vector<std::vector<int>> list;
    for (const DeviceSpec& s : specs) list.push_back(s.cores);
    return list;
  };
  using Lists = std::vector<std::vector<int>>;
  const auto assigned = [&](std::vector<DeviceSpec> specs, const std::vector<int>& usable, int threads,
                            CoreUse use = {}) {
    return cores(assign_cores(std::move(specs), usable, {4, 5, 6, 7}, threads, use));
  };
  CHECK(assigned({spec({4}), spec({5})}, {4, 5, 6}, 0) == Lists{{4}, {5}});
  CHECK(assigned({spec({}), spec({})}, {4, 5, 6, 7}, 0) == Lists{{4, 5}, {6, 7}});
  CHECK(assigned({spec({9}), spec({10})}, {4, 5}, 0) == Lists{{4}, {5}});  // a plan from another machine
  CHECK(assigned({spec({0, 1, 2, 3}), spec({4, 5, 6, 7})}, {4, 5}, 0) == Lists{{4}, {5}});
  CHECK(assigned({spec({}), spec({}), spec({})}, {4, 5}, 0) == Lists{{4}, {5}, {4}});
  CHECK(assigned({spec({4}), spec({5}), spec({4}), spec({5})}, {4, 5}, 0) == Lists{{4}, {5}, {4}, {5}});
  CHECK(assigned({spec({5})}, {4, 5}, 2) == Lists{{4, 5}});
  CHECK(assigned({spec({5})}, {4, 5}, 9) == Lists{{4, 5}});
  // Beside other sessions.
  CHECK(assigned({spec({4, 5})}, {4, 5}, 1, {{4, 1}}) == Lists{{5}});
  CHECK(assigned({spec({4}), spec({5})}, {4, 5, 6, 7}, 0, {{4, 2}, {5, 1}}) == Lists{{6}, {7}});
  CHECK(assigned({spec({4}), spec({5})}, {4, 5}, 0, {{4, 1}, {5, 1}}) == Lists{{4}, {5}});
  // Named: also beyond what a quota pays for, never elsewhere.
  CHECK(assigned({spec({7}, true), spec({6})}, {4, 5, 6}, 0) == Lists{{7}, {6}});
  CHECK(assigned({spec({6}, true), spec({6})}, {4, 5, 6}, 0) == Lists{{6}, {4}});
  CHECK_CODE(Code::kInvalidArgument, "device 1 is cpu@6+99, and this process may not run on core 99; it may on 4-7",
             assigned({spec({4}), spec({6, 99}, true)}, {4, 5, 6}, 0));
  CHECK(parse_devices("cpu@1,cpu:1", {0, 1})[0].named);
  CHECK(!parse_devices("cpu@1,cpu:1", {0, 1})[1].named);

  const auto leases = std::make_shared<CoreLeases>();
  const std::vector<int> usable = usable_cores();
  const auto one = [&] { return CoreLeases::lease(leases, {spec(usable)}, 1, true); };
  auto first = one();
  const auto second = one();
  if (usable.size() > 1) CHECK(first->specs()[0].cores != second->specs()[0].cores);
  const std::vector<int> freed = first->specs()[0].cores;
  first.reset();
  CHECK(one()->specs()[0].cores == freed);
}

TEST_CASE("session: inputs and parameters may have the names of step scalars") {
  using enum OpCode;
  const auto model = [](const char* in, const char* weight, const char* other) {
    small::Model m;
    const TensorId x = m.input(in, {8, 4}), y = m.input("y", {8, 4});
    const TensorId h = m.op(k_matmul, {x, m.variable(weight, {4, 4})}, {}, "learning_rate");
    const TensorId z = m.op(k_add, {h, m.variable(other, {4})}, {}, "updates");
    m.minimize(m.op(k_reduce_mean, {m.op(k_squared_difference, {z, y})}, {}, "loss"), OptimizerKind::kAdamW);
    m.g.training.precision = Precision::kFloat16;  // scales its loss
    return m;
  };
  const auto trained = [&](const char* in, const char* weight, const char* other, const char* strategy) {
    CompileOptions options;
    options.strategy = strategy;
    return small::train(model(in, weight, other), options.strategy == "local" ? "ref:1" : "ref:2", options).losses;
  };
  for (const char* strategy : {"replica(2)", "pipeline(2, micro_batches=2)", "split(2)"})
    for (const auto& [in, weight, other] :
         {std::array{"learning_rate", "updates", "loss_scale"}, std::array{"updates", "loss_scale", "learning_rate"}}) {
      CAPTURE(strategy);
      const auto want = trained(in, weight, other, "local"), got = trained(in, weight, other, strategy);
      CHECK(got.size() == want.size());
      for (size_t i = 0; i < got.size(); ++i) CHECK(got[i] == doctest::Approx(want[i]).epsilon(0.001));
    }
}

}  // namespace
}  // namespace whale
