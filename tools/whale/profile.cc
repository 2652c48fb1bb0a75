// profile: what a model's ops take on the devices that are here, or took where others measured.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "commands.h"
#include "file.h"
#include "plan_arguments.h"
#include "runner.h"

namespace tool {
namespace {

using Json = nlohmann::ordered_json;

struct ProfileArguments {
  std::string path, devices, out, precision;
  std::vector<std::string> imports;
  std::vector<int64_t> samples;
  double seconds = 0;
  bool json = false;
};

std::vector<std::string> names(const std::string& text) {
  return text.empty() ? std::vector<std::string>() : names_in(text);
}

// What `whale profile` wrote, as it is; nothing: another's.
std::optional<Json> own_profile(const std::string& path) {
  if (is_directory(path)) return std::nullopt;
  Json out = Json::parse(read_file(path), nullptr, false);
  if (!out.is_object() || !out.contains("schema") || !out.contains("devices") || !out["devices"].is_array())
    return std::nullopt;
  return out;
}

Json imported(const Engine& engine, const ProfileArguments& a) {
  const std::vector<std::string> devices = names(a.devices);
  if (!devices.empty() && devices.size() != a.imports.size())
    throw Failure("--devices names " + std::to_string(devices.size()) + " device types for " +
                  std::to_string(a.imports.size()) + " files to import; give one for each, or none");
  Json out;
  for (size_t k = 0; k < a.imports.size(); ++k) {
    std::optional<Json> own = own_profile(a.imports[k]);
    Json one = own ? std::move(*own)
                   : Json::parse(text(whale_engine_profile_import_json, engine.get(), str(a.imports[k]),
                                      str(devices.empty() ? std::string() : devices[k])));
    if (out.empty()) {
      out = std::move(one);
      continue;
    }
    if (out.value("model", Json()) != one.value("model", Json()))
      throw Failure(a.imports[k] + " is of another model than " + a.imports[0] + ": " +
                    one.value("model", Json()).dump() + ", not " + out.value("model", Json()).dump() +
                    "; join profiles of one model");
    for (auto& device : one["devices"]) out["devices"].push_back(std::move(device));
  }
  return out;
}

Json measured(const Engine& engine, const ProfileArguments& a) {
  const GraphHandle graph = own<GraphHandle>(whale_graph_load, engine.get(), str(a.path));
  const std::string devices = a.devices.empty() ? "cpu:1" : a.devices;
  const Cluster cluster = own<Cluster>(whale_cluster_create, engine.get(), str(devices));
  whale_plan_options options = WHALE_PLAN_OPTIONS_INIT;
  options.precision = precision_of(a.precision);
  std::fprintf(stderr, "running %s on %s, some seconds\n", shown(a.path).c_str(), shown(devices).c_str());
  return Json::parse(text(whale_engine_profile_json, engine.get(), static_cast<const whale_graph*>(graph.get()),
                          static_cast<const whale_cluster*>(cluster.get()),
                          static_cast<const whale_plan_options*>(&options), a.samples.data(), a.samples.size(),
                          a.seconds));
}

void print_table(const Json& profile) {
  for (const Json& device : profile["devices"]) {
    size_t points = 0;
    const Json none = Json::array();
    const Json& ops = device.contains("ops") ? device["ops"] : none;
    for (const Json& op : ops) points += op["points"].size();
    std::printf("%s: %zu ops, %zu points", shown(device["device"].get<std::string>()).c_str(), ops.size(), points);
    if (device.contains("layers"))
      std::printf(", %zu layers at %zu sizes", device["layers"][0]["times"].size(), device["layers"].size());
    std::printf("\n");
    if (!device.contains("steps")) continue;
    std::printf("%13s%13s%13s%13s%13s\n", "local batch", "a step, ms", "forward", "backward", "update");
    for (const Json& step : device["steps"])
      std::printf("%13lld%13.3f%13.3f%13.3f%13.3f\n", static_cast<long long>(step["samples"].get<int64_t>()),
                  step["step"].get<double>() * 1e3, step["forward"].get<double>() * 1e3,
                  step["backward"].get<double>() * 1e3, step["update"].get<double>() * 1e3);
  }
}

// Devices are measured together, by one process: several would each write the file.
void check_alone(const Engine& engine) {
  const World world = own<World>(whale_world_create, engine.get(), static_cast<const whale_world_options*>(nullptr));
  const int32_t ranks = whale_world_size(world.get());
  if (ranks > 1)
    throw Failure("`whale profile` measures in one process, and this is rank " +
                  std::to_string(whale_world_rank(world.get())) + " of " + std::to_string(ranks) +
                  ": run it without `whale launch`, once on each kind of machine, with all of its devices (--devices "
                  "cpu:" +
                  std::to_string(ranks) + "), and join the files with --import ONE --import OTHER -o BOTH");
}

}  // namespace

void add_profile(CLI::App& app) {
  const auto a = std::make_shared<ProfileArguments>();
  CLI::App* command = app.add_subcommand(
      "profile",
      "what a model's ops take on the devices that are here, for `plan`, `predict`, `simulate`, `run --profile`");
  CLI::Option* model = command->add_option("MODEL", a->path, "a .whale file, of which steps are run on each device");
  CLI::Option* import =
      command
          ->add_option(
              "--import", a->imports,
              "instead of running: a file that Sailor or Metis wrote, a table of ops, or one that `whale profile` "
              "wrote elsewhere; several for several devices")
          ->allow_extra_args(false)
          ->excludes(model);
  command->add_option("--devices", a->devices,
                      "to run on, all at once: cpu:N, cpu@CORES, ref:N (default cpu:1); with --import: the device type "
                      "of each file, joined by commas");
  command
      ->add_option("--samples", a->samples,
                   "local batches, joined by commas (default: the model's, a half, a quarter of it, ...)")
      ->delimiter(',')
      ->check(whole(1, INT32_MAX))
      ->type_name("INT")
      ->excludes(import);
  command->add_option("--seconds", a->seconds, "that each local batch takes, about (default 1)")
      ->check(above_zero())
      ->excludes(import);
  command->add_option("--precision", a->precision, "f32, bf16, f16, f64 (ref devices); default: the model's")
      ->excludes(import);
  command->add_option("-o,--output", a->out, "write it, for --profile");
  command->add_flag("--json", a->json, "print as JSON");
  command->callback([a] {
    if (a->path.empty() && a->imports.empty())
      throw Failure("`whale profile` needs a model, such as gpt.whale, or --import FILE");
    if (!a->out.empty()) check_target(a->out, "--output", {a->path});
    const Engine engine = make_engine();
    check_alone(engine);
    const Json profile = a->imports.empty() ? measured(engine, *a) : imported(engine, *a);
    if (!a->out.empty()) write_file(a->out, profile.dump(1) + "\n");
    if (a->json)
      std::printf("%s\n", profile.dump().c_str());
    else
      print_table(profile);
    if (!a->out.empty())
      std::fprintf(stderr, "wrote %s; `whale plan --profile %s` goes by it\n", shown(a->out).c_str(),
                   shown(a->out).c_str());
  });
}

}  // namespace tool
