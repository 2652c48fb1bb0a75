// Device lists, strategies, shares, and the way from scopes to a mesh.
#include <doctest/doctest.h>
#include <rapidcheck.h>

#include <numeric>

#include "base/error.h"
#include "cluster/devices.h"
#include "parallel/shares.h"
#include "parallel/strategy.h"
#include "parallel/task_graph.h"
#include "schedule/accumulation.h"
#include "unit/small_models.h"

using namespace whale;

namespace {

std::string message_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.message();
  }
  return "";
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_CASE("device lists parse, deal cores and print back") {
  const std::vector<int> cores{0, 1, 2, 3, 8};
  auto d = parse_devices("cpu:2", cores);
  REQUIRE(d.size() == 2);
  CHECK(d[0].cores == std::vector<int>{0, 1, 2});
  CHECK(d[1].cores == std::vector<int>{3, 8});
  CHECK(to_string(d) == "cpu@0-2,cpu@3+8");
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

TEST_CASE("strategies round trip") {
  for (const char* text :
       {"replica", "replica(3, shares=[3,2,1])", "replica(2) > pipeline(4, micro_batches=8, schedule=1f1b) > split(2)",
        "cluster(\"cpu:4\", layout=average(2)) > replica(by=micro_batch)", "stage(2)",
        "split(2, factor=heads, shares=[1,0.5])", "pipeline(schedule=interleaved, chunks=2)",
        "replica(layout=[[0,1],[2]])"})
    CHECK(to_string(parse_strategy(text)) == text);
  CHECK(to_string(parse_strategy(" replica ( count = 2 ) ")) == "replica(2)");
}

TEST_CASE("wrong strategies say where") {
  CHECK(has(message_of([] { parse_strategy(""); }), "expected a scope"));
  CHECK(has(message_of([] { parse_strategy("replicate(2)"); }), "'replicate'"));
  CHECK(has(message_of([] { parse_strategy("replica(2"); }), "','"));
  CHECK(has(message_of([] { parse_strategy("replica(2) split"); }), "character 12"));
  CHECK(has(message_of([] { parse_strategy("replica(ways=2)"); }), "it has count, shares, by, layout"));
  CHECK(has(message_of([] { parse_strategy("replica(shares=[1,-1])"); }), "shares"));
  CHECK(has(message_of([] { parse_strategy("replica(0)"); }), "whole number"));
  CHECK(has(message_of([] { parse_strategy("pipeline(schedule=2f2b)"); }), "1f1b"));
  CHECK(has(message_of([] { parse_strategy("replica(shares=[1,2"); }), "']'"));
}

TEST_CASE("shares are rounded by largest remainder, ties to the lower index") {
  CHECK(round_shares(10, {3, 2, 1}) == std::vector<int64_t>{5, 3, 2});
  CHECK(round_shares(3, {1, 1}) == std::vector<int64_t>{2, 1});
  CHECK(round_shares(8, {3, 0, 1}) == std::vector<int64_t>{6, 0, 2});
  CHECK(round_shares(1, {0, 1, 1}) == std::vector<int64_t>{0, 1, 0});
  CHECK(round_shares(0, {1, 1}) == std::vector<int64_t>{0, 0});
  CHECK(round_shares(6, {0.1, 0.2, 0.3}) == std::vector<int64_t>{1, 2, 3});
  CHECK_THROWS_AS(round_shares(3, {0, 0}), Error);
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
  CHECK(rc::check("a batch is cut once, in order", [] {
    const auto batch = *rc::gen::inRange<int64_t>(0, 200), m = *rc::gen::inRange<int64_t>(1, 9);
    const auto devices = *rc::gen::inRange<size_t>(1, 6);
    std::vector<double> weights(devices, 1.0);
    weights[0] = 2.5;
    const BatchCut cut = cut_batch(batch, m, weights);
    int64_t at = 0;
    for (size_t u = 0; u < cut.runs.size(); ++u) {
      RC_ASSERT(cut.runs[u].begin == at);
      RC_ASSERT(cut.runs[0].size() - cut.runs[u].size() <= 1);
      for (const Interval& part : cut.parts[u]) {
        RC_ASSERT(part.begin == at);
        at = part.end;
      }
      RC_ASSERT(cut.runs[u].end == at);
    }
    RC_ASSERT(at == batch);
  }));
}

TEST_CASE("scopes become meshes; what does not fit names scope and devices") {
  const auto mesh = [](const char* text, int64_t devices) {
    auto nest = parse_strategy(text);
    return resolve_mesh(nest, devices, "default strategy");
  };
  CHECK(mesh("replica", 4).axes[0].size == 4);
  CHECK(mesh("replica(shares=[3,1])", 2).device_shares() == std::vector<double>{3, 1});
  const Mesh nested = mesh("replica(2, shares=[1,2]) > replica(shares=[1,3])", 4);
  CHECK(nested.device_shares() == std::vector<double>{1, 3, 2, 6});
  CHECK(nested.coordinates(2) == std::vector<int64_t>{1, 0});
  const std::string few = message_of([&] { mesh("replica(2)", 4); });
  CHECK_MESSAGE((has(few, "replica(2)") && has(few, "wants 2") && has(few, "4 are there")), few);
  CHECK(has(message_of([&] { mesh("replica(8)", 4); }), "wants 8"));
  CHECK(has(message_of([&] { mesh("replica(3, shares=[1,1])", 3); }), "expected 3"));
  CHECK(has(message_of([&] { mesh("replica(2, shares=[0,0])", 2); }), "shares"));
  for (const char* later : {"split(2)", "pipeline(2)", "stage(2)", "replica(2, by=micro_batch)",
                            "replica(2, layout=row)", "cluster > replica"})
    CHECK_MESSAGE(has(message_of([&] { mesh(later, 2); }), "not implemented"), later);
}

TEST_CASE("a bare replica takes what the strategy or another scope says") {
  small::Model m = small::mlp();
  const auto meshes = [&](const char* strategy, int64_t devices) { return form_task_graphs(m.g, devices, strategy); };
  CHECK(meshes("", 3)[0].mesh.axes[0].size == 3);
  CHECK(meshes("replica(shares=[3,1])", 2)[0].mesh.axes[0].shares == std::vector<double>{3, 1});
  m.enter(ScopeKind::kReplica, 0, {2, 1});
  m.op(OpCode::k_relu, {m.g.outputs[0].tensor});
  const auto tasks = meshes("", 2);  // the other ops are unannotated
  CHECK(tasks.size() == 1);
  CHECK(tasks[0].mesh.axes[0].shares == std::vector<double>{2, 1});
  m.enter(ScopeKind::kSplit, 2);
  m.op(OpCode::k_relu, {m.g.outputs[0].tensor});
  CHECK(has(message_of([&] { meshes("", 2); }), "split"));
}

TEST_CASE("the schedule of accumulation") {
  CHECK(accumulation_schedule(1) == std::vector<SegmentRun>{{Region::kBody, 0}});
  const auto rows = accumulation_schedule(3);
  REQUIRE(rows.size() == 5);
  CHECK(rows[0].region == Region::kPrologue);
  CHECK(rows[3] == SegmentRun{Region::kBody, 2});
  CHECK(rows[4].region == Region::kEpilogue);
}
