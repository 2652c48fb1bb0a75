// Options that change the arithmetic of a sum of gradients on purpose (--adasum, --gradient-dtype) are compared with
// the arithmetic that they ask for: one device computes the gradient of each replica's samples at the plan's own
// parameters, and what the plan made of them is compared, step by step; then what it made of its own sums.
#pragma once

#include "lockstep.h"
#include "sums.h"

namespace tool {

// Of a report: what it compares.
const char* subject_of_sums(bool adasum);

// Both sides hand out "grad:PARAMETER" of every parameter of `sum`. of_updates: the precision that updates compute in.
Report compare_gradients(whale_engine* engine, const Sides& sides, const std::vector<Batch>& batches,
                         const SessionArguments& arguments, const std::vector<Decision>& decisions,
                         const GradientSum& sum, const Setting& setting, const Setting& of_updates, const Tick& tick);

}  // namespace tool
