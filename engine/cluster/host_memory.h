// How much memory this process may still take.
#pragma once

#include <cstdint>
#include <string>

namespace whale {

struct HostMemory {
  uint64_t bytes = UINT64_MAX;  // UINT64_MAX: the system does not say
  std::string where;            // who says so: "MemAvailable of /proc/meminfo", "memory.max of the control group ..."
};

// The least of what the machine has available and of what each control group of the process leaves it. Page cache of a
// group counts as free: the kernel gives it up. From the texts of /proc/meminfo and /proc/PID/cgroup and where the
// groups are mounted.
HostMemory host_memory(const std::string& meminfo, const std::string& membership, const std::string& mount);
HostMemory host_memory();  // of this process

}  // namespace whale
