#include "cluster/cluster_file.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <map>
#include <optional>
#include <set>

#include "base/error.h"
#include "base/json_input.h"
#include "base/text.h"
#include "cluster/device_types.h"
#include "cluster/devices.h"
#include "cluster/links_text.h"

namespace whale {
namespace {

constexpr int64_t kMostDevices = 65536;
constexpr size_t kMostLinks = 1 << 20, kMostLinksOfDevices = 1 << 22;  // of pairs of nodes; that devices hold together
constexpr double kLeastRate = 1e3, kMostRate = 1e18;                   // FLOP/s or bytes/s: no device is beyond
constexpr double kLeastMemory = 1e6;

// A value with where it is: a JSON pointer.
struct Place {
  const Json* json;
  std::string where;

  std::string_view name() const { return where.empty() ? std::string_view("the file") : std::string_view(where); }
  [[noreturn]] void bad(std::string_view expected) const {
    throw invalid("{} is {}, expected {}", name(), brief(text_of(*json), 60), expected);
  }
  std::optional<Place> find(const char* member) const {
    const auto it = json->find(member);
    if (it == json->end()) return std::nullopt;
    return Place{&*it, where + pointer_part(std::string_view(member))};
  }
  void only(std::initializer_list<std::string_view> names) const {
    if (!json->is_object()) bad("an object");
    for (const auto& [member, value] : json->items())
      if (std::ranges::find(names, member) == names.end())
        throw invalid("{}: '{}' is not known; there are {}", name(), brief(member, 40), fmt::join(names, ", "));
  }
  std::vector<Place> list() const {
    if (!json->is_array() || json->empty()) bad("a list with something in it");
    std::vector<Place> out;
    for (size_t k = 0; k < json->size(); ++k) out.push_back({&(*json)[k], where + pointer_part(k)});
    return out;
  }
  double figure(double least, double most) const {
    const double value = json->is_number() ? json->get<double>() : NAN;
    if (!std::isfinite(value) || value < least || value > most) bad(fmt::format("a number from {} to {}", least, most));
    return value;
  }
  int64_t count(int64_t most, int64_t least = 1) const {
    const double value = json->is_number() ? json->get<double>() : NAN;
    if (!(value >= static_cast<double>(least) && value <= static_cast<double>(most)) || value != std::floor(value))
      bad(fmt::format("a whole number from {} to {}", least, most));
    return static_cast<int64_t>(value);
  }
  std::string text() const {
    if (!json->is_string()) bad("a text");
    return json->get<std::string>();
  }
  // What `read` makes of its text, with the place where it cannot.
  template <class Read>
  auto as(Read read) const {
    const std::string mine = text();
    try {
      return read(mine);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{}: {}", where, e.message()));
    }
  }
};

double rate(const Place& at) { return at.figure(kLeastRate, kMostRate); }

// "800Gb/s@5us", or both figures.
LinkRates link(const Place& at) {
  if (at.json->is_string()) return at.as(parse_rate);
  at.only({"bytes_per_second", "latency_seconds"});
  const auto bytes = at.find("bytes_per_second"), latency = at.find("latency_seconds");
  if (!bytes) at.bad("bytes_per_second in it");
  return {rate(*bytes), latency ? latency->figure(0, kMostLatency) : kUsualLatency};
}

// A rate, or one for each size that was measured: the best.
double best_of(const Place& at) {
  if (at.json->is_number()) return rate(at);
  if (!at.json->is_object() || at.json->empty()) at.bad("a rate, or rates by size");
  double best = 0;
  for (const auto& [size, value] : at.json->items())
    best = std::max(best, rate({&value, at.where + pointer_part(size)}));
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
  if (const auto price = at.find("price_per_hour")) d.figures.price_per_hour = price->figure(1e-9, 1e9);
  if (const auto memory = at.find("memory_bytes"))
    d.memory_bytes = static_cast<int64_t>(memory->figure(kLeastMemory, static_cast<double>(kMostDeviceMemory)));
}

void check_number(int64_t more, const std::vector<DeviceSpec>& there) {
  if (std::ssize(there) + more > kMostDevices) throw invalid("it has more than {} devices", kMostDevices);
}

void read_devices(const Place& at, std::vector<DeviceSpec>& out) {
  at.only({"device", "type", "count", "memory_bytes", "flops_per_second", "bytes_per_second", "seconds_per_op", "host",
           "price_per_hour"});
  const auto device = at.find("device"), type = at.find("type");
  if (device.has_value() == type.has_value())
    at.bad("either a device such as \"cpu@0\" or a type such as \"V100-32GB\"");
  const auto of_type = [](const std::string& text) {
    if (const DeviceType* known = find_device_type(text)) return device_of(*known);
    throw invalid("{}", no_device_type(text));
  };
  const auto of_list = [&](const std::string& text) {
    if (text.find_first_of("|~+, ") != text.npos && text.find("@") == text.npos)
      device->bad("one device, such as cpu@0");
    const std::vector<DeviceSpec> list = parse_devices(text);
    if (list.size() != 1) device->bad("one device; `count` says how many there are");
    return list[0];
  };
  DeviceSpec one = type ? type->as(of_type) : device->as(of_list);
  read_figures(at, one);
  const auto count = at.find("count");
  const int64_t times = count ? count->count(kMostDevices) : 1;
  check_number(times, out);
  out.insert(out.end(), static_cast<size_t>(times), one);
}

// Of a text such as "cpu@0~1Gb/s": what it says connects its node, which says nothing else of that.
void take_links(const Place& device, NodeLinks& links, const Place& node) {
  const auto named = device.find("device");
  const std::string text = named ? named->text() : "";
  const size_t mark = text.find('~');
  if (mark == text.npos) return;
  const auto parse = [](const std::string& whole) {
    std::string packed;
    for (const char c : whole.substr(whole.find('~') + 1))
      if (c != ' ' && c != '\t') packed += c;
    return parse_links(packed);
  };
  const NodeLinks mine = named->as(parse);
  const auto take = [&](LinkRates NodeLinks::*which, const char* name) {
    if ((mine.*which).bytes_per_second <= 0) return;
    if ((links.*which).bytes_per_second > 0 && links.*which != mine.*which)
      named->bad(fmt::format("the same {} as the rest of {} has, or none: it is the node's", name, node.name()));
    links.*which = mine.*which;
  };
  take(&NodeLinks::network, "network"), take(&NodeLinks::inside, "links inside");
}

// Sites, by name, in the order in which nodes name them first.
class Zones {
 public:
  explicit Zones(const Place& file) : known_(file.find("zones")) {
    if (!known_) return;
    if (!known_->json->is_object() || known_->json->empty()) known_->bad("an object with a zone in it");
    for (const auto& [name, value] : known_->json->items()) {
      const Place zone{&value, known_->where + pointer_part(brief(name, 40))};
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
        throw invalid("{} has no nodes; a zone is the zone of some node",
                      known_->where + pointer_part(brief(name, 40)));
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
    size_t pairs = 0;
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
      if (pairs += one.size() * other.size(); pairs > kMostLinks)
        between->bad(fmt::format("at most {} pairs of nodes with links of their own; networks need none", kMostLinks));
      for (const int a : one)
        for (const int b : other) {
          if (a == b) continue;
          links[a].push_back({b, rates});
          if (names.first != names.second) links[b].push_back({a, rates});
        }
    }
    for (auto& [_, mine] : links) std::ranges::sort(mine, {}, &NodeLink::place);
    size_t held = 0;
    for (DeviceSpec& d : devices) {
      d.place = d.node;
      const auto mine = links.find(d.place);
      if (mine == links.end()) continue;
      if (held += mine->second.size(); held > kMostLinksOfDevices)
        throw invalid("{}: its devices have more than {} links together; networks need none", list_->where,
                      kMostLinksOfDevices);
      d.links = mine->second;
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
    for (const Place& d : list->list()) take_links(d, links, node);
    for (DeviceSpec& d : devices) {
      links.put(d.figures);
      if (d.figures.network.bytes_per_second <= 0 && connected) connected = false, first_alone = node.where;
    }
    zones.put(node, devices);
    const auto count = node.find("count");
    const int64_t times = count ? count->count(kMostDevices) : 1;
    check_number(times * std::ssize(devices), out);
    pairs.see(node, nodes, times);
    for (int64_t k = 0; k < times; ++k, ++nodes)
      for (DeviceSpec d : devices) d.node = nodes, out.push_back(std::move(d));
  }
  zones.check();
  pairs.put(out);
  if (nodes > 1 && !connected)
    throw invalid(
        "{} has no network, and there are {} nodes; say what connects it, such as "
        "\"network\": \"100Gb/s@10us\"",
        first_alone, nodes);
  return out;
}

// To the four digits that a measurement has, so that the text of a device list, which is exact, stays short.
double four_digits(double measured) {
  const std::string text = fmt::format("{:.4g}", measured);
  std::from_chars(text.data(), text.data() + text.size(), measured);
  return measured;
}

// What a probe measured: devices of one node, or of a rank each. Links inside: the slowest gather.
std::vector<DeviceSpec> of_probe(const Place& file) {
  std::vector<DeviceSpec> out;
  const auto list = file.find("devices");
  if (!list) file.bad("devices in it");
  for (const Place& at : list->list()) {
    if (!at.json->is_object()) at.bad("an object");
    const auto device = at.find("device_text");
    if (!device) at.bad("device_text in it, as a newer `whale devices --probe` writes it");
    std::vector<DeviceSpec> one = device->as([](const std::string& text) { return parse_devices(text); });
    if (one.size() != 1) device->bad("one device");
    read_figures(at, one[0]);
    if (const auto node = at.find("node")) one[0].node = static_cast<int>(node->count(kMostDevices, 0));
    if (!out.empty() && one[0].node < out.back().node) at.bad("devices in the order of their nodes");
    if (const auto gather = file.find("gather")) {
      const auto [rate, latency] = link(*gather);
      one[0].figures.inside = one[0].figures.network = {four_digits(rate), four_digits(latency)};
    }
    check_number(1, out);
    out.push_back(std::move(one[0]));
  }
  return out;
}

constexpr std::string_view kExpected =
    "expected an object with nodes, {\"nodes\": [{\"devices\": [{\"type\": \"V100-32GB\", \"count\": 8}]}]}, or what "
    "`whale devices --probe -o FILE` wrote; docs/clusters.md shows more";

std::vector<DeviceSpec> read_cluster(std::string_view content) {
  const Json json = parse_json(content);
  const Place file{&json, ""};
  if (file.find("nodes")) return of_nodes(file);
  if (file.find("probe")) return of_probe(file);
  throw invalid("it has neither nodes nor what a probe measured; {}", kExpected);
}

// An editor's mark of UTF-8.
std::string_view without_mark(std::string_view content) {
  constexpr std::string_view kMark = "\xEF\xBB\xBF";
  return content.starts_with(kMark) ? content.substr(kMark.size()) : content;
}

std::string name_of_file(const std::string& path) {
  return path.empty() ? "cluster file" : fmt::format("cluster file '{}'", brief(path));
}

}  // namespace

bool is_cluster_json(std::string_view content) {
  content = without_mark(content);
  const size_t first = content.find_first_not_of(" \t\r\n");
  return first != content.npos && (content[first] == '{' || content[first] == '[');
}

std::vector<DeviceSpec> devices_of_json(std::string_view content, const std::string& path) {
  try {
    return read_cluster(without_mark(content));
  } catch (const Error& e) {
    throw Error(e.code(), fmt::format("{}: {}", name_of_file(path), e.message()));
  }
}

std::vector<DeviceSpec> devices_of_cluster_file(std::string_view content, const std::string& path) {
  if (is_cluster_json(content)) return devices_of_json(content, path);
  content = without_mark(content);
  const std::string name = name_of_file(path);
  if (content.find_first_not_of(" \t\r\n") == content.npos)
    throw invalid("{} is empty; {}; or a device list, a node a line, such as V100-32GB:8", name, kExpected);
  std::optional<Error> whole;
  try {
    const std::string list = devices_of_file(content);
    if (list.empty()) throw invalid("all of its lines are empty or comments, expected a node a line");
    return parse_devices(list);
  } catch (const Error& e) {
    whole = e;
  }
  int line = 0;  // that is wrong by itself
  for (size_t at = 0; at < content.size();) {
    const size_t end = std::min(content.find('\n', at), content.size());
    ++line;
    try {
      const std::string node = devices_of_file(content.substr(at, end - at));
      if (!node.empty()) (void)parse_devices(node);
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("{}, line {}: {}", name, line, e.message()));
    }
    at = end + 1;
  }
  throw Error(whole->code(), fmt::format("{}: {}", name, whole->message()));
}

}  // namespace whale
