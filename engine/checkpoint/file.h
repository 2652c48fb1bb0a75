// Files and folders with every failure as an Error that names the path, and with fsync.
#pragma once

#include <cstddef>
#include <string>

namespace whale {

// A file being written. finish() syncs and closes; without it the destructor only closes.
class OutputFile {
 public:
  explicit OutputFile(const std::string& path);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;
  void write(const void* data, size_t bytes);
  void finish();

 private:
  std::string path_;
  int descriptor_ = -1;
};

void write_file(const std::string& path, const std::string& text);     // synced
std::string read_file(const std::string& path, size_t at_most_bytes);  // throws data_loss when longer
void sync_directory(const std::string& path);
[[noreturn]] void throw_errno(const char* what, const std::string& path);  // from errno, with a fitting code

}  // namespace whale
