#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <map>

#include "base/error.h"
#include "search/partition.h"
#include "validate/csv.h"
#include "validate/measured_json.h"
#include "validate/planners.h"

namespace whale {
namespace {

int64_t id_of(const Json& json, const char* key, const std::string& path) {
  const Json& value = json_at(json, key, path);
  if (!value.is_number_integer()) throw invalid("{}: '{}' is {}, expected a whole number", path, key, text_of(value));
  return value.get<int64_t>();
}

int count_of(const Json& json, const char* key, const std::string& path) {
  const double value = json_number(json, key, path);
  if (value != std::floor(value) || value > 64) throw invalid("{}: '{}' is {}, expected 0 to 64", path, key, value);
  return static_cast<int>(value);
}

PartitionProblem read_partition(const std::string& path, std::vector<int64_t>& ids) {
  const Json json = read_json(path);
  PartitionProblem out;
  out.devices = count_of(json, "maxFPGAs", path);
  out.hosts = count_of(json, "maxCPUs", path);
  out.device_bytes = json_number(json, "maxSizePerFPGA", path);
  const Json &nodes = json_at(json, "nodes", path), &edges = json_at(json, "edges", path);
  if (!nodes.is_array() || !edges.is_array()) throw invalid("{}: 'nodes' and 'edges' are no lists", path);
  std::map<int64_t, int> place;
  std::map<int64_t, int64_t> colors;
  for (const Json& node : nodes) {
    const int64_t id = id_of(node, "id", path);
    if (!place.try_emplace(id, static_cast<int>(out.nodes.size())).second)
      throw invalid("{}: two nodes have the id {}", path, id);
    ids.push_back(id);
    PartitionNode one{.device_ms = json_number(node, "fpgaLatency", path),
                      .host_ms = json_number(node, "cpuLatency", path),
                      .on_device = json_truth(node, "supportedOnFpga", path),
                      .backward = json_truth(node, "isBackwardNode", path)};
    if (node.contains("size")) one.bytes = json_number(node, "size", path);
    if (node.contains("colorClass"))
      one.color =
          colors.try_emplace(id_of(node, "colorClass", path), static_cast<int64_t>(colors.size())).first->second;
    out.nodes.push_back(one);
  }
  std::vector<bool> known(out.nodes.size(), false);
  for (const Json& edge : edges) {
    int ends[2];
    for (const int end : {0, 1}) {
      const int64_t id = id_of(edge, end == 0 ? "sourceId" : "destId", path);
      const auto at = place.find(id);
      if (at == place.end()) throw invalid("{}: an edge has the node {}, which is none", path, id);
      ends[end] = at->second;
    }
    const double cost = json_number(edge, "cost", path);
    PartitionNode& from = out.nodes[ends[0]];
    if (known[ends[0]] && std::abs(from.send_ms - cost) > 1e-6)
      throw invalid("{}: the output of node {} costs {} on one edge and {} on another", path, ids[ends[0]],
                    from.send_ms, cost);
    from.send_ms = cost;
    known[ends[0]] = true;
    out.edges.emplace_back(ends[0], ends[1]);
  }
  return out;
}

std::string lower(std::string text) {
  for (char& c : text) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace

bool is_partition(const std::string& path) {
  const auto graph = [](const std::string& file) {
    return read_measured(file).find("\"maxFPGAs\"") != std::string::npos;
  };
  if (!is_folder(path)) return path.ends_with(".json") && graph(path);
  const std::vector<std::string> files = files_in(path, ".json");
  return !files.empty() && graph(files.front());
}

Json validate_partition(const std::string& path, const ValidateOptions&) {
  const bool folder = is_folder(path);
  const std::vector<std::string> files = folder ? files_in(path, ".json") : std::vector{path};
  if (files.empty()) throw invalid("{} has no files that end with .json", path);
  // Optima by the ends of the files' names, where a file beside them says some.
  std::map<std::string, std::pair<double, double>> optima;
  // The folder itself, and for one graph or one kind of them the two above.
  std::filesystem::path above = path;
  for (int up = 0; up < 3 && optima.empty(); ++up, above = above.parent_path()) {
    const std::string file = (above / "optimum.csv").string();
    std::error_code ignored;
    if (!std::filesystem::is_regular_file(file, ignored)) continue;
    const Csv csv = read_csv(file);
    for (size_t r = 0; r < csv.rows.size(); ++r)
      optima[lower(csv.text(r, "graph"))] = {
          csv.number(r, "optimum_ms_per_sample"),
          csv.has("seconds_of_their_exact_search") ? csv.number(r, "seconds_of_their_exact_search") : 0};
  }
  Json rows = Json::array();
  std::string text =
      fmt::format("{:<34}{:>10}{:>10}{:>8}{:>8}{:>9}\n", "graph", "ms", "optimum", "proven", "s", "theirs s");
  bool all_proven = true, all_equal = true;
  double slowest = 0;
  for (const std::string& file : files) {
    std::vector<int64_t> ids;
    const PartitionProblem problem = read_partition(file, ids);
    FoundPartition found;
    try {
      found = partition(problem);
    } catch (Error& error) {
      throw Error(error.code(), file + ": " + error.message());
    }
    std::string name = file.substr(0, file.size() - 5);
    const size_t slash = name.find_last_of('/'),
                 two = slash == std::string::npos || slash == 0 ? slash : name.find_last_of('/', slash - 1);
    if (two != std::string::npos) name = name.substr(two + 1);
    Json row{{"graph", name},
             {"ms", found.ms},
             {"least_ms", found.least_ms},
             {"proven", found.proven},
             {"seconds", found.seconds}};
    const auto known = optima.find(lower(name));
    if (known != optima.end()) {
      row["optimum_ms"] = known->second.first;
      row["their_seconds"] = known->second.second;
      // They are printed with six digits.
      const bool equal = std::abs(found.ms - known->second.first) <= 1e-5 * known->second.first;
      row["equals_optimum"] = equal;
      all_equal &= equal;
    }
    row["nodes"] = problem.nodes.size();
    row["groups"] = found.groups;
    row["ideals"] = found.ideals;
    row["parts_priced"] = found.pairs;
    Json parts = Json::array();
    for (const PartitionPart& part : found.parts) {
      Json nodes = Json::array();
      for (const int i : part.nodes) nodes.push_back(ids[i]);
      parts.push_back({{"host", part.host}, {"ms", part.ms}, {"bytes", part.bytes}, {"nodes", nodes}});
    }
    row["parts"] = parts;
    rows.push_back(row);
    all_proven &= found.proven;
    slowest = std::max(slowest, found.seconds);
    text += fmt::format("{:<34}{:>10.4f}{:>10}{:>8}{:>8.3f}{:>9}\n", name, found.ms,
                        known == optima.end() ? "-" : fmt::format("{:.4f}", known->second.first),
                        found.proven ? "yes" : "no", found.seconds,
                        known == optima.end() ? "-" : fmt::format("{:.2f}", known->second.second));
  }
  return Json{{"rows", rows},
              {"all_proven", all_proven},
              {"all_equal_known_optima", all_equal},
              {"slowest_seconds", slowest},
              {"text", text}};
}

}  // namespace whale
