#include "cluster/devices.h"

#include <optional>

#include "base/error.h"
#include "base/text.h"
#include "cluster/device_types.h"
#include "cluster/links_text.h"
#include "cluster/presets.h"

namespace whale {
namespace {

constexpr int64_t kMostDevices = 65536;
constexpr int kMostCores = 65536;
constexpr int64_t kMostDeviceCores = int64_t{1} << 22;  // of all devices together
constexpr const char* kGrammar =
    "expected items joined by commas: cpu:N, cpu@CORES, cpu@CORES*K, ref:N, lag:N, lag_cpu:N, null:N (CORES: 0-3 or "
    "0+2), with their memory cpu-4GB:N, null-80GB:N, or a device type V100-32GB:N; nodes joined by |, Nx before a node "
    "repeats it, ~100Gb/s behind it is its network; or 8xV100-32GB + 8xP100-16GB";

std::optional<DeviceKind> kind_of(std::string_view name) {
  for (size_t k = 0; k < std::size(kDeviceKinds); ++k)
    if (kDeviceKinds[k].name == name) return static_cast<DeviceKind>(k);
  return std::nullopt;
}

// Behind its kind, as cores are: one that is not said is 0.
bool has_number(const DeviceSpec& d) { return traits(d.kind).takes_number && d.index != 0; }

struct Unit {
  std::string_view name;
  int64_t bytes;
};
constexpr Unit kUnits[] = {
    {"TB", 1000'000'000'000},  {"GB", 1000'000'000}, {"MB", 1000'000}, {"KB", 1000},     {"kB", 1000},
    {"TiB", int64_t{1} << 40}, {"GiB", 1 << 30},     {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}};

// "80GB": in the largest unit that divides it.
std::string memory_text(int64_t bytes) {
  const Unit* best = &kUnits[std::size(kUnits) - 1];
  for (const Unit& unit : kUnits)
    if (bytes % unit.bytes == 0 && unit.bytes > best->bytes) best = &unit;
  return fmt::format("{}{}", bytes / best->bytes, best->name);
}

struct Item {
  std::string_view text;
  [[noreturn]] void fail(std::string_view what) const {
    throw invalid("device list: item '{}': {}; {}", brief(text), what, kGrammar);
  }
  // `what` shows a part of the item: of a long one, nothing else.
  [[noreturn]] void fail_naming(std::string_view what) const {
    if (text.size() <= 160) fail(what);
    throw invalid("device list: {}; {}", what, kGrammar);
  }
  [[noreturn]] void fail_kind(std::string_view name) const {
    const std::string kinds = fmt::format("'{}' is not a kind or type of device", brief(name, 40));
    const std::string types = no_device_type(name);
    fail_naming(kinds + types.substr(types.find_first_of(",;")));
  }
  int64_t number(std::string_view digits, int64_t least, int64_t most) const {
    const std::optional<int64_t> value = whole_number(digits);
    if (!value && !digits.empty() && digits.find_first_not_of("0123456789") == digits.npos)
      fail_naming(fmt::format("{} is outside {}..{}", brief(digits, 40), least, most));
    if (!value) fail_naming(fmt::format("'{}' is not a number", brief(digits, 40)));
    if (*value < least || *value > most) fail(fmt::format("{} is outside {}..{}", *value, least, most));
    return *value;
  }
  // "80GB"
  int64_t memory(std::string_view size) const {
    const size_t digits = std::min(size.find_first_not_of("0123456789"), size.size());
    for (const Unit& unit : kUnits)
      if (unit.name == size.substr(digits))
        return number(size.substr(0, digits), 1, kMostDeviceMemory / unit.bytes) * unit.bytes;
    const bool decimal = digits > 0 && digits < size.size() && size[digits] == '.';
    fail_naming(fmt::format("'{}' is no amount of memory such as 80GB, 512MiB{}", brief(size, 40),
                            decimal ? ": a whole number is expected; take a smaller unit" : ""));
  }
  // "0-3+8": ranges joined by +.
  std::vector<int> cores(std::string_view list) const {
    std::vector<int> out;
    for (size_t at = 0; at <= list.size();) {
      const size_t plus = std::min(list.find('+', at), list.size());
      const std::string_view part = list.substr(at, plus - at);
      const size_t dash = part.find('-');
      const int64_t first = number(part.substr(0, dash), 0, kMostCores);
      const int64_t last = dash == part.npos ? first : number(part.substr(dash + 1), 0, kMostCores);
      if (last < first) fail_naming(fmt::format("the range {} runs backwards", brief(part, 40)));
      if (std::ssize(out) + last - first >= kMostCores) fail(fmt::format("it names more than {} cores", kMostCores));
      for (int64_t c = first; c <= last; ++c) out.push_back(static_cast<int>(c));
      at = plus + 1;
    }
    return out;
  }
};

// Run i of n over the cores: the first ones get one more; more devices than cores: in turn.
std::vector<int> share_of(const std::vector<int>& cores, int64_t i, int64_t n) {
  const auto have = static_cast<int64_t>(cores.size());
  if (have == 0) return {};
  if (n > have) return {cores[i % have]};
  const int64_t size = have / n, more = have % n;
  const int64_t begin = i * size + std::min(i, more), count = size + (i < more ? 1 : 0);
  return {cores.begin() + begin, cores.begin() + begin + count};
}

void parse_item(const Item& item, const std::vector<int>& cores, std::vector<DeviceSpec>& out) {
  const size_t mark = item.text.find_first_of(":@");
  const std::string_view name = item.text.substr(0, mark), kind = name.substr(0, name.find('-'));
  const bool at = mark != item.text.npos && item.text[mark] == '@';
  std::string_view rest = mark == item.text.npos ? std::string_view("1") : item.text.substr(mark + 1);
  if (const DeviceType* type = find_device_type(name)) {
    if (at) item.fail(fmt::format("'{}' devices have no cores to choose", name));
    out.insert(out.end(), static_cast<size_t>(item.number(rest, 1, kMostDevices)), device_of(*type));
    return;
  }
  if (kind == "cuda") throw unimplemented("device list: item '{}': this build has no CUDA back end", brief(item.text));
  const std::optional<DeviceKind> of = kind_of(kind);
  if (!of) item.fail_kind(name.substr(0, name.find('+')));
  const int64_t memory = kind.size() < name.size() ? item.memory(name.substr(kind.size() + 1)) : 0;
  const auto [takes_cores, takes_number] = std::pair(traits(*of).takes_cores, traits(*of).takes_number);
  if (at && !takes_cores && !takes_number) item.fail(fmt::format("'{}' devices have no cores to choose", kind));
  if (at) {
    const size_t star = rest.find('*');
    const int64_t count = star == rest.npos ? 1 : item.number(rest.substr(star + 1), 1, kMostDevices);
    if (takes_number) {
      const auto number = static_cast<int>(item.number(rest.substr(0, star), 0, INT32_MAX));
      out.insert(out.end(), static_cast<size_t>(count),
                 {.kind = *of, .cores = {}, .index = number, .memory_bytes = memory});
      return;
    }
    const std::vector<int> list = item.cores(rest.substr(0, star));
    if (count * std::ssize(list) > kMostDeviceCores)
      item.fail(fmt::format("{} devices of {} cores each are more than {} cores together", count, list.size(),
                            kMostDeviceCores));
    for (int64_t i = 0; i < count; ++i)
      out.push_back({.kind = *of, .cores = list, .named = true, .memory_bytes = memory});
    return;
  }
  const int64_t count = item.number(rest, 1, kMostDevices);
  for (int64_t i = 0; i < count; ++i)
    out.push_back(
        {.kind = *of, .cores = takes_cores ? share_of(cores, i, count) : std::vector<int>{}, .memory_bytes = memory});
}

// "16xnull:8": 16, "null:8".
std::pair<int64_t, std::string_view> repeated(std::string_view node) {
  const size_t digits = std::min(node.find_first_not_of("0123456789"), node.size());
  if (digits == 0 || digits == node.size() || node[digits] != 'x') return {1, node};
  return {Item{node}.number(node.substr(0, digits), 1, kMostDevices), node.substr(digits + 1)};
}

std::vector<DeviceSpec> parse_node(std::string_view node, std::string_view text, const std::vector<int>& cores) {
  std::vector<DeviceSpec> out;
  for (size_t at = 0; at <= node.size();) {
    const size_t comma = std::min(node.find(',', at), node.size());
    const Item item{node.substr(at, comma - at)};
    if (item.text.empty()) throw invalid("device list '{}' has an empty item; {}", brief(text), kGrammar);
    parse_item(item, cores, out);
    if (out.size() > static_cast<size_t>(kMostDevices))
      throw invalid("device list '{}' names more than {} devices", brief(text), kMostDevices);
    at = comma + 1;
  }
  return out;
}

std::string core_list(const std::vector<int>& cores) {
  std::string text;
  for (size_t i = 0; i < cores.size();) {
    size_t j = i;
    while (j + 1 < cores.size() && cores[j + 1] == cores[j] + 1) ++j;
    if (!text.empty()) text += '+';
    text += i == j ? fmt::format("{}", cores[i]) : fmt::format("{}-{}", cores[i], cores[j]);
    i = j + 1;
  }
  return text;
}

}  // namespace

std::vector<DeviceSpec> parse_devices(std::string_view text, const std::vector<int>& cores) {
  std::vector<DeviceSpec> out;
  std::string packed;
  for (const char c : text)
    if (c != ' ' && c != '\t') packed += c;
  if (packed.empty()) throw invalid("device list is empty; {}", kGrammar);
  if (const std::optional<std::string> list = list_of_preset(packed)) packed = *list;
  int node = 0;
  for (size_t at = 0; at <= packed.size();) {
    const size_t bar = std::min(packed.find('|', at), packed.size());
    const auto [count, whole_node] = repeated(std::string_view(packed).substr(at, bar - at));
    const size_t mark = whole_node.find('~');
    std::vector<DeviceSpec> devices = parse_node(whole_node.substr(0, mark), text, cores);
    if (mark != whole_node.npos) {
      const NodeLinks links = parse_links(whole_node.substr(mark + 1));
      for (DeviceSpec& d : devices) links.put(d.figures);
    }
    if (static_cast<int64_t>(out.size()) + count * static_cast<int64_t>(devices.size()) > kMostDevices)
      throw invalid("device list '{}' names more than {} devices", brief(text), kMostDevices);
    int64_t of_node = 0;
    for (const DeviceSpec& device : devices) of_node += std::ssize(device.cores);
    if (count * of_node > kMostDeviceCores)
      throw invalid("device list '{}' names {} cores in {} nodes each, more than {} together", brief(text), of_node,
                    count, kMostDeviceCores);
    for (int64_t k = 0; k < count; ++k, ++node)
      for (DeviceSpec device : devices) device.node = node, out.push_back(std::move(device));
    at = bar + 1;
  }
  return out;
}

std::vector<DeviceSpec> parse_devices(std::string_view text) { return parse_devices(text, usable_cores()); }

DeviceSpec device_of(const DeviceType& type) {
  return {.kind = DeviceKind::kNull,
          .cores = {},
          .memory_bytes = static_cast<int64_t>(type.memory_bytes),
          .type = type.name,
          .figures = figures_of(type)};
}

std::string to_string(const DeviceSpec& device) {
  std::string text = device.type.empty() ? name_of(device.kind) : device.type;
  if (device.memory_bytes && device.type.empty()) text += "-" + memory_text(device.memory_bytes);
  if (!device.cores.empty()) text += "@" + core_list(device.cores);
  if (has_number(device)) text += fmt::format("@{}", device.index);
  return text;
}

namespace {

std::string node_text(const DeviceSpec* begin, const DeviceSpec* end) {
  std::string text;
  for (const DeviceSpec *i = begin, *j = begin; i < end; i = j) {
    while (j < end && *j == *i) ++j;
    const bool pinned = !i->cores.empty() || has_number(*i);
    if (!text.empty()) text += ',';
    text += to_string(*i);
    if (!pinned) text += fmt::format(":{}", j - i);
    if (pinned && j - i > 1) text += fmt::format("*{}", j - i);
  }
  if (begin < end) text += links_text(*begin);
  return text;
}

}  // namespace

std::string to_string(const std::vector<DeviceSpec>& devices) {
  std::vector<std::pair<std::string, int>> nodes;  // text, how many of it
  for (size_t i = 0, j = 0; i < devices.size(); i = j) {
    while (j < devices.size() && devices[j].node == devices[i].node) ++j;
    std::string text = node_text(devices.data() + i, devices.data() + j);
    if (nodes.empty() || nodes.back().first != text) nodes.emplace_back(std::move(text), 0);
    ++nodes.back().second;
  }
  std::string out;
  for (const auto& [text, count] : nodes)
    out += fmt::format("{}{}{}", out.empty() ? "" : "|", count > 1 ? fmt::format("{}x", count) : "", text);
  return out;
}

std::string devices_of_file(std::string_view content) {
  std::string out;
  for (size_t at = 0; at < content.size();) {
    const size_t end = std::min(content.find('\n', at), content.size());
    std::string line;
    for (const char c : content.substr(at, end - at)) {
      if (c == '#') break;
      if (c != ' ' && c != '\t' && c != '\r') line += c;
    }
    if (const std::optional<std::string> list = list_of_preset(line)) line = *list;
    if (!line.empty()) out += (out.empty() ? "" : "|") + line;
    at = end + 1;
  }
  return out;
}

}  // namespace whale
