// Clusters of typed devices: presets, links, files; and what they say of times.
#include <doctest/doctest.h>

#include <string>

#include "cluster/cluster_file.h"
#include "cluster/device_kinds.h"
#include "cluster/device_types.h"
#include "cluster/devices.h"
#include "cluster/links_text.h"
#include "compile/compile.h"
#include "simulate/rates.h"
#include "simulate/simulate.h"
#include "small_models.h"
#include "unit/caught.h"

namespace whale {
namespace {

TEST_CASE("device types: named with and without their memory, in large and small letters") {
  REQUIRE(find_device_type("v100-32gb") != nullptr);
  CHECK(find_device_type("V100-32")->memory_bytes == 32e9);
  CHECK(std::string_view(find_device_type("V100")->name) == "V100-16GB");
  CHECK(find_device_type("T4")->sheet.flops_per_second == 8.141e12);
  for (const auto& [name, type] : {std::pair("Titan RTX", "TITAN-RTX"),
                                   {"titanrtx", "TITAN-RTX"},
                                   {"TITAN_RTX", "TITAN-RTX"},
                                   {"RTX3090", "RTX-3090"},
                                   {"rtx 3090", "RTX-3090"},
                                   {"RTX-3090-24GB", "RTX-3090"},
                                   {"NVIDIA GeForce RTX 3090", "RTX-3090"},
                                   {"P100", "P100-16GB"},
                                   {"H100-80GB", "H100"},
                                   {"v100 32gb", "V100-32GB"},
                                   {"A100-SXM4-80GB", "A100-80GB"},
                                   {"Tesla T4", "T4"},
                                   {"AMD Instinct MI210", "MI210"},
                                   {"Xeon core", "XEON-CORE"}}) {
    CAPTURE(name);
    REQUIRE(find_device_type(name) != nullptr);
    CHECK(std::string_view(find_device_type(name)->name) == type);
  }
  for (const char* none : {"RTX-2080Ti", "H100-94GB", "T4-32GB", "V100-64GB", "-", "GB", "NVIDIA", "32GB"})
    CHECK_MESSAGE(find_device_type(none) == nullptr, none);
  CHECK(has(no_device_type("V1000"),
            "'V1000' is not a type of device, nearest are V100-16GB, V100-32GB, P100-16GB; the types are P4,"));
  CHECK(has(no_device_type("RTX-2080Ti"), "nearest are RTX-2080; "));
  CHECK(!has(no_device_type("banana"), "nearest"));
  for (const DeviceType& t : device_types()) CHECK(has(no_device_type("banana"), t.name));
  CHECK(no_device_type(std::string(100'000, 'V')).size() < 600);
  CHECK(find_device_type("V") == nullptr);
  CHECK(find_device_type("RTX") == nullptr);
  CHECK(find_device_type("") == nullptr);
  for (const DeviceType& t : device_types()) {
    CAPTURE(t.name);
    CHECK(find_device_type(t.name) == &t);
    const DeviceFigures f = figures_of(t);
    CHECK((f.f32_flops_per_second > 0 && f.f32_flops_per_second <= t.sheet.flops_per_second));
    CHECK((f.half_flops_per_second > 0 && f.half_flops_per_second <= t.sheet.flops_per_second16));
    CHECK((f.bytes_per_second > 0 && f.bytes_per_second <= t.sheet.bytes_per_second));
    CHECK((f.inside.bytes_per_second > 0 && f.inside.bytes_per_second <= t.inside_peak));
  }
}

TEST_CASE("clusters in a few words are device lists, and come back as text") {
  const auto same = [](const char* preset, const char* list) {
    CAPTURE(preset);
    CHECK(parse_devices(preset, {0}) == parse_devices(list, {0}));
  };
  same("8xV100-32GB + 8xP100-16GB", "V100-32GB:8|P100-16GB:8");
  same("60 nodes of 8xA100-80GB, 800Gb/s", "60xA100-80GB:8~800Gb/s");
  same("2 nodes of 4xT4, 50Gb/s@20us, 6GB/s + 1xL4", "2xT4:4~50Gb/s@20us~6GB/s|L4:1");
  CHECK(parse_devices("60 nodes of 8xA100-80GB, 800Gb/s").size() == 480);
  for (const char* text : {"V100-32GB:8|P100-16GB:8", "60xA100-80GB:8~800Gb/s@10us", "T4:4~50Gb/s@20us~48Gb/s@8us",
                           "null:2~10Gb/s@5us", "A100-40GB:2,T4:1"}) {
    CAPTURE(text);
    const std::vector<DeviceSpec> devices = parse_devices(text, {0});
    CHECK(parse_devices(to_string(devices), {0}) == devices);
  }
  CHECK(parse_devices("V100-32GB:1")[0].memory_bytes == 32'000'000'000);
  CHECK(has(message_of([] { parse_devices("8xFOO + 8xT4"); }), "'FOO' is not a kind or type of device"));
  CHECK(has(message_of([] { parse_devices("8xT4 + 8xV1000"); }),
            "'V1000' is not a type of device, nearest are V100-16GB"));
  CHECK(has(message_of([] { parse_devices("2 nodes of 8xRTX3091, 10Gb/s"); }), "nearest are RTX-3090"));
  CHECK(has(message_of([] { parse_devices("T4@0"); }), "no cores to choose"));
  for (const char* bad : {"T4:2~fast", "T4:2~-1Gb/s", "T4:2~nanGb/s", "T4:2~1e999Gb/s", "T4:2~10Gb/s@", "T4:2~",
                          "T4:2~10Gb/s@1.001s", "T4:2~999B/s"})
    CHECK_THROWS_AS(parse_devices(bad), Error);
}

TEST_CASE("clusters are printed in units that people read, exactly") {
  const auto printed = [](double bytes, double seconds) {
    DeviceSpec d = parse_devices("null:1", {0})[0];
    d.figures.network = {bytes, seconds};
    const std::string text = to_string(std::vector<DeviceSpec>{d});
    const LinkRates back = parse_devices(text, {0})[0].figures.network;
    CHECK(back.bytes_per_second == bytes);
    CHECK(back.latency_seconds == seconds);
    return text;
  };
  CHECK(printed(1.25e10, 1e-5) == "null:1~100Gb/s@10us");
  CHECK(printed(1.25e10, 0) == "null:1~100Gb/s@0us");
  CHECK(printed(9.481e9, 2.612e-6) == "null:1~75.848Gb/s@2.612us");
  printed(9.48123456789e9, 2.6123456789e-6);
  CHECK(printed(1.25e5, 0.03) == "null:1~1Mb/s@30ms");
  CHECK(printed(1000, 5e-9) == "null:1~1000B/s@5ns");
  CHECK(printed(1e18, 1) == "null:1~8e+09Gb/s@1000ms");
}

TEST_CASE("cluster files: nodes with devices, figures and links") {
  const std::vector<DeviceSpec> devices = devices_of_json(R"({"nodes": [
      {"count": 2, "devices": [{"type": "V100-32GB", "count": 2}], "network": "25Gb/s@20us"},
      {"name": "old", "devices": [{"device": "ref", "count": 1, "memory_bytes": 8e9,
                    "flops_per_second": {"f32": 5e12, "f16": {"128": 1e12, "512": 9e12}}, "bytes_per_second": 3e11}],
       "inside": {"bytes_per_second": 1e10}, "network": {"bytes_per_second": 3e9, "latency_seconds": 1e-5}}]})");
  REQUIRE(devices.size() == 5);
  CHECK(devices[3].node == 1);
  CHECK(devices[0].figures.network.bytes_per_second == doctest::Approx(25e9 / 8));
  CHECK(devices[0].figures.network.latency_seconds == doctest::Approx(20e-6));
  CHECK(devices[4].kind == DeviceKind::kRef);
  CHECK(devices[4].node == 2);
  CHECK(devices[4].memory_bytes == 8'000'000'000);
  CHECK(devices[4].figures.f32_flops_per_second == 5e12);
  CHECK(devices[4].figures.half_flops_per_second == 9e12);
  CHECK(devices[4].figures.inside == LinkRates{1e10, 10e-6});
}

TEST_CASE("cluster files: links without a latency have that of device lists; texts of devices keep theirs") {
  const auto of = [](const char* devices, const char* node = "") {
    return devices_of_json(fmt::format(R"({{"nodes": [{{"devices": {}{}}}]}})", devices, node));
  };
  const auto list = parse_devices("T4~80Gb/s~8Gb/s", {0})[0].figures;
  for (const char* node : {R"(, "network": {"bytes_per_second": 1e10}, "inside": {"bytes_per_second": 1e9})",
                           R"(, "network": "80Gb/s", "inside": "8Gb/s")"}) {
    const DeviceFigures said = of(R"([{"type": "T4"}])", node)[0].figures;
    CHECK(said.network == list.network);
    CHECK(said.inside == list.inside);
  }
  CHECK(of(R"([{"type": "T4"}])", R"(, "network": {"bytes_per_second": 1e10, "latency_seconds": 0})")[0]
            .figures.network == LinkRates{1e10, 0});
  // Of whichever device of a node it is said.
  for (const char* devices : {R"([{"device": "cpu@0~1Gb/s~2Gb/s@3us"}, {"device": "cpu@1"}])",
                              R"([{"device": "cpu@0"}, {"device": "cpu@1 ~ 1Gb/s~2Gb/s@3us"}])"})
    for (const DeviceSpec& d : of(devices)) {
      CHECK(d.figures.network == LinkRates{1e9 / 8, 10e-6});
      CHECK(d.figures.inside == LinkRates{2e9 / 8, 3e-6});
    }
  CHECK(has(message_of([&] { of(R"([{"device": "cpu@0~1Gb/s"}, {"device": "cpu@1~2Gb/s"}])"); }),
            "/nodes/0/devices/1/device is \"cpu@1~2Gb/s\", expected the same network as the rest of /nodes/0"));
  CHECK(has(message_of([&] { of(R"([{"device": "cpu@0~1Gb/s"}])", R"(, "network": "2Gb/s")"); }), "the same network"));
}

TEST_CASE("cluster files: what is wrong is named with its place") {
  const auto refused = [](const char* text, const char* because) {
    CAPTURE(text);
    const std::string message = message_of([&] { devices_of_json(text); });
    CAPTURE(message);
    CHECK(has(message, because));
  };
  refused("{", "line 1, column 2: unexpected end of input");
  refused("{\"nodes\":\n [{\"devices\": NaN}]}", "line 2, column 15: invalid literal");
  refused(R"({"nodes": [{"devices": [{"type": "T4", "memory_bytes": 1e999}]}]})", "number overflow parsing '1e999'");
  refused("{\"nodes\": \"\xff\"}", "ill-formed UTF-8");
  refused("[]", "neither nodes");
  refused((std::string(R"({"nodes":)") + std::string(60000, '[')).c_str(), "more than 64 deep");
  refused("{}", "neither nodes");
  refused(R"({"nodes": [{"devices": [{"type": "T4", "count": 1, "count": 2}]}]})",
          "/nodes/0/devices/0/count is given twice");
  refused(R"({"nodes": [{"devices": [{"type": "T4"}]}], "nodes": []})", "/nodes is given twice");
  refused(R"({"nodes": []})", "something in it");
  refused(R"({"nodes": 3})", "/nodes is 3");
  refused(R"({"nodes": [{}]})", "devices in it");
  refused(R"({"nodes": [{"devices": [{"type": "FOO"}]}]})", "/nodes/0/devices/0/type: 'FOO' is not a type of device");
  refused(R"({"nodes": [{"devices": [{"type": "F\u0000\u001b\u007fO"}]}]})",
          "/nodes/0/devices/0/type: 'F\\x00\\x1b\\x7fO' is not a type of device; the types are");
  refused(R"({"nodes": [{"devices": [{"type": "T4", "count": 0}]}]})",
          "/nodes/0/devices/0/count is 0, expected a whole number from 1 to 65536");
  refused(R"({"nodes": [{"devices": [{"type": "T4", "count": 1.5}]}]})", "whole number");
  refused(R"({"nodes": [{"devices": [{"type": "T4", "counts": 1}]}]})", "/nodes/0/devices/0: 'counts' is not known");
  refused(R"({"nodes": [{"devices": [{"type": "T4", "count": 1e18}]}]})",
          "count is 1e+18, expected a whole number from 1 to 65536");
  refused(R"({"nodes": [{"devices": [{"type": "T4", "count": "2"}]}]})", "count is \"2\", expected a whole number");
  refused(R"({"nodes": [{"devices": []}]})", "/nodes/0/devices is [], expected a list with something in it");
  refused(R"({"nodes": [{"devices": [{"type": "8xT4"}]}]})", "'8xT4' is not a type of device");
  refused(
      R"({"nodes": [{"devices": [{"type": "T4"}], "network": {"bytes_per_second": 1e9, "latency_seconds": 1000}}]})",
      "/nodes/0/network/latency_seconds is 1000, expected a number from 0 to 1");
  refused(R"({"zones": {"a/b~": {"network": "1Gb/s@2s"}}, "nodes": [{"zone": "a/b~", "devices": [{"type": "T4"}]}]})",
          "/zones/a~1b~0/network: ");
  refused(R"({"nodes": [{"devices": [{"type": "T4", "device": "ref"}]}]})", "either a device");
  refused(R"({"nodes": [{"devices": [{"device": "ref:2"}]}]})", "one device");
  refused(R"({"nodes": [{"devices": [{"device": "ref", "flops_per_second": {"f32": -1}}]}]})",
          "/nodes/0/devices/0/flops_per_second/f32 is -1");
  refused(R"({"nodes": [{"devices": [{"device": "ref", "flops_per_second": {}}]}]})", "a rate of f32");
  refused(R"({"nodes": [{"devices": [{"device": "ref", "bytes_per_second": 1e40}]}]})", "bytes_per_second is 1e+40");
  refused(R"({"nodes": [{"devices": [{"device": "ref"}], "network": "quick"}]})",
          "/nodes/0/network: device list: 'quick' is no rate of a link");
  refused(R"({"nodes": [{"count": 2, "devices": [{"device": "ref", "flops_per_second": {"f32": 1e9}}]}]})",
          "has no network");
  refused(R"({"zones": {}, "nodes": [{"devices": [{"type": "T4"}]}]})", "an object with a zone");
  refused(R"({"zones": {"a": {}}, "nodes": [{"zone": "a", "devices": [{"type": "T4"}]}]})",
          "/zones/a is {}, expected a network");
  refused(R"({"zones": {"a": {"network": "1Gb/s"}}, "nodes": [{"devices": [{"type": "T4"}]}]})", "a zone in it");
  refused(R"({"zones": {"a": {"network": "1Gb/s"}}, "nodes": [{"zone": "b", "devices": [{"type": "T4"}]}]})",
          "/nodes/0/zone is \"b\", expected the name");
  refused(R"({"zones": {"a": {"network": "1Gb/s"}, "b": {"network": "1Gb/s"}},
              "nodes": [{"zone": "a", "devices": [{"type": "T4"}]}]})",
          "/zones/b has no nodes");
  refused(R"({"zones": {"a": {"network": "1Gb/s"}, "b": {"network": "1Gb/s"}},
              "nodes": [{"zone": "a", "devices": [{"type": "T4"}]}, {"zone": "b", "devices": [{"type": "T4"}]},
                        {"zone": "a", "devices": [{"type": "T4"}]}]})",
          "listed together");
  refused(R"({"nodes": [{"zone": "a", "devices": [{"type": "T4"}]}]})", "the name of one of the file's zones");
  refused(R"({"nodes": [{"count": 60000, "devices": [{"type": "T4", "count": 60000}]}]})", "more than 65536");
}

TEST_CASE("rates: products of 16 bits by their kind") {
  DeviceSpec d = devices_of_json(R"({"nodes": [{"devices": [{"device": "null", "bytes_per_second": 1e12,
      "flops_per_second": {"f32": 1e13, "bf16": 1e12, "f16": 1e14}}]}]})")[0];
  const auto flops = [&](Precision p) { return CostModel({d}, 1, kMachineOfCores, p).rates_of(d).flops_per_second; };
  CHECK(flops(Precision::kFloat32) == 1e13);
  CHECK(flops(Precision::kBFloat16) == 1e12);
  CHECK(flops(Precision::kFloat16) == 1e14);
  d = parse_devices("V100-32GB:1")[0];  // has no bf16
  CHECK(flops(Precision::kBFloat16) == flops(Precision::kFloat32));
  CHECK(flops(Precision::kFloat16) > 4 * flops(Precision::kFloat32));
  d.figures = {};
  const DeviceSpec fast = parse_devices("H100:1")[0];
  const CostModel beside({fast, d}, 1, kMachineOfCores);
  CHECK(beside.rates_of(d).flops_per_second == kMachineOfCores.device.flops_per_second);
}

// Two nodes of two: groups across them share the network, those inside do not.
TEST_CASE("rates: parts that leave a node at once share its network") {
  const std::vector<DeviceSpec> devices = parse_devices("2xnull:2~8Gb/s@0.001ns~80Gb/s@0.001ns", {0});
  Plan plan;
  plan.devices = devices;
  plan.groups = {{"all", {{0, 1, 2, 3}}}, {"across", {{0, 2}, {1, 3}}}, {"inside", {{0, 1}, {2, 3}}}};
  Entry entry;
  entry.links.push_back({"x", 1, {{0, 2, {}, {}}, {1, 3, {}, {}}, {2, 3, {}, {}}}});
  const PlanRates rates(CostModel(devices, 1, kMachineOfCores), plan, entry);
  CHECK(rates.group(0, 3).bytes_per_second == doctest::Approx(1e9));
  CHECK(rates.group(1, 0).bytes_per_second == doctest::Approx(0.5e9));
  CHECK(rates.group(2, 0).bytes_per_second == doctest::Approx(10e9));
  CHECK(rates.link(0, 0).bytes_per_second == doctest::Approx(0.5e9));
  CHECK(rates.link(0, 2).bytes_per_second == doctest::Approx(10e9));
  CHECK(rates.members(1, 2) == 2);
}

// The same figures on all devices are those of a profile: the same times.
TEST_CASE("rates: what is between zones is slower than what is between their nodes, and all of a zone share it") {
  const std::vector<DeviceSpec> devices = devices_of_json(R"({
      "zones": {"west": {"network": "8Gb/s@20ms"}, "east": {"network": "4Gb/s@10ms"}},
      "nodes": [{"zone": "west", "count": 2, "devices": [{"type": "T4", "count": 2}], "network": "80Gb/s@20us"},
                {"zone": "east", "devices": [{"type": "T4", "count": 2}], "network": "80Gb/s@20us"}]})");
  REQUIRE(devices.size() == 6);
  CHECK(devices[0].zone == 0);
  CHECK(devices[3].zone == 0);
  CHECK(devices[4].zone == 1);
  const CostModel cost(devices, 1, kMachineOfCores);
  CHECK(cost.between(devices[0], devices[2]).bytes_per_second == doctest::Approx(10e9));
  CHECK(cost.between(devices[0], devices[4]) == LinkRates{0.5e9, 20e-3});
  CHECK(cost.between(devices[0], devices[4], 2, 2).bytes_per_second == doctest::Approx(0.25e9));
  CHECK(cost.between(devices[0], devices[4], 100, 2).bytes_per_second == doctest::Approx(0.1e9));  // the node's is less

  // Gradients of the pairs {0, 3}, {1, 4}, {2, 5}: two of three leave the zone of their first.
  CompileOptions options;
  options.strategy = "replica(2) > split(3)";
  const Plan plan = compile(small::mlp(6, OptimizerKind::kSgd, 6, 12).g, devices, options);
  const PlanRates rates(cost, plan, plan.entries[0]);
  bool seen = false;
  for (size_t g = 0; g < plan.groups.size(); ++g) {
    if (plan.groups[g].parts.size() != 3) continue;
    seen = true;
    CHECK(rates.group(static_cast<int32_t>(g), 1).bytes_per_second == doctest::Approx(0.25e9));
    CHECK(rates.group(static_cast<int32_t>(g), 0).bytes_per_second > 1e9);  // inside the zone
  }
  CHECK(seen);
  const std::vector<uint8_t> file = serialize(plan);
  CHECK(deserialize(file.data(), file.size()).devices == plan.devices);
}

TEST_CASE("rates: two nodes with a link of their own take it, and nobody else") {
  const std::vector<DeviceSpec> devices = devices_of_json(R"({
      "nodes": [{"name": "a", "count": 2, "devices": [{"type": "T4", "count": 2}], "network": "8Gb/s@20us"},
                {"name": "b", "devices": [{"type": "T4", "count": 2}], "network": "16Gb/s@10us"}],
      "links": [{"between": ["b", "a"], "network": "80Gb/s@1us"}]})");
  REQUIRE(devices.size() == 6);
  const CostModel cost(devices, 1, kMachineOfCores);
  const auto between = [&](size_t a, size_t b, int64_t sharing = 1) {
    return cost.between(devices[a], devices[b], sharing);
  };
  CHECK(between(0, 2) == devices[0].figures.network);  // of the two a
  for (const auto& [a, b] : {std::pair(0, 4), {2, 5}, {4, 0}, {5, 3}}) {
    CHECK(between(static_cast<size_t>(a), static_cast<size_t>(b)) == LinkRates{10e9, 1e-6});
    CHECK(between(static_cast<size_t>(a), static_cast<size_t>(b), 2).bytes_per_second == doctest::Approx(5e9));
  }
  CHECK(between(4, 5) == devices[4].figures.inside);
  CHECK(!are_alike(devices[0], devices[4]));

  // The rest of a cluster keeps it.
  const std::vector<DeviceSpec> chosen = chosen_of(devices, {2, 3, 4, 5});
  CHECK(chosen[0].node == 0);
  CHECK(CostModel(chosen, 1, kMachineOfCores).between(chosen[0], chosen[2]) == LinkRates{10e9, 1e-6});

  // A stage of an a sends to one of b by it, and a plan's file has it.
  CompileOptions options;
  options.strategy = "pipeline(3, micro_batches=2) > replica(2)";
  const Plan plan = compile(small::gpt(4, OptimizerKind::kSgd, 4).g, devices, options);
  const PlanRates rates(cost, plan, plan.entries[0]);
  size_t seen = 0;
  for (size_t l = 0; l < plan.entries[0].links.size(); ++l)
    for (const Transfer& t : plan.entries[0].links[l].transfers) {
      const auto from = static_cast<size_t>(t.from), to = static_cast<size_t>(t.to);
      if (devices[from].node == devices[to].node) continue;
      const bool own = (devices[from].node == 2) != (devices[to].node == 2);
      CHECK(rates.link(static_cast<int32_t>(l), t.from).bytes_per_second == doctest::Approx(own ? 5e9 : 0.5e9));
      ++seen;
    }
  CHECK(seen > 0);
  const std::vector<uint8_t> file = serialize(plan);
  CHECK(deserialize(file.data(), file.size()).devices == plan.devices);

  // All nodes of one name.
  const std::vector<DeviceSpec> among = devices_of_json(R"({
      "nodes": [{"name": "a", "count": 3, "devices": [{"type": "T4"}], "network": "8Gb/s@20us"}],
      "links": [{"between": ["a", "a"], "network": {"bytes_per_second": 3e9}}]})");
  CHECK(CostModel(among, 1, kMachineOfCores).between(among[2], among[0]) == LinkRates{3e9, 10e-6});
}

TEST_CASE("cluster files: links of nodes that are not there, or of one alone") {
  const auto refused = [](const std::string& nodes, const std::string& links, const char* because) {
    const std::string text = R"({"nodes": [)" + nodes + R"(], "links": )" + links + "}";
    CAPTURE(text);
    const std::string message = message_of([&] { devices_of_json(text); });
    CAPTURE(message);
    CHECK(!message.empty());
    CHECK(has(message, because));
  };
  const std::string a = R"({"name": "a", "network": "1Gb/s", "devices": [{"type": "T4"}]})";
  const std::string both = a + R"(, {"name": "b", "network": "1Gb/s", "devices": [{"type": "T4"}]})";
  refused(both, "[]", "a list with something in it");
  refused(both, R"([{"between": ["a", "c"], "network": "1Gb/s"}])", "/links/0/between/1 is \"c\", expected the name");
  refused(both, R"([{"between": ["a", "a"], "network": "1Gb/s"}])", "two nodes; what is inside");
  refused(both, R"([{"between": ["a"], "network": "1Gb/s"}])", "the names of two nodes");
  refused(both, R"([{"between": ["a", "b"]}])", "between and network");
  refused(both, R"([{"between": ["a", "b"], "network": "0Gb/s"}])", "0Gb/s");
  refused(both, R"([{"between": ["a", "b"], "network": "1Gb/s"}, {"between": ["b", "a"], "network": "2Gb/s"}])",
          "no link yet");
  refused(a + ", " + a, R"([{"between": ["a", "a"], "network": "1Gb/s"}])", "a name that no other node has");
  refused(
      R"({"name": "a", "count": 30000, "devices": [{"type": "T4"}]}, {"name": "b", "count": 30000, "devices": [{"type": "T4"}]})",
      R"([{"between": ["a", "b"], "network": "1Gb/s"}])", "at most 1048576 pairs of nodes");
  refused(R"({"name": "a", "count": 1000, "devices": [{"type": "T4", "count": 65}]})",
          R"([{"between": ["a", "a"], "network": "1Gb/s"}])", "have more than 4194304 links together");
}

TEST_CASE("cluster files: the file is named, and of device lists the line") {
  const auto said = [](const char* content) {
    return message_of([&] { devices_of_cluster_file(content, "here.json"); }, {Code::kInvalidArgument});
  };
  for (const char* empty : {"", " \n\t\r\n", "\xEF\xBB\xBF"}) {
    CAPTURE(empty);
    CHECK(said(empty).starts_with("cluster file 'here.json' is empty; expected an object with nodes"));
  }
  CHECK(said("# nobody\n\n").starts_with("cluster file 'here.json': all of its lines are empty or comments"));
  CHECK(said("{\"nodes\": 3}").starts_with("cluster file 'here.json': /nodes is 3, expected a list"));
  CHECK(said("V100-32GB:2\n# c\nT4:x\n").starts_with("cluster file 'here.json', line 3: device list: item 'T4:x'"));
  CHECK(said("T4:40000\nT4:40000\n").starts_with("cluster file 'here.json': device list"));  // each is right
  CHECK(devices_of_cluster_file("\xEF\xBB\xBF{\"nodes\": [{\"devices\": [{\"type\": \"Titan RTX\", \"count\": 2.0}]}]}",
                                "")
            .size() == 2);
  // A line is what it is by itself.
  const std::vector<DeviceSpec> lines = devices_of_cluster_file("8xV100-32GB\n8xP100-16GB\n", "two.txt");
  CHECK(lines == parse_devices("8xV100-32GB + 8xP100-16GB"));
}

TEST_CASE("rates: devices with the profile's own figures take the profile's times") {
  const small::Model m = small::gpt();
  std::vector<DeviceSpec> with = parse_devices("null:4", {0});
  for (DeviceSpec& d : with) {
    d.figures.f32_flops_per_second = kMachineOfCores.device.flops_per_second;
    d.figures.bytes_per_second = kMachineOfCores.device.bytes_per_second;
    d.figures.seconds_per_op = kMachineOfCores.device.seconds_per_op;
    d.figures.inside = kMachineOfCores.link;
  }
  for (const char* strategy : {"replica", "split", "replica(2) > pipeline(2, micro_batches=3, warmup=[2,1])"}) {
    CAPTURE(strategy);
    CompileOptions options;
    options.strategy = strategy;
    const Plan a = compile(m.g, parse_devices("null:4", {0}), options), b = compile(m.g, with, options);
    const auto seconds = [](const Plan& p) { return times_of(p, p.entries[0], SIZE_MAX)->seconds; };
    // Only where figures are known cuts and warm-ups are moved, which may be faster.
    if (b.stage_begins.empty()) {
      CHECK(seconds(a) == doctest::Approx(seconds(b)));
      CHECK(print(a.entries[0].programs[0]) == print(b.entries[0].programs[0]));
    } else {
      CHECK(seconds(b) < seconds(a));
    }
  }
}

TEST_CASE("a plan file keeps types and figures of its devices") {
  CompileOptions options;
  options.strategy = "replica(2)";
  const Plan plan = compile(small::mlp().g, parse_devices("T4:1,V100-32GB:1~10Gb/s"), options);
  const std::vector<uint8_t> bytes = serialize(plan);
  const Plan again = deserialize(bytes.data(), bytes.size());
  CHECK(again.devices == plan.devices);
  CHECK(again.devices[1].type == "V100-32GB");
}

}  // namespace
}  // namespace whale
