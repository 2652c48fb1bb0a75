// What things cost: one value for the devices of a plan, and pure functions from counts to seconds that every pass and
// report calls with it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cluster/device_spec.h"
#include "cost/curve.h"
#include "ops/op.h"

namespace whale {

// What is known of a kind of machine: what a measurement would fill in, and from what size on a thing is worth doing.
class MeasuredProfile;

struct Profile {
  DeviceRates device;
  LinkRates link;                 // between two devices
  LinkRates host;                 // between a device and its host's memory
  double freed_bytes_per_second;  // where memory is traded for time: the bytes that a second more of a step must free
  double worth_seconds;           // of a step: a rewrite that saves less starts more collectives than it saves
  int64_t cached_bytes;           // a smaller result stays in a device's cache until it is read
  int64_t bucket_bytes;           // of gradients in one collective: starts and latencies are small beside it
  int64_t copied_bytes;           // of updates whose operands are copied from the host's memory and back as a whole
  int64_t worth_copying_bytes;    // of a value: a smaller one does not go to the host's memory
  int64_t product_rows;           // fewer leave a device idle
  int64_t remade_flops;           // an element: ops with no more are cheaper made again than moved
  int64_t spread;                 // times as many elements as what is spread: the small one moves
  // What training makes of a forward pass.
  double passes;           // of an op: forward, input gradient, weight gradient
  double update_passes;    // over the bytes of a parameter: Adam reads p, g, m, v and writes p, m, v
  double add_passes;       // over the bytes of a gradient that a micro-batch adds: the sum is read and written
  double held_copies;      // of a parameter: p, g, m, v
  double gathered_copies;  // of what is put together for a step: itself, and the sum of its gradients in f32
  // Times of a model's ops on some devices (cost/measured.h): they come before rates. None: nothing was measured.
  std::shared_ptr<const MeasuredProfile> measured = {};
};
// Of devices that nobody has measured.
inline const Profile kMachineOfCores{.device = {100e9, 20e9, 2e-6},
                                     .link = {10e9, 5e-6},
                                     .host = {10e9, 5e-6},
                                     .freed_bytes_per_second = 4e9,
                                     .worth_seconds = 100e-6,
                                     .cached_bytes = 256 << 10,
                                     .bucket_bytes = 4 << 20,
                                     .copied_bytes = 256 << 10,
                                     .worth_copying_bytes = 1024,
                                     .product_rows = 32,
                                     .remade_flops = 8,
                                     .spread = 8,
                                     .passes = 3,
                                     .update_passes = 7,
                                     .add_passes = 3,
                                     .held_copies = 4,
                                     .gathered_copies = 3};

// visit(name, number), of all of them but what was measured.
template <class P, class Visit>
void each_figure(P&& p, Visit&& visit) {
  visit("device.flops_per_second", p.device.flops_per_second);
  visit("device.bytes_per_second", p.device.bytes_per_second);
  visit("device.seconds_per_op", p.device.seconds_per_op);
  visit("link.bytes_per_second", p.link.bytes_per_second);
  visit("link.latency_seconds", p.link.latency_seconds);
  visit("host.bytes_per_second", p.host.bytes_per_second);
  visit("host.latency_seconds", p.host.latency_seconds);
  visit("freed_bytes_per_second", p.freed_bytes_per_second);
  visit("worth_seconds", p.worth_seconds);
  visit("cached_bytes", p.cached_bytes);
  visit("bucket_bytes", p.bucket_bytes);
  visit("copied_bytes", p.copied_bytes);
  visit("worth_copying_bytes", p.worth_copying_bytes);
  visit("product_rows", p.product_rows);
  visit("remade_flops", p.remade_flops);
  visit("spread", p.spread);
  visit("passes", p.passes);
  visit("update_passes", p.update_passes);
  visit("add_passes", p.add_passes);
  visit("held_copies", p.held_copies);
  visit("gathered_copies", p.gathered_copies);
}
// Those that nobody has measured are left out. profile_of() throws where a figure is unknown, below 0, or a rate of 0.
Attrs attrs_of(const Profile& profile);
Profile profile_of(const Attrs& attrs);

// Made once for a plan, from its devices; every pass and report asks this one, or one that is made of the plan again.
struct CostModel : Profile {
  // `precision`: of products. Where devices have figures of their own, `device` is the slowest of them, and `link` that
  // inside a node, or between nodes of one device each.
  CostModel(const std::vector<DeviceSpec>& devices, double memory_price, const Profile& profile,
            Precision precision = Precision::kFloat32);
  double memory_price;  // 1, or how often cheaper a freed byte is bought since faster plans did not fit
  bool beside;          // devices have engines for communication; else it takes the time of their cores

  bool half, bf16;      // products are of 16 bits; of those with the exponents of f32
  DeviceRates unknown;  // of a device that has no figures: the profile's

  DeviceRates rates_of(const DeviceSpec& device, bool of_half) const;
  DeviceRates rates_of(const DeviceSpec& device) const { return rates_of(device, half); }
  bool has_unlike_cores() const { return unlike_cores_; }
  LinkRates host_of(const DeviceSpec& device) const;
  // Of one message, or of each device of a ring; of the network of a node that `sharing` of them use at once, and of
  // what is between zones, which `of_zone` do.
  LinkRates between(const DeviceSpec& from, const DeviceSpec& to, int64_t sharing = 1, int64_t of_zone = 1) const;

  double held_seconds(double bytes) const { return bytes / freed_bytes_per_second; }  // what holding them is worth

 private:
  // By node and cores: devices of the plan that share them, and what one of them reaches of the plan's fastest. Those
  // alone of which that is known by their cores: named by hand, and nobody has measured them.
  struct Cores {
    int64_t sharers = 1;
    double speed = 1;
  };
  std::map<std::pair<int, std::vector<int>>, Cores> cores_;
  bool unlike_cores_ = false;
};

OpCost operator+(const OpCost& a, const OpCost& b);

// Roofline: the slower of arithmetic and memory, plus the start.
double op_seconds(const OpCost& cost, const DeviceRates& rates);

// The same of this part of an op's rows, as a product by the curve of the device, where it is one and the device has
// one.
double op_seconds(const OpCost& cost, const std::optional<Product>& product, const DeviceRates& rates, double part = 1);

// Of an op: what was measured of its shape, else as above.
double op_seconds(const OpView& op, const DeviceRates& rates);

// Of the two devices, the one that computes less in a second.
inline const DeviceRates& slower(const DeviceRates& a, const DeviceRates& b) {
  return b.flops_per_second < a.flops_per_second ? b : a;
}

inline double pass_seconds(double bytes, const DeviceRates& rates) {  // over memory, started by something else
  return bytes / rates.bytes_per_second;
}

// A message in each of `rounds`, of `bytes` together.
inline double link_seconds(double bytes, int64_t rounds, const LinkRates& link) {
  return static_cast<double>(rounds) * link.latency_seconds + bytes / link.bytes_per_second;
}

// A ring: 2 (n - 1) rounds of 1/n of the bytes (Patarasuk and Yuan, 2009). One device: nothing.
double all_reduce_seconds(double bytes, int64_t devices, const LinkRates& link);

// n - 1 rounds of 1/n of the bytes that each ends up with.
double all_gather_seconds(double bytes, int64_t devices, const LinkRates& link);

// How a value of which each device of an axis has a part, or a term of the sum, comes to be whole there or cut (in
// another way): all_gather, all_to_all, all_reduce, reduce_scatter.
struct Reshard {
  bool sum = false, cut = false;
};
double received_bytes(Reshard reshard, double bytes, int64_t devices);  // by each
double reshard_seconds(Reshard reshard, double bytes, int64_t devices, const LinkRates& link);

}  // namespace whale
