// Finds and opens back ends.
#include <map>
#include <mutex>

#include "base/error.h"
#include "base/library.h"
#include "device/device.h"
#include "device/lag/lag.h"
#include "device/null/null.h"
#include "device/ref/ref.h"

namespace whale {

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
        return std::unique_ptr<Backend>(
            static_cast<const BackendEntry*>(
                open_library(folder, "libwhale_cpu.so", WHALE_BACKEND_SYMBOL, "back end",
                             "Install libwhale's CPU back end beside libwhale.so, with oneDNN 2.6 or newer (libdnnl), "
                             "or use 'ref' devices"))
                ->create());
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

const std::string& Backends::folder() const { return state_->folder; }

Backend& Backends::get(DeviceKind kind) {
  const std::lock_guard lock(state_->mutex);
  return state_->of(kind);
}

}  // namespace whale
