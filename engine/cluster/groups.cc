#include "cluster/groups.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <sstream>

namespace whale {
namespace {

bool lists(std::string_view controllers, std::string_view wanted) {
  while (!controllers.empty()) {
    const size_t end = std::min(controllers.find(','), controllers.size());
    if (controllers.substr(0, end) == wanted) return true;
    controllers.remove_prefix(std::min(end + 1, controllers.size()));
  }
  return false;
}

std::vector<std::string> folders_around(const std::string& mount, std::string group) {
  std::vector<std::string> out;
  for (;; group.resize(group.rfind('/'))) {
    while (group.ends_with('/')) group.pop_back();
    out.push_back(mount + group);
    if (group.find('/') == group.npos) return out;
  }
}

}  // namespace

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

GroupFolders group_folders(const std::string& membership, const std::string& mount, std::string_view controller) {
  std::string group, older_group;  // "/system.slice/trainer.service"; of the layout with a hierarchy per controller
  std::istringstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // "4:cpu,cpuacct:/docker/ab"; of the one hierarchy "0::/user"
    const size_t first = line.find(':'), second = first == line.npos ? first : line.find(':', first + 1);
    if (second == line.npos) continue;
    const std::string_view controllers = std::string_view(line).substr(first + 1, second - first - 1);
    if (controllers.empty()) group = line.substr(second + 1);
    if (lists(controllers, controller)) older_group = line.substr(second + 1);
  }
  return {folders_around(mount, group), folders_around(mount + "/" + std::string(controller), older_group)};
}

}  // namespace whale
