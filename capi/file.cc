// Whole files, read and written.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "guard.h"
#include "handles.h"

namespace whale::capi {
namespace {

Error system_error(const char* did, const std::string& path) {
  const int e = errno;
  const Code code = e == ENOENT || e == ENOTDIR               ? Code::kNotFound
                    : e == EACCES || e == EPERM || e == EROFS ? Code::kPermissionDenied
                    : e == ENOSPC || e == EDQUOT              ? Code::kResourceExhausted
                                                              : Code::kUnavailable;
  return error(code, "cannot {} '{}': {}", did, path, std::strerror(e));
}

struct File {
  int fd = -1;
  ~File() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

std::vector<uint8_t> read_file(const std::string& path) {
  const File file{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (file.fd < 0) throw system_error("open", path);
  struct stat info {};
  if (::fstat(file.fd, &info) != 0) throw system_error("read", path);
  if (!S_ISREG(info.st_mode)) throw invalid("'{}' is not a regular file", path);
  if (info.st_size > INT32_MAX)
    throw invalid("'{}' has {} bytes; graphs and plans are smaller than 2 GiB", path, info.st_size);
  std::vector<uint8_t> out(static_cast<size_t>(info.st_size));
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t n = ::read(file.fd, out.data() + done, out.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw system_error("read", path);
    if (n == 0) break;  // it became shorter meanwhile
    done += static_cast<size_t>(n);
  }
  out.resize(done);
  return out;
}

void write_file(const std::string& path, const std::vector<uint8_t>& bytes) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  try {
    File file{::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (file.fd < 0) throw system_error("write", temporary);
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = ::write(file.fd, bytes.data() + done, bytes.size() - done);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) throw system_error("write", temporary);
      done += static_cast<size_t>(n);
    }
    if (::fsync(file.fd) != 0) throw system_error("write", temporary);
    if (::rename(temporary.c_str(), path.c_str()) != 0) throw system_error("write", path);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

}  // namespace whale::capi
