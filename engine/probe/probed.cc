#include <algorithm>

#include "cluster/devices.h"
#include "probe/probe.h"

namespace whale {
namespace {

Json of_sizes(const std::vector<ProbedDevice::Product>& products) {
  Json out = Json::object();
  for (const auto& product : products) out[std::to_string(product.size)] = product.flops_per_second;
  return out;
}

Json of_link(const LinkRates& rates) {
  return {{"bytes_per_second", rates.bytes_per_second}, {"latency_seconds", rates.latency_seconds}};
}

}  // namespace

Profile Probed::profile() const {
  Profile out = kMachineOfCores;
  if (devices.empty()) return out;
  const auto slowest = [&](auto figure) {
    double least = figure(devices[0]);
    for (const ProbedDevice& d : devices) least = std::min(least, figure(d));
    return least;
  };
  out.device.flops_per_second = slowest([](const auto& d) {
    double best = 0;
    for (const auto& product : d.f32) best = std::max(best, product.flops_per_second);
    return best;
  });
  out.device.bytes_per_second = slowest([](const auto& d) { return d.bytes_per_second; });
  out.host.bytes_per_second = slowest([](const auto& d) { return d.host.bytes_per_second; });
  out.host.latency_seconds = -slowest([](const auto& d) { return -d.host.latency_seconds; });
  if (devices.size() > 1) out.link = gather;
  return out;
}

Json Probed::json() const {
  Json out = {{"probe", 1}, {"devices", Json::array()}, {"links", Json::array()}};
  for (size_t d = 0; d < devices.size(); ++d) {
    const ProbedDevice& probed = devices[d];
    Json flops = {{"f32", of_sizes(probed.f32)}};
    if (!probed.bf16.empty()) flops["bf16"] = of_sizes(probed.bf16);
    out["devices"].push_back({{"device", d},
                              {"rank", probed.rank},
                              {"kind", traits(probed.kind).name},
                              {"device_text", to_string(probed.spec)},
                              {"node", probed.spec.node},
                              {"flops_per_second", std::move(flops)},
                              {"bytes_per_second", probed.bytes_per_second},
                              {"host", of_link(probed.host)}});
  }
  for (const ProbedLink& link : links) {
    Json row = {{"from", link.from}, {"to", link.to}};
    row.update(of_link(link.rates));
    out["links"].push_back(std::move(row));
  }
  if (devices.size() > 1) out["gather"] = of_link(gather);
  Json figures = Json::object();
  const Profile mine = profile();
  each_figure(mine, [&](const std::string& name, const auto& value) {
    const bool measured = name.starts_with("device.") || name.starts_with("link.") || name.starts_with("host.");
    if (measured && name != "device.seconds_per_op") figures[name] = value;
  });
  if (devices.size() < 2) figures.erase("link.bytes_per_second"), figures.erase("link.latency_seconds");
  out["profile"] = std::move(figures);
  return out;
}

}  // namespace whale
