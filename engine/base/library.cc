#include "base/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

#include "base/error.h"
#include "base/version.h"

namespace whale {
namespace {

void anchor() {}  // an address inside this library

}  // namespace

std::string own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&anchor), &info) == 0 || info.dli_fname == nullptr) return {};
  char* real = realpath(info.dli_fname, nullptr);
  const std::string path = real != nullptr ? real : info.dli_fname;
  std::free(real);
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash);
}

const void* open_library(const std::string& folder, const char* file, const char* symbol, const char* what,
                         const char* install) {
  const std::string path = folder.empty() ? file : folder + "/" + file;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    const bool hidden = access(path.c_str(), F_OK) == 0 && access(path.c_str(), R_OK) != 0;
    throw error(Code::kUnavailable, "cannot open the {} {}: {}. {}", what, path, reason ? reason : "unknown reason",
                hidden ? "It is there and may not be read: give its reader the permission" : install);
  }
  const void* entry = dlsym(library, symbol);
  const char* version = entry == nullptr ? nullptr : *static_cast<const char* const*>(entry);
  if (version == nullptr)
    throw error(Code::kUnavailable, "{} does not export '{}': it is no {} of libwhale. {}", path, symbol, what,
                install);
  if (std::string_view(version) != kVersion)
    throw error(Code::kUnavailable, "{} is of version {}, libwhale is {}: both must come from one build. {}", path,
                version, kVersion, install);
  return entry;
}

}  // namespace whale
