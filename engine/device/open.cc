// Finds and opens back ends.
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "base/error.h"
#include "base/version.h"
#include "device/device.h"
#include "device/lag/lag.h"
#include "device/null/null.h"
#include "device/ref/ref.h"

namespace whale {
namespace {

void anchor() {}  // an address inside this library

std::string own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&anchor), &info) == 0 || info.dli_fname == nullptr) return {};
  // A link to the library may lie elsewhere; its back ends lie beside the file.
  char* real = realpath(info.dli_fname, nullptr);
  const std::string path = real != nullptr ? real : info.dli_fname;
  std::free(real);
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? std::string() : path.substr(0, slash);
}

// The library stays loaded until the process ends: its threads and its kernels may outlive everything here.
std::unique_ptr<Backend> open_library(const std::string& folder, const char* file, const char* install) {
  const std::string path = folder.empty() ? file : folder + "/" + file;
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    const bool hidden = access(path.c_str(), F_OK) == 0 && access(path.c_str(), R_OK) != 0;
    throw error(Code::kUnavailable, "cannot open the back end {}: {}. {}", path, reason ? reason : "unknown reason",
                hidden ? "It is there and may not be read: give its reader the permission" : install);
  }
  const auto* entry = static_cast<const BackendEntry*>(dlsym(library, WHALE_BACKEND_SYMBOL));
  if (entry == nullptr || entry->version == nullptr)
    throw error(Code::kUnavailable, "{} does not export '{}': it is no back end of libwhale. {}", path,
                WHALE_BACKEND_SYMBOL, install);
  if (std::string_view(entry->version) != kVersion)
    throw error(Code::kUnavailable, "{} is of version {}, libwhale is {}: both must come from one build. {}", path,
                entry->version, kVersion, install);
  return std::unique_ptr<Backend>(entry->create());
}

}  // namespace

struct Backends::State {
  std::string folder;
  std::mutex mutex;
  std::map<DeviceKind, std::unique_ptr<Backend>> open;

  Backend& of(DeviceKind kind) {
    std::unique_ptr<Backend>& backend = open[kind];
    if (backend == nullptr) backend = make(kind);
    return *backend;
  }

  std::unique_ptr<Backend> make(DeviceKind kind) {
    switch (kind) {
      case DeviceKind::kRef: return make_ref_backend();
      case DeviceKind::kNull: return make_null_backend();
      case DeviceKind::kLag: return make_lag_backend(of(DeviceKind::kRef), kind);
      case DeviceKind::kLagCpu: return make_lag_backend(of(DeviceKind::kCpu), kind);
      case DeviceKind::kCpu:
        return open_library(
            folder, "libwhale_cpu.so",
            "Install libwhale's CPU back end beside libwhale.so, with oneDNN 2.6 or newer (libdnnl), or use "
            "'ref' devices");
      case DeviceKind::kCuda: break;
    }
    throw error(Code::kUnavailable,
                "this build of libwhale has no CUDA back end; use 'cpu' devices, or 'null' to try a plan");
  }
};

Backends::Backends(std::string library_dir) : state_(std::make_unique<State>()) {
  state_->folder = library_dir.empty() ? own_folder() : std::move(library_dir);
}

Backends::~Backends() = default;

Backend& Backends::get(DeviceKind kind) {
  const std::lock_guard lock(state_->mutex);
  return state_->of(kind);
}

}  // namespace whale
