#include "checkpoint/save_lock.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>

#include "base/error.h"
#include "base/file_size_signal.h"
#include "checkpoint/index.h"

namespace whale {
namespace {

namespace fs = std::filesystem;

constexpr const char* kName = ".whale.saving";
constexpr std::string_view kBegin = "libwhale save ";                      // ID process PID
constexpr std::string_view kRanks = "\nranks ", kReplaces = " replaces ";  // the next line: N replaces M ID
constexpr size_t kIdDigits = 32;

std::string read_start(int descriptor) {
  char text[256];
  const ssize_t got = ::pread(descriptor, text, sizeof text, 0);
  return {text, static_cast<size_t>(got > 0 ? got : 0)};
}

void check_ours(const std::string& text, const std::string& path) {
  if (!text.empty() && !text.starts_with(kBegin))
    throw error(Code::kFailedPrecondition,
                "'{}' was not made by libwhale, which needs this name while it saves; move it away", path);
}

bool set_lock(int descriptor, short kind) {
  struct flock lock {};
  lock.l_type = kind;
  lock.l_whence = SEEK_SET;  // the whole file
  int result = 0;
  do result = ::fcntl(descriptor, F_OFD_SETLK, &lock);
  while (result != 0 && errno == EINTR);
  return result == 0;
}

// False: another save has it.
bool lock(int descriptor, const Directory& folder) {
  if (set_lock(descriptor, F_WRLCK)) return true;
  if (errno != EAGAIN && errno != EACCES)
    throw error(Code::kFailedPrecondition,
                "the file system of '{}' cannot lock files ({}), without which two saves could destroy each other; "
                "save to another one",
                folder.path(), fmt::format("errno {}", errno));
  return false;
}

void write_claim(int descriptor, const SaveClaim& claim, const std::string& path) {
  const FileSizeSignalHeld held;
  const std::string text = fmt::format("{}{} process {}{}{}{}{} {}\n", kBegin, claim.id, ::getpid(), kRanks,
                                       claim.ranks, kReplaces, claim.replaced_ranks, claim.replaced);
  if (::pwrite(descriptor, text.data(), text.size(), 0) != static_cast<ssize_t>(text.size()) ||
      ::ftruncate(descriptor, static_cast<off_t>(text.size())) != 0 || ::fsync(descriptor) != 0)
    throw_errno("write", path);
}

int64_t number_after(const std::string& text, std::string_view word) {
  const size_t at = text.find(word);
  int64_t n = 1;
  if (at != std::string::npos) std::from_chars(text.data() + at + word.size(), text.data() + text.size(), n);
  return std::clamp(n, int64_t{1}, kMostRanks);
}

SaveClaim read_claim(const std::string& text) {
  SaveClaim claim;
  if (text.size() < kBegin.size() + kIdDigits || !is_random_id(text.substr(kBegin.size(), kIdDigits))) return claim;
  claim.id = text.substr(kBegin.size(), kIdDigits);
  claim.ranks = number_after(text, kRanks), claim.replaced_ranks = number_after(text, kReplaces);
  const size_t last = text.rfind(' ');
  if (text.find(kReplaces) != std::string::npos && text.size() == last + kIdDigits + 2 &&
      is_random_id(text.substr(last + 1, kIdDigits)))
    claim.replaced = text.substr(last + 1, kIdDigits);
  return claim;
}

// Open for writing and without a name, so that a process that is killed leaves nothing. Where the file system has no
// such files it has one for a moment, and remove_trials() knows it.
int open_trial(const Directory& folder) {
  const int nameless = ::openat(folder.descriptor(), ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0666);
  if (nameless >= 0) return nameless;
  const std::string name = fmt::format("{}.{}", kName, random_id());
  const int named = ::openat(folder.descriptor(), name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (named < 0) throw_errno("write into", folder.path());
  folder.remove(name);
  return named;
}

struct Descriptor {
  int number;
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
};

}  // namespace

void SaveLock::check(const Directory& folder) {
  const std::string path = folder.path_of(kName);
  const Descriptor there{::openat(folder.descriptor(), kName, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
  if (there.number < 0 && errno != ENOENT) throw_errno("write", path);
  struct stat info {};
  if (there.number >= 0 && ::fstat(there.number, &info) == 0)
    check_ours(S_ISREG(info.st_mode) ? read_start(there.number) : "?", path);
  const Descriptor trial{open_trial(folder)};
  lock(trial.number, folder);
  write_claim(trial.number, {.id = random_id()}, path);
}

void SaveLock::remove_trials() const {
  const std::string begin = fmt::format("{}.", kName);
  std::error_code failed;
  for (fs::directory_iterator at(folder_.path(), failed), end; !failed && at != end; at.increment(failed)) {
    const std::string name = at->path().filename();
    struct stat info {};
    if (name.starts_with(begin) && is_random_id(name.substr(begin.size())) &&
        ::fstatat(folder_.descriptor(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(info.st_mode) &&
        info.st_size == 0)
      folder_.remove(name);
  }
}

// False: the file went away meanwhile, with the save that made it.
bool SaveLock::take() {
  const std::string path = folder_.path_of(kName);
  descriptor_ = ::openat(folder_.descriptor(), kName, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
  if (descriptor_ < 0) {
    if (errno == ENOENT && folder_.removed())
      throw error(Code::kAborted, "'{}' was removed while a checkpoint was to be saved into it; save again",
                  folder_.path());
    throw_errno("write", path);
  }
  struct stat mine {
  }, there{};
  if (::fstat(descriptor_, &mine) != 0) throw_errno("read", path);
  const std::string text = S_ISREG(mine.st_mode) ? read_start(descriptor_) : "?";
  check_ours(text, path);
  if (!lock(descriptor_, folder_)) {
    const size_t process = text.find("process ");
    throw error(
        Code::kAborted,
        "another save to '{}' is under way{}; this one did nothing. Save again when it has ended, or to another "
        "directory",
        folder_.path(),
        process == std::string::npos ? "" : fmt::format(" ({})", text.substr(process, text.find('\n') - process)));
  }
  // The save that we waited for no longer may have removed the file between open and lock.
  if (::fstatat(folder_.descriptor(), kName, &there, AT_SYMLINK_NOFOLLOW) != 0 || there.st_ino != mine.st_ino)
    return false;
  interrupted_ = read_claim(read_start(descriptor_));
  return true;
}

SaveLock::SaveLock(const Directory& folder) : folder_(folder) {
  try {
    while (!take()) ::close(descriptor_);
  } catch (...) {
    if (descriptor_ >= 0) ::close(descriptor_);
    throw;
  }
}

void SaveLock::claim(const SaveClaim& claim) { write_claim(descriptor_, claim, folder_.path_of(kName)); }

void SaveLock::check_claimed(const Directory& folder, const std::string& id) {
  const Descriptor there{::openat(folder.descriptor(), kName, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
  if (there.number >= 0 && read_claim(read_start(there.number)).id == id) return;
  throw not_the_directory(folder.path(), "its save is not under way there");
}

Error SaveLock::not_the_directory(const std::string& path, std::string_view why) {
  return error(Code::kFailedPrecondition,
               "'{}' is not the directory that rank 0 saves into: {}. All ranks save into one directory; give them one "
               "that they share, such as one of a network file system",
               path, why);
}

SaveLock::~SaveLock() {
  if (!left_) folder_.remove(kName);
  set_lock(descriptor_, F_UNLCK);  // a child made by fork() meanwhile has the file open too
  ::close(descriptor_);
}

}  // namespace whale
