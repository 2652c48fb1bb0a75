// What things cost: one value for the devices of a plan, and pure functions from counts to seconds that every pass and
// report calls with it.
#pragma once

#include <cstdint>
#include <vector>

#include "cluster/device_spec.h"
#include "ops/op.h"

namespace whale {

// What a device achieves.
struct DeviceRates {
  double flops_per_second;
  double bytes_per_second;
  double seconds_per_op;  // to start an instruction
};

struct LinkRates {
  double bytes_per_second;
  double latency_seconds;
  LinkRates flow() const { return {bytes_per_second, 0}; }  // of transfers that share their latencies with others
};

// What is known of a kind of machine: what a measurement would fill in, and from what size on a thing is worth doing.
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
};
// Of devices that nobody has measured.
inline constexpr Profile kMachineOfCores{.device = {100e9, 20e9, 2e-6},
                                         .link = {10e9, 5e-6},
                                         .host = {10e9, 5e-6},
                                         .freed_bytes_per_second = 4e9,
                                         .worth_seconds = 100e-6,
                                         .cached_bytes = 256 << 10,
                                         .bucket_bytes = 4 << 20,
                                         .copied_bytes = 256 << 10,
                                         .worth_copying_bytes = 1024,
                                         .product_rows = 32};

// Made once for a plan, from its devices; every pass and report asks this one.
struct CostModel : Profile {
  explicit CostModel(const std::vector<DeviceSpec>& devices, double memory_price = 1,
                     const Profile& profile = kMachineOfCores);
  double memory_price;  // 1, or how often cheaper a freed byte is bought since faster plans did not fit
  bool beside;          // devices have engines for communication; else it takes the time of their cores
};

OpCost operator+(const OpCost& a, const OpCost& b);

// Roofline: the slower of arithmetic and memory, plus the start.
double op_seconds(const OpCost& cost, const DeviceRates& rates);

// A message in each of `rounds`, of `bytes` together.
double link_seconds(double bytes, int64_t rounds, const LinkRates& link);

// A ring: 2 (n - 1) rounds of 1/n of the bytes (Patarasuk and Yuan, 2009). One device: nothing.
double all_reduce_seconds(double bytes, int64_t devices, const LinkRates& link);

// n - 1 rounds of 1/n of the bytes that each ends up with.
double all_gather_seconds(double bytes, int64_t devices, const LinkRates& link);

}  // namespace whale
