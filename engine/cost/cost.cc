#include "cost/cost.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/error.h"

namespace whale {

Attrs attrs_of(const Profile& profile) {
  Attrs usual, out;
  each_figure(kMachineOfCores, [&](const char* name, auto value) { usual[name] = value; });
  each_figure(profile, [&](const char* name, auto value) {
    if (Attr mine = value; mine != usual[name]) out[name] = std::move(mine);
  });
  return out;
}

Profile profile_of(const Attrs& attrs) {
  Profile out = kMachineOfCores;
  size_t known = 0;
  each_figure(out, [&](const char* name, auto& value) {
    const auto it = attrs.find(name);
    if (it == attrs.end()) return;
    ++known;
    const auto* given = std::get_if<std::remove_reference_t<decltype(value)>>(&it->second);
    if (!given) throw invalid("figure '{}' of a machine is of another type", name);
    const bool divides = std::string_view(name).ends_with("per_second");
    if (!(divides ? *given > 0 : *given >= 0) || !std::isfinite(static_cast<double>(*given)))
      throw invalid("figure '{}' of a machine is {}, expected a number {} 0", name, *given, divides ? "above" : "from");
    value = *given;
  });
  if (known != attrs.size()) throw invalid("a figure of a machine is unknown; a newer libwhale may know it");
  return out;
}

CostModel::CostModel(const std::vector<DeviceSpec>& devices, double price, const Profile& profile)
    : Profile(profile),
      memory_price(price),
      beside(std::none_of(devices.begin(), devices.end(), [](const auto& d) { return !traits(d.kind).overlaps; })) {
  freed_bytes_per_second /= memory_price;
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

double received_bytes(Reshard reshard, double bytes, int64_t devices) {
  const auto n = static_cast<double>(devices);
  const double part = bytes * (n - 1) / n;
  if (reshard.sum) return reshard.cut ? part : 2 * part;
  return reshard.cut ? part / n : part;
}

double reshard_seconds(Reshard reshard, double bytes, int64_t devices, const LinkRates& link) {
  if (reshard.sum && !reshard.cut) return all_reduce_seconds(bytes, devices, link);
  if (!reshard.sum && reshard.cut) return link_seconds(received_bytes(reshard, bytes, devices), devices - 1, link);
  return all_gather_seconds(bytes, devices, link);
}

}  // namespace whale
