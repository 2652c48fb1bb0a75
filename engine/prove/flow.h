// What the rows of a program read of what other rows wrote, byte by byte, for all micro-batches.
#pragma once

#include "plan/plan.h"
#include "prove/runs.h"

namespace whale::proof {

// Does each micro-batch from the third of a run to its last read what the second one reads, of the same segments: of
// its own rows, of the micro-batch before it, or of what no micro-batch wrote? And does no other row read what one of
// those left out wrote?
bool flows_evenly(const Program& program, const Runs& micro_batches);

}  // namespace whale::proof
