// The table of device types: what a device of that name has by its data sheet, and what it achieves.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cluster/figures.h"
#include "cluster/gpu_sheet.h"

namespace whale {

struct DeviceType {
  const char* name;     // "V100-32GB"; without its memory where it is the first of that name: "V100"
  GpuSheet sheet;       // peaks; of what is no GPU without a board, processors and cache
  double memory_bytes;  // as its maker counts: 10^9
  bool bf16;            // at the peak of 16 bits; else f16 alone is
  double inside_peak;   // bytes/s each way between devices of a node: NVLink, or PCIe
  double host_peak;     // bytes/s with its host's memory
  // Achieved shares of these.
  double f32_share, half_share, memory_share, inside_share;
  double price_per_hour = 0;  // about, on demand, in US dollars, of one device; 0: not known

  bool is_gpu() const { return sheet.processors > 0; }
  // Its devices reach each other by the way that goes to the host.
  bool host_linked() const { return inside_peak == host_peak; }
};
const std::vector<DeviceType>& device_types();
// By name; nullptr: none. Case, blanks, - and _ do not count ("rtx 3090"), nor do the names of makers and of their
// lines before it ("NVIDIA GeForce RTX 3090"); its memory may be said or left out ("H100-80GB", "P100"): of several
// that differ in it alone, the first of the table. The name of the board is one too.
const DeviceType* find_device_type(std::string_view name);
// Says that there is none of that name, with those nearest to it and all that there are.
std::string no_device_type(std::string_view name);
// Of those that are GPUs, by the name of the board or of the type; nullptr: none.
const DeviceType* find_gpu(std::string_view name);
DeviceFigures figures_of(const DeviceType& type);

// Between nodes, where nothing is said: 100 Gb/s.
inline constexpr LinkRates kUsualNetwork{12.5e9, 10e-6};

}  // namespace whale
