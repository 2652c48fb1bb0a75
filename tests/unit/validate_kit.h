// Tables of measurements that tests write themselves.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace whale {

class WrittenFolder {
 public:
  WrittenFolder() {
    static int number = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("whale-validate-" + std::to_string(::getpid()) + "-" + std::to_string(number++));
    std::filesystem::create_directory(path_);
  }
  ~WrittenFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  WrittenFolder(const WrittenFolder&) = delete;
  WrittenFolder& operator=(const WrittenFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::string write(const std::string& name, const std::string& content) const {
    std::ofstream(path_ / name) << content;
    return (path_ / name).string();
  }

 private:
  std::filesystem::path path_;
};

class WrittenFile {
 public:
  WrittenFile(const std::string& name, const std::string& content) : path_(folder_.write(name, content)) {}
  const std::string& path() const { return path_; }

 private:
  WrittenFolder folder_;
  std::string path_;
};

}  // namespace whale
