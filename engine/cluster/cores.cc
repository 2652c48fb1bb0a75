// What this process may use of the machine.
#include <sched.h>

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <thread>

#include "cluster/devices.h"

namespace whale {
namespace {

std::string read_text(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
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

std::vector<int> usable_cores() {
  std::vector<int> cores = allowed_cores();
  int limit = cores_of_quota(read_text("/sys/fs/cgroup/cpu.max"));
  if (limit == 0)  // the older layout of control groups
    limit = cores_of_quota(read_text("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") + " " +
                           read_text("/sys/fs/cgroup/cpu/cpu.cfs_period_us"));
  if (limit > 0 && static_cast<size_t>(limit) < cores.size()) cores.resize(static_cast<size_t>(limit));
  return cores;
}

}  // namespace whale
