#include "cost/interference.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "cost/gpu_sheet.h"

namespace whale {
namespace {

struct Fitted {
  const char* gpu;
  Interference constants;
};
constexpr Fitted kFitted[] = {
#include "cost/interference_fitted.inc"
};

constexpr const char* kHostLinked[] = {"l4", "nvidia-l4", "tesla-t4", "tesla-p4"};

// A GPU without constants of its own takes those of the first whose architecture it has, else of the first of all.
struct Architecture {
  const char *name, *gpu;
};
constexpr Architecture kArchitectures[] = {
    {"Pascal", "v100-sxm2-16gb"}, {"Volta", "v100-sxm2-16gb"},  {"Turing", "l4"},           {"Ada", "l4"},
    {"Ampere", "a100-sxm4-40gb"}, {"Hopper", "a100-sxm4-40gb"}, {"CDNA", "a100-sxm4-40gb"},
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
  const bool host_linked = std::ranges::any_of(kHostLinked, [&](const char* each) { return same_gpu(each, gpu); });
  if (const Fitted* own = fitted(gpu)) return {own->constants, host_linked, own->gpu, true};
  const GpuSheet* sheet = gpu_sheet(gpu);
  const auto* near = std::ranges::find_if(
      kArchitectures, [&](const Architecture& a) { return sheet && sheet->architecture == a.name; });
  const Fitted* like = fitted(near == std::end(kArchitectures) ? "a100-sxm4-40gb" : near->gpu);
  return {like->constants, host_linked, like->gpu, false};
}

PerWork<double> progress_rates(const PerWork<bool>& running, const Interference& i, bool far) {
  const double copy = far ? i.copy_by_far_link : 0, link = far ? i.far_link_by_copy : 0;
  // slowed[a][b]: of a by b.
  const double slowed[kWorks][kWorks] = {
      {0, far ? i.compute_by_far_link : i.compute_by_link, i.compute_by_copy, i.compute_by_copy},
      {i.link_by_compute, 0, link, link},
      {0, copy, 0, i.to_device_by_to_host},
      {0, copy, i.to_host_by_to_device, 0}};
  PerWork<double> rates{};
  double sum = 0;
  for (int a = 0; a < kWorks; ++a) {
    if (!running[a]) continue;
    double second = 1;
    for (int b = 0; b < kWorks; ++b)
      if (running[b]) second += slowed[a][b];
    rates[a] = 1 / second;
    sum += rates[a];
  }
  if (sum > 0 && sum < 1)
    for (double& rate : rates) rate /= sum;
  return rates;
}

double together_seconds(const PerWork<double>& alone, const Interference& interference, bool far) {
  PerWork<double> left = alone;
  double total = 0;
  for (;;) {
    PerWork<bool> running{};
    for (int w = 0; w < kWorks; ++w) running[w] = left[w] > 0;
    const PerWork<double> rates = progress_rates(running, interference, far);
    double first = std::numeric_limits<double>::infinity();
    for (int w = 0; w < kWorks; ++w)
      if (running[w]) first = std::min(first, left[w] / rates[w]);
    if (first == std::numeric_limits<double>::infinity()) return total;
    total += first;
    for (int w = 0; w < kWorks; ++w) {
      if (!running[w]) continue;
      const bool ends = left[w] / rates[w] <= first;
      left[w] = ends ? 0 : left[w] - first * rates[w];
    }
  }
}

}  // namespace whale
