#include "cost/curve.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "base/error.h"

namespace whale {
namespace {

struct Fitted {
  const char* gpu;
  CurveConstants constants;
};
constexpr Fitted kFitted[] = {
#include "cost/curve_fitted.inc"
};

// Whose kernels come nearest, of the architectures that were measured: by the generation of the maker's libraries.
struct Nearest {
  const char *architecture, *gpu;
};
constexpr Nearest kNearest[] = {
    {"Pascal", "Tesla P100-PCIE-16GB"},
    {"Volta", "Tesla V100-PCIE-32GB"},
    {"Turing", "Tesla T4"},
    {"Ampere", "NVIDIA A100-PCIE-40GB"},
    {"Ada", "NVIDIA L4"},
    {"Hopper", "NVIDIA H100 80GB HBM3"},
    {"CDNA", "NVIDIA A100-PCIE-40GB"},
};
constexpr const char* kOfNoArchitecture = "NVIDIA A100-PCIE-40GB";

const Fitted* fitted(std::string_view gpu) {
  const auto* at = std::ranges::find_if(kFitted, [&](const Fitted& f) { return same_gpu(f.gpu, gpu); });
  return at == std::end(kFitted) ? nullptr : at;
}

// Of the kernels, alike on all GPUs. tools/fit/ops.py has the same.
struct Tile {
  double m, n;
};
constexpr Tile kTiles[] = {{128, 128}, {128, 64}, {64, 128}, {64, 64}};
constexpr double kLargestTile = 128 * 128;
constexpr double kSplits[] = {1, 2, 4, 8};  // of the inner dimension, whose sums are added in memory
constexpr double kInnerStep = 8;            // a tile takes one more to fill its pipeline
constexpr double kSharpness = 4;            // of the soft maximum of arithmetic and memory
constexpr double kRowBytes = 32768;         // rows from here on strain the translation of addresses
constexpr double kHeatSeconds = 0.02;       // in which the clock has fallen half its way

double achieved_flops(double bytes_an_element, const DeviceCurve& curve) {
  const double peak = bytes_an_element <= 2 ? curve.sheet.flops_per_second16 : curve.sheet.flops_per_second;
  return peak * curve.constants.compute_share;
}

double achieved_bytes(const DeviceCurve& curve) { return curve.sheet.bytes_per_second * curve.constants.memory_share; }

// Waves of tiles over the processors: the last one may be nearly empty.
double tiled_seconds(const Product& p, const DeviceCurve& curve) {
  const double processors = static_cast<double>(curve.sheet.processors);
  const double rate = achieved_flops(p.bytes_an_element, curve) / processors;
  double best = std::numeric_limits<double>::infinity();
  for (const Tile& tile : kTiles) {
    const double area = tile.m * tile.n;
    const double tiles = p.batch * std::ceil(p.m / tile.m) * std::ceil(p.n / tile.n);
    const double step = 2 * area * std::pow(area / kLargestTile, -curve.constants.tile_loss) / rate;
    for (const double split : kSplits) {
      const double inner = (std::ceil(p.k / split / kInnerStep) + 1) * kInnerStep;
      double seconds = std::ceil(tiles * split / processors) * inner * step;
      if (split > 1) seconds += 2 * split * p.batch * p.m * p.n * p.bytes_an_element / achieved_bytes(curve);
      best = std::min(best, seconds);
    }
  }
  return best;
}

double soft_max(double a, double b) {
  const double most = std::max(a, b);
  if (most <= 0) return 0;
  return most * std::pow(std::pow(a / most, kSharpness) + std::pow(b / most, kSharpness), 1 / kSharpness);
}

double heated(double seconds, const DeviceCurve& curve) {
  if (!curve.sheet.heats) return seconds;
  return seconds * (1 + curve.constants.strain * seconds / (seconds + kHeatSeconds));
}

// Rows that are read again: from the cache as long as those at work fit there.
double missed_share(double rows, double columns, double bytes_an_element, double threads_a_row,
                    const DeviceCurve& curve) {
  const double at_work = static_cast<double>(curve.sheet.processors) *
                         std::floor(static_cast<double>(curve.sheet.threads) / threads_a_row);
  const double live = std::min(rows, at_work) * columns * bytes_an_element;
  return std::clamp((live / static_cast<double>(curve.sheet.cache_bytes) - 0.25) / 0.35, 0., 1.);
}

double passes_seconds(double passes, double rows, double columns, double bytes_an_element, const DeviceCurve& curve) {
  return pass_seconds(passes * rows * columns * bytes_an_element, curve);
}

}  // namespace

DeviceCurve curve_of(const GpuSheet& sheet) {
  if (const Fitted* own = fitted(sheet.name)) return {sheet, own->constants, own->gpu, ""};
  const auto* near =
      std::ranges::find_if(kNearest, [&](const Nearest& n) { return sheet.architecture == n.architecture; });
  const char* gpu = near == std::end(kNearest) ? kOfNoArchitecture : near->gpu;
  DeviceCurve curve{sheet, fitted(gpu)->constants, gpu, ""};
  // A strain of long runs says nothing of a board that holds its clock, and the other way round.
  if (gpu_sheet(gpu)->heats != sheet.heats) curve.constants.strain = 0;
  curve.note = fmt::format("{}: not measured; its peaks, constants of {}", sheet.name, curve.fitted_on);
  return curve;
}

DeviceCurve curve_of(std::string_view gpu) {
  const GpuSheet* sheet = gpu_sheet(gpu);
  if (!sheet) {
    std::string names;
    for (const GpuSheet& each : gpu_sheets()) names += (names.empty() ? "" : ", ") + each.name;
    throw invalid("no data sheet of the GPU '{}'; give one (a folder of JSON files), or one of {}", gpu, names);
  }
  return curve_of(*sheet);
}

double product_seconds(const Product& product, const DeviceCurve& curve) {
  if (product.flops() <= 0) return curve.constants.start_seconds;
  double arithmetic = tiled_seconds(product, curve);
  if (!curve.sheet.heats)
    arithmetic *= 1 + curve.constants.strain * std::max(0., 1 - kRowBytes / (product.k * product.bytes_an_element));
  return curve.constants.start_seconds + heated(soft_max(arithmetic, product.bytes() / achieved_bytes(curve)), curve);
}

double pass_seconds(double bytes, const DeviceCurve& curve) {
  return curve.constants.start_seconds + bytes / achieved_bytes(curve);
}

double softmax_seconds(double rows, double columns, double bytes_an_element, const DeviceCurve& curve) {
  // The largest element, the sum and the result: three readings, of which most find short rows in the cache.
  constexpr double kMissed = 0.25, kLongRow = 4096, kThreads = 1024;
  double missed = kMissed;
  if (columns > kLongRow) missed = std::max(missed, missed_share(rows, columns, bytes_an_element, kThreads, curve));
  return passes_seconds(2 + 2 * missed, rows, columns, bytes_an_element, curve);
}

double layer_norm_seconds(double rows, double columns, double bytes_an_element, const DeviceCurve& curve) {
  constexpr double kThreads = 128;
  const double missed = missed_share(rows, columns, bytes_an_element, kThreads, curve);
  return passes_seconds(2 + missed, rows, columns, bytes_an_element, curve);
}

double op_seconds(const OpCost& cost, double bytes_an_element, const DeviceCurve& curve) {
  const double arithmetic = cost.flops / achieved_flops(bytes_an_element, curve);
  return curve.constants.start_seconds + heated(soft_max(arithmetic, cost.bytes / achieved_bytes(curve)), curve);
}

}  // namespace whale
