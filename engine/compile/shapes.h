// Strategies that are looked at, before anything is planned: counts of replicas, stages and ways of splits on a set of
// devices, micro-batches; what they would take by counts alone.
#pragma once

#include <string>
#include <vector>

#include "compile/automatic.h"
#include "compile/device_sets.h"
#include "compile/model_parts.h"
#include "compile/savings.h"

namespace whale {

struct Shape {
  Candidate candidate;
  const DeviceSet* set = nullptr;
  int64_t replicas = 1, stages = 1, split = 1;
  int64_t parts = 1;             // micro-batches
  bool outside = false;          // the pipeline is around the replicas: stages of one type of devices
  double rank = 0;               // seconds of a step, by counts
  double ways = 1;               // that parameters are cut into
  double cut = 0, cut_ways = 1;  // bytes of parameters that are cut in other ways
};

// Of a model, what shapes are ranked by.
struct ModelCounts {
  explicit ModelCounts(const Graph& graph);
  int64_t batch = 0;
  double parameters = 0;           // bytes
  double states = 0;               // of optimizers, for each byte of a parameter
  double flops = 0, products = 0;  // of a forward pass; bytes that its products make
};

// All of them, in no order. What a model has written stays: what is left are devices, micro-batches and what saves
// memory. The sets outlive them.
std::vector<Shape> shapes_of(const Graph& graph, const ModelCounts& counts, const std::vector<DeviceSet>& sets,
                             const CompileOptions& options);

// Whether it has half to twice as many stages and ways of a split as a strategy that is written.
class Present {
 public:
  // Throws where it needs more than twice so many devices, which some may have been lost of.
  Present(const std::string& strategy, int64_t devices);
  bool is_near(const Shape& shape) const;

 private:
  int64_t stages_ = 1, split_ = 1;
};

// A lower bound of what a device holds: parameters, state, and gradients that are summed over micro-batches.
double least_bytes(const ModelCounts& counts, const Shape& shape, const PlanOptions& options);

}  // namespace whale
