// Processes in groups of their own that do not outlive this one.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace tool {

// Kills process groups once this process has ended, SIGKILL included: a process that waits for the end of a pipe. The
// kernel's signal at the parent's death reaches children alone, not theirs.
class Guard {
 public:
  Guard();
  ~Guard();  // kills those that are left
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;
  void add(pid_t group) const { tell(group); }
  void remove(pid_t group) const { tell(-group); }  // before its number may be used again

 private:
  void tell(pid_t group) const;
  int pipe_ = -1;
  pid_t pid_ = -1;
};

enum class Stream { kNull, kInherit, kPipe };

struct ChildSpec {
  std::vector<std::string> words;        // a name without a slash is looked for in PATH
  std::vector<std::string> environment;  // NAME=VALUE, before what this process has
  Stream in = Stream::kNull, out = Stream::kPipe, err = Stream::kPipe;
};
struct Child {
  pid_t pid = -1;                   // and its group
  int in = -1, out = -1, err = -1;  // our ends of its pipes, which do not block
};
// To be called by the main thread: the kernel takes the end of the thread that forked for the parent's. `mask` and
// `pipe_ignored` are this process's signals before it changed them. Throws Failure where there is no such program.
Child start_child(const ChildSpec& spec, const Guard& guard, const sigset_t& mask, bool pipe_ignored);

}  // namespace tool
