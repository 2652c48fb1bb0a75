#include "cost/cost.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "base/error.h"
#include "cluster/device_kinds.h"
#include "cost/links.h"
#include "cost/measured.h"

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
    const std::string_view text = name;
    const auto figure = static_cast<double>(*given);
    const bool divides = text.ends_with("per_second");
    if (!(divides ? figure > 0 : figure >= 0) || !std::isfinite(figure))
      throw invalid("figure '{}' of a machine is {}, expected a number {} 0", name, *given, divides ? "above" : "from");
    // As a cluster file's: no machine is beyond.
    constexpr double kLeastRate = 1e3, kMostRate = 1e18, kMostSeconds = 1;
    const bool of_machine = text.starts_with("device.") || text.starts_with("link.") || text.starts_with("host.");
    if (of_machine && divides && (figure < kLeastRate || figure > kMostRate))
      throw invalid("figure '{}' of a machine is {}, expected a number from {} to {}", name, *given, kLeastRate,
                    kMostRate);
    if (of_machine && !divides && figure > kMostSeconds)
      throw invalid("figure '{}' of a machine is {} seconds, expected at most {}", name, *given, kMostSeconds);
    value = *given;
  });
  if (known != attrs.size()) throw invalid("a figure of a machine is unknown; a newer libwhale may know it");
  return out;
}

namespace {

// The slower of both ends, as far as they are known.
LinkRates link_between(const DeviceSpec& from, const DeviceSpec& to, int64_t sharing, int64_t of_zone,
                       const LinkRates& usual) {
  const bool inside = from.node == to.node;
  const LinkRates& a = inside ? from.figures.inside : from.figures.network;
  const LinkRates& b = inside ? to.figures.inside : to.figures.network;
  if (a.bytes_per_second <= 0 && b.bytes_per_second <= 0) return usual;
  LinkRates out = a.bytes_per_second <= 0 ? b : b.bytes_per_second <= 0 ? a : slower(a, b);
  if (const auto own = std::ranges::lower_bound(from.links, to.place, {}, &NodeLink::place);
      !inside && own != from.links.end() && own->place == to.place)
    out = own->rates;
  if (!inside) out.bytes_per_second /= static_cast<double>(std::max<int64_t>(1, sharing));
  if (from.zone != to.zone && from.figures.across.bytes_per_second > 0 && to.figures.across.bytes_per_second > 0) {
    LinkRates across = slower(from.figures.across, to.figures.across);
    across.bytes_per_second /= static_cast<double>(std::max<int64_t>(1, of_zone));
    out = slower(out, across);
  }
  return out;
}

}  // namespace

CostModel::CostModel(const std::vector<DeviceSpec>& devices, double price, const Profile& profile, Precision precision)
    : Profile(profile),
      memory_price(price),
      beside(std::none_of(devices.begin(), devices.end(), [](const auto& d) { return !traits(d.kind).overlaps; })),
      half(is_half(precision)),
      bf16(precision == Precision::kBFloat16),
      unknown(profile.device) {
  freed_bytes_per_second /= memory_price;
  const std::vector<int64_t> sharers = sharers_of(devices);
  double most = 0;  // cores of a device
  for (size_t d = 0; d < devices.size(); ++d) {
    Cores& mine = cores_[{devices[d].node, devices[d].cores}];
    mine = {sharers[d], 0};
    if (!devices[d].named || devices[d].figures.known()) continue;
    mine.speed = static_cast<double>(devices[d].cores.size()) / static_cast<double>(sharers[d]);
    most = std::max(most, mine.speed);
  }
  for (auto& [_, mine] : cores_) {
    mine.speed = mine.speed > 0 ? mine.speed / most : 1;
    unlike_cores_ |= mine.speed < 1;
  }
  const Profile usual = *this;
  bool first = true, pairs = false;  // pairs: of a node
  for (size_t d = 0; d < devices.size(); ++d) {
    const DeviceRates mine = rates_of(devices[d], half);
    if (mine.measured != nullptr && (device.measured == nullptr || mine.flops_per_second < device.flops_per_second))
      device.measured = mine.measured;
    if (!devices[d].figures.known()) continue;
    device = first ? mine
                   : DeviceRates{std::min(device.flops_per_second, mine.flops_per_second),
                                 std::min(device.bytes_per_second, mine.bytes_per_second),
                                 std::max(device.seconds_per_op, mine.seconds_per_op), slower(device, mine).measured,
                                 slower(device, mine).curve};
    host = slower(first ? host_of(devices[d]) : host, host_of(devices[d]));
    first = false;
    if (d == 0) continue;
    const bool inside = devices[d].node == devices[d - 1].node;
    const LinkRates here = link_between(devices[d - 1], devices[d], 1, 1, usual.link);
    if (inside == pairs)
      link = d == 1 ? here : slower(link, here);
    else if (inside)
      link = here, pairs = true;
  }
  if (first) return;
  // What is worth doing on a machine is worth it on a faster one by as much less.
  const double faster = device.flops_per_second / usual.device.flops_per_second;
  freed_bytes_per_second *= faster;
  worth_seconds /= faster;
  constexpr double kLatencies = 20;  // that a bucket takes: its own is small beside it
  bucket_bytes =
      std::max(bucket_bytes, static_cast<int64_t>(kLatencies * link.latency_seconds * link.bytes_per_second));
}

DeviceRates CostModel::rates_of(const DeviceSpec& d, bool of_half) const {
  const DeviceFigures& f = d.figures;
  DeviceRates out = unknown;
  if (f.known()) {
    const double halves = bf16 ? f.bf16_flops_per_second : f.half_flops_per_second;
    out = {of_half && halves > 0 ? halves : f.f32_flops_per_second,
           f.bytes_per_second > 0 ? f.bytes_per_second : unknown.bytes_per_second,
           f.seconds_per_op > 0 ? f.seconds_per_op : unknown.seconds_per_op};
    out.curve = curve_of_type(d.type);
  }
  const auto found = cores_.find({d.node, d.cores});
  const Cores mine = found == cores_.end() ? Cores{} : found->second;
  out.flops_per_second *= mine.speed, out.bytes_per_second *= mine.speed, out.seconds_per_op /= mine.speed;
  if (measured) out.measured = measured->of(kind_of(d, mine.sharers));
  return out;
}

LinkRates CostModel::host_of(const DeviceSpec& d) const {
  return d.figures.host.bytes_per_second > 0 ? d.figures.host : host;
}

LinkRates CostModel::between(const DeviceSpec& from, const DeviceSpec& to, int64_t sharing, int64_t of_zone) const {
  return link_between(from, to, sharing, of_zone, link);
}

OpCost operator+(const OpCost& a, const OpCost& b) { return {a.flops + b.flops, a.bytes + b.bytes}; }

double op_seconds(const OpCost& cost, const DeviceRates& rates) {
  return rates.seconds_per_op + std::max(cost.flops / rates.flops_per_second, cost.bytes / rates.bytes_per_second);
}

double op_seconds(const OpCost& cost, const std::optional<Product>& product, const DeviceRates& rates, double part) {
  const OpCost mine{cost.flops * part, cost.bytes * part};
  if (rates.curve == nullptr || !product) return op_seconds(mine, rates);
  Product p = *product;
  p.m = std::max(1.0, p.m * part);
  return rates.seconds_per_op + beside_memory(mine.flops / rates.flops_per_second * product_stretch(p, *rates.curve),
                                              mine.bytes / rates.bytes_per_second);
}

double op_seconds(const OpView& op, const DeviceRates& rates) {
  const OpCost cost = cost_of(op);
  if (rates.measured != nullptr)
    if (const auto times = rates.measured->of(shape_of(op, cost), rates.flops_per_second, rates.bytes_per_second))
      return times->at(1);
  return op_seconds(cost, rates.curve != nullptr ? product_of(op, cost) : std::nullopt, rates);
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
