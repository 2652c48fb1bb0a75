#include "cluster/device_types.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace whale {
namespace {

constexpr double kPcie3 = 15.8e9, kPcie4 = 31.5e9, kPcie5 = 63e9;  // 16 lanes, each way
constexpr double kOverPcie = 0.8;                                  // achieved
constexpr double kOverNvlink = 0.8;  // 229 of 300 GB/s on 8 A100, 134 of 150 on 8 V100, 370 of 450 on 8 H100 (ring)

}  // namespace

// Peaks: makers' data sheets. Shares: best measured products and copies where somebody published them (A100 271 of 312
// TFLOP/s, H100 795 of 989, B200 1,745 of 2,250; H100 copies 2.9 of 3.35 TB/s); in f32 those that fit measured ops
// (cost/curve_fitted.inc) within a tenth; else those of the generation before.
// Prices: what clouds ask on demand, about.
const std::vector<DeviceType>& device_types() {
  static const std::vector<DeviceType> types{
      // name, memory, f32, half, bf16, memory/s, inside, host, price; shares of f32, half, memory, inside
      {"P100-16GB", 16e9, 9.3e12, 18.7e12, false, 732e9, kPcie3, kPcie3, 1.46, .85, .75, .75, kOverPcie},
      {"V100-16GB", 16e9, 15.7e12, 125e12, false, 900e9, 150e9, kPcie3, 2.48, .88, .65, .85, kOverNvlink},
      {"V100-32GB", 32e9, 15.7e12, 125e12, false, 900e9, 150e9, kPcie3, 3.06, .88, .65, .85, kOverNvlink},
      {"T4", 16e9, 8.1e12, 65e12, false, 320e9, kPcie3, kPcie3, 0.35, .60, .40, .75, kOverPcie},
      {"A100-40GB", 40e9, 19.5e12, 312e12, true, 1555e9, 300e9, kPcie4, 3.67, .90, .80, .86, kOverNvlink},
      {"A100-80GB", 80e9, 19.5e12, 312e12, true, 2000e9, 300e9, kPcie4, 5.07, .90, .80, .86, kOverNvlink},
      {"H100", 80e9, 67e12, 989e12, true, 3350e9, 450e9, kPcie5, 9.80, .80, .75, .86, kOverNvlink},
      {"H200", 141e9, 67e12, 989e12, true, 4800e9, 450e9, kPcie5, 10.60, .80, .75, .86, kOverNvlink},
      {"B200", 180e9, 80e12, 2250e12, true, 7670e9, 900e9, kPcie5, 14.24, .80, .72, .86, kOverNvlink},
      {"L4", 24e9, 30.3e12, 121e12, true, 300e9, kPcie4, kPcie4, 0.71, .36, .60, .94, kOverPcie},
      {"RTX-3090", 24e9, 35.6e12, 71e12, true, 936e9, kPcie4, kPcie4, 0.30, .75, .80, .85, kOverPcie},
      {"RTX-2080", 8e9, 10.1e12, 40e12, false, 448e9, kPcie3, kPcie3, 0.15, .80, .70, .80, kOverPcie},
      {"TITAN-RTX", 24e9, 16.3e12, 130e12, false, 672e9, kPcie3, kPcie3, 0.25, .80, .60, .80, kOverPcie},
      {"XEON-CORE", 8e9, 170e9, 500e9, true, 25e9, 12e9, 25e9, 0.05, 1, 1, 1, 1},
  };
  return types;
}

const DeviceType* find_device_type(std::string_view name) {
  std::string wanted;
  for (const char c : name) wanted += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  const auto& types = device_types();
  for (const DeviceType& type : types)
    if (wanted == type.name || wanted + "GB" == type.name) return &type;
  for (const DeviceType& type : types) {  // without its memory: the first of that name
    const std::string_view name_of_type = type.name;
    const size_t dash = name_of_type.rfind('-');
    if (name_of_type.ends_with("GB") && wanted == name_of_type.substr(0, dash)) return &type;
  }
  return nullptr;
}

DeviceFigures figures_of(const DeviceType& t) {
  constexpr double kLaunch = 5e-6, kInside = 8e-6;  // a kernel, a collective inside a node
  return {.f32_flops_per_second = t.f32_peak * t.f32_share,
          .half_flops_per_second = t.half_peak * t.half_share,
          .bf16_flops_per_second = t.bf16 ? t.half_peak * t.half_share : 0,
          .bytes_per_second = t.memory_peak * t.memory_share,
          .seconds_per_op = kLaunch,
          .host = {t.host_peak * kOverPcie, kInside},
          .inside = {t.inside_peak * t.inside_share, kInside},
          .network = kUsualNetwork,
          .price_per_hour = t.price_per_hour};
}

}  // namespace whale
