// Whether what a profile says can be: its times among each other, and beside what its devices can do at all.
#pragma once

#include "cost/measured.h"

namespace whale {

// Throws invalid where a profile contradicts itself, or has times of another unit, by more than any accident of a
// measurement: which device, which op, which figures. What an accident may have done is added to its doubts.
// `machine`: rates that were measured along with it; nullptr: none were.
void check_plausible(MeasuredProfile& profile, const DeviceRates* machine);

// The same of a model's layers: `flops` of a forward pass for each sample, by so many ops.
void check_layers(const MeasuredProfile& profile, double flops, double ops, std::vector<std::string>& doubts);

}  // namespace whale
