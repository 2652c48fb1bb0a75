// What this process may use of the machine.
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <thread>

#include "cluster/cores.h"
#include "cluster/devices.h"
#include "cluster/groups.h"

namespace whale {
namespace {

// The smallest limit of these groups; 0: none.
template <class LimitOf>
int smallest_limit(const std::vector<std::string>& folders, LimitOf limit_of) {
  int least = 0;
  for (const std::string& folder : folders)
    if (const int limit = limit_of(folder); limit > 0 && (least == 0 || limit < least)) least = limit;
  return least;
}

}  // namespace

int cores_of_quota(std::string_view text) {
  int64_t quota = 0, period = 0;
  const auto first = std::from_chars(text.data(), text.data() + text.size(), quota);  // "max": no limit
  if (first.ec != std::errc{} || quota <= 0) return 0;
  const char* rest = first.ptr;
  const char* end = text.data() + text.size();
  while (rest != end && (*rest == ' ' || *rest == '\n')) ++rest;
  if (std::from_chars(rest, end, period).ec != std::errc{} || period <= 0) return 0;
  return static_cast<int>(std::max<int64_t>(1, (quota + period - 1) / period));
}

std::vector<int> allowed_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0)
    for (int c = 0; c < CPU_SETSIZE; ++c)
      if (CPU_ISSET(static_cast<size_t>(c), &set)) cores.push_back(c);
  if (cores.empty())
    for (int c = 0; c < static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); ++c) cores.push_back(c);
  return cores;
}

int cores_of_groups(const std::string& membership, const std::string& mount) {
  const GroupFolders folders = group_folders(membership, mount, "cpu");
  const int limit = smallest_limit(
      folders.unified, [](const std::string& folder) { return cores_of_quota(read_text(folder + "/cpu.max")); });
  const int older_limit = smallest_limit(folders.controller, [](const std::string& folder) {
    return cores_of_quota(read_text(folder + "/cpu.cfs_quota_us") + " " + read_text(folder + "/cpu.cfs_period_us"));
  });
  return limit > 0 && older_limit > 0 ? std::min(limit, older_limit) : std::max(limit, older_limit);
}

std::vector<int> usable_cores() {
  std::vector<int> cores = allowed_cores();
  const int limit = cores_of_groups(read_text("/proc/self/cgroup"), "/sys/fs/cgroup");
  if (limit > 0 && static_cast<size_t>(limit) < cores.size()) cores.resize(static_cast<size_t>(limit));
  return cores;
}

}  // namespace whale
