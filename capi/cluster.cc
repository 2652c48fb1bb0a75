// Clusters: device lists.
#include "cluster/cluster_file.h"
#include "cluster/devices.h"

#include <algorithm>

#include "guard.h"
#include "handles.h"

using namespace whale;        // NOLINT
using namespace whale::capi;  // NOLINT

whale_status* whale_cluster_create(whale_engine* engine, whale_str devices, whale_cluster** out) {
  return guard([&] {
    need(engine, "engine");
    need(out, "out");
    auto cluster = std::make_unique<whale_cluster>();
    const std::string list = nonempty(devices, "devices");
    constexpr std::string_view kFile = "file:";
    if (list.starts_with(kFile)) {
      const std::string path = list.substr(kFile.size());
      const std::vector<uint8_t> bytes = read_file(path);
      const std::string_view content(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      if (const size_t binary = content.find('\0'); binary != content.npos)
        throw invalid("'{}' is no list of devices: it is binary{}. A file of devices is text, a node a line",
                      brief(path),
                      content.find("WHG1") == 4   ? ", a model"
                      : content.find("WHP1") == 4 ? ", a plan"
                                                  : "");
      cluster->devices = devices_of_cluster_file(content, path);
    } else {
      cluster->devices = parse_devices(list);
    }
    check_devices(engine->limits, cluster->devices.size());
    *out = cluster.release();
  });
}

whale_device whale::capi::describe_device(const std::vector<DeviceSpec>& devices, size_t index) {
  if (index >= devices.size()) throw invalid("argument `index` is {}; there are {} devices", index, devices.size());
  const auto kind = [&] {
    switch (devices[index].kind) {
      case DeviceKind::kCpu: return WHALE_DEVICE_CPU;
      case DeviceKind::kRef: return WHALE_DEVICE_REF;
      case DeviceKind::kNull: return WHALE_DEVICE_NULL;
      case DeviceKind::kLag: return WHALE_DEVICE_LAG;
      case DeviceKind::kLagCpu: return WHALE_DEVICE_LAG_CPU;
      case DeviceKind::kCuda: break;
    }
    throw internal("a device of a kind that whale.h does not have");
  };
  const auto before = std::ranges::count_if(devices.begin(), devices.begin() + static_cast<std::ptrdiff_t>(index),
                                            [&](const DeviceSpec& other) { return other.node == devices[index].node; });
  return {sizeof(whale_device),         kind(),
          devices[index].node,          static_cast<int32_t>(index),
          static_cast<int32_t>(before), devices[index].memory_bytes};
}

whale_status* whale_cluster_device(const whale_cluster* cluster, size_t index, whale_device* out) {
  return guard([&] { fill(out, describe_device(need(cluster, "cluster").devices, index), "out"); });
}

size_t whale_cluster_size(const whale_cluster* cluster) { return cluster == nullptr ? 0 : cluster->devices.size(); }
void whale_cluster_release(whale_cluster* cluster) { delete cluster; }
