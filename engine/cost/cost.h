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
};

// Made once for a plan, from its devices; every pass and report asks this one.
struct CostModel {
  DeviceRates device;
  LinkRates link;                 // between two devices
  LinkRates host;                 // between a device and its host's memory
  double freed_bytes_per_second;  // where memory is traded for time: the bytes that a second more of a step must free
  double memory_price;            // 1, or how often cheaper a freed byte is bought since faster plans did not fit
  bool beside;                    // devices have engines for communication; else it takes the time of their cores
};
// Of devices that nobody has measured: those of a machine of cores.
CostModel cost_model(const std::vector<DeviceSpec>& devices, double memory_price = 1);

OpCost operator+(const OpCost& a, const OpCost& b);

// Roofline: the slower of arithmetic and memory, plus the start.
double op_seconds(const OpCost& cost, const DeviceRates& rates);

// A ring: 2 (n - 1) rounds of 1/n of the bytes (Patarasuk and Yuan, 2009). One device: nothing.
double all_reduce_seconds(double bytes, int64_t devices, const LinkRates& link);

// n - 1 rounds of 1/n of the bytes that each ends up with.
double all_gather_seconds(double bytes, int64_t devices, const LinkRates& link);

}  // namespace whale
