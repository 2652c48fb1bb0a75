// Schedules: what one device runs, in order. A row is a segment kind and a micro-batch.
#pragma once

#include <cstdint>
#include <vector>

#include "ir/graph.h"

namespace whale {

struct SegmentRun {
  Region region{};
  int64_t micro_batch = 0;
  friend bool operator==(const SegmentRun&, const SegmentRun&) = default;
};

// Gradient accumulation: the prologue, the body once per micro-batch, the epilogue. One micro-batch: the body alone,
// which then holds all three, so that updates and communication overlap the backward pass.
std::vector<SegmentRun> accumulation_schedule(int64_t micro_batches);

}  // namespace whale
