#include "process.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>
#include <csignal>

#include "base/error.h"

namespace whale::test {

Ended in_process(const std::function<std::string()>& body, int seconds) {
  int ends[2];
  if (pipe(ends) != 0) throw internal("no pipe");
  const pid_t child = fork();
  if (child < 0) throw internal("no process");
  if (child == 0) {
    close(ends[0]);
    std::string said;
    try {
      said = body();
    } catch (const std::exception& e) {
      said = std::string("X") + e.what();
    }
    for (size_t at = 0; at < said.size();) {
      const ssize_t n = write(ends[1], said.data() + at, said.size() - at);
      if (n <= 0) break;
      at += static_cast<size_t>(n);
    }
    _exit(0);
  }
  close(ends[1]);
  Ended ended;
  char block[65536];
  for (;;) {
    pollfd wait{ends[0], POLLIN, 0};
    if (poll(&wait, 1, seconds * 1000) <= 0) {
      ended.how = Ended::How::kHang;
      kill(child, SIGKILL);
      break;
    }
    const ssize_t n = read(ends[0], block, sizeof block);
    if (n <= 0) break;
    ended.said.append(block, static_cast<size_t>(n));
  }
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  if (ended.how == Ended::How::kWell && (!WIFEXITED(status) || WEXITSTATUS(status) != 0 || ended.said.empty())) {
    ended.how = Ended::How::kCrash;
    ended.said = WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status)) : "it ended";
  }
  return ended;
}

}  // namespace whale::test
