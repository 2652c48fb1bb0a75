// A Plan in float64: every device, group, transfer and instruction stays, and what rounds to fewer bits does not.
#pragma once

#include "plan/plan.h"

namespace whale {

// Of reference devices, without a limit of memory. What a plan in float32 or in 16 bits computes wrongly this one does
// too, where rounding is too small to hide it. Throws unimplemented for split weights (`split_sgd`), whose halves are
// the bits of a float32.
Plan in_float64(const Plan& plan);

}  // namespace whale
