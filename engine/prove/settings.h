// What a session reads of a plan beside its programs.
#pragma once

#include "plan/plan.h"
#include "prove/reference.h"

namespace whale::proof {

// Optimizer, learning rate, precision and variables are those of the source; stops where they are not.
void check_settings(const Plan& plan, const Entry& entry, const Reference& reference);

}  // namespace whale::proof
