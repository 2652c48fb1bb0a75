#include "cost/gpu_sheet.h"

#include <algorithm>

namespace whale {
namespace {

std::string plain(std::string_view name) {
  std::string out;
  for (const char c : name) out += c == '_' || c == ' ' ? '-' : c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  return out;
}

}  // namespace

bool same_gpu(std::string_view a, std::string_view b) { return plain(a) == plain(b); }

const std::vector<GpuSheet>& gpu_sheets() {
  constexpr int64_t kMiB = 1 << 20;
  // Name, architecture, flops/s in float32 and in 16 bits, bytes/s, processors, cache, threads, heats.
  static const std::vector<GpuSheet> sheets{
      {"Tesla P4", "Pascal", 5.699e12, 5.699e12, 192e9, 40, 2 * kMiB},
      {"Tesla P100-PCIE-16GB", "Pascal", 9.519e12, 18.7e12, 732e9, 56, 4 * kMiB},
      {"Tesla V100-PCIE-32GB", "Volta", 14.029e12, 112e12, 900e9, 80, 6 * kMiB},
      {"Tesla V100-SXM2-16GB", "Volta", 15.7e12, 125e12, 900e9, 80, 6 * kMiB},
      {"Tesla V100-SXM2-32GB", "Volta", 15.7e12, 125e12, 900e9, 80, 6 * kMiB},
      {"Tesla T4", "Turing", 8.141e12, 65e12, 320e9, 40, 4 * kMiB, 1024, true},
      {"NVIDIA A100-PCIE-40GB", "Ampere", 19.492e12, 312e12, 1555e9, 108, 40 * kMiB},
      {"NVIDIA A100-SXM4-40GB", "Ampere", 19.492e12, 312e12, 1555e9, 108, 40 * kMiB},
      {"NVIDIA A100 80GB PCIe", "Ampere", 19.492e12, 312e12, 1935e9, 108, 40 * kMiB},
      {"NVIDIA A100-SXM4-80GB", "Ampere", 19.492e12, 312e12, 2039e9, 108, 40 * kMiB},
      {"NVIDIA L4", "Ada", 31.334e12, 121e12, 300e9, 60, 48 * kMiB, 1536, true},
      {"NVIDIA H100 80GB HBM3", "Hopper", 66.908e12, 989e12, 3430e9, 132, 50 * kMiB},
      {"NVIDIA H200", "Hopper", 66.908e12, 989e12, 4800e9, 132, 50 * kMiB},
      {"AMD Instinct MI100", "CDNA", 46.1e12, 184.6e12, 1230e9, 120, 8 * kMiB},
      {"AMD Instinct MI210", "CDNA", 45.3e12, 181e12, 1640e9, 104, 16 * kMiB},
      {"AMD Instinct MI250", "CDNA", 45.3e12, 181e12, 1640e9, 104, 16 * kMiB},
  };
  return sheets;
}

const GpuSheet* gpu_sheet(std::string_view name) {
  const auto at = std::ranges::find_if(gpu_sheets(), [&](const GpuSheet& s) { return same_gpu(s.name, name); });
  return at == gpu_sheets().end() ? nullptr : &*at;
}

}  // namespace whale
