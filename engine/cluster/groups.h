// The control groups that a process is in.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace whale {

// Folders of the group of a process and of those around it, innermost first, of both layouts.
struct GroupFolders {
  std::vector<std::string> unified;     // one hierarchy
  std::vector<std::string> controller;  // a hierarchy of its own for this controller
};
// From the text of /proc/PID/cgroup and where the groups are mounted.
GroupFolders group_folders(const std::string& membership, const std::string& mount, std::string_view controller);

std::string read_text(const std::string& path);  // what can be read of it; a file that is not there: nothing

}  // namespace whale
