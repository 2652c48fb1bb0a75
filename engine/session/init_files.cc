#include "session/init_files.h"

#include <algorithm>
#include <filesystem>

#include "base/error.h"
#include "base/text.h"

namespace whale {
namespace fs = std::filesystem;

namespace {

// Of an existing path without links and "..": of what is there of another one.
fs::path real(const fs::path& path) {
  std::error_code failed;
  fs::path out = fs::weakly_canonical(path, failed);
  return failed ? fs::absolute(path).lexically_normal() : out;
}

bool is_inside(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

}  // namespace

std::string init_path(const std::string& file, const InitFiles& files, const std::string& variable) {
  const fs::path path = fs::path(files.base) / file;  // an absolute one stays as it is
  if (!files.bounded) return path.string();
  if (files.root.empty())
    throw error(Code::kPermissionDenied,
                "initial value of '{}': file '{}' may not be read: the {} came as bytes, without a folder of its own; "
                "make the engine with option init_dir, the folder that may be read",
                brief(variable), brief(file), files.what);
  const fs::path found = real(files.base.empty() ? fs::path(files.root) / file : path), root = real(files.root);
  if (is_inside(found, root)) return found.string();
  throw error(Code::kPermissionDenied, "initial value of '{}': file '{}' is '{}', outside of '{}', {}; {}",
              brief(variable), brief(file), brief(found.string()), brief(root.string()),
              files.given ? "the value of engine option init_dir"
                          : fmt::format("the folder of the {} file, which alone may be read", files.what),
              files.given ? fmt::format("put it there, or give a folder that it is in, such as '{}'",
                                        brief(found.parent_path().string()))
                          : "put it there, or make the engine with option init_dir, the folder that may be read");
}

std::string rebased(const std::string& file, const std::string& base, const std::string& folder) {
  const fs::path path(file);
  if (path.is_absolute()) return file;
  const auto whole = [](const std::string& each) {
    return (fs::absolute(each.empty() ? "." : each) / "").lexically_normal();
  };
  const fs::path from = whole(base), to = whole(folder);
  return from == to ? file : (from / path).lexically_normal().lexically_relative(to).string();
}

}  // namespace whale
