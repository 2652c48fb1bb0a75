// What the first entry of a plan takes: bytes by class and seconds, of every class of devices.
#pragma once

#include <string>
#include <vector>

#include "plan/figures.h"
#include "shard/sharded_graph.h"
#include "task/condense.h"

namespace whale {

struct Estimate {
  // Devices of one program.
  struct Class {
    std::vector<int32_t> devices;  // in rising order
    MemoryFigures memory;
    double seconds = 0;  // of their own work in a step
  };
  std::string strategy;
  std::vector<Class> classes;  // by first device of each mesh
  double seconds = 0;          // of a step, with the bubble of its schedule
};

// Memory is the plan's. Seconds: by the cost model, instructions of a queue one after the other and queues beside
// each other; in a pipeline the rows of its schedule on the clock, messages for nothing.
Estimate estimate_of(const ShardedGraph& graph, const Plan& plan);

// The same of a model whose condensed form was laid out and lowered; `tasks`: the model's. Memory within 2 % of the
// plan's.
Estimate estimate_of(const Condensed& condensed, const TaskGraphs& tasks, const ShardedGraph& graph, const Plan& plan);

// Whether two estimates of the same devices say the same of their memory, where what they differ by would come again
// with each of `layers`: within 1 % of `least` bytes.
bool agree(const Estimate& one, const Estimate& other, int64_t layers, int64_t least);

// Of the device that lacks most; 0: as far as devices say how much they have, it fits.
int64_t missing_bytes(const Estimate& estimate, const std::vector<DeviceSpec>& devices);

std::string estimate_text(const Estimate& estimate, const std::vector<DeviceSpec>& devices);
std::string estimate_json(const Estimate& estimate, const std::vector<DeviceSpec>& devices);

}  // namespace whale
