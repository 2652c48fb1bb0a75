#include "cluster/cluster_file.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/json.h"
#include "base/text.h"
#include "cluster/devices.h"
#include "cluster/links_text.h"

namespace whale {
namespace {

constexpr int64_t kMostDevices = 65536;
constexpr double kLeastRate = 1e3, kMostRate = 1e18;  // FLOP/s or bytes/s: no device is beyond
constexpr double kLeastMemory = 1e6;
constexpr int kMostLevels = 64;  // of lists and objects in each other

// A value with where it is.
struct Place {
  const Json* json;
  std::string where;

  [[noreturn]] void bad(std::string_view expected) const {
    throw invalid("cluster file: {} is {}, expected {}", where.empty() ? "the file" : where, brief(text_of(*json), 60),
                  expected);
  }
  std::optional<Place> find(const char* name) const {
    const auto it = json->find(name);
    if (it == json->end()) return std::nullopt;
    return Place{&*it, where.empty() ? name : where + "." + name};
  }
  void only(std::initializer_list<std::string_view> names) const {
    if (!json->is_object()) bad("an object");
    for (const auto& [name, value] : json->items())
      if (std::ranges::find(names, name) == names.end())
        throw invalid("cluster file: {}{}'{}' is not known; there are {}", where, where.empty() ? "" : ": ",
                      brief(name, 40), fmt::join(names, ", "));
  }
  std::vector<Place> list() const {
    if (!json->is_array() || json->empty()) bad("a list with something in it");
    std::vector<Place> out;
    for (size_t k = 0; k < json->size(); ++k) out.push_back({&(*json)[k], fmt::format("{}[{}]", where, k)});
    return out;
  }
  double figure(double least, double most) const {
    if (!json->is_number()) bad("a number");
    const double value = json->get<double>();
    if (!std::isfinite(value) || value < least || value > most) bad(fmt::format("a number from {} to {}", least, most));
    return value;
  }
  int64_t count(int64_t most) const {
    if (!json->is_number_integer()) bad("a whole number");
    return static_cast<int64_t>(figure(1, static_cast<double>(most)));
  }
  std::string text() const {
    if (!json->is_string()) bad("a text");
    return json->get<std::string>();
  }
};

double rate(const Place& at) { return at.figure(kLeastRate, kMostRate); }

// "800Gb/s@5us", or both figures.
LinkRates link(const Place& at) {
  if (at.json->is_string()) return parse_rate(at.text());
  at.only({"bytes_per_second", "latency_seconds"});
  const auto bytes = at.find("bytes_per_second"), latency = at.find("latency_seconds");
  if (!bytes) at.bad("bytes_per_second in it");
  return {rate(*bytes), latency ? latency->figure(0, 3600) : 0};
}

// A rate, or one for each size that was measured: the best.
double best_of(const Place& at) {
  if (at.json->is_number()) return rate(at);
  if (!at.json->is_object() || at.json->empty()) at.bad("a rate, or rates by size");
  double best = 0;
  for (const auto& [size, value] : at.json->items()) best = std::max(best, rate({&value, at.where + "." + size}));
  return best;
}

void read_figures(const Place& at, DeviceSpec& d) {
  if (const auto flops = at.find("flops_per_second")) {
    flops->only({"f32", "bf16", "f16"});
    if (const auto f32 = flops->find("f32")) d.figures.f32_flops_per_second = best_of(*f32);
    if (const auto f16 = flops->find("f16")) d.figures.half_flops_per_second = best_of(*f16);
    if (const auto bf16 = flops->find("bf16")) d.figures.bf16_flops_per_second = best_of(*bf16);
    if (!d.figures.known()) flops->bad("a rate of f32 in it");
  }
  if (const auto bytes = at.find("bytes_per_second")) d.figures.bytes_per_second = rate(*bytes);
  if (const auto start = at.find("seconds_per_op")) d.figures.seconds_per_op = start->figure(0, 1);
  if (const auto host = at.find("host")) d.figures.host = link(*host);
  if (const auto price = at.find("price_per_hour")) d.figures.price_per_hour = price->figure(0, 1e9);
  if (const auto memory = at.find("memory_bytes"))
    d.memory_bytes = static_cast<int64_t>(memory->figure(kLeastMemory, static_cast<double>(kMostDeviceMemory)));
}

void read_devices(const Place& at, std::vector<DeviceSpec>& out) {
  at.only({"device", "type", "count", "memory_bytes", "flops_per_second", "bytes_per_second", "seconds_per_op", "host",
           "price_per_hour"});
  const auto device = at.find("device"), type = at.find("type");
  if (device.has_value() == type.has_value())
    at.bad("either a device such as \"cpu@0\" or a type such as \"V100-32GB\"");
  const std::string text = device ? device->text() : type->text();
  if (text.find_first_of("|~+, ") != text.npos && text.find("@") == text.npos)
    (device ? device : type)->bad("one device, such as cpu@0, or a type of devices");
  std::vector<DeviceSpec> one = parse_devices(text);
  if (one.size() != 1) at.bad("one device; `count` says how many there are");
  if (type && one[0].type.empty()) type->bad("a type of devices, such as V100-32GB");
  read_figures(at, one[0]);
  const auto count = at.find("count");
  out.insert(out.end(), static_cast<size_t>(count ? count->count(kMostDevices) : 1), one[0]);
}

// Sites, by name, in the order in which nodes name them first.
class Zones {
 public:
  explicit Zones(const Place& file) : known_(file.find("zones")) {
    if (!known_) return;
    if (!known_->json->is_object() || known_->json->empty()) known_->bad("an object with a zone in it");
    for (const auto& [name, value] : known_->json->items()) {
      const Place zone{&value, known_->where + "." + brief(name, 40)};
      zone.only({"network"});
      const auto network = zone.find("network");
      if (!network) zone.bad("a network in it: what connects it with other zones, such as \"5Gb/s@30ms\"");
      across_[name] = link(*network);
    }
  }

  // Of a node; without zones all are in one.
  void put(const Place& node, std::vector<DeviceSpec>& devices) {
    const auto named = node.find("zone");
    if (!named && !known_) return;
    if (!named) node.bad("a zone in it, since the file has zones");
    const std::string name = named->text();
    const auto across = across_.find(name);
    if (across == across_.end()) named->bad("the name of one of the file's zones");
    if (const auto at = std::ranges::find(order_, name); at != order_.end() && at + 1 != order_.end())
      named->bad("the zone of the node before it, or one that no node had: the nodes of a zone are listed together");
    if (order_.empty() || order_.back() != name) order_.push_back(name);
    for (DeviceSpec& d : devices) d.zone = static_cast<int>(order_.size()) - 1, d.figures.across = across->second;
  }

  void check() const {
    for (const auto& [name, across] : across_)
      if (std::ranges::find(order_, name) == order_.end())
        throw invalid("cluster file: zones.{} has no nodes", brief(name, 40));
  }

 private:
  const std::optional<Place> known_;
  std::map<std::string, LinkRates> across_;
  std::vector<std::string> order_;
};

// Pairs of nodes that have something else between them than their networks.
class PairLinks {
 public:
  explicit PairLinks(const Place& file) : list_(file.find("links")) {}

  // `nodes` of them, one after another, from this place.
  void see(const Place& node, int place, int64_t nodes) {
    const auto name = node.find("name");
    if (!name) return;
    const std::string text = name->text();
    if (text.empty()) name->bad("a name");
    std::vector<int>& mine = named_[text];
    if (!mine.empty() && list_) name->bad("a name that no other node has, since the file has links");
    for (int64_t k = 0; k < nodes; ++k) mine.push_back(place + static_cast<int>(k));
  }

  void put(std::vector<DeviceSpec>& devices) const {
    if (!list_) return;
    std::map<int, std::vector<NodeLink>> links;
    std::set<std::pair<std::string, std::string>> seen;
    for (const Place& at : list_->list()) {
      at.only({"between", "network"});
      const auto between = at.find("between"), network = at.find("network");
      if (!between || !network) at.bad("between and network in it");
      const std::vector<Place> ends = between->list();
      if (ends.size() != 2) between->bad("the names of two nodes");
      std::pair<std::string, std::string> names{ends[0].text(), ends[1].text()};
      if (names.first > names.second) std::swap(names.first, names.second);
      const std::vector<int>&one = nodes_of(ends[0]), &other = nodes_of(ends[1]);
      if (names.first == names.second && one.size() < 2)
        between->bad("two nodes; what is inside of one is said there (inside)");
      if (!seen.insert(names).second) between->bad("two nodes that have no link yet");
      const LinkRates rates = link(*network);
      for (const int a : one)
        for (const int b : other) {
          if (a == b) continue;
          links[a].push_back({b, rates});
          if (names.first != names.second) links[b].push_back({a, rates});
        }
    }
    for (auto& [_, mine] : links) std::ranges::sort(mine, {}, &NodeLink::place);
    for (DeviceSpec& d : devices) {
      d.place = d.node;
      if (const auto mine = links.find(d.place); mine != links.end()) d.links = mine->second;
    }
  }

 private:
  const std::vector<int>& nodes_of(const Place& name) const {
    const auto at = named_.find(name.text());
    if (at == named_.end()) name.bad("the name of one of the file's nodes");
    return at->second;
  }

  const std::optional<Place> list_;
  std::map<std::string, std::vector<int>> named_;  // places
};

std::vector<DeviceSpec> of_nodes(const Place& file) {
  file.only({"nodes", "zones", "links"});
  Zones zones(file);
  PairLinks pairs(file);
  std::vector<DeviceSpec> out;
  int nodes = 0;
  bool connected = true;
  std::string first_alone;
  for (const Place& node : file.find("nodes")->list()) {
    node.only({"name", "count", "devices", "inside", "network", "zone"});
    std::vector<DeviceSpec> devices;
    const auto list = node.find("devices");
    if (!list) node.bad("devices in it");
    for (const Place& d : list->list()) read_devices(d, devices);
    NodeLinks links;
    if (const auto inside = node.find("inside")) links.inside = link(*inside);
    if (const auto network = node.find("network")) links.network = link(*network);
    for (DeviceSpec& d : devices) {
      links.put(d.figures);
      if (d.figures.network.bytes_per_second <= 0 && connected) connected = false, first_alone = node.where;
    }
    zones.put(node, devices);
    const auto count = node.find("count");
    const int64_t times = count ? count->count(kMostDevices) : 1;
    if (std::ssize(out) + times * std::ssize(devices) > kMostDevices)
      throw invalid("cluster file: it has more than {} devices", kMostDevices);
    pairs.see(node, nodes, times);
    for (int64_t k = 0; k < times; ++k, ++nodes)
      for (DeviceSpec d : devices) d.node = nodes, out.push_back(std::move(d));
  }
  zones.check();
  pairs.put(out);
  if (nodes > 1 && !connected)
    throw invalid(
        "cluster file: {} has no network, and there are {} nodes; say what connects it, such as "
        "\"network\": \"100Gb/s@10us\"",
        first_alone, nodes);
  return out;
}

// What a probe measured: devices of one node, or of a rank each. Links inside: the slowest gather.
std::vector<DeviceSpec> of_probe(const Place& file) {
  std::vector<DeviceSpec> out;
  const auto list = file.find("devices");
  if (!list) file.bad("devices in it");
  for (const Place& at : list->list()) {
    const auto device = at.find("device_text");
    if (!device) at.bad("device_text in it, as a newer `whale devices --probe` writes it");
    std::vector<DeviceSpec> one = parse_devices(device->text());
    if (one.size() != 1) device->bad("one device");
    read_figures(at, one[0]);
    if (const auto node = at.find("node")) one[0].node = static_cast<int>(node->figure(0, kMostDevices));
    if (const auto gather = file.find("gather")) one[0].figures.inside = one[0].figures.network = link(*gather);
    out.push_back(std::move(one[0]));
  }
  return out;
}

}  // namespace

bool is_cluster_json(std::string_view content) {
  const size_t first = content.find_first_not_of(" \t\r\n");
  return first != content.npos && content[first] == '{';
}

// Readers of JSON go as deep as the text does.
static void check_levels(std::string_view content) {
  int levels = 0;
  bool quoted = false;
  for (size_t i = 0; i < content.size(); ++i) {
    const char c = content[i];
    if (quoted && c == '\\') ++i;
    if (c == '"') quoted = !quoted;
    if (quoted) continue;
    levels += c == '[' || c == '{' ? 1 : c == ']' || c == '}' ? -1 : 0;
    if (levels > kMostLevels)
      throw invalid("cluster file: lists and objects are {} deep, expected nodes with devices", levels);
  }
}

std::vector<DeviceSpec> devices_of_json(std::string_view content) {
  check_levels(content);
  std::vector<std::set<std::string>> names;  // of the objects that are open
  std::string twice;
  const auto look = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) names.emplace_back();
    if (event == Json::parse_event_t::object_end) names.pop_back();
    if (event == Json::parse_event_t::key && !names.back().insert(parsed.get<std::string>()).second)
      twice = parsed.get<std::string>();
    return true;
  };
  const Json json = Json::parse(content, look, false);
  if (!twice.empty()) throw invalid("cluster file: '{}' is given twice in one object", brief(twice, 40));
  if (json.is_discarded()) throw invalid("cluster file: it begins like JSON and is none");
  const Place file{&json, ""};
  if (file.find("nodes")) return of_nodes(file);
  if (file.find("probe")) return of_probe(file);
  throw invalid("cluster file: it has neither nodes nor what a probe measured; docs/clusters.md shows one");
}

}  // namespace whale
