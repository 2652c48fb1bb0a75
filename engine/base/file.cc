#include "base/file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "base/file_size_signal.h"
#include "base/text.h"

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

void check_regular(mode_t mode, const std::string& path) {
  if (S_ISREG(mode)) return;
  const char* kind = S_ISDIR(mode)    ? "a directory"
                     : S_ISFIFO(mode) ? "a pipe"
                     : S_ISSOCK(mode) ? "a socket"
                     : S_ISCHR(mode)  ? "a device"
                     : S_ISBLK(mode)  ? "a device"
                                      : "something else";
  throw invalid("'{}' is {}, not a regular file", brief(path), kind);
}

void write_all(int descriptor, const void* data, size_t bytes, const std::string& path) {
  const FileSizeSignalHeld held;
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(descriptor, at, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw_errno("write", path);
    at += written;
    bytes -= static_cast<size_t>(written);
  }
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

// A synced file that gets its name last, so that a crash leaves none, where the file system can do that. Errors speak
// of `path`, which the file is for.
void write_fresh(const Directory& folder, const std::string& name, const void* data, size_t bytes,
                 const std::string& path) {
  for (const bool named : {false, true}) {
    const Descriptor file{
        named ? ::openat(folder.descriptor(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)
              : ::openat(folder.descriptor(), ".", O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666)};
    if (file.number < 0) {
      if (named) throw_errno("write", path);
      continue;
    }
    write_all(file.number, data, bytes, path);
    if (::fsync(file.number) != 0) throw_errno("sync", path);
    const std::string link = fmt::format("/proc/self/fd/{}", file.number);
    if (named || ::linkat(AT_FDCWD, link.c_str(), folder.descriptor(), name.c_str(), AT_SYMLINK_FOLLOW) == 0) return;
  }
}

}  // namespace

void throw_errno(const char* what, const std::string& path) {
  const int number = errno;
  throw error(code_of_errno(number), "cannot {} '{}': {}", what, brief(path), std::strerror(number));
}

Directory::Directory(const std::string& path) : path_(path) {
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (descriptor_ < 0) throw_errno("open the directory", path);
}
Directory::~Directory() { ::close(descriptor_); }

std::string Directory::path_of(std::string_view name) const {
  return path_.ends_with('/') ? fmt::format("{}{}", path_, name) : fmt::format("{}/{}", path_, name);
}

Directory::Entry Directory::find(const std::string& name) const {
  struct stat info {};
  if (::fstatat(descriptor_, name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0)
    return S_ISREG(info.st_mode) ? Entry::kFile : Entry::kOther;
  if (errno != ENOENT) throw_errno("look for", path_of(name));
  return Entry::kAbsent;
}

void Directory::rename(const std::string& from, const std::string& to) const {
  if (::renameat(descriptor_, from.c_str(), descriptor_, to.c_str()) != 0) throw_errno("replace", path_of(to));
}

void Directory::remove(const std::string& name) const noexcept { ::unlinkat(descriptor_, name.c_str(), 0); }

void Directory::sync() const {
  // EINVAL: this file system has no such thing
  if (::fsync(descriptor_) != 0 && errno != EINVAL) throw_errno("sync", path_);
}

bool Directory::removed() const {
  struct stat info {};
  return ::fstat(descriptor_, &info) == 0 && info.st_nlink == 0;
}

InputFile::InputFile(const std::string& path) : path_(path) { open(AT_FDCWD, path); }
InputFile::InputFile(const Directory& folder, const std::string& name) : path_(folder.path_of(name)) {
  open(folder.descriptor(), name);
}

void InputFile::open(int folder, const std::string& name) {
  struct stat info {};
  // Before opening: a device may act on it. After: it may be another file by then.
  if (::fstatat(folder, name.c_str(), &info, 0) != 0) throw_errno("read", path_);
  check_regular(info.st_mode, path_);
  descriptor_ = ::openat(folder, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (descriptor_ < 0) throw_errno("read", path_);
  try {
    if (::fstat(descriptor_, &info) != 0) throw_errno("read", path_);
    check_regular(info.st_mode, path_);
  } catch (...) {
    ::close(descriptor_);
    throw;
  }
  size_ = static_cast<uint64_t>(info.st_size);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::read(uint64_t offset, void* to, size_t bytes) const {
  char* target = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t got = ::pread(descriptor_, target, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw_errno("read", path_);
    if (got == 0) throw error(Code::kDataLoss, "'{}' ends at byte {}, {} more were expected", path_, offset, bytes);
    target += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<size_t>(got);
  }
}

std::string InputFile::text(uint64_t at_most, const char* longer_means) const {
  if (size_ > at_most) throw error(Code::kDataLoss, "'{}' has {} bytes: {}", path_, size_, longer_means);
  std::string out(size_, '\0');
  read(0, out.data(), out.size());
  return out;
}

OutputFile::OutputFile(const Directory& folder, const std::string& name) : path_(folder.path_of(name)) {
  descriptor_ = ::openat(folder.descriptor(), name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor_ < 0) throw_errno("write", path_);
}

OutputFile::~OutputFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

void OutputFile::write(const void* data, size_t bytes) { write_all(descriptor_, data, bytes, path_); }

void OutputFile::finish() {
  if (::fsync(descriptor_) != 0) throw_errno("sync", path_);
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) throw_errno("close", path_);
}

std::string random_id() {
  unsigned char bytes[16];
  for (size_t have = 0; have < sizeof bytes;) {
    const ssize_t got = ::getrandom(bytes + have, sizeof bytes - have, 0);
    if (got < 0 && errno != EINTR) throw_errno("get random numbers from", "getrandom");
    have += static_cast<size_t>(std::max<ssize_t>(got, 0));
  }
  std::string out;
  out.reserve(2 * sizeof bytes);
  for (const unsigned char byte : bytes) out += fmt::format("{:02x}", byte);
  return out;
}

bool is_random_id(std::string_view s) {
  return s.size() == 32 && s.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

void replace_file(const std::string& path, const void* data, size_t bytes) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
  const std::string target = real ? real.get() : path;
  struct stat info {};
  if (real && ::stat(target.c_str(), &info) == 0) check_regular(info.st_mode, path);
  const size_t slash = target.rfind('/');
  const std::string name = slash == std::string::npos ? target : target.substr(slash + 1);
  if (name.empty()) throw invalid("'{}' names a directory, not a file", path);
  const std::string place = slash == std::string::npos ? "." : target.substr(0, std::max<size_t>(slash, 1));
  if (::access(place.c_str(), F_OK) != 0) throw_errno("write", path);
  const Directory folder(place);
  const std::string fresh = fmt::format(".whale-{}", random_id());
  try {
    write_fresh(folder, fresh, data, bytes, path);
    folder.rename(fresh, name);
  } catch (...) {
    folder.remove(fresh);
    throw;
  }
  folder.sync();
}

}  // namespace whale
