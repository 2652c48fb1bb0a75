#include "cluster/host_memory.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/error.h"
#include "cluster/groups.h"

namespace whale {
namespace {

std::optional<uint64_t> number(std::string_view text) {  // "max": none
  text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
  uint64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc{}) return std::nullopt;
  return value;
}

// The number behind a key that begins a line.
std::optional<uint64_t> field(const std::string& text, const std::string& key) {
  const size_t at = text.starts_with(key) ? 0 : text.find("\n" + key);
  if (at == text.npos) return std::nullopt;
  return number(std::string_view(text).substr(at + key.size() + (at > 0 ? 1 : 0)));
}

struct GroupFiles {
  const char *limit, *used, *inactive, *active;  // the last two: of memory.stat
};
constexpr GroupFiles kUnified{"memory.max", "memory.current", "inactive_file ", "active_file "};
constexpr GroupFiles kController{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ",
                                 "total_active_file "};

void lessen(HostMemory& found, const std::vector<std::string>& folders, const GroupFiles& files) {
  for (const std::string& folder : folders) {
    const auto limit = number(read_text(folder + "/" + files.limit));
    const auto used = number(read_text(folder + "/" + files.used));
    if (!limit || !used) continue;
    const std::string stat = read_text(folder + "/memory.stat");
    const uint64_t cache = field(stat, files.inactive).value_or(0) + field(stat, files.active).value_or(0);
    const uint64_t kept = *used - std::min(*used, cache);
    const uint64_t left = *limit - std::min(*limit, kept);
    if (left < found.bytes) found = {left, fmt::format("{}/{} less what is used of it", folder, files.limit)};
  }
}

}  // namespace

HostMemory host_memory(const std::string& meminfo, const std::string& membership, const std::string& mount) {
  HostMemory found;
  if (const auto kib = field(meminfo, "MemAvailable:")) found = {*kib * 1024, "MemAvailable of /proc/meminfo"};
  const GroupFolders groups = group_folders(membership, mount, "memory");
  lessen(found, groups.unified, kUnified);
  lessen(found, groups.controller, kController);
  return found;
}

HostMemory host_memory() {
  return host_memory(read_text("/proc/meminfo"), read_text("/proc/self/cgroup"), "/sys/fs/cgroup");
}

}  // namespace whale
