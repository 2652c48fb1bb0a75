#include "cost/cost.h"

#include <algorithm>

namespace whale {

CostModel cost_model(const std::vector<DeviceSpec>& devices, double memory_price) {
  const LinkRates link{10e9, 5e-6};
  const bool cores = std::any_of(devices.begin(), devices.end(), [](const DeviceSpec& d) {
    return d.kind == DeviceKind::kCpu || d.kind == DeviceKind::kRef;
  });
  return {{100e9, 20e9, 2e-6}, link, link, 4e9 / memory_price, memory_price, !cores};
}

OpCost operator+(const OpCost& a, const OpCost& b) { return {a.flops + b.flops, a.bytes + b.bytes}; }

double op_seconds(const OpCost& cost, const DeviceRates& rates) {
  return rates.seconds_per_op + std::max(cost.flops / rates.flops_per_second, cost.bytes / rates.bytes_per_second);
}

double all_gather_seconds(double bytes, int64_t devices, const LinkRates& link) {
  if (devices <= 1) return 0;
  const auto n = static_cast<double>(devices);
  return (n - 1) * (link.latency_seconds + bytes / n / link.bytes_per_second);
}

double all_reduce_seconds(double bytes, int64_t devices, const LinkRates& link) {
  return 2 * all_gather_seconds(bytes, devices, link);
}

}  // namespace whale
