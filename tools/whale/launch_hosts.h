// Where the ranks of `whale launch` run: even runs of ranks over hosts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tool {

struct Host {
  std::string name;  // as ssh takes it
  int ranks = 0;
  bool here() const { return name == "localhost"; }
  std::string address() const;  // the name without a user
};

// "a,b:2,[2001:db8::1]:4": names, each with how many ranks it gets. Those without a number share what `processes`
// leaves, the first ones get one more where it does not come out even; with 0 processes they get one each. Throws
// Failure.
std::vector<Host> read_hosts(const std::string& text, int64_t processes);

}  // namespace tool
