// What the control groups of a process pay for.
#pragma once

#include <string>

namespace whale {

// How many cores the quotas of a process' control group and of those around it pay for, from the text of
// /proc/PID/cgroup and where the groups are mounted; 0: no limit.
int cores_of_groups(const std::string& membership, const std::string& mount);

}  // namespace whale
