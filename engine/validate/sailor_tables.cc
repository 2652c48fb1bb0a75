#include "validate/sailor_tables.h"

#include <charconv>

#include "base/error.h"
#include "validate/measured_json.h"

namespace whale {
namespace {

int whole(const std::string& key, const std::string& path) {
  int value = 0;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), value);
  if (error != std::errc{} || end != key.data() + key.size() || value < 1)
    throw invalid("{}: the key '{}' is no number from 1", path, key);
  return value;
}

}  // namespace

SailorTables::SailorTables(std::string folder, std::string profiles)
    : folder_(std::move(folder)), profiles_(profiles.empty() ? folder_ + "/profiles" : std::move(profiles)) {}

ClusterProblem SailorTables::problem(const std::string& model,
                                     const std::vector<std::pair<std::string, int>>& devices) const {
  ClusterProblem out;
  // Its settings: the file of configs/ that names the model.
  bool set = false;
  for (const std::string& path : files_in(folder_ + "/configs", ".json")) {
    const Json config = read_json(path);
    if (!config.is_object() || !config.contains("model") || config["model"] != model ||
        !config.contains("num_all_layers"))
      continue;
    out.batch = static_cast<int64_t>(json_number(config, "global_batch_size", path));
    out.layers = static_cast<int>(json_number(config, "num_all_layers", path));
    if (out.layers < 1 || out.layers > 1000) throw invalid("{}: {} layers, expected 1 to 1000", path, out.layers);
    set = true;
  }
  if (!set) throw invalid("{}/configs has no file with settings of '{}'", folder_, model);

  const std::string cluster_path = folder_ + "/configs/basic_cluster_config.json";
  const Json cluster = read_json(cluster_path);
  const Json& zone_name = json_at(cluster, "zone", cluster_path);
  if (!zone_name.is_string()) throw invalid("{}: 'zone' is no name", cluster_path);
  const auto zone = zone_name.get<std::string>();
  int node = 1;
  for (const auto& [name, count] : devices) {
    const Json& type = json_at(cluster, name, cluster_path);
    node = static_cast<int>(json_number(type, "gpus_per_node", cluster_path));
    if (node < 1 || node > 64 || count < 0) throw invalid("{}: nodes of {} {}", cluster_path, node, name);
    ClusterDevices here{.name = name, .nodes = std::vector<int>(static_cast<size_t>(count / node), node)};
    if (count % node > 0) here.nodes.push_back(count % node);
    here.memory_bytes = json_number(type, "mem_per_gpu", cluster_path);
    out.types.push_back(std::move(here));
  }
  out.splits = {1, 2, 4};
  out.reserved_bytes = {2e9, 3e9, 3e9};

  const std::string info_path = folder_ + "/llm_info.json";
  const Json info = read_json(info_path);
  const Json& layers = json_at(info, model, info_path);
  for (const int split : out.splits) {
    const Json& here = json_at(layers, std::to_string(split), info_path);
    std::vector<double> parameters, activations;
    for (int l = 0; l < out.layers; ++l) {
      const Json& layer = json_at(here, std::to_string(l), info_path);
      parameters.push_back(json_number(layer, "params_floats", info_path));
      activations.push_back(json_number(layer, "act_mem_floats", info_path));
      if (split == 1) {
        out.weight_bytes.push_back(4 * parameters.back());
        out.output_bytes.push_back(4 * json_number(layer, "act_output_floats", info_path));
      }
    }
    out.parameters.push_back(std::move(parameters));
    out.activations.push_back(std::move(activations));
  }

  const std::string links_path = folder_ + "/providers/multizone_bandwidths_het.json";
  const Json links_file = read_json(links_path);
  const Json& links = json_at(links_file, zone, links_path);
  for (const auto& [from, unused] : devices)
    for (const int split : out.splits) {
      const Json& sender = json_at(json_at(links, from, links_path), std::to_string(split), links_path);
      std::vector<BandwidthCurve> row;
      for (const auto& [to, unused_too] : devices)
        for (const int other : out.splits) {
          const Json& pair =
              json_at(json_at(json_at(sender, zone, links_path), to, links_path), std::to_string(other), links_path);
          if (!pair.is_array() || pair.empty())
            throw invalid("{}: expected coefficients between {} and {}", links_path, from, to);
          row.push_back({json_numbers(pair[0], links_path)});
        }
      out.sends.push_back(std::move(row));
    }

  for (size_t t = 0; t < devices.size(); ++t) {
    std::string path = profiles_;
    path.append("/").append(model).append("/").append(devices[t].first).append("/profile.json");
    const Json profile = read_json(path);
    if (!profile.is_object()) throw invalid("{}: expected sizes of micro-batches", path);
    for (const auto& [micro_batch, by_split] : profile.items()) {
      if (!by_split.is_object())
        throw invalid("{}: expected degrees of tensor parallelism below '{}'", path, micro_batch);
      for (const auto& [split_name, by_layer] : by_split.items()) {
        const int split = whole(split_name, path);
        if (split > out.splits.back() || (split & (split - 1)) != 0) continue;  // not within a node of four
        LayerTimes times{.type = static_cast<int>(t),
                         .split = split,
                         .micro_batch = whole(micro_batch, path),
                         .seconds = {},
                         .update_seconds = {}};
        for (int l = 0; l < out.layers; ++l) {
          const std::vector<double> row = json_numbers(json_at(by_layer, std::to_string(l), path), path);
          if (row.size() != 3)
            throw invalid("{}: layer {} has {} figures, expected forward, backward and update seconds", path, l,
                          row.size());
          times.seconds.push_back(row[0] + row[1]);
          times.update_seconds.push_back(row[2]);
        }
        out.times.push_back(std::move(times));
      }
    }
  }
  verify(out);
  return out;
}

}  // namespace whale
