#include "cluster/presets.h"

#include <algorithm>

#include "base/error.h"
#include "base/text.h"
#include "cluster/device_types.h"

namespace whale {
namespace {

std::string_view take_digits(std::string_view& text) {
  const size_t n = std::min(text.find_first_not_of("0123456789"), text.size());
  const std::string_view digits = text.substr(0, n);
  text.remove_prefix(n);
  return digits;
}

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

// "60nodesof8xA100-80GB,800Gb/s" as "60xA100-80GB:8~800Gb/s".
std::optional<std::string> node_of(std::string_view group) {
  std::string_view number = take_digits(group), nodes = "1";
  if (number.empty()) return std::nullopt;
  const bool words = take(group, "nodesof") || take(group, "nodeof");
  if (words) {
    nodes = number, number = take_digits(group);
    if (number.empty()) return std::nullopt;
  }
  if (!take(group, "x")) return std::nullopt;
  const size_t comma = std::min(group.find(','), group.size());
  const std::string_view name = group.substr(0, comma);
  if (find_device_type(name) == nullptr) {
    if (words) throw invalid("device list: {}", no_device_type(name));
    return std::nullopt;
  }
  std::string out = std::string(nodes) + "x" + std::string(group.substr(0, comma)) + ":" + std::string(number);
  if (comma < group.size()) {
    out += "~";
    for (const char c : group.substr(comma + 1)) out += c == ',' ? '~' : c;
  }
  return out;
}

}  // namespace

std::optional<std::string> list_of_preset(std::string_view packed) {
  std::string out;
  for (size_t at = 0; at <= packed.size();) {
    const size_t plus = std::min(packed.find('+', at), packed.size());
    const std::optional<std::string> node = node_of(packed.substr(at, plus - at));
    if (!node && !out.empty()) {
      std::string_view name = packed.substr(at, plus - at);
      if (!take_digits(name).empty() && take(name, "x") && !name.empty())
        throw invalid("device list: {}", no_device_type(name.substr(0, name.find(','))));
      throw invalid(
          "device list: '{}' stands beside NxTYPE and is none: expected such as 8xV100-32GB, of the types of "
          "docs/clusters.md",
          brief(packed.substr(at, plus - at), 40));
    }
    if (!node) return std::nullopt;
    out += (out.empty() ? "" : "|") + *node;
    at = plus + 1;
  }
  return out;
}

}  // namespace whale
