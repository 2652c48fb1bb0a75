// What the feeds of some devices read of the inputs, for ranks that are given no more than that.
#pragma once

#include <memory>
#include <vector>

#include "data/input_slices.h"
#include "run/bound.h"

namespace whale {

// The samples that a feed takes in one row of its program's schedule.
struct FedSamples {
  size_t number = 0, count = 1;  // of its pieces: by micro-batch, or one for all
  SampleRange range;
};
FedSamples fed_samples(const Entry& entry, const DeviceRow& row, const ScheduleRow& at, const Instruction& feed);

// Of every input, in the order of the entry's; writes what each feed moves of them into BoundInstruction::slices.
// `programs`: by device; null: another rank's.
std::vector<InputSlices> bind_slices(const Entry& entry, const std::vector<std::unique_ptr<BoundProgram>>& programs);

}  // namespace whale
