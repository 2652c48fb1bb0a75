// Which instructions a run must execute to make the outputs that were asked for: the backward slice of the programs.
#pragma once

#include <vector>

#include "plan/plan.h"

namespace whale {

// [segment][instruction]; everything else may be skipped.
using Mask = std::vector<std::vector<uint8_t>>;

// Per program. What several devices do together is in all of their masks or in none.
std::vector<Mask> slice(const Entry& entry, const std::vector<bool>& outputs_wanted);
// Marks the inputs that the mask needs.
void mark_inputs(const Program& program, const Mask& mask, std::vector<bool>& inputs);
// The first input that the mask needs and that was not given; -1: none.
int missing_input(const Program& program, const Mask& mask, const std::vector<const void*>& inputs);

}  // namespace whale
