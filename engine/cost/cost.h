// Pure functions from counts to seconds. Balancer, simulator and reports call the same ones.
#pragma once

#include <cstdint>

#include "ops/op.h"

namespace whale {

// What a device achieves, measured or assumed.
struct DeviceRates {
  double flops_per_second = 100e9;
  double bytes_per_second = 20e9;
  double seconds_per_op = 2e-6;  // to start an instruction
};

struct LinkRates {
  double bytes_per_second = 10e9;
  double latency_seconds = 5e-6;
};

// Where memory is traded for time: the bytes that a second more of a step must free.
inline constexpr double kFreedBytesPerSecond = 4e9;

OpCost operator+(const OpCost& a, const OpCost& b);

// Roofline: the slower of arithmetic and memory, plus the start.
double op_seconds(const OpCost& cost, const DeviceRates& rates);

// A ring: 2 (n - 1) rounds of 1/n of the bytes (Patarasuk and Yuan, 2009). One device: nothing.
double all_reduce_seconds(double bytes, int64_t devices, const LinkRates& link);

// n - 1 rounds of 1/n of the bytes that each ends up with.
double all_gather_seconds(double bytes, int64_t devices, const LinkRates& link);

}  // namespace whale
