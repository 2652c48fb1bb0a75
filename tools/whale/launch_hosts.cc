#include "launch_hosts.h"

#include <algorithm>
#include <charconv>

#include "api.h"

namespace tool {
namespace {

[[noreturn]] void refuse(const std::string& entry, const std::string& why) {
  throw Failure("--hosts: '" + shown(entry) + "' " + why + "; expected such as a,b:2,[2001:db8::1]:4");
}

Host read_host(const std::string& entry) {
  Host host;
  size_t end = entry.starts_with('[') ? entry.find(']') : entry.find(':');
  if (entry.starts_with('[') && end == entry.npos) refuse(entry, "lacks a ']'");
  host.name = entry.starts_with('[') ? entry.substr(1, end++ - 1) : entry.substr(0, end);
  if (end != entry.npos && end < entry.size()) {
    const char *first = entry.data() + end + 1, *last = entry.data() + entry.size();
    const auto [read, error] = std::from_chars(first, last, host.ranks);
    if (entry[end] != ':' || read != last || error != std::errc{} || host.ranks < 1)
      refuse(entry, "does not end in a whole number of ranks, of 1 or more (an IPv6 address stands in brackets)");
  }
  // A name that begins with a dash would be an option of ssh.
  if (host.name.empty() || host.name.starts_with('-') ||
      host.name.find_first_of(" \t\n'\"\\;&|<>()$`") != host.name.npos)
    refuse(entry, "has no name of a host");
  return host;
}

}  // namespace

std::string Host::address() const {
  const size_t at = name.rfind('@');
  return at == name.npos ? name : name.substr(at + 1);
}

std::vector<Host> read_hosts(const std::string& text, int64_t processes) {
  std::vector<Host> hosts;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    hosts.push_back(read_host(text.substr(begin, end - begin)));
    for (size_t h = 0; h + 1 < hosts.size(); ++h)
      if (hosts[h].name == hosts.back().name) refuse(hosts[h].name, "stands there twice: say how many with NAME:RANKS");
    begin = end + 1;
  }
  int64_t open = 0, taken = 0;
  for (const Host& host : hosts) taken += host.ranks, open += host.ranks == 0;
  const int64_t rest = (processes == 0 ? taken + open : processes) - taken;
  if (open == 0 ? rest != 0 : rest < open)
    throw Failure("--hosts has places for " + std::string(open == 0 ? "" : "at least ") + std::to_string(taken + open) +
                  " ranks, and -n is " + std::to_string(processes) + "; each host gets a rank or more");
  int64_t k = 0;
  for (Host& host : hosts)
    if (host.ranks == 0) host.ranks = static_cast<int>(rest / open + (k++ < rest % open));
  return hosts;
}

}  // namespace tool
