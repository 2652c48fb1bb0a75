// One device of a run, as data: what a device list's text says.
#pragma once

#include <cstdint>
#include <vector>

namespace whale {

enum class DeviceKind : uint8_t { kCpu, kRef, kNull, kCuda, kLag };

inline constexpr int64_t kMostDeviceMemory = int64_t{1} << 50;  // bytes: beyond any device

struct DeviceSpec {
  DeviceKind kind = DeviceKind::kCpu;
  std::vector<int> cores;    // kCpu: logical CPUs it may use; empty: decided when the session opens (its share)
  int index = 0;             // kCuda: ordinal; kLag: seed of its delays
  int node = 0;              // of the cluster: which machine; numbered as listed
  bool named = false;        // the cores were named by hand (cpu@CORES): these and no others
  int64_t memory_bytes = 0;  // that a plan may take; 0: not said
  friend bool operator==(const DeviceSpec&, const DeviceSpec&) = default;
};
const char* name_of(DeviceKind kind);  // "cpu", "ref", "null", "cuda", "lag"

}  // namespace whale
