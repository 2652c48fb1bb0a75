#include "cost/interference.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cluster/device_types.h"

namespace whale {
namespace {

struct Fitted {
  const char* gpu;
  Interference constants;
};
constexpr Fitted kFitted[] = {
#include "cost/interference_fitted.inc"
};

// A GPU without constants of its own takes those of the first whose architecture it has, else of the first of all.
struct Architecture {
  const char *name, *gpu;
};
constexpr Architecture kArchitectures[] = {
    {"Pascal", "v100-sxm2-32gb"},
    {"Volta", "v100-sxm2-32gb"},
    {"Turing", "l4"},
    {"Ada", "l4"},
    {"Ampere", "a100-sxm4-40gb"},
    {"Hopper", "a100-sxm4-40gb"},
    {"Blackwell", "a100-sxm4-40gb"},
    {"CDNA", "a100-sxm4-40gb"},
};

const Fitted* fitted(std::string_view gpu) {
  const auto named = [&](const Fitted& f) {
    // "a100-sxm4-40gb" is "NVIDIA A100-SXM4-40GB".
    return same_gpu(gpu, f.gpu) || (gpu.size() > std::string_view(f.gpu).size() &&
                                    same_gpu(gpu.substr(gpu.size() - std::string_view(f.gpu).size()), f.gpu));
  };
  const auto* at = std::ranges::find_if(kFitted, named);
  return at == std::end(kFitted) ? nullptr : at;
}

}  // namespace

GpuInterference interference_of(std::string_view gpu) {
  const DeviceType* type = find_gpu(gpu);
  const bool host_linked = type != nullptr && type->host_linked();
  if (const Fitted* own = fitted(gpu)) return {own->constants, host_linked, own->gpu, true};
  const auto* near = std::ranges::find_if(
      kArchitectures, [&](const Architecture& a) { return type && type->sheet.architecture == a.name; });
  const Fitted* like = fitted(near == std::end(kArchitectures) ? "a100-sxm4-40gb" : near->gpu);
  return {like->constants, host_linked, like->gpu, false};
}

PerLoad<double> progress_rates(const PerLoad<bool>& running, const Interference& i, bool far) {
  const double copy = far ? i.copy_by_far_link : 0, link = far ? i.far_link_by_copy : 0;
  // slowed[a][b]: of a by b.
  const double slowed[kLoads][kLoads] = {
      {0, far ? i.compute_by_far_link : i.compute_by_link, i.compute_by_copy, i.compute_by_copy},
      {i.link_by_compute, 0, link, link},
      {0, copy, 0, i.to_device_by_to_host},
      {0, copy, i.to_host_by_to_device, 0}};
  PerLoad<double> rates{};
  double sum = 0;
  for (int a = 0; a < kLoads; ++a) {
    if (!running[a]) continue;
    double second = 1;
    for (int b = 0; b < kLoads; ++b)
      if (running[b]) second += slowed[a][b];
    rates[a] = 1 / second;
    sum += rates[a];
  }
  if (sum > 0 && sum < 1)
    for (double& rate : rates) rate /= sum;
  return rates;
}

double together_seconds(const PerLoad<double>& alone, const Interference& interference, bool far) {
  PerLoad<double> left = alone;
  double total = 0;
  for (;;) {
    PerLoad<bool> running{};
    for (int w = 0; w < kLoads; ++w) running[w] = left[w] > 0;
    const PerLoad<double> rates = progress_rates(running, interference, far);
    double first = std::numeric_limits<double>::infinity();
    for (int w = 0; w < kLoads; ++w)
      if (running[w]) first = std::min(first, left[w] / rates[w]);
    if (first == std::numeric_limits<double>::infinity()) return total;
    total += first;
    for (int w = 0; w < kLoads; ++w) {
      if (!running[w]) continue;
      const bool ends = left[w] / rates[w] <= first;
      left[w] = ends ? 0 : left[w] - first * rates[w];
    }
  }
}

DeviceInterference interference_of(const DeviceSpec& device) {
  const DeviceType* type = device.type.empty() ? nullptr : find_device_type(device.type);
  const bool host_linked = type != nullptr && type->host_linked();
  if (type != nullptr && type->is_gpu())
    return {.gpu = interference_of(type->sheet.name).constants, .host_linked = host_linked};
  return {.host_linked = host_linked, .shares_cores = !traits(device.kind).overlaps};
}

PerLoad<double> progress_rates(const PerLoad<bool>& running, const DeviceInterference& device, bool leaves_node) {
  if (device.gpu) return progress_rates(running, *device.gpu, device.goes_far(leaves_node));
  const auto loads = static_cast<int>(std::ranges::count(running, true));
  PerLoad<double> rates{};
  for (int a = 0; a < kLoads; ++a)
    if (running[a]) rates[a] = device.shares_cores ? part_of_cores(loads) : 1;
  return rates;
}

}  // namespace whale
