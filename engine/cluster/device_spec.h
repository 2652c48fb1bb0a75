// One device of a run, as data: what a device list's text says; and the table of kinds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cluster/figures.h"

namespace whale {

enum class DeviceKind : uint8_t { kCpu, kRef, kNull, kCuda, kLag, kLagCpu };

// What planning and sessions ask of a kind.
struct DeviceTraits {
  const char* name;           // in device lists
  bool computes = true;       // false: it holds no values
  bool float64 = false;       // has kernels for it
  bool overlaps = false;      // communicates beside computing; false: both take the same cores
  bool takes_cores = false;   // written name@CORES
  bool takes_number = false;  // written name@NUMBER: an ordinal, a seed
};
// By DeviceKind.
inline constexpr DeviceTraits kDeviceKinds[] = {
    {.name = "cpu", .takes_cores = true},
    {.name = "ref", .float64 = true},
    {.name = "null", .computes = false, .float64 = true, .overlaps = true},
    {.name = "cuda", .overlaps = true, .takes_number = true},
    {.name = "lag", .float64 = true, .overlaps = true, .takes_number = true},
    {.name = "lag_cpu", .overlaps = true, .takes_number = true},
};
constexpr const DeviceTraits& traits(DeviceKind kind) { return kDeviceKinds[static_cast<size_t>(kind)]; }

inline constexpr int64_t kMostDeviceMemory = int64_t{1} << 50;  // bytes: beyond any device

// What connects a device's node with one other node, each way, in place of their networks.
struct NodeLink {
  int place = 0;  // of the other
  LinkRates rates = {};
  friend bool operator==(const NodeLink&, const NodeLink&) = default;
};

struct DeviceSpec {
  DeviceKind kind = DeviceKind::kCpu;
  std::vector<int> cores;    // kCpu: logical CPUs it may use; empty: decided when the session opens (its share)
  int index = 0;             // kCuda: ordinal; kLag, kLagCpu: seed of its delays
  int node = 0;              // of the cluster: which machine; numbered as listed
  int zone = 0;              // of the cluster: which site; its nodes are listed together
  int place = 0;             // of its node in the file that has the links: it stays where nodes are left out
  bool named = false;        // the cores were named by hand (cpu@CORES): these and no others
  int64_t memory_bytes = 0;  // that a plan may take; 0: not said
  std::string type = {};     // "V100-32GB": of the table of device types; empty: not said
  DeviceFigures figures = {};
  std::vector<NodeLink> links = {};  // by place
  friend bool operator==(const DeviceSpec&, const DeviceSpec&) = default;
};
constexpr const char* name_of(DeviceKind kind) { return traits(kind).name; }

}  // namespace whale
