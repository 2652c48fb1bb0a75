#include "launch_ssh.h"

namespace tool {
namespace {

std::string shell_word(std::string_view text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

RemoteCommand over_ssh(const std::string& host, const std::string& folder, const std::vector<std::string>& words,
                       const std::vector<std::string>& environment, int connect_seconds) {
  // What the shell there reads of its own input must be this and no byte more: the rest is the watcher's.
  std::string script = "exec 3<&0 </dev/null\n";
  script += "cd " + shell_word(folder) + " || exit 127\n";
  for (const std::string& each : environment) {
    const size_t is = each.find('=');
    script += "export " + each.substr(0, is) + "=" + shell_word(std::string_view(each).substr(is + 1)) + "\n";
  }
  script += "command -v " + shell_word(words[0]) + " >/dev/null || { echo " +
            shell_word("whale: no program '" + words[0] + "' here") + " >&2; exit 127; }\n";
  // sshd gives each command a session, so that group 0 is the rank with its children. sshd waits until nobody has the
  // output any more: the watcher has it not.
  script +=
      "( trap '' INT TERM HUP; while IFS= read -r signal <&3; do kill -s \"$signal\" 0; done; kill -s KILL 0 ) "
      ">/dev/null 2>&1 &\n"
      "exec 3<&-\n";
  script += "echo " + shell_word(kStarted) + "\n";
  // The shell outlives its program to say how it ended; a trap, other than what is ignored, is not inherited.
  script += "trap : INT TERM HUP\n";
  for (const std::string& word : words) script += shell_word(word) + " ";
  script += "\nexit $?\n";

  // Read byte by byte, as nothing else keeps from reading ahead; whatever shell the user has there takes this one line.
  const std::string count = std::to_string(script.size());
  return {{"ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=" + std::to_string(connect_seconds), "-o",
           "ServerAliveInterval=10", host, "exec sh -c 'eval \"$(dd bs=1 count=" + count + " 2>/dev/null)\"'"},
          std::move(script)};
}

}  // namespace tool
