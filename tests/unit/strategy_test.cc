// Device lists, strategies, shares, and the way from scopes to a mesh.
#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "base/file.h"
#include "cluster/cores.h"
#include "cluster/devices.h"
#include "cluster/host_memory.h"
#include "cluster/shares.h"
#include "task/stages.h"
#include "task/strategy.h"
#include "unit/caught.h"
#include "unit/small_models.h"
#include "unit/tasks.h"

using namespace whale;

namespace {}  // namespace

TEST_CASE("device lists parse, deal cores and print back") {
  const std::vector<int> cores{0, 1, 2, 3, 8};
  auto d = parse_devices("cpu:2", cores);
  REQUIRE(d.size() == 2);
  CHECK(d[0].cores == std::vector<int>{0, 1, 2});
  CHECK(d[1].cores == std::vector<int>{3, 8});
  CHECK(to_string(d) == "cpu@0-2,cpu@3+8");
  CHECK(!d[0].named);
  for (DeviceSpec& dealt : d) dealt.named = true;  // the text names the cores
  CHECK(parse_devices(to_string(d), {}) == d);
  d = parse_devices("cpu:3", {4, 5});  // more devices than cores
  CHECK(d[0].cores == std::vector<int>{4});
  CHECK(d[2].cores == std::vector<int>{4});
  d = parse_devices("ref:2, null, cpu@0-1+4*2", cores);
  REQUIRE(d.size() == 5);
  CHECK(d[2].kind == DeviceKind::kNull);
  CHECK(d[4].cores == std::vector<int>{0, 1, 4});
  CHECK(to_string(d) == "ref:2,null:1,cpu@0-1+4*2");
  CHECK(parse_devices(to_string(d), {}) == d);
  CHECK(!parse_devices("cpu").front().cores.empty());
}

TEST_CASE("wrong device lists say which item and why") {
  for (const char* bad :
       {"", ",", "cpu:0", "cpu:x", "tpu:2", "cpu@", "cpu@3-1", "ref@1", "cpu:2,,ref:1", "cpu:99999999", "cpu@0*0"})
    CHECK_MESSAGE(has(message_of([&] { parse_devices(bad, {0}); }), "expected"), bad);
  CHECK(has(message_of([&] { parse_devices("cpu:2,tpu:1", {0}); }), "'tpu:1'"));
  CHECK_THROWS_AS(parse_devices("cuda:1", {0}), Error);
}

TEST_CASE("CPU quota") {
  CHECK(cores_of_quota("max 100000\n") == 0);
  CHECK(cores_of_quota("200000 100000\n") == 2);
  CHECK(cores_of_quota("150000 100000") == 2);
  CHECK(cores_of_quota("50000 100000") == 1);
  CHECK(cores_of_quota("") == 0);
  CHECK(cores_of_quota("-1\n 100000") == 0);
}

TEST_CASE("CPU quota: of the group that the process is in and of those around it, in both layouts") {
  char name[] = "/tmp/whale_groups_XXXXXX";
  const std::string mount = mkdtemp(name);
  const auto put = [&](const std::string& folder, const char* file, const char* text) {
    std::filesystem::create_directories(mount + folder);
    std::ofstream(mount + folder + "/" + file) << text;
  };
  put("/a/b/c", "cpu.max", "max 100000\n");
  put("/a/b", "cpu.max", "250000 100000\n");
  put("/a", "cpu.max", "400000 100000\n");
  put("/a/tight", "cpu.max", "50000 100000\n");
  CHECK(cores_of_groups("0::/a/b/c\n", mount) == 3);
  CHECK(cores_of_groups("0::/a\n", mount) == 4);
  CHECK(cores_of_groups("1:name=systemd:/x\n0::/a/tight\n", mount) == 1);
  CHECK(cores_of_groups("0::/\n", mount) == 0);
  CHECK(cores_of_groups("", mount) == 0);
  CHECK(cores_of_groups("no colons\n0:one\n0::", mount) == 0);
  CHECK(cores_of_groups("0::/gone/from/here\n", mount) == 0);
  put("", "cpu.max", "600000 100000\n");  // a container's own, whose path outside means nothing in it
  CHECK(cores_of_groups("0::/gone/from/here\n", mount) == 6);
  CHECK(cores_of_groups("0::/a/b/c\n", mount) == 3);
  put("/cpu/docker/one", "cpu.cfs_quota_us", "200000\n");
  put("/cpu/docker/one", "cpu.cfs_period_us", "100000\n");
  CHECK(cores_of_groups("4:cpuacct,cpu:/docker/one\n3:cpuset:/\n", mount) == 2);
  CHECK(cores_of_groups("4:cpuset:/docker/one\n", mount) == 6);
  std::filesystem::remove_all(mount);
}

TEST_CASE("memory: the least of what the machine and the groups leave, page cache being free") {
  const std::string mount = std::filesystem::temp_directory_path() / ("whale-memory-" + random_id());
  const auto put = [&](const std::string& folder, const char* file, const char* text) {
    std::filesystem::create_directories(mount + folder);
    std::ofstream(mount + folder + "/" + file) << text;
  };
  const std::string meminfo = "MemTotal:       4000 kB\nMemFree:   1 kB\nMemAvailable:       3000 kB\n";
  CHECK(host_memory(meminfo, "", mount).bytes == 3000 * 1024);
  CHECK(host_memory(meminfo, "0::/a/b\n", mount).where == "MemAvailable of /proc/meminfo");
  CHECK(host_memory("", "", mount).bytes == UINT64_MAX);
  CHECK(host_memory("MemFree: 1 kB\n", "no colons\n", mount).bytes == UINT64_MAX);
  put("/a", "memory.max", "2000000\n"), put("/a", "memory.current", "1500000\n");
  put("/a/b", "memory.max", "max\n"), put("/a/b", "memory.current", "5\n");
  CHECK(host_memory(meminfo, "0::/a/b\n", mount).bytes == 500000);
  CHECK(host_memory(meminfo, "0::/a/b\n", mount).where.find("/a/memory.max") != std::string::npos);
  put("/a", "memory.stat", "anon 1\ninactive_file 300000\nactive_file 100000\nshmem 7\n");
  CHECK(host_memory(meminfo, "0::/a/b\n", mount).bytes == 900000);
  put("/a", "memory.current", "9000000\n");
  CHECK(host_memory(meminfo, "0::/a\n", mount).bytes == 0);
  put("/memory/docker/one", "memory.limit_in_bytes", "1000000\n");
  put("/memory/docker/one", "memory.usage_in_bytes", "800000\n");
  put("/memory/docker/one", "memory.stat", "inactive_file 9\ntotal_inactive_file 50000\n");
  put("/memory", "memory.limit_in_bytes", "9223372036854771712\n"), put("/memory", "memory.usage_in_bytes", "1\n");
  CHECK(host_memory(meminfo, "4:memory:/docker/one\n3:cpu:/\n", mount).bytes == 250000);
  CHECK(host_memory(meminfo, "4:memory:/\n", mount).bytes == 3000 * 1024);
  std::filesystem::remove_all(mount);
}

TEST_CASE("strategies round trip") {
  for (const char* text :
       {"replica", "replica(3, shares=[3,2,1])", "replica(2) > pipeline(4, micro_batches=8, schedule=1f1b) > split(2)",
        "cluster(\"cpu:4\", device_order=average(2)) > replica(by=micro_batch)", "stage(2)",
        "split(2, factor=heads, shares=[1,0.5])", "replica(2, shares=[1,1,1])",
        "pipeline(schedule=interleaved, virtual_stages=2)", "pipeline(3, schedule=zb_h1, warmup=[5,2,2])",
        "pipeline(2, micro_batches=4, warmup=[3,1])", "replica(device_order=[[0,1],[2]])"})
    CHECK(to_string(parse_strategy(text)) == text);
  CHECK(to_string(parse_strategy(" replica ( count = 2 ) ")) == "replica(2)");
  CHECK(to_string(parse_strategy("pipeline(2, warmup = [3, 1], schedule=1f1b)")) ==
        "pipeline(2, schedule=1f1b, warmup=[3,1])");
}

TEST_CASE("wrong strategies say where") {
  CHECK(has(message_of([] { parse_strategy(""); }), "expected a scope"));
  CHECK(has(message_of([] { parse_strategy("replicate(2)"); }), "'replicate'"));
  CHECK(has(message_of([] { parse_strategy("replica(2"); }), "','"));
  for (const char* text : {"replica(2, shares=[1,1], shares=[1,2])", "pipeline(2, micro_batches=2, micro_batches=4)",
                           "split(2, ways=4)", "pipeline(2, micro_batches=2, micro_batches=2)"})
    CHECK(has(message_of([&] { parse_strategy(text); }), "is given twice"));
  CHECK(has(message_of([] { parse_strategy("replica(2) split"); }), "character 12"));
  CHECK(has(message_of([] { parse_strategy("replica(ways=2)"); }), "it has count, shares, by, device_order"));
  CHECK(has(message_of([] { parse_strategy("replica(shares=[1,-1])"); }), "shares"));
  CHECK(has(message_of([] { parse_strategy("replica(0)"); }), "whole number"));
  CHECK(has(message_of([] { parse_strategy("pipeline(schedule=2f2b)"); }), "1f1b"));
  CHECK(has(message_of([] { parse_strategy("replica(shares=[1,2"); }), "']'"));
  // Of several clauses: all of the text, and the place in it.
  const auto clauses = [](const char* text) { return message_of([&] { parse_clauses(text); }); };
  CHECK(has(clauses("replica(2);"), "strategy 'replica(2);': at character 12: expected a scope"));
  CHECK(has(clauses("; replica"), "strategy '; replica': at character 1: expected a scope"));
  CHECK(
      has(clauses("a: replica(2; b"), "strategy 'a: replica(2; b': at character 13: expected ',' or ')', found '; b'"));
  CHECK(has(clauses("replica; x: split(2) y"), "strategy 'replica; x: split(2) y': at character 22"));
  CHECK(has(clauses("replica; x: split(hats=2)"), "strategy 'replica; x: split(hats=2)': split has no parameter"));
}

TEST_CASE("shares are rounded by largest remainder, ties to the lower index") {
  CHECK(round_shares(10, {3, 2, 1}) == std::vector<int64_t>{5, 3, 2});
  CHECK(round_shares(3, {1, 1}) == std::vector<int64_t>{2, 1});
  CHECK(round_shares(8, {3, 0, 1}) == std::vector<int64_t>{6, 0, 2});
  CHECK(round_shares(1, {0, 1, 1}) == std::vector<int64_t>{0, 1, 0});
  CHECK(round_shares(0, {1, 1}) == std::vector<int64_t>{0, 0});
  CHECK(round_shares(6, {0.1, 0.2, 0.3}) == std::vector<int64_t>{1, 2, 3});
  CHECK_THROWS_AS(round_shares(3, {0, 0}), Error);
  CHECK_THROWS_WITH_AS(round_shares(3, {1e308, 1e308}), doctest::Contains("expected a finite sum"), Error);
  CHECK_THROWS_AS(round_shares(3, {-1, 2}), Error);
}

TEST_CASE("properties of shares") {
  CHECK(rc::check("parts add up, are near the exact share, and keep zero", [] {
    const auto total = *rc::gen::inRange<int64_t>(0, 10000);
    auto weights =
        *rc::gen::container<std::vector<double>>(rc::gen::map(rc::gen::inRange(0, 50), [](int i) { return i / 7.0; }));
    weights.push_back(1.0);
    const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
    const auto parts = round_shares(total, weights);
    RC_ASSERT(std::accumulate(parts.begin(), parts.end(), int64_t{0}) == total);
    for (size_t i = 0; i < parts.size(); ++i) {
      const double exact = static_cast<double>(total) * weights[i] / sum;
      RC_ASSERT(static_cast<double>(parts[i]) > exact - 1.001);
      RC_ASSERT(static_cast<double>(parts[i]) < exact + 1.001);
      if (weights[i] == 0) RC_ASSERT(parts[i] == 0);
      for (size_t j = i + 1; j < parts.size(); ++j)
        if (weights[i] == weights[j]) RC_ASSERT(parts[i] >= parts[j]);
    }
  }));
}

TEST_CASE("scopes become meshes; what does not fit names scope and devices") {
  const auto form = [](const char* text, int64_t devices) {
    small::Model m = small::mlp();
    return small::tasks_of(m.g, devices, text);
  };
  const auto mesh = [&](const char* text, int64_t devices) { return form(text, devices).meshes[0]; };
  CHECK(mesh("replica", 4).axes == std::vector<MeshAxis>{{"replica", 4, {}, {}}});
  CHECK(mesh("replica(shares=[3,1])", 2).axes[0].shares == std::vector<double>{3, 1});
  CHECK(mesh("replica(shares=[3,1])", 2).devices == std::vector<int32_t>{0, 1});
  const Mesh nested = mesh("replica(2, shares=[1,2]) > replica(shares=[1,3])", 4);
  REQUIRE(nested.axes.size() == 2);
  CHECK(nested.axes[0].shares == std::vector<double>{1, 2});
  CHECK(nested.axes[1].shares == std::vector<double>{1, 3});
  CHECK(nested.coordinates(2) == std::vector<int64_t>{1, 0});
  CHECK(mesh("cluster(device_order=[[2,3],[0,1]]) > replica", 4).devices == std::vector<int32_t>{2, 3, 0, 1});
  // Counts left out: the outermost one takes what the others leave.
  const Mesh inferred = mesh("replica > split(3)", 6);
  REQUIRE(inferred.axes.size() == 2);
  CHECK(inferred.axes[0].size == 2);
  CHECK(inferred.axes[1] == MeshAxis{"split", 3, {}, {}});
  CHECK(form("replica > split(3)", 6).strategy == "replica(2) > split(3)");
  CHECK(form("split", 5).strategy == "split(5)");
  CHECK(form("replica(2) > pipeline > split(2)", 12).strategy == "replica(2) > pipeline(3) > split(2)");

  const auto refusal = [&](const char* text, int64_t devices) { return message_of([&] { form(text, devices); }); };
  const std::string few = refusal("replica(2)", 4);
  CHECK_MESSAGE((has(few, "replica(2)") && has(few, "wants 2") && has(few, "4 are there")), few);
  CHECK(has(refusal("replica(8)", 4), "wants 8"));
  CHECK(has(refusal("split(8)", 4), "wants 8"));
  CHECK(has(refusal("replica(2) > split(3)", 4), "wants 6"));
  const std::string pipe = refusal("replica(2) > pipeline(2)", 6);
  CHECK_MESSAGE((has(pipe, "pipeline(2)") && has(pipe, "6 are there")), pipe);
  CHECK(has(refusal("replica(3, shares=[1,1])", 3), "expected 3"));
  CHECK(has(refusal("replica(2, shares=[0,0])", 2), "shares"));
  CHECK(has(refusal("pipeline(2) > pipeline(2)", 4), "pipeline inside a pipeline"));
  CHECK(has(refusal("cluster(device_order=[[0,1],[1,2]]) > replica", 4), "each of the devices 0 to 3 once"));
  CHECK(has(refusal("pipeline(40)", 40), "can be cut into at most"));
  CHECK(has(refusal("cluster(\"cpu:2\") > replica", 2), "not implemented"));
}

TEST_CASE("every axis has its role, per leaf of the scope tree") {
  small::Model m;
  m.g.name = "two leaves";
  const TensorId x = m.input("x", {8, 4});
  m.enter(ScopeKind::kReplica, 4);
  const TensorId h = m.op(OpCode::k_matmul, {x, m.variable("w1", {4, 8})}, {}, "backbone");
  m.scope = 0;
  m.enter(ScopeKind::kSplit, 4);
  m.g.scopes.back().factor = "columns";
  const TensorId y = m.op(OpCode::k_matmul, {h, m.variable("w2", {8, 12})}, {}, "classifier");
  m.g.outputs = {{"y", y}};
  const TaskGraphs tasks = small::tasks_of(m.g, 4, "");
  REQUIRE(tasks.meshes.size() == 1);
  REQUIRE(tasks.meshes[0].axes.size() == 1);
  CHECK(tasks.meshes[0].axes[0].name == "replica|split");
  CHECK(tasks.meshes[0].axes[0].size == 4);
  REQUIRE(tasks.tasks.size() == 2);
  CHECK(tasks.task(m.g.ops[0]).roles == std::vector<AxisRole>{AxisRole::kReplica});
  CHECK(tasks.task(m.g.ops[1]).roles == std::vector<AxisRole>{AxisRole::kSplit});
  CHECK(tasks.task(m.g.ops[1]).factors == std::vector<std::string>{"columns"});
  CHECK(tasks.task(m.g.ops[1]).path.find("split") != std::string::npos);
}

TEST_CASE("scopes that share devices are cut at common places") {
  small::Model m;
  m.g.name = "refined";
  const TensorId x = m.input("x", {8, 4});
  m.enter(ScopeKind::kReplica, 4);
  const TensorId h = m.op(OpCode::k_matmul, {x, m.variable("w1", {4, 8})});
  m.scope = 0;
  m.enter(ScopeKind::kReplica, 2);
  m.enter(ScopeKind::kSplit, 2);
  m.g.outputs = {{"y", m.op(OpCode::k_matmul, {h, m.variable("w2", {8, 12})})}};
  const TaskGraphs tasks = small::tasks_of(m.g, 4, "");
  REQUIRE(tasks.meshes[0].axes.size() == 2);
  CHECK(tasks.meshes[0].axes[0].name == "replica");
  CHECK(tasks.meshes[0].axes[1].name == "replica|split");
  CHECK(tasks.task(m.g.ops[0]).roles == std::vector<AxisRole>{AxisRole::kReplica, AxisRole::kReplica});
  CHECK(tasks.task(m.g.ops[1]).roles == std::vector<AxisRole>{AxisRole::kReplica, AxisRole::kSplit});
  // 6 devices as 2 * 3 and as 3 * 2 have no common places.
  m.g.scopes[1].count = 3;
  m.g.scopes[2].count = 2;
  m.g.scopes[3].count = 3;
  small::Model other = m;
  other.g.scopes[1].parent = 0;
  const std::string message = message_of([&] { small::tasks_of(other.g, 6, ""); });
  CHECK_MESSAGE(!message.empty(), message);
}

TEST_CASE("stages: written ones, cut ones, their devices") {
  const auto pipeline = [](int64_t first, int64_t second, bool extra) {
    small::Model m;
    m.g.name = "stages";
    const TensorId x = m.input("x", {8, 4});
    m.enter(ScopeKind::kPipeline);
    const ScopeId outer = m.scope;
    m.enter(ScopeKind::kStage, first);
    const TensorId h = m.op(OpCode::k_matmul, {x, m.variable("w1", {4, 8})}, {}, "one");
    m.scope = outer;
    m.enter(ScopeKind::kStage, second);
    TensorId y = m.op(OpCode::k_matmul, {h, m.variable("w2", {8, 12})}, {}, "two");
    m.scope = 0;
    if (extra) y = m.op(OpCode::k_relu, {y}, {}, "three");  // joins what it reads
    m.g.outputs = {{"y", y}};
    return m;
  };
  small::Model m = pipeline(0, 0, true);
  const TaskGraphs tasks = small::tasks_of(m.g, 2, "");
  CHECK(tasks.stages() == 2);
  CHECK(tasks.meshes.size() == 2);
  CHECK(tasks.schedule == "1f1b");
  CHECK(tasks.mesh(0).devices == std::vector<int32_t>{0});
  CHECK(tasks.mesh(1).devices == std::vector<int32_t>{1});
  CHECK(m.g.ops[0].stage == 0);
  CHECK(m.g.ops[1].stage == 1);
  CHECK(m.g.ops[2].stage == 1);
  // Stages of different sizes; what they want must be used inside.
  small::Model thirds = small::gpt();
  const TaskGraphs uneven = small::tasks_of(thirds.g, 7, "pipeline(2) > replica");
  CHECK(uneven.mesh(0).devices == std::vector<int32_t>{0, 1, 2, 3});
  CHECK(uneven.mesh(1).devices == std::vector<int32_t>{4, 5, 6});
  CHECK(uneven.mesh(0).axes[0].size == 4);
  CHECK(uneven.mesh(1).axes[0].size == 3);
  m = pipeline(3, 0, false);
  const std::string idle = message_of([&] { small::tasks_of(m.g, 4, ""); });
  CHECK_MESSAGE((has(idle, "stage") && has(idle, "3 device(s)") && has(idle, "use 1")), idle);
  m = pipeline(3, 2, false);
  const std::string message = message_of([&] { small::tasks_of(m.g, 4, ""); });
  CHECK_MESSAGE((has(message, "pipeline") && has(message, "wants 5") && has(message, "4 are there")), message);
  // Not written: cut by time.
  small::Model gpt = small::gpt();
  const TaskGraphs cut = small::tasks_of(gpt.g, 6, "replica(2) > pipeline(3, micro_batches=2, schedule=gpipe)");
  CHECK(cut.stages() == 3);
  CHECK(cut.schedule == "gpipe");
  CHECK(cut.mesh(1).devices == std::vector<int32_t>{1, 4});
  CHECK(cut.mesh(1).axes[0].name == "replica");
  std::vector<int> ops(3);
  int32_t last = 0;
  for (const Op& op : gpt.g.ops) {
    ++ops[op.stage];
    for (const TensorId id : op.inputs)
      if (id != kNone && gpt.g.tensor(id).producer != kNone)
        CHECK(gpt.g.op(gpt.g.tensor(id).producer).stage <= op.stage);
    last = std::max(last, op.stage);
  }
  CHECK(last == 2);
  for (const int n : ops) CHECK(n > 3);
  // Virtual stages: each device has several stages of the model.
  small::Model chunked = small::gpt();
  const TaskGraphs loop = small::tasks_of(chunked.g, 2, "pipeline(2, schedule=interleaved, virtual_stages=2)");
  CHECK(loop.mesh_of_stage == std::vector<int32_t>{0, 1, 0, 1});
  small::Model vee = small::gpt();
  CHECK(small::tasks_of(vee.g, 2, "pipeline(2, schedule=zb_v)").mesh_of_stage == std::vector<int32_t>{0, 1, 1, 0});
  // A stage that reads what a later one makes.
  m = pipeline(0, 0, false);
  std::swap(m.g.ops[0].scope, m.g.ops[1].scope);
  CHECK_NOTHROW(small::tasks_of(m.g, 2, ""));  // stages are numbered in the order of their first ops
  m = pipeline(0, 0, false);
  m.scope = m.g.ops[0].scope;
  m.g.outputs = {{"z", m.op(OpCode::k_relu, {m.g.outputs[0].tensor}, {}, "back")}};
  const std::string back = message_of([&] { small::tasks_of(m.g, 2, ""); });
  CHECK_MESSAGE((has(back, "'back'") && has(back, "forward only")), back);
}

TEST_CASE("a clause of the text stands inside the pipeline that the text has for the others") {
  // Of eight blocks the last four have a part called 'wide'.
  const auto form = [](const std::string& strategy, int64_t devices) {
    small::Model m;
    TensorId h = m.input("x", {8, 16});
    for (int i = 0; i < 8; ++i) {
      h = m.op(OpCode::k_matmul, {h, m.variable(fmt::format("v{}", i), {16, 16})}, {}, fmt::format("block{}", i));
      if (i < 4) continue;
      m.enter(ScopeKind::kName);
      m.g.scopes.back().name = "wide";
      h = m.op(OpCode::k_matmul, {h, m.variable(fmt::format("w{}", i), {16, 16})}, {}, fmt::format("wide{}", i));
      m.scope = 0;
    }
    m.g.outputs = {{"y", h}};
    TaskGraphs tasks = small::tasks_of(m.g, devices, strategy);
    return std::pair{std::move(m.g), std::move(tasks)};
  };
  using Roles = std::vector<AxisRole>;
  const auto roles = [](const Graph& g, const TaskGraphs& tasks, std::string_view name) {
    return tasks.task(*std::ranges::find(g.ops, name, &Op::name)).roles;
  };
  {
    const auto [g, tasks] = form("pipeline(3, micro_batches=2) > replica(2); wide: split(2)", 6);
    CHECK(tasks.stages() == 3);
    CHECK(tasks.mesh(0).axes[0].name == "replica");
    CHECK(tasks.mesh(2).devices == std::vector<int32_t>{4, 5});
    for (const Op& op : g.ops) {
      CAPTURE(op.name);
      const Roles mine = tasks.task(op).roles;
      CHECK(std::ranges::count(mine, AxisRole::kSplit) == (op.name.starts_with("wide") ? 1 : 0));
      CHECK(std::ranges::count(mine, AxisRole::kReplica) == (op.name.starts_with("wide") ? 0 : 1));
    }
    CHECK(g.ops.front().stage == 0);
    CHECK(g.ops.back().stage == 2);
  }
  {  // What is around the pipeline is around both; a count left out is what the stage has.
    const auto [g, tasks] = form("replica(2) > pipeline(2, micro_batches=2) > replica; wide: split", 12);
    CHECK(roles(g, tasks, "block0")[0] == AxisRole::kReplica);
    CHECK(roles(g, tasks, "wide7")[0] == AxisRole::kReplica);
    CHECK(std::ranges::count(roles(g, tasks, "wide7"), AxisRole::kSplit) == 1);
    CHECK(tasks.strategy.find("replica(2) > pipeline(2, micro_batches=2) > split(3)") != tasks.strategy.npos);
    CHECK(tasks.mesh(1).devices == std::vector<int32_t>{3, 4, 5, 9, 10, 11});
  }
  {  // Written out it is the same.
    const auto [g, tasks] = form("pipeline(2) > replica(2); wide: pipeline(2) > split(2)", 4);
    CHECK(tasks.stages() == 2);
    CHECK(tasks.strategy == form("pipeline(2) > replica(2); wide: split(2)", 4).second.strategy);
  }
  const std::string sizes = message_of([&] { form("pipeline(2) > replica(2); wide: split(3)", 4); });
  CHECK_MESSAGE((has(sizes, "wants 6") && has(sizes, "4 are there")), sizes);
}

TEST_CASE("pipelines side by side are virtual stages of one") {
  const auto form = [](int64_t first, int64_t second, const char* schedule, int64_t devices, bool inside = false) {
    small::Model m;
    TensorId h = m.input("x", {8, 4});
    for (const int64_t stages : {first, second}) {
      m.scope = 0;
      m.enter(ScopeKind::kPipeline, stages);
      m.g.scopes.back().micro_batches = 4;
      if (stages == first) m.g.scopes.back().schedule = schedule;
      if (inside) m.enter(ScopeKind::kReplica, 2);
      for (int i = 0; i < 4; ++i) h = m.op(OpCode::k_tanh, {h}, {}, fmt::format("p{}.{}", stages == second, i));
    }
    m.scope = 0;
    m.g.outputs = {{"y", m.op(OpCode::k_relu, {h}, {}, "after")}};
    TaskGraphs tasks = small::tasks_of(m.g, devices, "");
    return std::pair{std::move(m.g), std::move(tasks)};
  };
  const auto [g, tasks] = form(2, 0, "", 2);
  CHECK(tasks.schedule == "interleaved");
  CHECK(tasks.virtual_stages == 2);
  CHECK(tasks.mesh_of_stage == std::vector<int32_t>{0, 1, 0, 1});
  for (const Op& op : g.ops) {
    if (op.name.starts_with("p0")) CHECK(op.stage <= 1);
    if (op.name.starts_with("p1")) CHECK(op.stage >= 2);
    if (op.name == "after") CHECK(op.stage == 3);
  }
  CHECK(form(0, 0, "1f1b", 3).second.mesh_of_stage == std::vector<int32_t>{0, 1, 2, 0, 1, 2});
  CHECK(form(0, 0, "interleaved", 2).second.virtual_stages == 4);
  CHECK(form(2, 2, "", 4, true).second.mesh(3).devices == std::vector<int32_t>{2, 3});
  CHECK(has(message_of([&] { form(2, 3, "", 2); }), "different stages"));
  CHECK(has(message_of([&] { form(2, 2, "zb_h1", 2); }), "run interleaved; leave the schedule out"));
}

TEST_CASE("a pipeline's cut costs what the cost model's link costs") {
  // Half of the work is before the middle, where much crosses; little crosses after the second op.
  small::Model m;
  TensorId y = m.input("x", {64, 16});
  const int64_t widths[] = {256, 4, 256, 256, 256, 16};
  int64_t width = 16;
  for (const int64_t w : widths) {
    y = m.op(OpCode::k_matmul, {y, m.variable(fmt::format("w{}", w + width * 1000), {width, w})});
    width = w;
  }
  std::vector<OpId> ops(m.g.ops.size());
  std::iota(ops.begin(), ops.end(), 0);
  const auto first_of_second = [&](double bytes_per_second) {
    Profile profile = kMachineOfCores;
    profile.link = {bytes_per_second, 0}, profile.freed_bytes_per_second = bytes_per_second;
    const auto stages = cut_stages(m.g, ops, 2, 1, CostModel({}, 1, profile));
    return std::find(stages.begin(), stages.end(), 1) - stages.begin();
  };
  CHECK(first_of_second(1e15) == 4);
  CHECK(first_of_second(1e6) == 2);
  static_assert(!std::is_default_constructible_v<CostModel>);
  static_assert(!std::is_default_constructible_v<TaskGraphs>);
}

// All cuts are tried: the slowest stage is as fast as it can be, and the others share the rest evenly. Nothing of
// what crosses counts here.
TEST_CASE("a pipeline's cut is the evenest of those whose slowest stage is the fastest") {
  for (const std::vector<int64_t>& widths : {std::vector<int64_t>{64, 64, 64, 64, 64, 64, 2048, 4},
                                             {16, 900, 16, 16, 16, 500, 16, 16},
                                             {8, 8, 8, 8, 8, 8, 8},
                                             {700, 8, 8, 8, 8, 8, 8, 8}})
    for (const int64_t stages : {2, 3, 4}) {
      small::Model m;
      TensorId y = m.input("x", {64, 16});
      int64_t width = 16;
      for (size_t k = 0; k < widths.size(); ++k) {
        y = m.op(OpCode::k_matmul, {y, m.variable(fmt::format("w{}", k), {width, widths[k]})});
        width = widths[k];
      }
      std::vector<OpId> ops(m.g.ops.size());
      std::iota(ops.begin(), ops.end(), 0);
      Profile profile = kMachineOfCores;
      profile.link = {1e18, 0}, profile.freed_bytes_per_second = 1e18;
      const CostModel cost({}, 1, profile);
      std::vector<double> seconds;
      for (const Op& op : m.g.ops) seconds.push_back(op_seconds(cost_of(view_of(m.g, op)), cost.device));
      const auto judged = [&](const std::vector<int32_t>& stage_of) {  // slowest, squares
        std::vector<double> of(static_cast<size_t>(stages));
        for (size_t k = 0; k < seconds.size(); ++k) of[stage_of[k]] += seconds[k];
        double slowest = 0, squares = 0;
        for (const double s : of) slowest = std::max(slowest, s), squares += s * s;
        return std::pair(slowest, squares);
      };
      std::vector<std::pair<double, double>> all;
      std::vector<int32_t> tried(ops.size());
      const auto each = [&](const auto& self, size_t k) -> void {
        if (k == tried.size()) {
          if (tried.back() == stages - 1) all.push_back(judged(tried));
          return;
        }
        for (const int32_t s : {tried[k - 1], tried[k - 1] + 1})
          if (s < stages) tried[k] = s, self(self, k + 1);
      };
      each(each, 1);
      double fastest = std::numeric_limits<double>::infinity(), evenest = fastest;
      for (const auto& [slowest, squares] : all) fastest = std::min(fastest, slowest);
      for (const auto& [slowest, squares] : all)
        if (slowest <= fastest * 1.001) evenest = std::min(evenest, squares);
      const auto [slowest, squares] = judged(cut_stages(m.g, ops, stages, 1, cost, false));
      CAPTURE(stages);
      CHECK(slowest <= fastest * 1.0011);
      CHECK(squares == doctest::Approx(evenest).epsilon(1e-6));
    }
}

TEST_CASE("a bare replica takes what the strategy or another scope says") {
  small::Model m = small::mlp();
  const auto form = [&](const char* strategy, int64_t devices) {
    Graph g = m.g;
    return small::tasks_of(g, devices, strategy);
  };
  CHECK(form("", 3).meshes[0].axes[0].size == 3);
  CHECK(form("replica(shares=[3,1])", 2).meshes[0].axes[0].shares == std::vector<double>{3, 1});
  m.enter(ScopeKind::kReplica, 0, {2, 1});
  m.op(OpCode::k_relu, {m.g.outputs[0].tensor});
  const TaskGraphs tasks = form("", 2);  // the other ops are unannotated
  CHECK(tasks.tasks.size() == 1);
  CHECK(tasks.meshes[0].axes[0].shares == std::vector<double>{2, 1});
  CHECK(tasks.strategy == "replica(2, shares=[2,1])");
  for (const std::vector<double>& shares : {std::vector<double>{4, 2}, {0.2, 0.1}, {2 / 3.0, 1 / 3.0}}) {  // weights
    m.scope = 0;
    m.enter(ScopeKind::kReplica, 0, shares);
    m.op(OpCode::k_relu, {m.g.outputs[0].tensor});
    CHECK(form("", 2).meshes[0].axes[0].shares == std::vector<double>{2, 1});
  }
  m.scope = 0;
  m.enter(ScopeKind::kReplica, 0, {1, 3});
  m.op(OpCode::k_relu, {m.g.outputs[0].tensor});
  const std::string message = message_of([&] { form("", 2); });
  CHECK_MESSAGE(has(message, "different places"), message);
}
