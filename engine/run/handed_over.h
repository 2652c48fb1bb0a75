// What devices hand over to the host: which bytes of an output's whole tensor, wherever the device is.
#pragma once

#include <vector>

#include "plan/plan.h"
#include "run/sharing.h"

namespace whale {

struct HandedRun {
  size_t host = 0, local = 0, bytes = 0;  // of the whole tensor, of the device's
};

// Whether the device of `row` hands an output over, or another one does.
bool hands_over(const DeviceRow& row, const PlanOutput& output);
// What it hands over in one row of its schedule.
std::vector<HandedRun> handed_over(const Plan& plan, const Entry& entry, const DeviceRow& row, const ScheduleRow& at,
                                   const work::Fetch& fetch);
// Whether what is handed over has its samples micro-batch by micro-batch; else it is the same in all rows.
bool by_micro_batch(const Entry& entry, const DeviceRow& row, const ScheduleRow& at, const work::Fetch& fetch);

// Of a whole step, by rank and output; `ranks`: of each device.
std::vector<std::vector<ByteRuns>> handed_over_by_rank(const Plan& plan, const Entry& entry,
                                                       const std::vector<int32_t>& ranks, size_t size);

}  // namespace whale
