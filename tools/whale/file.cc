#include "file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "api.h"

namespace tool {
namespace {

[[noreturn]] void fail(const char* what, const std::string& path) {
  throw Failure("cannot " + std::string(what) + " '" + shown(path) + "': " + std::strerror(errno));
}

// Of what is neither a file nor a directory.
std::string kind_of(const struct stat& info) {
  return S_ISFIFO(info.st_mode) ? "a pipe" : S_ISSOCK(info.st_mode) ? "a socket" : "a device";
}

void check_regular(const struct stat& info, const std::string& path) {
  if (S_ISREG(info.st_mode)) return;
  if (S_ISDIR(info.st_mode)) throw Failure("'" + shown(path) + "' is a directory, a file was expected");
  throw Failure("'" + shown(path) + "' is " + kind_of(info) + ", not a file; write what it gives to a file first");
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

std::string read_at_most(const std::string& path, size_t at_most) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) fail("open", path);
  check_regular(info, path);  // before opening: a device may act on it
  const Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)};
  if (file.number < 0) fail("open", path);
  if (::fstat(file.number, &info) != 0) fail("read", path);
  check_regular(info, path);
  const auto size = static_cast<size_t>(info.st_size);
  std::string out;
  out.reserve(std::min(size, at_most));
  char block[1 << 16];
  while (out.size() < at_most) {
    const ssize_t got = ::read(file.number, block, std::min(sizeof block, at_most - out.size()));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path);
    if (got == 0) break;
    out.append(block, static_cast<size_t>(got));
  }
  if (out.size() < std::min(size, at_most))
    throw Failure("'" + shown(path) + "' became shorter while it was read; try again");
  return out;
}

}  // namespace

std::string read_file(const std::string& path) { return read_at_most(path, SIZE_MAX); }
std::string read_start(const std::string& path, size_t bytes) { return read_at_most(path, bytes); }

bool is_directory(const std::string& path) {
  struct stat info {};
  return ::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode);
}

void check_target(const std::string& path, const char* option, const std::vector<std::string>& reads) {
  const std::string text = std::string(option) + " '" + shown(path) + "': ";
  struct stat info {};
  const bool there = ::stat(path.c_str(), &info) == 0;
  if (there && S_ISDIR(info.st_mode))
    throw Failure(text + "a directory stands there, a file was expected; give another name");
  if (there && !S_ISREG(info.st_mode))
    throw Failure(text + kind_of(info) + " stands there, a file was expected; give another name");
  for (const std::string& read : reads)
    if (struct stat other{};
        there && ::stat(read.c_str(), &other) == 0 && other.st_dev == info.st_dev && other.st_ino == info.st_ino)
      throw Failure(text + "this command reads that file, and would overwrite it; give another name");
  struct stat link {};
  if (!there && errno == ELOOP) throw Failure(text + "links lead round in a circle; give another name");
  if (!there && ::lstat(path.c_str(), &link) == 0 && S_ISLNK(link.st_mode))
    throw Failure(text + "it is a link to something that is not there; give another name, or remove the link");
  std::string trial = path + ".XXXXXX";
  const Descriptor file{::mkostemp(trial.data(), O_CLOEXEC)};
  if (file.number < 0) throw Failure(text + "cannot write there: " + std::strerror(errno));
  ::unlink(trial.c_str());
}

void write_file(const std::string& path, const std::string& text) {
  struct stat info {};
  const bool there = ::stat(path.c_str(), &info) == 0;
  if (there) check_regular(info, path);
  std::string fresh = path + ".XXXXXX";
  const Descriptor file{::mkostemp(fresh.data(), O_CLOEXEC)};
  if (file.number < 0) fail("write", path);
  const mode_t mask = ::umask(0);
  ::umask(mask);
  bool good = ::fchmod(file.number, there ? info.st_mode & 0777 : 0666 & ~mask) == 0;
  for (size_t done = 0; good && done < text.size();) {
    const ssize_t n = ::write(file.number, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    good = n >= 0;
    done += static_cast<size_t>(std::max<ssize_t>(n, 0));
  }
  if (good && ::rename(fresh.c_str(), path.c_str()) == 0) return;
  const int number = errno;
  ::unlink(fresh.c_str());
  errno = number;
  fail("write", path);
}

}  // namespace tool
