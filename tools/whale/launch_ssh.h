// A rank on another host, by way of ssh.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tool {

struct RemoteCommand {
  std::vector<std::string> words;  // of ssh
  std::string input;               // for its standard input, which stays open after it
};
// Runs `words` in `folder` there. All that is particular to the rank, its secrets too, goes through the standard input:
// what stands on a command line is for all users of a host to read. Further lines of the input are names of signals
// (INT) for the rank and its children; its end, as when this machine is gone, kills them.
RemoteCommand over_ssh(const std::string& host, const std::string& folder, const std::vector<std::string>& words,
                       const std::vector<std::string>& environment, int connect_seconds);

// The line of the standard output behind which the program's own output begins. Before it a login shell may speak.
inline constexpr std::string_view kStarted = "whale launch: started";

}  // namespace tool
