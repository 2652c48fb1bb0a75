// What is handed out: by which devices, which part of an output each, and whether it is all of it, once.
#pragma once

#include "plan/part.h"
#include "plan/plan.h"

namespace whale::proof {

// As the run time does it (engine/run/handed_over).
bool hands_over(const DeviceRow& row, const PlanOutput& output);
// What a device hands over in a row of its schedule: cuts of the output.
std::vector<SubAxisCut> handed_over(const Plan& plan, const Entry& entry, const DeviceRow& row, const ScheduleRow& at,
                                    const work::Fetch& fetch);
// Each output of the model, and the loss, by all devices and rows, walked or not: one that is put together from parts
// has each element once, any other one is handed over. Stops otherwise.
void check_outputs(const Plan& plan, const Entry& entry);

}  // namespace whale::proof
