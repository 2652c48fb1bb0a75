// Whether a plan has races, by looking at every pair of instructions of a segment: slow, and written without a look at
// the plan verifier, whose finding it judges. Waits that are missing rarely show in numbers.
#pragma once

#include <string>

#include "plan/plan.h"

namespace whale::test {

std::string race_in(const Entry& entry);  // "" or one of them

}  // namespace whale::test
