// Searches of published planning problems beside brute force on small ones, and their files when broken.
#include <doctest/doctest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>

#include "property.h"
#include "search/cluster_pipelines.h"
#include "search/least_part.h"
#include "search/partition.h"
#include "search/share_out.h"
#include "unit/caught.h"
#include "validate/validate.h"

using namespace whale;

namespace {

// Three layers on two types; times fall with the split, and rise with the micro-batch.
ClusterProblem small_cluster() {
  ClusterProblem p;
  p.layers = 3;
  p.batch = *rc::gen::inRange(4, 17);
  p.splits = {1, 2};
  p.reserved_bytes = {1, 1};
  for (const int t : {0, 1})
    p.types.push_back({.name = t == 0 ? "fast" : "slow",
                       .nodes = std::vector<int>(static_cast<size_t>(*rc::gen::inRange(1, 3)), 2),
                       .memory_bytes = 60.0 + *rc::gen::inRange(0, 100)});
  for (const int split : p.splits) {
    p.parameters.push_back({4.0 / split, 2.0 / split, 3.0 / split});
    p.activations.push_back({2.0 / split, 1.0 / split, 2.0 / split});
  }
  p.bytes_per_parameter = 4;
  p.output_bytes = {3e6, 2e6, 1e6};
  p.weight_bytes = {4e9, 2e9, 3e9};
  const double link = *rc::gen::inRange(1, 20);
  p.sends.assign(4, std::vector<BandwidthCurve>(4, {{link}}));
  p.sends[0][0] = {{2 * link}};
  for (const int t : {0, 1})
    for (const int split : p.splits)
      for (const int b : {1, 2}) {
        LayerTimes times{.type = t, .split = split, .micro_batch = b, .seconds = {}, .update_seconds = {0.1, 0.1, 0.1}};
        for (int l = 0; l < 3; ++l)
          times.seconds.push_back((t + 1) * (b + 0.2) * (*rc::gen::inRange(5, 15)) /
                                  (split + 0.3 * (split > 1 ? -1 : 0)) / 10);
        p.times.push_back(times);
      }
  return p;
}

// All plans of up to two classes.
double brute_force(const ClusterProblem& p) {
  double best = INFINITY;
  std::vector<std::vector<int>> all_cuts{{0, 3}, {0, 1, 3}, {0, 2, 3}, {0, 1, 2, 3}};
  for (const std::vector<int>& cuts : all_cuts) {
    const size_t stages = cuts.size() - 1;
    std::vector<std::vector<StagePlace>> places{{}};
    for (size_t i = 0; i < stages; ++i) {
      std::vector<std::vector<StagePlace>> longer;
      for (const auto& before : places)
        for (const int t : {0, 1})
          for (const int split : {1, 2}) {
            longer.push_back(before);
            longer.back().push_back({t, split});
          }
      places = longer;
    }
    struct One {
      ReplicaClass c;
      double base = 0, each = 0;  // seconds of one micro-batch, of one more
      int use[2] = {0, 0};
    };
    std::vector<One> ones;
    for (const auto& stages_of : places)
      for (const int64_t b : {1, 2}) {
        ClusterProblem alone = p;
        alone.batch = b;
        One one{.c = {.replicas = 1, .micro_batches = 1, .micro_batch = b, .stages = stages_of}};
        try {
          one.base = price(alone, {.cuts = cuts, .classes = {one.c}}).class_seconds[0];
          one.c.micro_batches = 2;
          one.each = price(alone, {.cuts = cuts, .classes = {one.c}}).class_seconds[0] - one.base;
        } catch (const Error&) {
          continue;
        }
        for (const StagePlace& place : stages_of) one.use[place.type] += place.split;
        ones.push_back(one);
      }
    const auto have = [&](size_t t) { return 2 * static_cast<int>(p.types[t].nodes.size()); };
    for (const One& a : ones)
      for (const One& b : ones)
        for (int na = 1; na * a.use[0] <= have(0) && na * a.use[1] <= have(1); ++na)
          for (int nb = 0; na * a.use[0] + nb * b.use[0] <= have(0) && na * a.use[1] + nb * b.use[1] <= have(1); ++nb) {
            for (int64_t m = 1; m <= p.batch; ++m) {
              ClusterPlan plan{.cuts = cuts, .classes = {a.c}};
              plan.classes[0].replicas = na;
              plan.classes[0].micro_batches = m;
              const int64_t left = p.batch - na * m * a.c.micro_batch;
              if (nb == 0 && left > 0) continue;
              if (nb > 0) {
                plan.classes.push_back(b.c);
                plan.classes[1].replicas = nb;
                plan.classes[1].micro_batches =
                    std::max<int64_t>(1, (left + nb * b.c.micro_batch - 1) / (nb * b.c.micro_batch));
              }
              try {
                best = std::min(best, price(p, plan).step_seconds);
              } catch (const Error&) {
              }
              if (left <= 0) break;
            }
          }
  }
  return best;
}

PartitionProblem random_graph() {
  PartitionProblem p;
  const int n = *rc::gen::inRange(1, 7);
  p.devices = *rc::gen::inRange(1, 4);
  p.hosts = *rc::gen::inRange(0, 2);
  p.device_bytes = *rc::gen::inRange(3, 20);
  for (int i = 0; i < n; ++i)
    p.nodes.push_back({.device_ms = static_cast<double>(*rc::gen::inRange(0, 9)),
                       .host_ms = static_cast<double>(*rc::gen::inRange(0, 40)),
                       .bytes = static_cast<double>(*rc::gen::inRange(0, 4)),
                       .send_ms = static_cast<double>(*rc::gen::inRange(0, 5)),
                       .on_device = *rc::gen::inRange(0, 12) > 0});
  for (int i = 0; i < n; ++i)
    for (int j = i + 1; j < n; ++j)
      if (*rc::gen::inRange(0, 3) == 0) p.edges.emplace_back(i, j);
  // Some have a backward node of their color, which reads from those of their readers.
  std::vector<int> mirror(static_cast<size_t>(n), -1);
  for (int i = 0; i < n; ++i)
    if (*rc::gen::inRange(0, 3) == 0) {
      mirror[i] = static_cast<int>(p.nodes.size());
      p.nodes[i].color = i;
      p.nodes.push_back({.device_ms = static_cast<double>(*rc::gen::inRange(0, 9)),
                         .host_ms = 9,
                         .send_ms = 1,
                         .backward = true,
                         .color = i});
    }
  const std::vector<std::pair<int, int>> forward = p.edges;
  for (const auto& [u, v] : forward)
    if (mirror[u] >= 0 && mirror[v] >= 0) p.edges.emplace_back(mirror[v], mirror[u]);
  return p;
}

// All placements whose forward parts can be put in an order: between parts there is no cycle.
double brute_force(const PartitionProblem& p) {
  const int n = static_cast<int>(p.nodes.size()), parts = p.devices + p.hosts;
  std::vector<int> part(static_cast<size_t>(n), 0);
  double best = INFINITY;
  const std::function<void(int)> place = [&](int i) {
    if (i < n) {
      const PartitionNode& node = p.nodes[i];
      if (node.backward) {  // after its forward node, whose place it shares
        part[i] = part[node.color];
        place(i + 1);
        return;
      }
      for (int k = 0; k < parts; ++k) {
        part[i] = k;
        place(i + 1);
      }
      return;
    }
    std::vector<std::vector<bool>> before(static_cast<size_t>(parts),
                                          std::vector<bool>(static_cast<size_t>(parts), false));
    for (const auto& [u, v] : p.edges)
      if (!p.nodes[u].backward && !p.nodes[v].backward && part[u] != part[v]) before[part[u]][part[v]] = true;
    for (size_t k = 0; k < before.size(); ++k)
      for (size_t a = 0; a < before.size(); ++a)
        for (size_t b = 0; b < before.size(); ++b)
          if (before[a][k] && before[k][b]) before[a][b] = true;
    double slowest = 0;
    for (int k = 0; k < parts; ++k) {
      if (before[k][k]) return;
      std::vector<int> nodes;
      double bytes = 0;
      bool on_device = true;
      for (int j = 0; j < n; ++j)
        if (part[j] == k) {
          nodes.push_back(j);
          bytes += p.nodes[j].bytes;
          on_device &= p.nodes[j].on_device;
        }
      const bool host = k >= p.devices;
      if (!host && (bytes > p.device_bytes || !on_device)) return;
      slowest = std::max(slowest, part_ms(p, nodes, host));
    }
    best = std::min(best, slowest);
  };
  place(0);
  return best;
}

// A folder for one test.
struct Folder {
  std::filesystem::path path =
      std::filesystem::temp_directory_path() /
      ("whale_planners_" + std::to_string(std::hash<std::string>{}(doctest::getContextOptions()->currentTest->m_name)));
  Folder() {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string write(const std::string& name, const std::string& text) const {
    std::filesystem::create_directories((path / name).parent_path());
    std::ofstream(path / name) << text;
    return (path / name).string();
  }
};

}  // namespace

TEST_CASE("shares of kinds: found where brute force finds some, and within the bound") {
  CHECK(whale::test::holds("equal to brute force", 100, [] {
    std::vector<ShareKind> kinds(static_cast<size_t>(*rc::gen::inRange(1, 4)));
    for (ShareKind& k : kinds)
      k = {.use = {*rc::gen::inRange(0, 4), *rc::gen::inRange(0, 4), 1},
           .samples = static_cast<double>(*rc::gen::inRange(1, 9))};
    const ShareRow have{*rc::gen::inRange(0, 10), *rc::gen::inRange(0, 10), *rc::gen::inRange(1, 7)};
    double best = 0;
    std::vector<int> n(3, 0);
    for (n[0] = 0; n[0] <= have[2]; ++n[0])
      for (n[1] = 0; n[1] <= (kinds.size() > 1 ? have[2] : 0); ++n[1])
        for (n[2] = 0; n[2] <= (kinds.size() > 2 ? have[2] : 0); ++n[2]) {
          ShareRow use{};
          double samples = 0;
          for (size_t k = 0; k < kinds.size(); ++k) {
            for (size_t r = 0; r < 3; ++r) use[r] += n[k] * kinds[k].use[r];
            samples += n[k] * kinds[k].samples;
          }
          if (use[0] <= have[0] && use[1] <= have[1] && use[2] <= have[2]) best = std::max(best, samples);
        }
    RC_ASSERT(share_bound(kinds, have, 3) >= best - 1e-6);
    RC_ASSERT(!share_out(kinds, have, 3, best + 0.5, 1000000));
    const auto found = share_out(kinds, have, 3, best, 1000000);
    RC_ASSERT(found.has_value());
    double samples = 0;
    ShareRow use{};
    for (size_t k = 0; k < kinds.size(); ++k) {
      samples += static_cast<double>((*found)[k]) * kinds[k].samples;
      for (size_t r = 0; r < 3; ++r) use[r] += static_cast<int32_t>((*found)[k]) * kinds[k].use[r];
    }
    RC_ASSERT(samples >= best - 1e-9);
    for (size_t r = 0; r < 3; ++r) RC_ASSERT(use[r] <= have[r]);
  }));
}

TEST_CASE("pipelines on a mixed cluster: within one percent of all plans of two classes, and priced as printed") {
  CHECK(whale::test::holds("near brute force", 100, [] {
    const ClusterProblem p = small_cluster();
    const double best = brute_force(p);
    if (std::isinf(best)) {
      RC_ASSERT(!message_of([&] { plan_pipelines(p); }, {Code::kInvalidArgument}).empty());
      return;
    }
    const FoundPipelines found = plan_pipelines(p, {.exhaustive_stages = 3});
    RC_ASSERT(price(p, found.plan).step_seconds == found.price.step_seconds);
    RC_ASSERT(found.price.step_seconds <= best * 1.01);
    // Warm: the same cluster again is no worse; one device less is planned, and not faster than all plans allow.
    RC_ASSERT(plan_pipelines(p, {.near_only = true}, &found.plan).price.step_seconds <=
              found.price.step_seconds * 1.01);
  }));
}

TEST_CASE("the price of pipelines: by hand; and what it refuses") {
  ClusterProblem p;
  p.layers = 2;
  p.batch = 8;
  p.types = {{.name = "d", .nodes = {2, 2}, .memory_bytes = 1000}};
  p.splits = {1, 2};
  p.parameters = {{10, 10}, {5, 5}};
  p.activations = {{1, 1}, {1, 1}};
  p.reserved_bytes = {0, 0};
  p.output_bytes = {1e6, 1e6};
  p.weight_bytes = {1e9, 1e9};
  p.sends.assign(2, std::vector<BandwidthCurve>(2, {{1.0}}));  // 1 GB/s at every size
  p.times = {{.type = 0, .split = 1, .micro_batch = 1, .seconds = {1, 2}, .update_seconds = {0.5, 0.25}}};
  const ReplicaClass two{.replicas = 2, .micro_batches = 4, .micro_batch = 1, .stages = {{0, 1}, {0, 1}}};
  const ClusterPrice found = price(p, {.cuts = {0, 1, 2}, .classes = {two}});
  // Sends: 0.001 of the first stage, twice 0.001 of the last. Rings of two among two buckets of 0.5 GB.
  CHECK(found.class_seconds[0] == doctest::Approx(3 * 2.002 + 3 + 0.003 + 0.5));
  CHECK(found.sync_seconds == doctest::Approx(2 * 2 * 0.25));
  CHECK(found.step_seconds == doctest::Approx(found.class_seconds[0] + found.sync_seconds));
  CHECK(found.peak_bytes[0] == doctest::Approx(24 * 10 + 4 * 2));
  const auto refused = [&](ClusterPlan plan) { return message_of([&] { price(p, plan); }, {Code::kInvalidArgument}); };
  ReplicaClass few = two;
  few.micro_batches = 3;
  CHECK(has(refused({{0, 1, 2}, {few}}), "6 samples a step, expected at least 8"));
  ReplicaClass many = two;
  many.replicas = 3;
  CHECK(has(refused({{0, 1, 2}, {many}}), "more than its nodes hold"));
  CHECK(has(refused({{0, 2, 2}, {two}}), "cuts"));
  p.types[0].memory_bytes = 240;
  CHECK(has(refused({{0, 1, 2}, {two}}), "stage 0"));
}

TEST_CASE("a device lost, and one that slows: planned again near the present plan") {
  ClusterProblem p;
  p.layers = 2;
  p.batch = 64;
  p.types = {{.name = "d", .nodes = {2, 2}, .memory_bytes = 1000}};
  p.splits = {1, 2};
  p.parameters = {{10, 10}, {5, 5}};
  p.activations = {{1, 1}, {1, 1}};
  p.reserved_bytes = {0, 0};
  p.output_bytes = {1e6, 1e6};
  p.weight_bytes = {1e6, 1e6};
  p.sends.assign(2, std::vector<BandwidthCurve>(2, {{1.0}}));
  p.times = {{.type = 0, .split = 1, .micro_batch = 1, .seconds = {1, 1}, .update_seconds = {0, 0}}};
  const FoundPipelines four = plan_pipelines(p);
  CHECK(four.plan.replicas() == 4);
  CHECK(four.price.step_seconds == doctest::Approx(32).epsilon(0.01));
  const FoundPipelines three = plan_pipelines(without_device(p, 0), {.near_only = true}, &four.plan);
  CHECK(three.price.step_seconds == doctest::Approx(44).epsilon(0.01));
  // Its node of two at half the speed is worth a device: 2 x 21 + 2 x 11.
  const FoundPipelines slow = replan_slow(p, 0, 2, four.plan, 0);
  CHECK(slow.price.step_seconds == doctest::Approx(44).epsilon(0.01));
}

TEST_CASE("stage cuts of graphs: no placement without cycles between its parts is faster") {
  CHECK(whale::test::holds("equal to brute force", 100, [] {
    const PartitionProblem p = random_graph();
    const double best = brute_force(p);
    if (std::isinf(best)) {
      RC_ASSERT(has(message_of([&] { partition(p); }, {Code::kInvalidArgument}), "no partition fits"));
      return;
    }
    const FoundPartition found = partition(p);
    RC_ASSERT(found.proven);
    RC_ASSERT(std::abs(found.ms - best) <= 1e-9 * (1 + best));
    size_t nodes = 0;
    double slowest = 0;
    for (const PartitionPart& part : found.parts) {
      nodes += part.nodes.size();
      slowest = std::max(slowest, part_ms(p, part.nodes, part.host));
    }
    RC_ASSERT(nodes == p.nodes.size());
    RC_ASSERT(std::abs(slowest - found.ms) <= 1e-9 * (1 + best));
    const PartitionGroups groups = group_nodes(p);
    for (size_t g = 0; g < groups.groups.size() && p.hosts == 0; ++g)
      RC_ASSERT(least_part_ms(groups, static_cast<int>(g)) <= best + 1e-6);
  }));
}

TEST_CASE("stage cuts of graphs: one order only, where there are too many ideals, says that it is not proven") {
  PartitionProblem p;
  for (int i = 0; i < 12; ++i) p.nodes.push_back({.device_ms = 1.0 + i, .host_ms = 1000, .send_ms = 1});
  p.devices = 3;
  p.device_bytes = 1;
  const FoundPartition few = partition(p, {.most_ideals = 100});
  const FoundPartition all = partition(p);
  CHECK_FALSE(few.proven);
  CHECK(all.proven);
  CHECK(all.ms == 26);  // 78 in three
  CHECK(few.ms >= all.ms);
  CHECK(few.least_ms <= all.ms);
}

TEST_CASE("graphs and tables that are broken: errors that name the file and what is wrong") {
  const Folder folder;
  const auto said = [&](const std::string& path, const char* form) {
    return message_of([&] { validate(path, {.form = form, .profiles = ""}); });
  };
  CHECK(has(said(folder.write("a.json", "{"), "partition"), "no JSON"));
  CHECK(has(said(folder.write("a.json", R"({"maxFPGAs": 1})"), "partition"), "maxCPUs"));
  const std::string head = R"({"maxFPGAs": 1, "maxCPUs": 0, "maxSizePerFPGA": 10, "nodes": [)";
  const std::string node =
      R"({"id": 1, "supportedOnFpga": 1, "fpgaLatency": 2, "cpuLatency": 3, "isBackwardNode": 0, "size": 1})";
  CHECK(has(said(folder.write("a.json", head + node + "," + node + R"(], "edges": []})"), "partition"),
            "two nodes have the id 1"));
  CHECK(has(said(folder.write("a.json", head + node + R"(], "edges": [{"sourceId": 1, "destId": 7, "cost": 0}]})"),
                 "partition"),
            "node 7"));
  CHECK(has(
      said(
          folder.write(
              "a.json",
              head +
                  R"({"id": 1, "supportedOnFpga": 1, "fpgaLatency": -2, "cpuLatency": 3, "isBackwardNode": 0}], "edges": []})"),
          "partition"),
      "'fpgaLatency' is -2"));
  CHECK(has(said(folder.write("a.json", head + R"(], "edges": []})"), "partition"), "no nodes"));
  const std::string other =
      R"({"id": 2, "supportedOnFpga": 1, "fpgaLatency": 2, "cpuLatency": 3, "isBackwardNode": 0, "size": 1})";
  CHECK(has(
      said(
          folder.write(
              "a.json",
              head + node + "," + other +
                  R"(], "edges": [{"sourceId": 1, "destId": 2, "cost": 0}, {"sourceId": 2, "destId": 1, "cost": 0}]})"),
          "partition"),
      "cycle"));
  const Json told = validate(
      folder.write("a.json", head + node + "," + other + R"(], "edges": [{"sourceId": 1, "destId": 2, "cost": 5}]})"),
      {});
  CHECK(told["form"] == "partition");
  CHECK(told["rows"][0]["ms"] == 4);
  CHECK(told["rows"][0]["proven"] == true);
  folder.write("planner_bars.csv",
               "planner,model,a100_40,v100_16,search_s_here,plan_it_per_s_in_sailor_simulator\nSailor,m,4,12,1,0.5\n");
  CHECK(has(said(folder.path.string(), "planners"), "cannot be read"));
  folder.write("configs/m.json", R"({"model": "m", "num_all_layers": 2, "global_batch_size": 4})");
  CHECK(has(said(folder.path.string(), "planners"), "basic_cluster_config.json"));
  folder.write("configs/basic_cluster_config.json",
               R"({"zone": "z", "A100-40": {"gpus_per_node": 4, "mem_per_gpu": "many"}})");
  CHECK(has(said(folder.path.string(), "planners"), "'mem_per_gpu' is \"many\""));
  CHECK(has(said(folder.write("b.csv", "x\n1\n"), "planners"), "no folder"));
}
