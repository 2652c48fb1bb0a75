// Whether devices that work together wait for each other for ever: their collectives and messages, in all rows.
#pragma once

#include <optional>

#include "plan/plan.h"
#include "prove/stopped.h"
#include "prove/symmetry.h"

namespace whale::proof {

// Goes through the devices that are walked, in the order of their programs. Where that comes to its end, no order of
// their queues stands still. Throws Uneven where devices meet in unlike micro-batches of which some are left out.
std::optional<Stopped> standstill_of(const Plan& plan, const Entry& entry, const Symmetry& symmetry);

}  // namespace whale::proof
