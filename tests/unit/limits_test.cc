// What is absurd is refused at once, and planning can be stopped wherever it is.
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <functional>
#include <numeric>
#include <optional>

#include "base/text.h"
#include "base/watch.h"
#include "cluster/devices.h"
#include "compile/checks.h"
#include "compile/compile.h"
#include "lower/tree.h"
#include "plan/figures.h"
#include "plan/verify.h"
#include "prove/prove.h"
#include "prove/walk.h"
#include "schedule/schedule.h"
#include "unit/caught.h"
#include "unit/small_models.h"

using namespace whale;

namespace {

constexpr double kHang = 60;  // seconds after which a test counts as hanging, on the slowest machine

std::string refusal(const Graph& graph, const char* devices, const CompileOptions& options) {
  const Watch watch("planning", nullptr, kHang);
  return message_of(
      [&] {
        compile(graph, parse_devices(devices, {0, 1}), options);
      },
      {Code::kInvalidArgument, Code::kResourceExhausted, Code::kUnimplemented});
}

}  // namespace

TEST_CASE("absurd counts in options and strategies are errors that show them, before anything is sized by them") {
  struct Row {
    CompileOptions options;
    const char* devices;
    std::vector<const char*> parts;
  };
  const auto strategy = [](const char* text) { return CompileOptions{.strategy = text}; };
  const Row rows[] = {
      {{.strategy = "", .accumulation = 9}, "null:1", {"9 micro-batches", "batch of 8", "at most 8"}},
      {{.strategy = "", .accumulation = 1'000'000}, "null:1", {"1000000 micro-batches", "batch of 8"}},
      {{.strategy = "", .accumulation = int64_t{1} << 62}, "null:4", {"micro-batches", "batch of 8"}},
      {strategy("pipeline(2, micro_batches=1000000)"), "null:2", {"1000000 micro-batches", "batch of 8"}},
      {strategy("pipeline(2, micro_batches=99999999999999999999)"), "null:2", {"micro_batches", "whole number"}},
      {strategy("pipeline(1000000)"), "null:4", {"wants 1000000 stages", "4 device(s)"}},
      {strategy("pipeline(2, virtual_stages=1000000)"), "null:2", {"wants 1000000 virtual stages", "op(s)"}},
      {strategy("pipeline(2, virtual_stages=2147483648)"), "null:2", {"2147483648 virtual stages", "op(s)"}},
      {strategy("pipeline(2, schedule=interleaved, virtual_stages=99999)"), "null:2", {"99999 virtual stages"}},
      {strategy("replica(2147483648)"), "null:4", {"wants 2147483648", "4 are there"}},
      {strategy("replica(2147483648) > split(2147483648) > replica(2147483648)"), "null:4", {"4 are there"}},
      {strategy("split(1000000000)"), "null:4", {"wants 1000000000", "4 are there"}},
      {strategy("stage(1000000000) > replica"), "null:4", {"4 are there"}},
      {strategy("cluster(device_order=average(1000000000))"), "null:4", {"1000000000"}},
      {{{.matmul_chunks = -1}}, "null:2", {"-1 chunks"}},
      {{{.prefetch = -1}}, "null:2", {"-1 gathers"}},
  };
  for (const Row& row : rows) {
    const std::string message = refusal(small::gpt(8).g, row.devices, row.options);
    INFO(row.options.strategy, " accumulation ", row.options.accumulation, ": ", message);
    CHECK(!message.empty());
    for (const char* part : row.parts) CHECK_MESSAGE(has(message, part), part);
  }
}

TEST_CASE("a strategy of very many scopes or clauses is an error") {
  std::string nest = "replica(1)", clauses = "replica";
  for (int i = 0; i < 20'000; ++i) nest += " > replica(1)", clauses += "; x" + std::to_string(i) + ": replica";
  CHECK(has(refusal(small::gpt(8).g, "null:1", {.strategy = nest}), "more than 64 scopes"));
  CHECK(has(refusal(small::gpt(8).g, "null:1", {.strategy = clauses}), "no scope is called 'x"));
}

TEST_CASE("options that merely bound a size may be as large as they like") {
  const char* devices = "null:2";
  for (const int64_t bytes : {int64_t{1}, INT64_MAX}) {
    CompileOptions options;
    options.bucket_bytes = bytes;
    CHECK(refusal(small::gpt(8).g, devices, options) == "");
  }
  for (const int64_t chunks : {int64_t{INT32_MAX}, INT64_MAX}) {
    CompileOptions options;
    options.strategy = "split(2)";
    options.matmul_chunks = chunks;
    CHECK(refusal(small::gpt(8).g, devices, options) == "");
  }
}

TEST_CASE("absurd counts in a graph: micro-batches, scopes, shares, without samples") {
  small::Model m = small::mlp(8);
  m.g.training.accumulation = int64_t{1} << 40;
  CHECK(has(refusal(m.g, "null:1", {}), "batch of 8"));
  for (Tensor& t : m.g.tensors) t.batch_dim = -1;
  CHECK(has(refusal(m.g, "null:1", {}), "no input of 'mlp' counts samples"));
  m = small::mlp(int64_t{1} << 40);  // samples enough, devices too many for so long a schedule
  m.g.training.accumulation = int64_t{1} << 31;
  CHECK(has(refusal(m.g, "null:4", {}), "rows, at most"));
  small::Model scoped;
  scoped.enter(ScopeKind::kReplica, 1 << 30);
  const TensorId x = scoped.input("x", {8, 4});
  scoped.minimize(scoped.op(OpCode::k_reduce_mean, {scoped.op(OpCode::k_matmul, {x, scoped.variable("w", {4, 4})})}),
                  OptimizerKind::kSgd);
  CHECK(has(refusal(scoped.g, "null:4", {}), "4 are there"));
  scoped.g.scopes[1].count = 0;
  scoped.g.scopes[1].shares.assign(100'000, 1);
  CHECK(has(refusal(scoped.g, "null:4", {}), "wants 100000"));
}

TEST_CASE("absurd device lists") {
  struct Row {
    const char *text, *part;
  };
  const Row rows[] = {{"cpu:1000000000", "outside 1..65536"},
                      {"cpu:99999999999999999999", "99999999999999999999 is outside 1..65536"},
                      {"cpu:many", "'many' is not a number"},
                      {"65536xnull:65536", "more than 65536 devices"},
                      {"cpu@0-65535*65536", "cores together"},
                      {"65536xcpu@0-65535", "more than"},
                      {"cpu@0-65535+0-65535", "more than 65536 cores"},
                      {"cpu@99999999", "outside 0..65536"}};
  for (const Row& row : rows) CHECK_MESSAGE(has(message_of([&] { parse_devices(row.text, {0}); }), row.part), row.text);
  const std::string endless(100'000, 'x');
  const std::string message = message_of([&] { parse_devices("cpu:1," + endless, {0}); });
  CHECK(message.size() < 1000);
  CHECK(has(message, "(100000 bytes)"));
}

TEST_CASE("long text is shown by both ends, cut between characters") {
  CHECK(brief("short") == "short");
  std::string text;
  for (int i = 0; i < 1000; ++i) text += "é";
  for (size_t most = 20; most < 30; ++most) {
    const std::string shown = brief(text, most);
    CHECK(shown.size() < most + 30);
    CHECK(has(shown, "... (2000 bytes) ..."));
    CHECK(shown.starts_with("éé"));
    CHECK(shown.ends_with("éé"));
    CHECK(shown.find("... (") % 2 == 0);
  }
  CHECK(whole_number("12") == 12);
  CHECK(whole_number("-3") == -3);
  for (const char* bad : {"", "1e3", " 1", "1 ", "+1", "99999999999999999999", "0x1", "one"})
    CHECK_MESSAGE(!whole_number(bad), bad);
}

TEST_CASE("planning stops at every look: cancelled, or out of time; the next plan is as if nothing had been") {
  const small::Model m = small::gpt(8);
  const auto devices = parse_devices("null:8", {0});
  const CompileOptions options{.strategy = "replica(2) > pipeline(2, micro_batches=2) > split(2)"};
  const std::string expected = print(compile(m.g, devices, options));
  int64_t looks = 0;
  {
    Watch watch("planning", nullptr, kHang);
    watch.looked = [&] { ++looks; };
    CHECK(print(compile(m.g, devices, options)) == expected);
  }
  CHECK(looks > 1000);
  for (int64_t k = 1; k <= looks; k += 1 + looks / 40) {
    std::atomic<bool> cancelled{false};
    Watch watch("planning", &cancelled, 0);
    int64_t at = 0;
    watch.looked = [&] { cancelled = ++at >= k; };
    CHECK(has(message_of([&] { compile(m.g, devices, options); }, {Code::kCancelled}), "planning was cancelled"));
    CHECK(at == k);  // the first look after it
  }
  {
    const Watch watch("planning", nullptr, 1e-9);
    CHECK(has(message_of([&] { compile(m.g, devices, options); }, {Code::kDeadlineExceeded}), "timeout of 1e-09"));
  }
  {  // what planning for another batch looks at is the same
    const Plan plan = compile(m.g, devices, options);
    const std::atomic<bool> cancelled{true};
    const Watch watch("planning", &cancelled, 0);
    message_of([&] { compile_entry(plan, "train", 5); }, {Code::kCancelled});
  }
  CHECK(print(compile(m.g, devices, options)) == expected);
  for (const double bad : {-1.0, std::nan(""), HUGE_VAL})
    CHECK(has(message_of([&] { const Watch watch("planning", nullptr, bad); }), "number of seconds"));
}

TEST_CASE("a proof stops at every look, and looks for each device and variable") {
  const small::Model m = small::gpt(8);
  const Plan plan =
      compile(m.g, parse_devices("null:8", {0}), {.strategy = "replica(2) > pipeline(2, micro_batches=2) > split(2)"});
  const std::string expected = to_json(prove(plan));
  int64_t looks = 0;
  const auto counted = [&](const std::function<void()>& work) {
    Watch watch("proving", nullptr, kHang);
    looks = 0;
    watch.looked = [&] { ++looks; };
    work();
    return looks;
  };
  counted([&] { CHECK(to_json(prove(plan)) == expected); });
  for (int64_t k = 1, all = looks; k <= all; k += 1 + all / 40) {
    std::atomic<bool> cancelled{false};
    Watch watch("proving", &cancelled, 0);
    int64_t at = 0;
    watch.looked = [&] { cancelled = ++at >= k; };
    CHECK(has(message_of([&] { prove(plan); }, {Code::kCancelled}), "proving was cancelled"));
    CHECK(at == k);
  }
  CHECK(to_json(prove(plan)) == expected);

  // Devices are begun, and variables compared at the end, without an instruction being walked.
  const auto walk_of = [&](const Plan& p, proof::Symmetry::Sought sought) {
    const Entry& entry = p.entries[0];
    proof::Reference reference(p, entry, proof::form_of(entry));
    const proof::Symmetry symmetry(p, entry, sought);
    std::optional<proof::Walk> walk;
    int64_t devices = 0;
    for (const DeviceRow& row : entry.rows) devices += symmetry.walked(row.device);
    CHECK(counted([&] { walk.emplace(p, entry, reference, symmetry); }) >= devices);
    int64_t before = 0, behind = 0;
    Watch watch("proving", nullptr, kHang);
    watch.looked = [&] { before += walk->walked() == 0, behind += walk->walked() == walk->to_walk(); };
    CHECK(!walk->run());
    CHECK(walk->to_walk() == walk->walked());
    CHECK(before > devices);
    CHECK(behind >= devices * std::ssize(p.variables));
    return walk->walked();
  };
  CompileOptions options{.strategy = "replica(8)"};
  options.accumulation = 8;
  const Plan regular = compile(small::mlp(64).g, parse_devices("null:8", {0}), options);
  CHECK(walk_of(regular, proof::Symmetry::Sought::kYes) < walk_of(regular, proof::Symmetry::Sought::kNo));
}

TEST_CASE("planning looks in every loop over micro-batches") {
  constexpr int64_t kFew = 1 << 13, kMany = 1 << 15;
  const auto plan_of = [](int64_t micro_batches, const char* strategy) {
    CompileOptions options{.strategy = strategy};
    options.accumulation = micro_batches;
    return compile(small::mlp(2 * micro_batches).g, parse_devices("null:2", {0}), options);
  };
  const auto looks = [](const std::function<void()>& work) {
    int64_t n = 0;
    Watch watch("planning", nullptr, kHang);
    watch.looked = [&] { ++n; };
    work();
    return n;
  };
  const Plan few = plan_of(kFew, "replica"), many = plan_of(kMany, "replica");
  const auto row = [](const Plan& p) -> const DeviceRow& { return p.entries[0].rows[0]; };
  const auto order = [](const Plan& p) {
    std::vector<int64_t> all(static_cast<size_t>(p.micro_batches));
    std::iota(all.begin(), all.end(), int64_t{0});
    return all;
  };
  const auto shape = [](const Plan& p) { return static_cast<int>(p.micro_batches); };
  const std::pair<const char*, std::function<void(const Plan&)>> loops[] = {
      {"samples_of", [&](const Plan& p) { samples_of(p.entries[0], row(p)); }},
      {"step_of", [](const Plan& p) { step_of(p.entries[0].programs[0]); }},
      {"plan_tree", [&](const Plan& p) { plan_tree(p.micro_batches, order(p)); }},
      {"verify_work", [](const Plan& p) { verify_work(p, p.entries[0]); }},
      {"verify_memory",
       [](const Plan& p) {
         verify_memory({p, p.entries[0], 0, p.entries[0].programs[0]});
       }},
      {"verify_collectives", [](const Plan& p) { verify_collectives(p, p.entries[0]); }},
      {"verify_communication", [](const Plan& p) { verify_communication(p, p.entries[0]); }},
      {"gpipe", [&](const Plan& p) { make_schedule("gpipe", 2, shape(p), 0); }},
      {"1f1b", [&](const Plan& p) { make_schedule("1f1b", 2, shape(p), 0); }},
      {"interleaved", [&](const Plan& p) { make_schedule("interleaved", 2, shape(p), 0); }},
      {"zb_h1", [&](const Plan& p) { make_schedule("zb_h1", 2, shape(p), 0); }},
      {"zb_v", [&](const Plan& p) { make_schedule("zb_v", 2, shape(p), 0); }},
  };
  for (const auto& [name, loop] : loops) {
    CAPTURE(name);
    CHECK(looks([&] { loop(many); }) - looks([&] { loop(few); }) >= (kMany - kFew) / 1024);
  }
}

TEST_CASE("what planning would take is estimated, and bounded by an option") {
  CompileOptions options{.strategy = "", .max_bytes = 1'000'000};
  const std::string message = refusal(small::gpt(8).g, "null:64", options);
  for (const char* part : {"64 devices", "max_plan_bytes", "1000000 bytes"}) CHECK_MESSAGE(has(message, part), message);
  options.max_bytes = int64_t{4} << 30;
  CHECK(refusal(small::gpt(8).g, "null:2", options) == "");
}
