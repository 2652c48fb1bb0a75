#include "cost/curve.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>

#include "base/error.h"
#include "cluster/device_types.h"

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
    {"Blackwell", "NVIDIA H100 80GB HBM3"},
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
constexpr double kLeastSide = 16;           // of a product: what does less with an element is none
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
  double known = 0, slower = 1;  // of the last area
  for (const Tile& tile : kTiles) {
    const double area = tile.m * tile.n;
    if (area != known) known = area, slower = std::pow(area / kLargestTile, -curve.constants.tile_loss);
    const double tiles = p.batch * std::ceil(p.m / tile.m) * std::ceil(p.n / tile.n);
    const double step = 2 * area * slower / rate;
    for (const double split : kSplits) {
      const double inner = (std::ceil(p.k / split / kInnerStep) + 1) * kInnerStep;
      double seconds = std::ceil(tiles * split / processors) * inner * step;
      if (split > 1) seconds += 2 * split * p.batch * p.m * p.n * p.bytes_an_element / achieved_bytes(curve);
      best = std::min(best, seconds);
    }
  }
  return best;
}

// With rows that strain the translation of addresses, of boards that hold their clock.
double arithmetic_seconds(const Product& p, const DeviceCurve& curve) {
  const double strain = curve.sheet.heats ? 0 : curve.constants.strain;
  return tiled_seconds(p, curve) *
         (1 + strain * std::max(0., 1 - kRowBytes / ((p.row > 0 ? p.row : p.k) * p.bytes_an_element)));
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
  if (find_gpu(gpu)->sheet.heats != sheet.heats) curve.constants.strain = 0;
  curve.note = fmt::format("{}: not measured; its peaks, constants of {}", sheet.name, curve.fitted_on);
  return curve;
}

DeviceCurve curve_of(std::string_view gpu) {
  const DeviceType* type = find_gpu(gpu);
  if (!type) {
    std::string names;
    for (const DeviceType& each : device_types())
      if (each.is_gpu()) names += (names.empty() ? "" : ", ") + each.sheet.name;
    throw invalid("no data sheet of the GPU '{}'; give one (a folder of JSON files), or one of {}", gpu, names);
  }
  return curve_of(type->sheet);
}

const DeviceCurve* curve_of_type(std::string_view type) {
  static const std::map<std::string, DeviceCurve, std::less<>> all = [] {
    std::map<std::string, DeviceCurve, std::less<>> out;
    for (const DeviceType& each : device_types())
      if (each.is_gpu()) out.emplace(each.name, curve_of(each.sheet));
    return out;
  }();
  const auto at = all.find(type);
  return at == all.end() ? nullptr : &at->second;
}

std::optional<Product> product_of(const OpView& op, const OpCost& cost) {
  if (op.inputs.size() < 2 || op.outputs.empty()) return std::nullopt;
  const auto count = [](const TensorType& t) { return static_cast<double>(element_count(t.dims)); };
  const double left = count(op.inputs[0]), right = count(op.inputs[1]), out = count(op.outputs[0]);
  const double multiplied = cost.flops / 2;  // batch m n k
  const double most = std::max({left, right, out});
  if (std::min({left, right, out}) < 1 || multiplied < kLeastSide * most) return std::nullopt;
  Product p{.bytes_an_element = static_cast<double>(size_of(op.inputs[0].dtype))};
  // batch m k, batch k n and batch m n elements; operands of a convolution are fewer than that, and its batch is 1.
  p.batch = std::max(1.0, left / multiplied * right / multiplied * out);
  p.k = multiplied / out;
  p.n = right / (p.batch * p.k);
  p.m = out / (p.batch * p.n);
  p.row = static_cast<double>(op.inputs[0].dims.empty() ? 1 : op.inputs[0].dims.back());
  if (p.n < 1 || p.m < 1) return std::nullopt;  // of other operands than these two
  return p;
}

double beside_memory(double arithmetic_seconds, double memory_seconds) {
  const double most = std::max(arithmetic_seconds, memory_seconds);
  if (most <= 0) return 0;
  const double less = std::min(arithmetic_seconds, memory_seconds) / most, squared = less * less;
  static_assert(kSharpness == 4);
  return most * std::sqrt(std::sqrt(1 + squared * squared));
}

double product_seconds(const Product& product, const DeviceCurve& curve) {
  if (product.flops() <= 0) return curve.constants.start_seconds;
  const double arithmetic = arithmetic_seconds(product, curve);
  return curve.constants.start_seconds +
         heated(beside_memory(arithmetic, product.bytes() / achieved_bytes(curve)), curve);
}

double product_stretch(const Product& product, const DeviceCurve& curve) {
  if (product.flops() <= 0) return 1;
  const double large = product.flops() / achieved_flops(product.bytes_an_element, curve);
  return std::max(1.0, heated(arithmetic_seconds(product, curve), curve) / large);
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
  return curve.constants.start_seconds + heated(beside_memory(arithmetic, cost.bytes / achieved_bytes(curve)), curve);
}

}  // namespace whale
