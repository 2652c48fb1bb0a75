#include "launch_child.h"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "api.h"

namespace tool {
namespace {

[[noreturn]] void fail(const std::string& what, int error) { throw Failure(what + ": " + std::strerror(error)); }

// Reads whole numbers until the other end is gone.
[[noreturn]] void guard(int pipe) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGTSTP}) std::signal(number, SIG_IGN);
  ::setsid();
  const int null = ::open("/dev/null", O_RDWR);
  for (int standard = 0; standard < 3; ++standard) ::dup2(null, standard);  // who reads this one's output sees its end
  ::dup2(pipe, 3);
  ::close_range(4, ~0U, 0);
  std::vector<pid_t> groups;
  for (pid_t group = 0; ::read(3, &group, sizeof group) == sizeof group;) {
    if (group > 0) groups.push_back(group);
    if (group < 0) std::erase(groups, -group);
  }
  for (const pid_t group : groups) ::kill(-group, SIGKILL);
  ::_exit(0);
}

struct Pipe {
  int read = -1, write = -1;
  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail("no pipe", errno);
    read = ends[0], write = ends[1];
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    if (read >= 0) ::close(read);
    if (write >= 0) ::close(write);
  }
  static int keep(int& end) {
    const int kept = end;
    end = -1;
    return kept;
  }
};

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));
  out.push_back(nullptr);
  return out;
}

std::vector<std::string> with_ours(const std::vector<std::string>& mine) {
  std::vector<std::string> all = mine;
  for (char** each = environ; *each != nullptr; ++each) {
    const std::string_view name = std::string_view(*each).substr(0, std::string_view(*each).find('='));
    bool given = false;
    for (const std::string& other : mine)
      given |= other.size() > name.size() && other.starts_with(name) && other[name.size()] == '=';
    if (!given) all.emplace_back(*each);
  }
  return all;
}

}  // namespace

Guard::Guard() {
  Pipe ends;
  pid_ = ::fork();
  if (pid_ < 0) fail("cannot start a process", errno);
  if (pid_ == 0) guard(ends.read);
  pipe_ = Pipe::keep(ends.write);
}

Guard::~Guard() {
  ::close(pipe_);
  ::waitpid(pid_, nullptr, 0);
}

void Guard::tell(pid_t group) const {
  ssize_t written = 0;
  do written = ::write(pipe_, &group, sizeof group);
  while (written < 0 && errno == EINTR);
}

Child start_child(const ChildSpec& spec, const Guard& guard, const sigset_t& mask, bool pipe_ignored) {
  const std::vector<std::string> environment = with_ours(spec.environment);
  const std::vector<char*> words = pointers(spec.words), variables = pointers(environment);
  const pid_t parent = ::getpid();
  Pipe in, out, err, trouble;
  Child child;
  child.pid = ::fork();
  if (child.pid < 0) fail("cannot start a process", errno);
  if (child.pid == 0) {
    const auto take = [](Stream stream, int pipe, int standard) {
      if (stream == Stream::kInherit) return;
      ::dup2(stream == Stream::kPipe ? pipe : ::open("/dev/null", O_RDWR | O_CLOEXEC), standard);
    };
    ::setpgid(0, 0);
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(127);  // which was dead before it was asked for
    take(spec.in, in.read, 0);
    take(spec.out, out.write, 1);
    take(spec.err, err.write, 2);
    std::signal(SIGXFSZ, SIG_DFL);
    if (!pipe_ignored) std::signal(SIGPIPE, SIG_DFL);
    ::sigprocmask(SIG_SETMASK, &mask, nullptr);
    ::execvpe(words[0], words.data(), variables.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t written = ::write(trouble.write, &error, sizeof error);
    ::_exit(127);
  }
  ::setpgid(child.pid, child.pid);  // by whoever of the two comes first
  guard.add(child.pid);
  ::close(Pipe::keep(trouble.write));
  int error = 0;
  ssize_t read = 0;
  do read = ::read(trouble.read, &error, sizeof error);
  while (read < 0 && errno == EINTR);
  if (read == sizeof error) {
    guard.remove(child.pid);
    ::waitpid(child.pid, nullptr, 0);
    const bool looked_for = spec.words[0].find('/') == std::string::npos;
    fail("cannot start '" + shown(spec.words[0]) + "'" + (looked_for ? ", which is looked for in PATH" : ""), error);
  }
  const auto ours = [](Stream stream, int& end) {
    if (stream != Stream::kPipe) return -1;
    ::fcntl(end, F_SETFL, O_NONBLOCK);
    return Pipe::keep(end);
  };
  child.in = ours(spec.in, in.write);
  child.out = ours(spec.out, out.read);
  child.err = ours(spec.err, err.read);
  return child;
}

}  // namespace tool
