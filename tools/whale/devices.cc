// devices: the back ends of this machine, and what its devices achieve.
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "commands.h"
#include "file.h"
#include "runner.h"

namespace tool {
namespace {

struct DevicesArguments {
  bool json = false, probe = false;
  std::string devices, out;
};

template <class... A>
std::string line(const char* format, A... values) {
  char out[200];
  std::snprintf(out, sizeof out, format, values...);
  return out;
}

// What a probe found, for a terminal.
std::string table_of(const nlohmann::json& found) {
  const auto best = [](const nlohmann::json& flops, const char* dtype) {
    double most = 0;
    if (flops.contains(dtype))
      for (const auto& [size, rate] : flops[dtype].items()) most = std::max(most, rate.get<double>());
    return most > 0 ? line("%.1f", most / 1e9) : std::string("-");
  };
  std::string out = line("%-8s%-6s%-6s%13s%14s%8s\n", "device", "rank", "kind", "f32 GFLOP/s", "bf16 GFLOP/s", "GB/s");
  for (const auto& d : found["devices"])
    out += line("%-8d%-6d%-6s%13s%14s%8.1f\n", d["device"].get<int>(), d["rank"].get<int>(),
                d["kind"].get<std::string>().c_str(), best(d["flops_per_second"], "f32").c_str(),
                best(d["flops_per_second"], "bf16").c_str(), d["bytes_per_second"].get<double>() / 1e9);
  const auto link = [&](const std::string& who, const nlohmann::json& rates) {
    out += line("%-20s%10.2f%9.1f\n", who.c_str(), rates["bytes_per_second"].get<double>() / 1e9,
                rates["latency_seconds"].get<double>() * 1e6);
  };
  if (!found["links"].empty()) out += line("\n%-20s%10s%9s\n", "between", "GB/s", "us");
  for (const auto& l : found["links"]) link(line("%d, %d", l["from"].get<int>(), l["to"].get<int>()), l);
  if (found.contains("gather")) link("all, a gather", found["gather"]);
  return out;
}

void probe(const Engine& engine, DevicesArguments a) {
  const World world = own<World>(whale_world_create, engine.get(), static_cast<const whale_world_options*>(nullptr));
  const int32_t ranks = whale_world_size(world.get());
  if (a.devices.empty())
    a.devices = "cpu:" + std::to_string(std::max(ranks, static_cast<int32_t>(std::thread::hardware_concurrency())));
  const Cluster cluster = own<Cluster>(whale_cluster_create, engine.get(), str(a.devices));
  if (whale_world_rank(world.get()) == 0) std::fprintf(stderr, "probing %s, some seconds\n", a.devices.c_str());
  const std::string found =
      text(whale_engine_probe_json, engine.get(), static_cast<const whale_cluster*>(cluster.get()),
           ranks > 1 ? world.get() : nullptr, static_cast<whale_cancel*>(nullptr));
  if (whale_world_rank(world.get()) != 0) return;
  const nlohmann::json parsed = nlohmann::json::parse(found);
  if (!a.out.empty()) write_file(a.out, nlohmann::ordered_json::parse(found).dump(2) + "\n");
  std::printf("%s%s", a.json ? found.c_str() : table_of(parsed).c_str(), a.json ? "\n" : "");
  if (!a.out.empty())
    std::fprintf(stderr, "wrote %s; `whale plan --profile %s` goes by it\n", a.out.c_str(), a.out.c_str());
}

}  // namespace

void add_devices(CLI::App& app) {
  auto* command = app.add_subcommand("devices", "the back ends of this machine, or what its devices achieve");
  auto a = std::make_shared<DevicesArguments>();
  command->add_flag("--json", a->json, "as JSON");
  auto* probes = command->add_flag("--probe", a->probe, "measure devices and links; also under `whale launch`");
  command
      ->add_option("--devices", a->devices,
                   "to measure: cpu:N, cpu@CORES, ref:N (default: a cpu device a core, or a rank)")
      ->needs(probes);
  command->add_option("-o,--output", a->out, "write what was measured, for --profile")->needs(probes);
  command->callback([a] {
    const Engine engine = make_engine();
    if (a->probe) return probe(engine, *a);
    std::printf("%s\n", text(a->json ? whale_engine_devices_json : whale_engine_devices, engine.get()).c_str());
  });
}

}  // namespace tool
