// The table of device types: what a device of that name has by its data sheet, and what it achieves.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "cluster/figures.h"

namespace whale {

struct DeviceType {
  const char* name;     // "V100-32GB"; without its memory where it is the first of that name: "V100"
  double memory_bytes;  // as its maker counts: 10^9
  double f32_peak;      // FLOP/s of products by the data sheet, dense; without tf32
  double half_peak;     // f16, and bf16 where it has that, with tensor cores where it has them
  bool bf16;
  double memory_peak;     // bytes/s
  double inside_peak;     // bytes/s each way between devices of a node: NVLink, or PCIe
  double host_peak;       // bytes/s with its host's memory
  double price_per_hour;  // about, on demand, in US dollars, of one device
  // Achieved shares of these.
  double f32_share, half_share, memory_share, inside_share;
};
const std::vector<DeviceType>& device_types();
// By name, large or small letters; nullptr: none.
const DeviceType* find_device_type(std::string_view name);
DeviceFigures figures_of(const DeviceType& type);

// Between nodes, where nothing is said: 100 Gb/s.
inline constexpr LinkRates kUsualNetwork{12.5e9, 10e-6};

}  // namespace whale
