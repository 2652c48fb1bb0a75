#include "cluster/device_types.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>
#include <utility>
#include <vector>

#include "base/format.h"
#include "base/text.h"

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
  constexpr int64_t kMiB = 1 << 20;
  // clang-format off
  static const std::vector<DeviceType> types{
      // name, {board, architecture, f32, 16 bits, memory/s, processors, cache, threads, heats}, memory, bf16, inside, host;
      // shares of f32, 16 bits, memory, inside; price
      {"P4", {"Tesla P4", "Pascal", 5.699e12, 5.699e12, 192e9, 40, 2 * kMiB}, 8e9, false, kPcie3, kPcie3, .79, .79, .75, kOverPcie, 0.60},
      {"P100-16GB", {"Tesla P100-PCIE-16GB", "Pascal", 9.519e12, 18.7e12, 732e9, 56, 4 * kMiB}, 16e9, false, kPcie3, kPcie3, .83, .75, .75, kOverPcie, 1.46},
      {"V100-16GB", {"Tesla V100-SXM2-16GB", "Volta", 15.7e12, 125e12, 900e9, 80, 6 * kMiB}, 16e9, false, 150e9, kPcie3, .88, .65, .85, kOverNvlink, 2.48},
      {"V100-32GB", {"Tesla V100-SXM2-32GB", "Volta", 15.7e12, 125e12, 900e9, 80, 6 * kMiB}, 32e9, false, 150e9, kPcie3, .88, .65, .85, kOverNvlink, 3.06},
      {"V100-PCIE-32GB", {"Tesla V100-PCIE-32GB", "Volta", 14.029e12, 112e12, 900e9, 80, 6 * kMiB}, 32e9, false, kPcie3, kPcie3, .88, .65, .85, kOverPcie, 3.06},
      {"T4", {"Tesla T4", "Turing", 8.141e12, 65e12, 320e9, 40, 4 * kMiB, 1024, true}, 16e9, false, kPcie3, kPcie3, .60, .40, .75, kOverPcie, 0.35},
      {"RTX-2080", {"NVIDIA GeForce RTX 2080", "Turing", 10.1e12, 40e12, 448e9, 46, 4 * kMiB, 1024}, 8e9, false, kPcie3, kPcie3, .80, .70, .80, kOverPcie, 0.15},
      {"TITAN-RTX", {"NVIDIA TITAN RTX", "Turing", 16.3e12, 130e12, 672e9, 72, 6 * kMiB, 1024}, 24e9, false, kPcie3, kPcie3, .80, .60, .80, kOverPcie, 0.25},
      {"A100-40GB", {"NVIDIA A100-SXM4-40GB", "Ampere", 19.492e12, 312e12, 1555e9, 108, 40 * kMiB}, 40e9, true, 300e9, kPcie4, .90, .80, .86, kOverNvlink, 3.67},
      {"A100-80GB", {"NVIDIA A100-SXM4-80GB", "Ampere", 19.492e12, 312e12, 2039e9, 108, 40 * kMiB}, 80e9, true, 300e9, kPcie4, .90, .80, .84, kOverNvlink, 5.07},
      {"A100-PCIE-40GB", {"NVIDIA A100-PCIE-40GB", "Ampere", 19.492e12, 312e12, 1555e9, 108, 40 * kMiB}, 40e9, true, kPcie4, kPcie4, .86, .75, .86, kOverPcie, 3.67},
      {"A100-PCIE-80GB", {"NVIDIA A100 80GB PCIe", "Ampere", 19.492e12, 312e12, 1935e9, 108, 40 * kMiB}, 80e9, true, kPcie4, kPcie4, .90, .75, .86, kOverPcie, 3.67},
      {"RTX-3090", {"NVIDIA GeForce RTX 3090", "Ampere", 35.6e12, 71e12, 936e9, 82, 6 * kMiB, 1536}, 24e9, true, kPcie4, kPcie4, .75, .80, .85, kOverPcie, 0.30},
      {"L4", {"NVIDIA L4", "Ada", 31.334e12, 121e12, 300e9, 60, 48 * kMiB, 1536, true}, 24e9, true, kPcie4, kPcie4, .35, .60, .94, kOverPcie, 0.71},
      {"H100", {"NVIDIA H100 80GB HBM3", "Hopper", 66.908e12, 989e12, 3430e9, 132, 50 * kMiB}, 80e9, true, 450e9, kPcie5, .80, .75, .84, kOverNvlink, 9.80},
      {"H200", {"NVIDIA H200", "Hopper", 66.908e12, 989e12, 4800e9, 132, 50 * kMiB}, 141e9, true, 450e9, kPcie5, .80, .75, .86, kOverNvlink, 10.60},
      {"B200", {"NVIDIA B200", "Blackwell", 80e12, 2250e12, 7670e9, 148, 126 * kMiB}, 180e9, true, 900e9, kPcie5, .80, .72, .86, kOverNvlink, 14.24},
      {"MI100", {"AMD Instinct MI100", "CDNA", 46.1e12, 184.6e12, 1230e9, 120, 8 * kMiB}, 32e9, true, kPcie4, kPcie4, .60, .60, .80, kOverPcie},
      {"MI210", {"AMD Instinct MI210", "CDNA", 45.3e12, 181e12, 1640e9, 104, 16 * kMiB}, 64e9, true, kPcie4, kPcie4, .60, .60, .80, kOverPcie},
      {"MI250", {"AMD Instinct MI250", "CDNA", 45.3e12, 181e12, 1640e9, 104, 16 * kMiB}, 64e9, true, kPcie4, kPcie4, .60, .60, .80, kOverPcie},
      {"XEON-CORE", {"", "", 170e9, 500e9, 25e9}, 8e9, true, 12e9, 25e9, 1, 1, 1, 1, 0.05},
  };
  // clang-format on
  return types;
}

bool same_gpu(std::string_view a, std::string_view b) {
  const auto plain = [](char c) {
    return c == '_' || c == ' ' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  };
  return std::ranges::equal(a, b, {}, plain, plain);
}

const DeviceType* find_gpu(std::string_view name) {
  for (const DeviceType& type : device_types())
    if (type.is_gpu() && (same_gpu(type.sheet.name, name) || same_gpu(type.name, name))) return &type;
  return nullptr;
}

namespace {

// In large letters, without blanks, dashes and makers.
std::string plain(std::string_view name) {
  std::string out;
  for (const char c : name)
    if (c != ' ' && c != '\t' && c != '-' && c != '_')
      out += static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  constexpr std::array<std::string_view, 6> kMakers{"NVIDIA", "AMD", "TESLA", "GEFORCE", "QUADRO", "INSTINCT"};
  for (const std::string_view maker : kMakers)
    if (out.starts_with(maker)) out.erase(0, maker.size());
  return out;
}

// A type by the names that it goes by.
struct Known {
  const DeviceType* type;
  std::string name, memory, board;  // plain; "V100", "32GB"
};

const std::vector<Known>& known_types() {
  static const std::vector<Known> all = [] {
    std::vector<Known> out;
    for (const DeviceType& type : device_types()) {
      Known known{&type, plain(type.name), fmt::format("{:.0f}GB", type.memory_bytes / 1e9), plain(type.sheet.name)};
      if (known.name.ends_with(known.memory)) known.name.resize(known.name.size() - known.memory.size());
      out.push_back(std::move(known));
    }
    return out;
  }();
  return all;
}

// How many letters are to be put in, taken out or replaced (Levenshtein's distance).
size_t distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 0; i < a.size(); ++i) {
    size_t before = row[0]++;
    for (size_t j = 0; j < b.size(); ++j)
      before = std::exchange(row[j + 1], std::min({row[j] + 1, row[j + 1] + 1, before + (a[i] != b[j])}));
  }
  return row.back();
}

// At most three that a slip of a few letters, or another memory, would make this name.
std::vector<std::string_view> nearest_types(std::string_view name) {
  constexpr size_t kLongest = 40, kMost = 3, kFarthest = 2;
  const std::string wanted = plain(name.substr(0, kLongest));
  std::vector<std::pair<size_t, std::string_view>> near;
  for (const Known& known : known_types()) {
    size_t least = std::min(distance(wanted, known.name), distance(wanted, known.name + known.memory));
    if (wanted.starts_with(known.name) || (wanted.size() > 1 && known.name.starts_with(wanted)))
      least = std::min<size_t>(least, 2);
    if (least <= kFarthest && 2 * least <= wanted.size()) near.emplace_back(least, known.type->name);
  }
  std::ranges::stable_sort(near, {}, &std::pair<size_t, std::string_view>::first);
  std::vector<std::string_view> out;
  for (const auto& [_, type] : near)
    if (out.size() < kMost) out.push_back(type);
  return out;
}

}  // namespace

const DeviceType* find_device_type(std::string_view name) {
  for (const DeviceType& type : device_types())
    if (name == type.name) return &type;
  const std::string wanted = plain(name);
  if (wanted.empty()) return nullptr;
  for (const Known& known : known_types()) {
    const std::string full = known.name + known.memory;
    if (wanted == full || wanted + "GB" == full || wanted == known.board) return known.type;
  }
  for (const Known& known : known_types())
    if (wanted == known.name) return known.type;
  return nullptr;
}

std::string no_device_type(std::string_view name) {
  std::vector<std::string_view> all;
  for (const DeviceType& type : device_types()) all.emplace_back(type.name);
  const std::vector<std::string_view> near = nearest_types(name);
  return fmt::format("'{}' is not a type of device{}; the types are {}", brief(name, 40),
                     near.empty() ? std::string() : fmt::format(", nearest are {}", fmt::join(near, ", ")),
                     fmt::join(all, ", "));
}

DeviceFigures figures_of(const DeviceType& t) {
  constexpr double kLaunch = 5e-6, kInside = 8e-6;  // a kernel, a collective inside a node
  return {.f32_flops_per_second = t.sheet.flops_per_second * t.f32_share,
          .half_flops_per_second = t.sheet.flops_per_second16 * t.half_share,
          .bf16_flops_per_second = t.bf16 ? t.sheet.flops_per_second16 * t.half_share : 0,
          .bytes_per_second = t.sheet.bytes_per_second * t.memory_share,
          .seconds_per_op = kLaunch,
          .host = {t.host_peak * kOverPcie, kInside},
          .inside = {t.inside_peak * t.inside_share, kInside},
          .network = kUsualNetwork,
          .price_per_hour = t.price_per_hour};
}

}  // namespace whale
