// Clusters of several machines: their text, and which device each order puts at which coordinates.
#include <doctest/doctest.h>

#include <numeric>

#include "cluster/devices.h"
#include "compile/compile.h"
#include "unit/caught.h"
#include "unit/small_models.h"
#include "unit/tasks.h"

using namespace whale;

namespace {

std::vector<int32_t> nodes_of(const std::vector<DeviceSpec>& devices) {
  std::vector<int32_t> nodes;
  for (const DeviceSpec& d : devices) nodes.push_back(d.node);
  return nodes;
}
Mesh mesh_of(const char* strategy, const char* devices) {
  small::Model m = small::mlp();
  const std::vector<int32_t> nodes = nodes_of(parse_devices(devices, {0}));
  return small::tasks_of(m.g, static_cast<int64_t>(nodes.size()), strategy, nodes).meshes[0];
}
std::vector<int32_t> counting(int n) {
  std::vector<int32_t> out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

}  // namespace

TEST_CASE("device lists of several nodes, and back") {
  CHECK(nodes_of(parse_devices("2xnull:2|null:1", {0})) == std::vector<int32_t>{0, 0, 1, 1, 2});
  CHECK(nodes_of(parse_devices("null:1, ref:1 | null:2", {0})) == std::vector<int32_t>{0, 0, 1, 1});
  CHECK(parse_devices("128xnull:8", {0}).size() == 1024);
  for (const char* text : {"null:4", "2xnull:4", "null:1,ref:2|2xnull:3|ref:1", "2xcpu@0*2|cpu@1"}) {
    const std::vector<DeviceSpec> devices = parse_devices(text, {0, 1});
    CHECK(to_string(devices) == text);
    CHECK(parse_devices(to_string(devices), {0, 1}) == devices);
  }
  CHECK(devices_of_file("# two racks\n2x null:8   # fast\n\n null:4, null:4\r\n") == "2xnull:8|null:4,null:4");
  CHECK(has(message_of([] { parse_devices("null:2|", {0}); }), "empty item"));
  CHECK(has(message_of([] { parse_devices("0xnull:2", {0}); }), "outside 1"));
  CHECK(has(message_of([] { parse_devices("65536xnull:65536", {0}); }), "more than 65536"));
  const Plan plan = compile(small::mlp().g, parse_devices("2xnull:2|null:1", {0}), {});
  const std::vector<uint8_t> bytes = serialize(plan);
  CHECK(deserialize(bytes.data(), bytes.size()).devices == plan.devices);
}

TEST_CASE("row keeps slices inside nodes, column lays them across, average makes n of them") {
  for (const char* strategy :
       {"cluster(device_order=row) > replica(2) > split(4)", "cluster(device_order=row) > replica(4) > split",
        "replica(2, device_order=row) > split(4)", "cluster(device_order=all) > replica",
        "cluster(device_order=row) > replica(4) > replica(2)"})
    CHECK(mesh_of(strategy, "2xnull:4").devices == counting(8));
  // Slice k, way i: device k of node i.
  const Mesh column = mesh_of("cluster(device_order=column) > replica(4) > split(2)", "2xnull:4");
  for (int64_t k = 0; k < 8; ++k) {
    const Ints at = column.coordinates(k);
    CHECK(column.devices[k] == at[1] * 4 + at[0]);
  }
  // Two replicas of a pipeline would each be in one node; by columns each has two devices of both.
  CHECK(mesh_of("replica(2, device_order=column) > split(4)", "2xnull:4").devices ==
        std::vector<int32_t>{0, 4, 1, 5, 2, 6, 3, 7});
  // 128 nodes of 8: one model replica stays inside a node.
  const Mesh large = mesh_of("cluster(device_order=row) > replica(128) > split(8)", "128xnull:8");
  for (int64_t k = 0; k < 1024; ++k) CHECK(large.devices[k] / 8 == large.coordinates(k)[0]);
  // The number of slices is the count of the scope inside.
  const Mesh average = mesh_of("cluster(device_order=average(4)) > replica > split", "2xnull:4");
  CHECK(average.axes[0].size == 4);
  CHECK(average.axes[1].size == 2);
  CHECK(average.devices == counting(8));
  // Nodes of several sizes, where slices fit.
  CHECK(mesh_of("cluster(device_order=row) > replica(3) > split(2)", "null:4|null:2").devices == counting(6));
  CHECK(mesh_of("cluster(device_order=[[0,4],[1,5],[2,3]]) > replica(3) > split(2)", "2xnull:3").devices ==
        std::vector<int32_t>{0, 4, 1, 5, 2, 3});
}

TEST_CASE("stages are slices too") {
  small::Model m = small::gpt(8);
  const std::vector<int32_t> nodes{0, 0, 1, 1};
  const TaskGraphs row =
      small::tasks_of(m.g, 4, "cluster(device_order=row) > pipeline(2, micro_batches=2) > split(2)", nodes);
  CHECK(row.meshes[0].devices == std::vector<int32_t>{0, 1});
  CHECK(row.meshes[1].devices == std::vector<int32_t>{2, 3});
  small::Model n = small::gpt(8);
  const TaskGraphs column =
      small::tasks_of(n.g, 4, "cluster(device_order=column) > pipeline(2, micro_batches=2) > split(2)", nodes);
  CHECK(column.meshes[0].devices == std::vector<int32_t>{0, 2});
  CHECK(column.meshes[1].devices == std::vector<int32_t>{1, 3});
}

TEST_CASE("device orders that do not fit name the scope, the devices and what to do") {
  struct Row {
    const char *strategy, *devices;
    std::vector<const char*> parts;
  };
  for (const Row& row : std::vector<Row>{
           {"cluster(device_order=row) > replica(2) > split(3)",
            "null:4|null:2",
            {"cluster(device_order=row) > replica(2) > split(3)", "devices 3 to 5", "node 0", "node 1",
             "choose a count"}},
           {"cluster(device_order=row) > replica(1) > split", "2xnull:2", {"devices 0 to 3", "slice of 4"}},
           {"cluster(device_order=column) > replica(2)", "null:1|null:1", {}},
           {"cluster(device_order=column) > replica(3) > split(2)", "null:4|null:2", {"[4, 2] devices", "equal size"}},
           {"cluster(device_order=column) > replica(4) > split(3)",
            "2xnull:6",
            {"3 device(s)", "2 nodes", "choose a count"}},
           {"cluster(device_order=average(3)) > replica(2)", "null:6", {"3 slices", "'replica(2)' wants 2"}},
           {"cluster(device_order=average(3)) > replica > split", "null:4", {"3", "4 are there"}},
           {"cluster(device_order=rows) > replica", "null:4", {"'rows'", "all, row, column, average(n)"}},
           {"replica(2) > cluster(device_order=row) > split(2)", "2xnull:2", {"device_order=row", "outermost"}},
       }) {
    INFO(row.strategy, " on ", row.devices);
    const std::string message = message_of([&] { mesh_of(row.strategy, row.devices); });
    CHECK(message.empty() == row.parts.empty());
    for (const char* part : row.parts) CHECK_MESSAGE(has(message, part), message);
  }
}

TEST_CASE("plans on nodes that are not there") {
  CompileOptions options;
  options.strategy = "cluster(device_order=row) > replica(2) > split(2)";
  const Plan plan = compile(small::gpt(8).g, parse_devices("2xnull:2", {0}), options);
  CHECK(plan.meshes[0].devices == std::vector<int32_t>{0, 1, 2, 3});
  CHECK(has(summary(plan), "2xnull:2"));
  CHECK(has(plan.strategy, "device_order=row"));
}
