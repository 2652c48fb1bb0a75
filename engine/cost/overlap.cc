#include "cost/overlap.h"

#include <algorithm>

namespace whale {
namespace {

constexpr int64_t kMostChunks = 16;
constexpr double kWorthwhile = 0.95;  // of the time before

}  // namespace

double whole_update_seconds(const UpdateWork& w, const DeviceRates& rates, const LinkRates& link) {
  const LinkRates flow = link.flow();
  return all_reduce_seconds(w.gradient_bytes, w.devices, flow) + op_seconds(w.update, rates);
}

double sliced_update_seconds(const UpdateWork& w, const DeviceRates& rates, const LinkRates& link) {
  const LinkRates flow = link.flow();
  const auto n = static_cast<double>(w.devices);
  const double slices = w.slice_bytes > 0 ? op_seconds({0, 2 * w.slice_bytes / n}, rates) : 0;
  return all_gather_seconds(w.gradient_bytes, w.devices, flow) + slices +
         op_seconds({w.update.flops / n, w.update.bytes / n}, rates) +
         all_gather_seconds(w.result_bytes, w.devices, flow);
}

Chunks choose_chunks(const ProductWork& w, const DeviceRates& rates, bool beside, int64_t least_rows) {
  Chunks best;
  best.seconds = best.whole_seconds = op_seconds(w.product, rates) + w.seconds_of_collective + w.latency_seconds;
  double limit = best.whole_seconds * kWorthwhile;
  for (int64_t n = 2; n <= kMostChunks && n * least_rows <= w.rows; ++n) {
    const auto parts = static_cast<double>(n);
    const double product = op_seconds({w.product.flops / parts, w.product.bytes / parts}, rates);
    const double collective = w.seconds_of_collective / parts + w.latency_seconds;
    const double step = beside ? std::max(product, collective) : product + collective;
    const double seconds = product + (parts - 1) * step + collective;
    if (seconds >= limit) continue;
    best.count = n;
    best.seconds = limit = seconds;
  }
  return best;
}

}  // namespace whale
