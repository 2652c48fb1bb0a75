// Files and folders with every failure as an Error that names the path. What is not a regular file (a pipe, a socket, a
// device, a directory) is an error where a file is expected, and is never waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace whale {

[[noreturn]] void throw_errno(const char* what, const std::string& path);  // from errno, with a fitting code

// A folder held open: what is done in it is done in this folder, whatever its path means by then.
class Directory {
 public:
  explicit Directory(const std::string& path);
  ~Directory();
  Directory(const Directory&) = delete;
  Directory& operator=(const Directory&) = delete;
  const std::string& path() const { return path_; }
  std::string path_of(std::string_view name) const;
  int descriptor() const { return descriptor_; }
  enum class Entry { kAbsent, kFile, kOther };
  Entry find(const std::string& name) const;  // links are not followed
  void rename(const std::string& from, const std::string& to) const;
  void remove(const std::string& name) const noexcept;  // a file; absent: nothing
  void sync() const;                                    // its entries; their contents are synced by themselves
  bool removed() const;                                 // by somebody, since it was opened

 private:
  std::string path_;
  int descriptor_ = -1;
};

// A regular file open for reading.
class InputFile {
 public:
  explicit InputFile(const std::string& path);
  InputFile(const Directory& folder, const std::string& name);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;
  const std::string& path() const { return path_; }
  uint64_t size() const { return size_; }                              // when it was opened
  void read(uint64_t offset, void* to, size_t bytes) const;            // throws data_loss when it ends before
  std::string text(uint64_t at_most, const char* longer_means) const;  // all of it; longer: data_loss with that

 private:
  void open(int folder, const std::string& name);
  std::string path_;
  int descriptor_ = -1;
  uint64_t size_ = 0;
};

// A new file being written; one that is there is an error. finish() syncs and closes; without it the destructor only
// closes.
class OutputFile {
 public:
  OutputFile(const Directory& folder, const std::string& name);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  void write(const void* data, size_t bytes);
  void finish();

 private:
  std::string path_;
  int descriptor_ = -1;
};

std::string random_id();                // 128 random bits as 32 hexadecimal digits
bool is_random_id(std::string_view s);  // has this form

// Writes a file as a whole: under a name of its own, synced, renamed, the folder synced. Readers see the file that was
// there or the new one, from any number of threads and processes at once; a failure leaves the one that was there. A
// link is followed; what is there and is no regular file is refused.
void replace_file(const std::string& path, const void* data, size_t bytes);

}  // namespace whale
