// What a device achieves and how it is connected, as figures. 0: not known.
#pragma once

#include <cstddef>

namespace whale {

class MeasuredDevice;  // cost/measured.h
struct DeviceCurve;    // cost/curve.h

struct DeviceRates {
  double flops_per_second;
  double bytes_per_second;
  double seconds_per_op;                     // to start an instruction
  const MeasuredDevice* measured = nullptr;  // ops that a profile has times of; the profile outlives this
  const DeviceCurve* curve = nullptr;        // how products of small and odd sizes are slower, where the table knows
  friend bool operator==(const DeviceRates&, const DeviceRates&) = default;
};

struct LinkRates {
  double bytes_per_second;
  double latency_seconds;
  LinkRates flow() const { return {bytes_per_second, 0}; }  // of transfers that share their latencies with others
  friend bool operator==(const LinkRates&, const LinkRates&) = default;
};

// Of one device, where they are its own: from the table of device types, a cluster file or a probe. What is not known
// is the profile's (cost/cost.h).
struct DeviceFigures {
  double f32_flops_per_second = 0;   // achieved by large products
  double half_flops_per_second = 0;  // the same in f16; not known: as f32
  double bf16_flops_per_second = 0;  // in bf16; not known, or not there: as f32
  double bytes_per_second = 0;       // of its memory
  double seconds_per_op = 0;
  LinkRates host = {};        // with the memory of its host
  LinkRates inside = {};      // with a device of its node, each way
  LinkRates network = {};     // of its node with other nodes, each way: all devices of the node share it
  LinkRates across = {};      // of its zone with other zones, each way: all devices of the zone share it
  double price_per_hour = 0;  // in any currency, of all devices the same

  bool known() const { return f32_flops_per_second > 0; }
  friend bool operator==(const DeviceFigures&, const DeviceFigures&) = default;
};

// visit(name, figure), of all of them.
template <class F, class Visit>
void each_figure_of_device(F&& f, Visit&& visit) {
  visit("f32_flops_per_second", f.f32_flops_per_second);
  visit("half_flops_per_second", f.half_flops_per_second);
  visit("bf16_flops_per_second", f.bf16_flops_per_second);
  visit("bytes_per_second", f.bytes_per_second);
  visit("seconds_per_op", f.seconds_per_op);
  visit("host.bytes_per_second", f.host.bytes_per_second);
  visit("host.latency_seconds", f.host.latency_seconds);
  visit("inside.bytes_per_second", f.inside.bytes_per_second);
  visit("inside.latency_seconds", f.inside.latency_seconds);
  visit("network.bytes_per_second", f.network.bytes_per_second);
  visit("network.latency_seconds", f.network.latency_seconds);
  visit("across.bytes_per_second", f.across.bytes_per_second);
  visit("across.latency_seconds", f.across.latency_seconds);
  visit("price_per_hour", f.price_per_hour);
}
inline constexpr size_t kFiguresOfDevice = 14;

}  // namespace whale
