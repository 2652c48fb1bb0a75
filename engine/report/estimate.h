// What a laid-out program takes, without lowering it: bytes by class and seconds, of every class of devices.
#pragma once

#include <string>
#include <vector>

#include "plan/figures.h"
#include "shard/layout_graph.h"

namespace whale {

struct Estimate {
  // Devices of one mesh whose parts have the same sizes.
  struct Class {
    std::vector<int32_t> devices;  // in rising order
    MemoryFigures memory;
    double seconds = 0;  // of their own work in a step
  };
  std::string strategy;
  std::vector<Class> classes;  // by mesh, then by first device
  double seconds = 0;          // of a step, with the bubble of its schedule
};

// Memory: the lives that lowering will find, from the order of the ops; variables are exact, an arena is its fullest
// moment. Not seen: gaps between buffers, chunks of products, sums in trees. Seconds: by the cost model, nothing beside
// anything. `overlap`: collectives go beside the computation.
Estimate estimate_of(const LayoutGraph& graph, bool overlap);

// Of the device that lacks most; 0: as far as devices say how much they have, it fits.
int64_t missing_bytes(const Estimate& estimate, const std::vector<DeviceSpec>& devices);

std::string estimate_text(const Estimate& estimate, const std::vector<DeviceSpec>& devices);
std::string estimate_json(const Estimate& estimate, const std::vector<DeviceSpec>& devices);

}  // namespace whale
