// What a machine achieves: figures of its devices, and of what is between them, for the cost model (cost/cost.h).
// Measured with the kernels and the transports that plans run by, all devices at once, so that what they share
// (memory, caches, a network card) counts.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/json.h"
#include "cost/cost.h"
#include "device/device.h"
#include "session/cores.h"
#include "world/world.h"

namespace whale {

struct ProbedDevice {
  int rank = 0;
  DeviceKind kind{};
  DeviceSpec spec = {};
  // A product of two square matrices of that size. bf16: none without kernels for it.
  struct Product {
    int64_t size = 0;
    double flops_per_second = 0;
  };
  std::vector<Product> f32 = {}, bf16 = {};
  double bytes_per_second = 0;  // that a sum of two long arrays reads and writes
  LinkRates host = {};          // with its host's memory
};

// Of two devices, whose messages go both ways at once.
struct ProbedLink {
  int from = 0, to = 0;
  LinkRates rates = {};
};

struct Probed {
  std::vector<ProbedDevice> devices;
  std::vector<ProbedLink> links;  // of all pairs
  LinkRates gather = {};          // as all_gather_seconds() has it, of all devices; one device: none

  // Of the slowest device: the others wait for it.
  Profile profile() const;
  Json json() const;  // docs/profiles.md
};

struct ProbeOptions {
  double seconds = 0.1;                       // of each measurement
  std::optional<World> world = {};            // of several ranks, all of which call it; each gets all of it
  std::shared_ptr<CoreLeases> leases = {};    // of the engine
  const std::atomic<bool>* cancel = nullptr;  // ends it with cancelled
};
// `devices`: of all ranks. Throws unimplemented for kinds that compute nothing or are there for tests.
Probed probe(Backends& backends, const std::vector<DeviceSpec>& devices, const ProbeOptions& options = {});

}  // namespace whale
