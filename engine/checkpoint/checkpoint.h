// A checkpoint is a directory: model.safetensors (parameters and running statistics), optimizer.safetensors (state,
// named PARAMETER/SLOT) and whale.json (counters). It is replaced as a whole: written beside itself, synced, and
// exchanged by one rename, so that a failure at any point leaves the previous one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/safetensors.h"

namespace whale {

struct CheckpointMeta {
  std::string model;  // name of the graph
  uint64_t seed = 0;
  int64_t iteration = 0, updates = 0;
  std::optional<double> learning_rate;  // set by hand; absent: the schedule's
  std::optional<double> loss_scale;     // f16
  int64_t steps_at_scale = 0;           // without an overflow, since the loss scale changed
};

struct CheckpointPart {  // one of the two files
  std::vector<StoredTensor> tensors;
  TensorSource source;
};

// Called with the name of each point at which writing may fail; for tests, which throw from it.
using FaultProbe = std::function<void(std::string_view point)>;

void write_checkpoint(const std::string& directory, const CheckpointMeta& meta, const CheckpointPart& model,
                      const CheckpointPart& optimizer, const FaultProbe& probe = {});

struct Checkpoint {
  CheckpointMeta meta;
  std::unique_ptr<SafetensorsFile> model, optimizer;
};
// Opens and checks all three files; throws not_found, data_loss, or failed_precondition for a newer format.
Checkpoint open_checkpoint(const std::string& directory);

}  // namespace whale
