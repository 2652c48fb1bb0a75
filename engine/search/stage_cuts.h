// Where a pipeline's stages are cut, and which type of device each is on: exact for the slowest stage, with its
// transfers, under each device's memory.
#pragma once

#include <vector>

namespace whale {

struct StageDevices {
  int count = 0;  // at most so many stages are on devices of this type
  double memory_bytes = 0;
  std::vector<double> seconds;  // of each layer: forward and backward of one micro-batch, at this type's share
};

struct StageCutsProblem {
  std::vector<StageDevices> types;
  std::vector<double> state_bytes;       // of each layer: parameters, gradients, optimizer state
  std::vector<double> activation_bytes;  // of each layer: kept for one micro-batch in flight
  std::vector<double> output_bytes;      // of each layer: what goes to the next one, and as much back
  // From a type to a type. A stage is busy while it sends as while it receives.
  std::vector<std::vector<double>> latency_seconds, seconds_per_byte;
  int micro_batches = 1;  // a stage keeps those of the stages after it and one, at most these
  std::vector<int>
      order;  // types of the stages in this order, of which the first ones may be left out; empty: any order
};

struct StageCuts {
  std::vector<int> cuts;   // stage i has the layers [cuts[i], cuts[i + 1])
  std::vector<int> types;  // of each stage
  double slowest_seconds = 0;
};

// Devices may stay idle. Throws invalid for tables of unlike lengths, and where nothing fits, with the layer that needs
// most.
StageCuts cut_stages(const StageCutsProblem& problem);

// Seconds of the slowest stage of given cuts; infinity where one does not fit, or a type is used too often. The rule
// that cut_stages is exact for.
double slowest_stage_seconds(const StageCutsProblem& problem, const std::vector<int>& cuts,
                             const std::vector<int>& types);

}  // namespace whale
