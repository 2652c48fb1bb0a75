#include "checkpoint/file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"

namespace whale {
namespace {

Code code_of_errno(int number) {
  switch (number) {
    case ENOENT:
    case ENOTDIR: return Code::kNotFound;
    case EACCES:
    case EPERM:
    case EROFS: return Code::kPermissionDenied;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
    case EMFILE:
    case ENFILE:
    case ENOMEM: return Code::kResourceExhausted;
    case EEXIST:
    case ENOTEMPTY: return Code::kAlreadyExists;
    case EISDIR:
    case ENAMETOOLONG:
    case ELOOP: return Code::kInvalidArgument;
    default: return Code::kUnavailable;
  }
}

}  // namespace

void throw_errno(const char* what, const std::string& path) {
  const int number = errno;
  throw error(code_of_errno(number), "cannot {} '{}': {}", what, path, std::strerror(number));
}

OutputFile::OutputFile(const std::string& path) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw_errno("write", path_);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::write(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor_, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_errno("write", path_);
    at += written;
    bytes -= static_cast<size_t>(written);
  }
}

void OutputFile::finish() {
  if (::fsync(descriptor_) != 0) throw_errno("sync", path_);
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) throw_errno("close", path_);
}

void write_file(const std::string& path, const std::string& text) {
  OutputFile file(path);
  file.write(text.data(), text.size());
  file.finish();
}

std::string read_file(const std::string& path, size_t at_most_bytes) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) throw_errno("read", path);
  std::string text;
  char block[16384];
  for (;;) {
    const ssize_t got = ::read(descriptor, block, sizeof block);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int number = errno;
      ::close(descriptor);
      errno = number;
      throw_errno("read", path);
    }
    if (got == 0) break;
    text.append(block, static_cast<size_t>(got));
    if (text.size() > at_most_bytes) {
      ::close(descriptor);
      throw error(Code::kDataLoss, "'{}' is longer than {} bytes: not what it should be", path, at_most_bytes);
    }
  }
  ::close(descriptor);
  return text;
}

void sync_directory(const std::string& path) {
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor < 0) throw_errno("open", path);
  const int result = ::fsync(descriptor);
  const int number = errno;
  ::close(descriptor);
  errno = number;
  if (result != 0 && number != EINVAL) throw_errno("sync", path);  // EINVAL: this file system has no such thing
}

}  // namespace whale
